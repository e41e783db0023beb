"""The results as an image: a panel for each model, with each engine's speed relative to tformer's.

It shows the steps of a decoder after a short prompt, and the first token after a prompt of up to 256; the table has
all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from versus.client import OURS, PEERS
from versus.measure import Record
from versus.shapes import ROWS, Case, Row

PALETTE = (
    "#111111", "#5f6b7a", "#a0a0a0", "#d1495b", "#2e86ab", "#edae49", "#8c564b", "#c49c94", "#17becf", "#9edae5",
    "#66a182", "#8d6a9f",
)  # fmt: skip
COLORS = dict(zip((peer.name for peer in PEERS), PALETTE, strict=True))
SHOWN = {"translate": ("request",), "continue": ("step", "first"), "embed": ("request",)}
WORDS = {"request": "", "step": "step", "first": "first token"}


def draw(records: Sequence[Record], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(row, _bars(row, records)) for row in ROWS]
    panels = [(row, bars) for row, bars in panels if bars]
    if not panels:
        return
    columns: list[list[tuple[Row, Bars]]] = [[], []]
    for panel in panels:
        min(columns, key=lambda column: sum(_height(bars) for _, bars in column)).append(panel)
    columns = [column for column in columns if column]
    tallest = max(sum(_height(bars) for _, bars in column) for column in columns)
    figure = pyplot.figure(figsize=(7.5 * len(columns), tallest + 0.6), layout="constrained")
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        heights = [_height(bars) for _, bars in column]
        heights.append(tallest - sum(heights) + 0.01)  # the shorter column ends in empty panels
        axes = part.subplots(len(heights), 1, height_ratios=heights)
        for axis, (row, bars) in zip(axes, column, strict=False):
            _panel(axis, row, bars)
        axes[-1].set_visible(False)
    figure.suptitle(textwrap.fill(title, 95 * len(columns)), fontsize=9, color="#444444")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


Bars = list[tuple[str, dict[str, float]]]


def _height(bars: Bars) -> float:
    """Return the height in inches."""
    return 0.9 + 0.15 * sum(len(engines) for _, engines in bars)


def _bars(row: Row, records: Sequence[Record]) -> Bars:
    """Return (label, engine → speed over tformer's) for each precision and case with figures of tformer and a peer."""
    speeds: dict[tuple[int, int, Case], dict[str, float]] = {}
    for record in records:
        if record["row"] != row.name or not isinstance(record.get("case"), dict):
            continue
        case = Case(**record["case"])
        for at, measure in enumerate(SHOWN[row.shape.kind]):
            ratio = record.get("ratio", {}).get(measure)
            if ratio and _shown(row, case, measure):
                key = (row.precisions.index(record["precision"]), at, case)
                speeds.setdefault(key, {})[record["peer"]] = 1 / ratio
    order = sorted(speeds, key=lambda key: (*key[:2], key[2].prompt, key[2].beams, key[2].batch))
    return [(_label(row, *key), speeds[key]) for key in order if len(speeds[key]) > 1]


def _shown(row: Row, case: Case, measure: str) -> bool:
    prompts = sorted({case.prompt for case in row.cases})
    if measure == "step":
        return case.prompt == prompts[0] and case.beams == 1
    return measure == "request" or (case.batch == 1 and case.prompt == [n for n in prompts if n <= 256][-1])


def _label(row: Row, precision: int, at: int, case: Case) -> str:
    word = WORDS[SHOWN[row.shape.kind][at]]
    return ", ".join(filter(None, [row.precisions[precision], word, case.name]))


def _panel(axis: Any, row: Row, bars: Bars) -> None:
    names = [peer.name for peer in PEERS if peer != OURS and any(peer.name in engines for _, engines in bars)]
    top = 0.0
    ticks, labels = [], []
    for label, engines in bars:
        shown = [name for name in names if name in engines]
        for i, name in enumerate(shown):
            speed = engines[name]
            axis.barh(top + i, speed, 0.86, color=COLORS[name], label=name)
            axis.text(speed, top + i, f" {speed:.2f}", va="center", fontsize=7, color="#444444")
        ticks.append(top + (len(shown) - 1) / 2)
        labels.append(label)
        top += len(shown) + 1
    axis.axvline(1, color=COLORS[OURS.name], linewidth=1.2)
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.set_ylim(top - 0.5, -1)
    axis.set_xlim(0, 1.12 * max(1.0, *(speed for _, engines in bars for speed in engines.values())))
    axis.set_title(f"{row.name}: speed of the others, tformer = 1", loc="left", fontsize=10, fontweight="bold")
    axis.tick_params(length=0, labelsize=8)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.5 / max(top, 8))}
    axis.legend([handles[name] for name in names], names, fontsize=8, frameon=False, ncols=len(names), **place)
