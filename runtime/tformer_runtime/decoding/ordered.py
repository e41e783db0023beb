"""Run lazily read inputs in batches and return their results in the order of the inputs.

`in_order` reads a window of inputs, gives it to a `Runner`, and yields each result as soon as it and all results before
it are finished. An error is deferred: it is raised in the turn of its input, after the results of the inputs before it.
Two runners exist:

- `ContinuousRunner`, for generation. Requests join the running batch as soon as others leave it, so all rows of the
  batch stay busy.
- `BatchRunner`, for models whose inputs of a batch start and end together. Several workers run batches in parallel.

A window is sorted by length, so that inputs of a batch are of similar length. The memory is that of the running batches
and of at most two windows, for any number of inputs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from msgspec import Struct

from tformer_runtime.base.errors import InputError, MemoryBudgetError, TformerError, with_input_number
from tformer_runtime.decoding.request import Request, Result
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.decoding.worker_pool import WorkerPool

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

WINDOW_BATCHES = 16  # batches that a window has inputs for


class Indexed(Protocol):
    """An input with its number in the list of inputs."""

    @property
    def index(self) -> int: ...


class BatchItem(Indexed, Protocol):
    """An input of a `BatchRunner`. It keeps its own result."""

    @property
    def finished(self) -> bool:
        """Whether the input has its result or an error."""

    @property
    def error(self) -> Exception | None: ...


class BatchRow(Protocol):
    """One row of a batch. An input may have several."""

    def fail(self, error: TformerError) -> None:
        """Keep the error instead of a result."""


Input = TypeVar("Input", bound=Indexed)
InputContra = TypeVar("InputContra", bound=Indexed, contravariant=True)
Finished = TypeVar("Finished")
FinishedCo = TypeVar("FinishedCo", covariant=True)
Output = TypeVar("Output")
Item = TypeVar("Item", bound=BatchItem)
Row = TypeVar("Row", bound=BatchRow)


class Runner(Protocol[InputContra, FinishedCo]):
    """Runs windows of inputs."""

    def accepts_window(self, pending: int) -> bool:
        """Return whether the next window should be read now. pending: inputs that were read and not yet returned."""

    def submit(self, window: Sequence[InputContra]) -> None:
        """Take the inputs of a window."""

    def step(self) -> Mapping[int, FinishedCo | BaseException]:
        """Run some of the work. Return finished work: the index of an input → its finished item or its error."""

    def close(self) -> None:
        """Stop all work and release memory and threads."""


class WindowLimits(Struct, Generic[Input], frozen=True):
    """Where a window ends.

    max_inputs: the maximum number of inputs.
    enough_values, min_rows: a window that has as many values and as many rows ends earlier.
    count_values, count_rows: return the values and the rows of an input.
    """

    max_inputs: int
    enough_values: float = math.inf
    count_values: Callable[[Input], int] = lambda _: 0
    min_rows: int = 1
    count_rows: Callable[[Input], int] = lambda _: 1

    def read(self, source: Iterator[Input]) -> tuple[list[Input], bool, Exception | None]:
        """Read a window. Return its inputs, whether there may be more, and the error that ended the reading."""
        window: list[Input] = []
        values = rows = 0
        try:
            for item in islice(source, self.max_inputs):
                window.append(item)
                values += self.count_values(item)
                rows += self.count_rows(item)
                if values >= self.enough_values and rows >= self.min_rows:
                    return window, True, None
        except Exception as error:
            return window, False, error
        return window, len(window) == self.max_inputs, None


def in_order(
    inputs: Iterable[Input],
    runner: Runner[Input, Finished],
    make_result: Callable[[Finished], Output],
    limits: WindowLimits[Input],
) -> Iterator[Output]:
    """Yield the results of all inputs in the order of the inputs.

    inputs: read lazily, a window at a time.
    make_result: makes the result of a finished input, in its turn.
    Raise an error of an input, of `make_result` or of reading after the results of the inputs before it. An InputError
    and a MemoryBudgetError get the number of their input, from 1.
    """
    source = iter(inputs)
    finished: dict[int, Finished | BaseException] = {}
    pending: deque[int] = deque()  # indices of the inputs that were read, without the returned ones
    read_error: Exception | None = None
    more = True
    try:
        while True:
            while pending and pending[0] in finished:
                index = pending.popleft()
                outcome = finished.pop(index)
                if isinstance(outcome, BaseException):
                    _raise_numbered(outcome, index)
                else:
                    yield make_result(outcome)
            if more and runner.accepts_window(len(pending)):
                window, more, read_error = limits.read(source)
                pending += [item.index for item in window]
                runner.submit(window)
                del window
            elif pending:
                finished.update(runner.step())
            else:
                break
        if read_error is not None:
            raise read_error
    finally:
        runner.close()


def _raise_numbered(error: BaseException, index: int) -> None:
    if isinstance(error, (InputError, MemoryBudgetError)) and error.input_number is None:
        raise with_input_number(error, index + 1) from error
    raise error


def generate_in_order(
    requests: Iterable[Request],
    make_task: Callable[[Request], SequenceTask],
    make_result: Callable[[SequenceTask], Result],
    schedulers: Sequence[Scheduler],
    batch_size: int,
) -> Iterator[Result]:
    """Yield the results of all requests in the order of the requests. Errors: see `in_order`.

    schedulers: one for each worker.
    """
    # A generator, so that the threads of the workers do not start before the caller needs the first result.
    runner = ContinuousRunner(schedulers, make_task, batch_size)
    yield from in_order(requests, runner, make_result, WindowLimits(WINDOW_BATCHES * batch_size))


class ContinuousRunner:
    """Decodes requests with continuous batching, the long ones of a window first."""

    def __init__(
        self, schedulers: Sequence[Scheduler], make_task: Callable[[Request], SequenceTask], batch_size: int
    ) -> None:
        self._scheduler: Scheduler | WorkerPool = schedulers[0] if len(schedulers) == 1 else WorkerPool(schedulers)
        self._make_task, self._batch_size = make_task, batch_size
        self._refused: dict[int, Exception] = {}  # errors of requests that could not be submitted

    def accepts_window(self, pending: int) -> bool:
        return self._scheduler.waiting < self._batch_size and pending <= WINDOW_BATCHES * self._batch_size

    def submit(self, window: Sequence[Request]) -> None:
        tasks = []
        for request in window:
            try:
                tasks.append(self._make_task(request))
            except Exception as error:
                self._refused[request.index] = error
        for task in sorted(tasks, key=lambda task: -task.prefill_positions):
            try:
                self._scheduler.submit(task)
            except Exception as error:
                self._refused[task.index] = error

    def step(self) -> dict[int, SequenceTask | BaseException]:
        finished: dict[int, SequenceTask | BaseException] = {**self._refused}
        self._refused.clear()
        for task in self._scheduler.step():
            finished[task.index] = task if task.error is None else task.error
        return finished

    def close(self) -> None:
        self._scheduler.release()


class _Window(Struct, Generic[Item]):
    """The unfinished inputs of a window. waits: for each batch, a function that returns when the batch is finished."""

    items: deque[Item]
    waits: deque[Callable[[], None]]


def _thread_pool(workers: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # one worker, the default of a short job, needs no pool

    return ThreadPoolExecutor(workers, "tformer-worker")


class BatchRunner(Generic[Item, Row]):
    """Runs the batches of a window. With several workers, threads run batches while the next window is read."""

    def __init__(
        self,
        make_batches: Callable[[Sequence[Item]], Iterable[Sequence[Row]]],
        run: Callable[[Sequence[Row]], object],
        workers: int = 1,
        max_windows: int | None = None,
    ) -> None:
        """
        make_batches: splits the rows of a window into batches.
        run: computes a batch and stores the results in its rows.
        max_windows: windows that are held at once; by default two with several workers and otherwise one.
        """
        self._make_batches, self._compute = make_batches, run
        self._pool = _thread_pool(workers) if workers > 1 else None
        self._max_windows = max_windows or (1 if self._pool is None else 2)
        self._windows: deque[_Window[Item]] = deque()

    def accepts_window(self, pending: int) -> bool:
        return len(self._windows) < self._max_windows

    def submit(self, window: Sequence[Item]) -> None:
        waits: deque[Callable[[], None]] = deque()
        for batch in self._make_batches(window):
            if self._pool is None:
                waits.append(partial(self._run, batch))
            else:
                waits.append(self._pool.submit(self._run, batch).result)
        if window:
            self._windows.append(_Window(deque(window), waits))

    def step(self) -> dict[int, Item | BaseException]:
        window = self._windows[0]
        if window.waits:
            window.waits.popleft()()
        if not window.waits:
            self._windows.popleft()
        outcomes: dict[int, Item | BaseException] = {}
        while window.items and (window.items[0].finished or not window.waits):  # only the first ones are needed now
            item = window.items.popleft()
            outcomes[item.index] = item if item.error is None else item.error
        return outcomes

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _run(self, rows: Sequence[Row]) -> None:
        """Run rows as one batch. If that fails, run each row alone, so that only the rows with an error fail.

        Cost: after a failure, all rows are computed again.
        """
        try:
            self._compute(rows)
            return
        except TformerError as error:
            if len(rows) == 1:
                rows[0].fail(error)
                return
        for row in rows:  # outside of `except`, because the exception holds the arrays of the whole batch
            self._run([row])
