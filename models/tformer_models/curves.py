"""The metrics of a run as a table and as a picture."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_curves(rows: Sequence[Mapping[str, float]], output: Path) -> None:
    """Write metrics.csv and curves.png into `output`, each in one go."""
    table = output / "metrics.csv.part"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: f"{value:.10g}" for name, value in row.items()} for row in rows)
    os.replace(table, output / "metrics.csv")
    picture = output / "curves.png.part"
    _draw(rows, picture)
    os.replace(picture, output / "curves.png")


def _draw(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot there is no window system to look for

    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    losses.plot(steps, [row["train_loss"] for row in rows], label="training (dropout, label smoothing)")
    losses.plot(steps, [row["loss"] for row in rows], label="validation")
    losses.set(xlabel="step", ylabel="cross-entropy, nats", yscale="log")
    if "forecast_error" in rows[0]:
        losses.set(ylabel="mean squared error")
        accuracies.plot(steps, [row["forecast_error"] for row in rows], label="whole forecasts, validation")
        accuracies.set(xlabel="step", ylabel="root mean squared error")
    else:
        for name in [name for name in rows[0] if name.endswith("accuracy")]:
            accuracies.plot(steps, [row[name] for row in rows], label=name.replace("_", " "))
        accuracies.set(xlabel="step", ylabel="share right, validation", ylim=(0, 1))
    for axes in (losses, accuracies):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100, format="png")
