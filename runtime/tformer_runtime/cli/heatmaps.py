"""Heat maps, with matplotlib: which positions of the source each generated token attended to, and what each position of
an input takes of each."""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, MissingExtraError, OptionError, OutputError, TformerError, numbered
from tformer_runtime.decoding.request import Result
from tformer_runtime.model import Model
from tformer_runtime.preprocess.inputs import Input

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
CELL = 0.28  # inches a token, so that its label fits
SMALL, LABEL = 0.14, 0.09  # inches a token where there are many squares, and the height of its label there
LARGEST = 40.0  # inches of a side; beyond, cells get smaller and not every label is written


class Drawing:
    """A picture of alignments for each of a run's inputs: OUT.png if there is one, OUT-1.png, OUT-2.png … if there are
    several."""

    what = "alignments"

    def __init__(self, path: Path, force: bool) -> None:
        """Refuses before the work what would be refused after it: OptionError, MissingExtraError, OutputError."""
        if path.suffix.lower() not in FORMATS:
            raise OptionError(
                f"{self.what} can be drawn into a file of the kind {', '.join(FORMATS)}, not {str(path)!r}"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingExtraError(f"drawing {self.what} needs matplotlib; pip install tformer[plot]")
        self._path, self._force, self._count = path, force, 0
        self._inputs: deque[Input] = deque()
        self._first: tuple[Model, Result, Input] | None = None  # until it is known whether it is the only one
        self._check(path)

    def watch(self, model: Model, inputs: Iterable[Input]) -> Iterator[Input]:
        """The inputs, remembered until their results are there. InputError, before it is run, for one that cannot be
        drawn."""
        for number, value in enumerate(inputs, 1):
            try:
                self._must_draw(model, value)
            except InputError as error:
                raise numbered(error, number) from error
            self._inputs.append(value)
            yield value

    def drawn(self, model: Model, results: Iterable[Result]) -> Iterator[Result]:
        """The results, each drawn before it is given on; but the first when it is known whether it is the only one,
        also by what is raised for an input after it."""
        found = iter(results)
        while True:
            try:
                result = next(found, None)
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
        self._check(path)
        self._picture(path, model, result, value)

    def _must_draw(self, model: Model, value: Input) -> None:
        """InputError for an input that has results but no picture."""

    def _picture(self, path: Path, model: Model, result: Any, value: Input) -> None:
        if result.alignments is not None:
            heat_map(path, result.alignments, *model.labels(value, result))

    def _check(self, path: Path) -> None:
        if path.exists() and not self._force:
            raise OutputError(f"{path} exists already: give --force to overwrite it")


class Maps(Drawing):
    """The same of what each position of an input takes of each, for which the model is run once more."""

    what = "attention"

    def __init__(self, path: Path, force: bool, truncate: bool, settings: Mapping[str, Any]) -> None:
        """settings: of the task."""
        super().__init__(path, force)
        self._truncate, self._settings = truncate, settings

    def _must_draw(self, model: Model, value: Input) -> None:
        model.at_once(value, self._truncate, self._settings)

    def _picture(self, path: Path, model: Model, result: Any, value: Input) -> None:
        attention_maps(path, *model.attention(value, self._truncate, **self._settings))


def heat_map(path: Path, weights: Array, source: Sequence[str], tokens: Sequence[str]) -> None:
    """Draw weights (tokens, source positions) with a label for each row and column, in the format of path's suffix.
    OutputError if it cannot be written."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display and is not for threads

    rows, columns = weights.shape
    width, height = (min(LARGEST, max(2.0, CELL * n + 1.2)) for n in (columns, rows))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    for axis, labels in ((axes.xaxis, source), (axes.yaxis, tokens)):
        every = 1 + int(CELL * len(labels) / LARGEST)
        axis.set_ticks(range(0, len(labels), every), [_plain(label) for label in labels[::every]])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.tick_params(axis="x", rotation=90 if max(map(len, source)) > 2 else 0)
    figure.colorbar(image, ax=axes, shrink=0.8)
    _save(figure, path)


def attention_maps(path: Path, weights: Array, tokens: Sequence[str]) -> None:
    """Draw weights (layers, heads, positions, positions): a row of squares for each layer and a column for each head,
    in each a row for the position that takes and a column for that of which it does. Errors as of `heat_map`."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    layers, heads, rows, columns = weights.shape
    high, wide = rows + 1, columns + 1  # with the line between squares
    sheet = np.full((layers * high - 1, heads * wide - 1), np.nan, np.float32)
    for layer, head in np.ndindex(layers, heads):
        sheet[layer * high :, head * wide :][:rows, :columns] = weights[layer, head]
    cell = min(SMALL, LARGEST / max(sheet.shape))
    figure = Figure(figsize=(cell * sheet.shape[1] + 2, cell * sheet.shape[0] + 1.5), layout="constrained")
    axes = figure.add_subplot()
    shades = colormaps["Blues"].with_extremes(bad="0.8")
    image = axes.imshow(sheet, cmap=shades, vmin=0.0, vmax=1.0, interpolation="nearest")
    every = math.ceil(LABEL / cell)
    for axis, squares, count in ((axes.xaxis, heads, columns), (axes.yaxis, layers, rows)):
        labels = [_plain(token) for token in tokens] if count == len(tokens) else [str(i) for i in range(count)]
        places = [(square * (count + 1) + at, labels[at]) for square in range(squares) for at in range(0, count, every)]
        axis.set_ticks(*zip(*places, strict=True), fontsize=5)
    axes.tick_params(length=0, pad=1)
    axes.tick_params(axis="x", rotation=90)
    for head in range(heads):
        axes.text(head * wide + (columns - 1) / 2, -1, f"head {head}", ha="center", va="bottom", fontsize=7)
    for layer in range(layers):
        place = sheet.shape[1], layer * high + (rows - 1) / 2
        axes.text(*place, f"layer {layer}", ha="left", va="center", rotation=270, fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.5)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """OutputError if it cannot be written; what stood there before is replaced only by a whole file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # characters that the font has not are drawn as boxes
            figure.savefig(part, format=path.suffix[1:].lower(), dpi=120)
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _plain(label: str) -> str:
    """A token as it is: a dollar sign would begin a formula, and a space would not be seen."""
    return label.replace("$", r"\$").replace(" ", "\N{OPEN BOX}")
