"""Heat maps of attention weights, drawn with matplotlib.

- cross-attention: generated tokens × source positions
- self-attention: positions × positions, for each layer and head
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import (
    InputError,
    MissingExtraError,
    OptionError,
    OutputError,
    TformerError,
    with_input_number,
)
from tformer_runtime.base.extras import install_command
from tformer_runtime.base.special_files import check_output_name
from tformer_runtime.base.whole_files import replaced_file
from tformer_runtime.decoding.request import Result
from tformer_runtime.model import Model
from tformer_runtime.preprocess.inputs import Input

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
CELL_INCHES = 0.28  # side of a cell, so that its label fits
HEAD_CELL_INCHES = 0.14  # side of a cell of an attention map, which has a square of cells per head
HEAD_LABEL_INCHES = 0.09  # height of a label there
MAX_SIDE_INCHES = 40.0  # of an image; in a larger one cells are smaller and some labels are left out


class HeatMapWriter:
    """Draws the cross-attention of each input of a run: OUT.png for one input, OUT-1.png, OUT-2.png … for several."""

    flag = "--cross-attentions"

    def __init__(self, path: Path, force: bool) -> None:
        """Check before the run that the images can be written.

        path: the file of the image. force: overwrite existing files.
        Raise OptionError for an unknown format, MissingExtraError without matplotlib, OutputError for a file that
        exists.
        """
        if path.suffix.lower() not in FORMATS:
            raise OptionError(
                f"{self.flag} can be drawn into a file of the kind {', '.join(FORMATS)}, not {str(path)!r}"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingExtraError(f"{self.flag} needs matplotlib: {install_command('plot')}")
        self._path, self._force, self._count = path, force, 0
        self._inputs: deque[Input] = deque()  # without a result
        self._first: tuple[Model, Result, Input] | None = None  # kept until the next result: its name depends on that
        self._check_absent(path)

    def watch(self, model: Model, inputs: Iterable[Input]) -> Iterator[Input]:
        """Yield the inputs, and keep each until its result is drawn.

        Raise InputError, before the model runs, for an input that cannot be drawn.
        """
        for number, value in enumerate(inputs, 1):
            try:
                self._check_drawable(model, value)
            except InputError as error:
                raise with_input_number(error, number) from error
            self._inputs.append(value)
            yield value

    def draw_results(self, model: Model, results: Iterable[Result]) -> Iterator[Result]:
        """Draw and yield each result.

        The first is drawn after the second is known, or after an error in place of the second, because the name of its
        file depends on that.
        """
        rest = iter(results)
        while True:
            try:
                result = next(rest, None)
            except Exception as error:
                try:
                    self._draw_first(self._numbered(1))
                except TformerError as other:
                    error.add_note(str(other))
                raise
            if result is None:
                break
            self._add(model, result)
            yield result
        self._draw_first(self._path)

    def _add(self, model: Model, result: Result) -> None:
        self._count += 1
        value = self._inputs.popleft()
        if self._count == 1:
            self._first = model, result, value
            return
        self._draw_first(self._numbered(1))
        self._draw(self._numbered(self._count), model, result, value)

    def _draw_first(self, path: Path) -> None:
        if self._first:
            self._draw(path, *self._first)
            self._first = None

    def _numbered(self, number: int) -> Path:
        return self._path.with_stem(f"{self._path.stem}-{number}")

    def _draw(self, path: Path, model: Model, result: Result, value: Input) -> None:
        self._check_absent(path)
        self._draw_image(path, model, result, value)

    def _check_drawable(self, model: Model, value: Input) -> None:
        """Raise InputError for an input that has a result but no image."""

    def _draw_image(self, path: Path, model: Model, result: Any, value: Input) -> None:
        if result.cross_attentions is not None:
            heat_map(path, result.cross_attentions, *model.labels(value, result))

    def _check_absent(self, path: Path) -> None:
        check_output_name(path)
        if path.exists() and not self._force:
            raise OutputError(f"{path} exists already: give --force to overwrite it")


class AttentionMapWriter(HeatMapWriter):
    """Draws the self-attention of each input. The model runs a second time for each image."""

    flag = "--attentions"

    def __init__(
        self, path: Path, force: bool, truncate: bool, settings: Mapping[str, Any], adapter: str | None = None
    ) -> None:
        """truncate: cut an input that is too long. settings: settings of the task. adapter: its name."""
        super().__init__(path, force)
        self._truncate, self._settings, self._adapter = truncate, settings, adapter

    def _check_drawable(self, model: Model, value: Input) -> None:
        model.calls.single_request(value, self._truncate, self._settings)

    def _draw_image(self, path: Path, model: Model, result: Any, value: Input) -> None:
        attention_maps(path, *model.attentions(value, self._truncate, self._adapter, **self._settings))


def heat_map(path: Path, weights: Array, source: Sequence[str], tokens: Sequence[str]) -> None:
    """Draw cross-attention weights.

    path: the file; its suffix is the format.
    weights: (tokens, source positions).
    source, tokens: the label of each column and of each row.
    Raise OutputError if the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot, which needs a display and is not thread-safe

    rows, columns = weights.shape
    width, height = (min(MAX_SIDE_INCHES, max(2.0, CELL_INCHES * n + 1.5)) for n in (columns, rows))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot(xlabel="source position", ylabel="generated token")
    image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    for axis, labels in ((axes.xaxis, source), (axes.yaxis, tokens)):
        stride = 1 + int(CELL_INCHES * len(labels) / MAX_SIDE_INCHES)
        axis.set_ticks(range(0, len(labels), stride), [_printable(label) for label in labels[::stride]])
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0)
    axes.tick_params(axis="x", rotation=90 if max(map(len, source)) > 2 else 0)
    figure.colorbar(image, ax=axes, shrink=0.8, label="cross-attention weight")
    _save(figure, path)


def attention_maps(path: Path, weights: Array, tokens: Sequence[str]) -> None:
    """Draw attention weights: a row of squares per layer, a square per head.

    path: the file; its suffix is the format.
    weights: (layers, heads, query positions, key positions).
    tokens: the label of each position.
    Raise OutputError if the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    layers, heads, rows, columns = weights.shape
    sheet = _tile_heads(weights)
    cell = min(HEAD_CELL_INCHES, MAX_SIDE_INCHES / max(sheet.shape))
    figure = Figure(figsize=(cell * sheet.shape[1] + 2.4, cell * sheet.shape[0] + 1.8), layout="constrained")
    axes = figure.add_subplot(xlabel="attended position (key)", ylabel="attending position (query)")
    shades = colormaps["Blues"].with_extremes(bad="0.8")
    image = axes.imshow(sheet, cmap=shades, vmin=0.0, vmax=1.0, interpolation="nearest")
    stride = math.ceil(HEAD_LABEL_INCHES / cell)
    for axis, squares, count in ((axes.xaxis, heads, columns), (axes.yaxis, layers, rows)):
        labels = [_printable(token) for token in tokens] if count == len(tokens) else [str(i) for i in range(count)]
        ticks = [(square * (count + 1) + i, labels[i]) for square in range(squares) for i in range(0, count, stride)]
        axis.set_ticks(*zip(*ticks, strict=True), fontsize=5)
    axes.tick_params(length=0, pad=1)
    axes.tick_params(axis="x", rotation=90)
    for head in range(heads):
        x = head * (columns + 1) + (columns - 1) / 2
        axes.text(x, -1, f"head {head}", ha="center", va="bottom", fontsize=7)
    for layer in range(layers):
        y = layer * (rows + 1) + (rows - 1) / 2
        axes.text(sheet.shape[1], y, f"layer {layer}", ha="left", va="center", rotation=270, fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.5, label="attention weight")
    _save(figure, path)


def _tile_heads(weights: Array) -> Array:
    """Return (layers, heads, rows, columns) as one matrix, with a line of NaN between the squares."""
    layers, heads, rows, columns = weights.shape
    sheet = np.full((layers * (rows + 1) - 1, heads * (columns + 1) - 1), np.nan, np.float32)
    for layer, head in np.ndindex(layers, heads):
        sheet[layer * (rows + 1) :, head * (columns + 1) :][:rows, :columns] = weights[layer, head]
    return sheet


def _save(figure: Figure, path: Path) -> None:
    """Write the image atomically. Raise OutputError if it cannot be written."""
    with replaced_file(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # characters that the font lacks are drawn as boxes
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=120)


def _printable(label: str) -> str:
    """Escape dollar signs, which begin a formula in matplotlib, and make spaces visible."""
    return label.replace("$", r"\$").replace(" ", "\N{OPEN BOX}")
