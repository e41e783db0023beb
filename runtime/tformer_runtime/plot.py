"""Heat maps of alignments, with matplotlib: which positions of the source each generated token attended to."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tformer_runtime.errors import MissingExtraError, OptionError, OutputError
from tformer_runtime.generate import Result
from tformer_runtime.inputs import Input
from tformer_runtime.model import Model
from tformer_runtime.session import Array

FORMATS = (".png", ".pdf", ".svg")
CELL = 0.28  # inches a token, so that its label fits
LARGEST = 40.0  # inches of a side; beyond, cells get smaller and not every label is written


class Drawing:
    """A picture for each of a run's inputs: OUT.png if there is one, OUT-1.png, OUT-2.png … if there are several."""

    def __init__(self, path: Path, force: bool) -> None:
        """Refuses before the work what would be refused after it: OptionError, MissingExtraError, OutputError."""
        if path.suffix.lower() not in FORMATS:
            raise OptionError(f"alignments are drawn into a file of the kind {', '.join(FORMATS)}, not {str(path)!r}")
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingExtraError("drawing alignments needs matplotlib; pip install tformer[plot]")
        self._path, self._force, self._count = path, force, 0
        self._inputs: deque[Input] = deque()
        self._first: tuple[Model, Result, Input] | None = None  # until it is known whether it is the only one
        self._check(path)

    def watch(self, inputs: Iterable[Input]) -> Iterator[Input]:
        """The inputs, remembered until their results are there."""
        for value in inputs:
            self._inputs.append(value)
            yield value

    def drawn(self, model: Model, results: Iterable[Result]) -> Iterator[Result]:
        """The results, each drawn before it is given on."""
        for result in results:
            self._add(model, result)
            yield result
        if self._first:
            self._draw(self._path, *self._first)

    def _add(self, model: Model, result: Result) -> None:
        self._count += 1
        value = self._inputs.popleft()
        if self._count == 1:
            self._first = model, result, value
            return
        if self._first:
            self._draw(self._numbered(1), *self._first)
            self._first = None
        self._draw(self._numbered(self._count), model, result, value)

    def _numbered(self, number: int) -> Path:
        return self._path.with_stem(f"{self._path.stem}-{number}")

    def _draw(self, path: Path, model: Model, result: Result, value: Input) -> None:
        self._check(path)
        if result.alignments is not None:
            heat_map(path, result.alignments, *model.labels(value, result))

    def _check(self, path: Path) -> None:
        if path.exists() and not self._force:
            raise OutputError(f"{path} exists already: give --force to overwrite it")


def heat_map(path: Path, weights: Array, source: Sequence[str], tokens: Sequence[str]) -> None:
    """Draw weights (tokens, source positions) with a label for each row and column, in the format of path's suffix.

    OutputError if it cannot be written; what stood there before is replaced only by a whole file.
    """
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
