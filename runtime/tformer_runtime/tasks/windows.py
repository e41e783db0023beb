"""Many inputs: read as they are needed, a window at a time, run in batches of that, given back in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from tformer_runtime.base.errors import TformerError

WINDOW = 16  # times the rows of a batch: how many inputs are sorted by length together

Input = TypeVar("Input")
Batch = TypeVar("Batch")
Row = TypeVar("Row")


def run_together(
    rows: Sequence[Row], run: Callable[[Sequence[Row]], object], failed: Callable[[Row, TformerError], object]
) -> None:
    """Run rows side by side; where that fails, each alone, so that it is known which was wrong, and `failed` is told.

    Cost: where it fails, all of them again.
    """
    try:
        run(rows)
        return
    except TformerError as error:
        if len(rows) == 1:
            failed(rows[0], error)
            return
    for row in rows:  # behind `except`, which holds the arrays of all of them
        run_together([row], run, failed)


def in_windows(
    source: Iterable[Input],
    batches: Callable[[Sequence[Input]], Iterable[Batch]],
    run: Callable[[Batch], None],
    size: int,
    workers: int = 1,
    weigh: Callable[[Input], int] = lambda _: 0,
    most: int = 1,
    least: int = 1,
    count: Callable[[Input], int] = lambda _: 1,
) -> Iterator[Input]:
    """Each input, in order, once `run` has been called with the batches of its window, which `batches` makes.

    size: inputs of a window, but such as count for `least` are enough if they weigh `most` together. workers: batches
    run side by side, while the next window is read. What reading raises, or `run`, is raised after the inputs before.
    Memory: the inputs of one window, of two with several workers.
    """
    inputs = iter(source)
    pool = ThreadPoolExecutor(workers, "tformer-worker") if workers > 1 else None
    waiting: deque[tuple[list[Input], list[Future[None]]]] = deque()
    failed: Exception | None = None
    more = True
    try:
        while more or waiting:
            while more and len(waiting) < (1 if pool is None else 2):
                window: list[Input] = []
                try:
                    weight = counted = 0
                    for value in islice(inputs, size):
                        window.append(value)
                        weight += weigh(value)
                        counted += count(value)
                        if weight >= most and counted >= least:
                            break
                    else:
                        more = len(window) == size
                except Exception as error:  # its turn has not come
                    failed, more = error, False
                started: list[Future[None]] = []
                for batch in batches(window):
                    if pool is None:
                        run(batch)
                    else:
                        started.append(pool.submit(run, batch))
                waiting.append((window, started))
            window, started = waiting.popleft()
            for ran in started:
                ran.result()
            yield from window
        if failed is not None:
            raise failed
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
