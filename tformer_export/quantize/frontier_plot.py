"""Plot of the frontier with matplotlib: the size and the loss of each measured mixture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tformer_export.common.degradation_budget import TOKENS
from tformer_export.quantize.bit_plan import Mixture
from tformer_runtime.base.errors import MissingExtraError
from tformer_runtime.base.extras import install_command
from tformer_runtime.base.whole_files import replaced_file


def check_drawable() -> None:
    """Raise MissingExtraError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(f"drawing the frontier needs matplotlib: {install_command('plot')}")


def draw(mixture: Mixture, path: Path) -> None:
    """Write a PNG; it replaces the old file only when it is complete."""
    check_drawable()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [point.size / 1e6 for point in mixture.frontier]
    has_tokens = mixture.frontier[0].quality.meaning == TOKENS
    axes.plot(sizes, [100 * point.quality.changed for point in mixture.frontier], "o-", color="tab:blue")
    axes.set_xlabel("matrices and embedding tables, MB")
    axes.set_ylabel(f"% {mixture.frontier[0].quality.meaning.whole}", color="tab:blue")
    axes.set_ylim(bottom=0)
    for i, (size, point) in enumerate(zip(sizes, mixture.frontier, strict=True)):
        point_place = size, 100 * point.quality.changed
        axes.annotate(f"{point.bits:.1f} bits", point_place, xytext=(4, 4), textcoords="offset points", fontsize=7)
        if i == mixture.chosen:
            axes.plot(*point_place, "*", color="tab:red", markersize=14, label="this file")
            axes.legend(loc="upper right")
    divergence_axes = axes.twinx()
    divergence_axes.plot(
        sizes, [point.quality.divergence for point in mixture.frontier], ".--", color="tab:gray", linewidth=0.8
    )
    divergence_axes.set_ylabel("KL divergence, nats" if has_tokens else "relative squared error", color="tab:gray")
    divergence_axes.set_ylim(bottom=0)
    axes.set_title(
        f"{mixture.positions} {mixture.frontier[0].quality.meaning.unit}, {mixture.budget} allowed", fontsize=9
    )
    with replaced_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
