"""A model of one stage over any number of inputs: read as they are needed, run with those of like length, given back in
their order.

Padding is computed too, so inputs of a window are sorted by length before they are put into batches, and cut out of the
results. A file whose rows padding would change has batches of one size alone. Memory: the inputs and results of one
window, of two with several workers; a window of inputs that are all of one size, or large, is a batch for each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, numbered
from tformer_runtime.base.validation import whole
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.step_outputs import cut_to
from tformer_runtime.format.manifest import Encode
from tformer_runtime.format.sizes import every_size
from tformer_runtime.tasks.base import Outputs, Reading
from tformer_runtime.tasks.windows import WINDOW, in_windows, run_together

POSITIONS = 512  # computed at once on a CPU at most: what one operator writes is still near when the next reads it
HELD = 2**23  # numbers of a window's inputs that are enough: 32 MB, 9 minutes of sound at 16 kHz
PATCHES = 196  # that a picture is taken for: those of 224 × 224 pixels, 16 × 16 each

Keep = Callable[[Outputs, Mapping[str, Array]], Outputs]  # what of a request's outputs is needed


@dataclass
class _Row:
    """One request, and its outputs or what went wrong."""

    sources: Mapping[str, Array]
    outputs: Outputs = ()
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.error = error

    @property
    def size(self) -> int:
        return max((value.size for value in self.sources.values()), default=0)

    def positions(self, encode: Encode) -> int:
        """How many the model is likely to compute for it; of a sound, not its samples but the frames that it makes of
        them."""
        sizes = every_size(encode, self.sources) if encode.follows else {}
        made = {rule.of: sizes[name] for name, rule in encode.follows.items()}
        axes = {spec.name: spec.shape[1] for spec in encode.inputs if len(spec.shape) > 1}
        counts = (
            PATCHES if value.ndim > 2 else made.get(str(axes.get(name)), len(value))
            for name, value in self.sources.items()
        )
        return max(counts, default=1) or 1


@dataclass
class _Read:
    """One input, its rows, or why there are none."""

    index: int
    reading: Reading
    rows: Sequence[_Row] = ()
    error: Exception | None = None

    @property
    def failed(self) -> Exception | None:
        return self.error or next((row.error for row in self.rows if row.error is not None), None)


def run_once(
    engine: Engine,
    readings: Iterable[Callable[[], Reading]],
    batch_size: int = 32,
    workers: int = 1,
    first: int = 0,
    keep: Keep = lambda outputs, request: outputs,
) -> Iterator[tuple[Reading, list[Outputs]]]:
    """Each input and the outputs for each of its requests, without batch axis and padding, in the order of the inputs.

    readings: what reads an input. What is wrong with an input raises in its turn, after the results of those before it,
    as an InputError that names it by its number, counted from 1. workers: batches run side by side. first: how many
    inputs came before these. keep: what is held of a request's outputs until its turn comes.
    """
    whole("batch_size", batch_size)
    whole("workers", workers)
    reads = (_made(read, index) for index, read in enumerate(readings, first))
    done = in_windows(
        reads,
        lambda some: _batches(engine, [row for read in some for row in read.rows], batch_size),
        lambda batch: run_together(batch, partial(_run, engine, keep), _Row.fail),
        size=(WINDOW if _sized(engine) else workers) * batch_size,
        workers=workers,
        weigh=lambda read: sum(value.size for row in read.rows for value in row.sources.values()),
        most=HELD,
        count=lambda read: len(read.rows),
        least=workers * batch_size,
    )
    return map(_result, done)


def _result(read: _Read) -> tuple[Reading, list[Outputs]]:
    if isinstance(read.failed, InputError):
        raise numbered(read.failed, read.index + 1) from read.failed
    if read.failed is not None:
        raise read.failed
    return read.reading, [row.outputs for row in read.rows]


def _sized(engine: Engine) -> bool:
    """Whether inputs have sizes of their own, as texts do and images that a model reads do not."""
    encode = engine.manifest.encode
    return encode is None or any(isinstance(axis, str) for spec in encode.inputs for axis in spec.shape[1:])


def _made(read: Callable[[], Reading], index: int) -> _Read:
    try:
        reading = read()
    except Exception as error:  # its turn has not come
        return _Read(index, Reading(()), error=error)
    return _Read(index, reading, [_Row(request) for request in reading.requests])


def _batches(engine: Engine, rows: Sequence[_Row], batch_size: int) -> Iterator[list[_Row]]:
    """The longest first; of one size each where rows of several sizes may not be run together."""
    encode = engine.manifest.encode
    assert encode is not None
    groups: dict[Any, list[_Row]] = {}
    for row in sorted(rows, key=lambda row: -row.size):
        shape = tuple(value.shape for value in row.sources.values())
        groups.setdefault(None if encode.ragged else shape, []).append(row)
    for group in groups.values():
        at = 0
        while at < len(group):
            count = batch_size
            if engine.session.device == "cpu":
                count = min(count, max(1, POSITIONS // group[at].positions(encode)))
            yield group[at : at + count]
            at += count


def _run(engine: Engine, keep: Keep, rows: Sequence[_Row]) -> None:
    """Give each row its outputs."""
    encode = engine.manifest.encode
    assert encode is not None
    named = {name: [row.sources[name] for row in rows] for name in rows[0].sources}
    given = engine.encode(named, len(rows))
    values = [(spec.shape[1:], given[spec.name].numpy()) for spec in encode.outputs]
    for at, row in enumerate(rows):
        sizes = every_size(encode, row.sources)
        own = keep([cut_to(sizes, shape, value[at]) for shape, value in values], row.sources)
        row.outputs = [np.array(value) for value in own]  # copies: a slice would hold the outputs of the whole batch
