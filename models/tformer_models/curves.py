"""The validation metrics of a run as a table and as an image."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tformer_runtime.base.whole_files import replaced_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWER_IS_BETTER = ("loss", "forecast_error")  # of the metrics that a recipe can monitor
FIGURE_INCHES = (10, 3.5)
FIGURE_DPI = 100


def write_curves(rows: Sequence[Mapping[str, float]], output: Path, monitor: str) -> None:
    """Write metrics.csv and curves.png into the folder `output`; each file is replaced atomically.

    rows: the metrics of each validation, in the order of the steps. monitor: the metric that selects the saved weights;
    the image marks its best step. Raises OutputError if a file cannot be written.
    """
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows({name: f"{value:.10g}" for name, value in row.items()} for row in rows)
    with replaced_file(output / "metrics.csv") as file:
        file.write(table.getvalue().encode())
    with replaced_file(output / "curves.png") as file:
        _draw(rows, find_best_step(rows, monitor), monitor, file)


def find_best_step(rows: Sequence[Mapping[str, float]], monitor: str) -> int:
    """Return the first step with the best value of `monitor`, whose weights Lightning's ModelCheckpoint keeps."""
    best = min if monitor in LOWER_IS_BETTER else max
    return int(best(rows, key=lambda row: row[monitor])["step"])


def _draw(rows: Sequence[Mapping[str, float]], best_step: int, monitor: str, file: BinaryIO) -> None:
    """Draw losses (left) and accuracies or forecast errors (right) over the steps."""
    from matplotlib.figure import Figure  # pyplot would look for a window system

    steps = [row["step"] for row in rows]
    figure = Figure(figsize=FIGURE_INCHES, layout="constrained")
    loss_axes, metric_axes = figure.subplots(1, 2)
    is_forecast = "forecast_error" in rows[0]
    regularisation = "dropout and noise" if is_forecast else "dropout and label smoothing"
    loss_axes.plot(steps, [row["train_loss"] for row in rows], label=f"training, with {regularisation}")
    loss_axes.plot(steps, [row["loss"] for row in rows], label="validation")
    loss_axes.set_yscale("log")
    if is_forecast:
        loss_axes.set_ylabel("mean squared error (log scale)")
        metric_axes.plot(steps, [row["forecast_error"] for row in rows], label="whole forecasts, validation")
        metric_axes.set_ylabel("root mean squared error (linear scale)")
    else:
        loss_axes.set_ylabel("cross-entropy in nats (log scale)")
        for name in [name for name in rows[0] if name.endswith("accuracy")]:
            metric_axes.plot(steps, [row[name] for row in rows], label=f"{name.replace('_', ' ')}, validation")
        metric_axes.set(ylabel="share of correct predictions (linear scale)", ylim=(0, 1))
    for axes in (loss_axes, metric_axes):
        _finish_axes(axes, best_step, monitor)
    figure.savefig(file, dpi=FIGURE_DPI, format="png")


def _finish_axes(axes: Axes, best_step: int, monitor: str) -> None:
    """Label the steps, mark the step whose weights are saved, and add the legend."""
    label = f"saved weights: step {best_step}, best {monitor.replace('_', ' ')}"
    axes.axvline(best_step, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("training step (linear scale)")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
