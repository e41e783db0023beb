"""A model of one stage over any number of inputs: read as they are needed, run with those of like length, given back in
their order.

Padding is computed too, so inputs of a window are sorted by length before they are put into batches, and cut out of the
results. A file whose rows padding would change has batches of one size alone. Memory: the inputs and results of one
window, of two with several workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tformer_runtime.checks import whole
from tformer_runtime.engine import Engine
from tformer_runtime.errors import InputError, TformerError
from tformer_runtime.record import cut_to
from tformer_runtime.requests import every_size
from tformer_runtime.session import Array

WINDOW = 16  # times the rows of a batch: how many inputs are sorted together


@dataclass
class _Row:
    """One input; sources: request input → its array. outputs, or what went wrong."""

    index: int
    sources: Mapping[str, Array]
    sizes: tuple[int, ...] = ()
    outputs: Sequence[Array] = ()
    error: Exception | None = None

    @property
    def size(self) -> int:
        return max((value.size for value in self.sources.values()), default=0)


def run_once(
    engine: Engine,
    requests: Iterable[Callable[[], Mapping[str, Array]]],
    batch_size: int = 32,
    workers: int = 1,
    first: int = 0,
) -> Iterator[list[Array]]:
    """The outputs for each input, without batch axis and padding, in the order of the inputs.

    requests: what makes an input's arrays, each by the name of a request input. What is wrong with an input raises in
    its turn, after the results of those before it, as an InputError that names it by its number, counted from 1.
    workers: batches run side by side. first: how many inputs came before these.
    """
    whole("batch_size", batch_size)
    whole("workers", workers)
    return _rows(engine, iter(requests), batch_size, workers, first)


def _rows(
    engine: Engine, source: Iterator[Callable[[], Mapping[str, Array]]], batch_size: int, workers: int, first: int
) -> Iterator[list[Array]]:
    pool = ThreadPoolExecutor(workers, "tformer-worker") if workers > 1 else None
    waiting: deque[tuple[list[_Row], list[Future[None]]]] = deque()
    failed: Exception | None = None
    more, count = True, first
    try:
        while more or waiting:
            while more and len(waiting) < (1 if pool is None else 2):
                window: list[_Row] = []
                try:
                    for request in islice(source, WINDOW * batch_size):
                        window.append(_made(request, count + len(window)))
                except Exception as error:  # of whoever gives the inputs
                    failed = error
                more = len(window) == WINDOW * batch_size
                count += len(window)
                batches = _batches(engine, window, batch_size)
                started = [pool.submit(_run, engine, batch) for batch in batches] if pool is not None else []
                if pool is None:
                    for batch in batches:
                        _run(engine, batch)
                waiting.append((window, started))
            window, started = waiting.popleft()
            for batch_of_rows in started:
                batch_of_rows.result()
            for row in window:
                if isinstance(row.error, InputError):
                    raise InputError(f"input {row.index + 1}: {row.error}") from row.error
                if row.error is not None:
                    raise row.error
                yield list(row.outputs)
        if failed is not None:
            raise failed
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _made(request: Callable[[], Mapping[str, Array]], index: int) -> _Row:
    try:
        return _Row(index, request())
    except Exception as error:  # its turn has not come
        return _Row(index, {}, error=error)


def _batches(engine: Engine, window: Sequence[_Row], batch_size: int) -> list[list[_Row]]:
    """The longest first; of one size each where rows of several sizes may not be run together."""
    encode = engine.manifest.encode
    assert encode is not None
    groups: dict[Any, list[_Row]] = {}
    for row in sorted((row for row in window if row.error is None), key=lambda row: -row.size):
        shape = tuple(value.shape for value in row.sources.values())
        groups.setdefault(None if encode.ragged else shape, []).append(row)
    return [group[at : at + batch_size] for group in groups.values() for at in range(0, len(group), batch_size)]


def _run(engine: Engine, rows: Sequence[_Row]) -> None:
    """Give each row its outputs. Where a batch fails, its rows are run alone, so that the wrong one is known."""
    encode = engine.manifest.encode
    assert encode is not None
    named = {name: [row.sources[name] for row in rows] for name in rows[0].sources}
    try:
        given = engine.encode(named, len(rows))
    except TformerError as error:
        if len(rows) == 1:
            rows[0].error = error
            return
        for row in rows:
            _run(engine, [row])
        return
    values = [(spec.shape[1:], given[spec.name].numpy()) for spec in encode.outputs]
    for at, row in enumerate(rows):
        sizes = every_size(encode, row.sources)
        # A copy: a slice would hold the outputs of the whole batch.
        row.outputs = [np.array(cut_to(sizes, shape, value[at])) for shape, value in values]
