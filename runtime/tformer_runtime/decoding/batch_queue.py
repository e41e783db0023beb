"""Calls that arrive one by one, and are computed in batches of those that wait: the queue of work without a scheduler.

A `BatchQueue` has the interface of a `Scheduler`, so that one thread can step both in turn. Each step computes one
batch, or a part of a batch that is computed in several parts. The rows that arrive while a batch is computed make the
next one; nothing waits for more rows. The next batch is always the one with the oldest row, so that no row waits for
ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from tformer_runtime.base.errors import DeadlineError, MemoryBudgetError, typed_memory_error
from tformer_runtime.decoding.scheduler import DEADLINE_MESSAGE
from tformer_runtime.engine.memory_budget import MemoryShare


class QueuedRow(Hashable, Protocol):
    """One row of a batch. It keeps its own result."""

    @property
    def finished(self) -> bool:
        """Whether the row has its result or an error."""

    @property
    def error(self) -> Exception | None: ...

    def fail(self, error: Exception) -> None:
        """Keep the error instead of a result."""


Row = TypeVar("Row", bound=QueuedRow)


class QueuedCall(Struct, Generic[Row], eq=False):
    """One call.

    rows: at least one.
    deadline: the time at which the call must be finished, by `time.monotonic`.
    error: the error that ended the call.
    """

    rows: Sequence[Row]
    deadline: float | None = None
    error: BaseException | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or all(row.finished for row in self.rows)


class BatchQueue(Generic[Row]):
    """Computes queued calls, one batch at a time. One thread at a time may use it, but for the numbers of `stats`.

    If a batch fails, each of its rows is computed alone, in a step of its own. So only the rows with an error fail.
    Cost: of a step, sorting the rows that wait, and the batch. A call waits for at most as many batches as there are
    rows before its last one.

    running_rows, running_requests: rows of the batch that is computed now, and the calls that they belong to.
    """

    def __init__(
        self,
        make_batches: Callable[[Sequence[Row]], Iterable[Sequence[Row]]],
        run: Callable[[Sequence[Row], MemoryShare], Iterator[object]],
        memory: MemoryShare,
        bytes_needed: Callable[[Sequence[Row]], int] = lambda rows: 0,
    ) -> None:
        """
        make_batches: splits rows into batches.
        run: computes a batch and stores the results in its rows. It yields between its parts, if it has several. It is
            closed if no call wants its rows any more.
        memory: the share of the batches, which does not block.
        bytes_needed: returns the bytes of that share that a batch needs at most.
        """
        self._make_batches, self._compute, self._bytes_needed = make_batches, run, bytes_needed
        self.memory = memory
        self.waits_for_memory = False  # whether, after a step, nothing runs because other requests hold the memory
        self.running_rows = self.running_requests = 0
        self.generated_tokens = 0  # as a scheduler has it
        self._calls: dict[Row, QueuedCall[Row]] = {}  # unfinished row → its call, in order of arrival
        self._alone: set[Row] = set()  # rows of a batch that failed
        self._batch: Sequence[Row] = ()
        self._parts: Iterator[object] | None = None  # of the batch
        self._finished: list[QueuedCall[Row]] = []  # calls that no step has returned yet
        self._unreturned: dict[QueuedCall[Row], None] = {}

    @property
    def idle(self) -> bool:
        return not self._calls and not self._finished

    def submit(self, call: QueuedCall[Row]) -> None:
        """Queue a call."""
        self._unreturned[call] = None
        self._calls |= dict.fromkeys(call.rows, call)

    def cancel(self, call: QueuedCall[Row], error: Exception) -> None:
        """End a call with an error. A batch that is computed goes on for other calls."""
        if self._is_open(call):
            self._end(call, error)

    def step(self) -> list[QueuedCall[Row]]:
        """Compute one batch, or the next part of it. Return the finished calls.

        If no batch runs because other requests hold the memory, nothing happens (`waits_for_memory`).
        """
        self._cancel_late()
        if self._parts is None:
            self._begin()
        if self._parts is not None:
            self._advance()
        finished, self._finished = self._finished, []
        for call in finished:
            self._unreturned.pop(call, None)
        return finished

    def step_or_fail(self, poll: Callable[[], object] | None = None) -> list[QueuedCall[Row]]:
        """Step without raising an error. An error that belongs to no single call ends all calls.

        poll: not needed, because calls join between two steps.
        """
        try:
            return self.step()
        except BaseException as error:
            return self.fail(error)

    def fail(self, error: BaseException) -> list[QueuedCall[Row]]:
        """End every call with an error. Calls that were finished before keep their result."""
        error = typed_memory_error(error)
        calls = list(self._unreturned)
        for call in calls:
            if not call.finished:
                call.error = error
        self._unreturned.clear()
        self._calls.clear()
        self._alone.clear()
        self._finished = []
        self._end_batch()
        self.memory.withdraw()
        return calls

    def _cancel_late(self) -> None:
        now = time.monotonic()
        for call in list(self._unreturned):
            if call.deadline is not None and now > call.deadline and self._is_open(call):
                self._end(call, DeadlineError(DEADLINE_MESSAGE))

    def _end(self, call: QueuedCall[Row], error: BaseException) -> None:
        """End a call with an error, without its other rows."""
        call.error = error
        self._finished.append(call)
        for row in call.rows:
            self._calls.pop(row, None)
            self._alone.discard(row)
        if self._parts is not None and not any(row in self._calls for row in self._batch):
            self._end_batch()

    def _begin(self) -> None:
        """Begin the batch with the oldest row, if there is memory for it. Rows that can never fit fail."""
        self.waits_for_memory = False
        batch: Sequence[Row] = ()
        while self._calls:
            batch = batch or self._next_batch()
            try:
                need = self._bytes_needed(batch)
                if need and not self.memory.reserve(need):  # no bytes need no turn
                    self.waits_for_memory = True
                    return
            except MemoryBudgetError as error:
                if len(batch) == 1:
                    self._end(self._calls[batch[0]], error)
                batch = self._half(batch)
                continue
            self._batch, self._parts = batch, self._compute(batch, self.memory)
            self.running_rows = len(batch)
            self.running_requests = len({self._calls[row] for row in batch})
            return
        self.memory.withdraw()

    def _next_batch(self) -> Sequence[Row]:
        """Return the batch with the oldest row."""
        oldest = next(iter(self._calls))
        if oldest not in self._alone:
            rows = [row for row in self._calls if row not in self._alone]
            try:
                return next(batch for batch in self._make_batches(rows) if oldest in batch)
            except Exception:  # of one of the rows, which has it again when it runs
                self._alone |= set(rows)
        return [oldest]

    def _half(self, batch: Sequence[Row]) -> Sequence[Row]:
        """Return the half of a batch with its oldest row; nothing of a batch of one row."""
        half = len(batch) // 2
        oldest = next((row for row in self._calls if row in batch), None)
        return next((part for part in (batch[:half], batch[half:]) if oldest in part), ())

    def _advance(self) -> None:
        """Compute the next part of the batch."""
        assert self._parts is not None
        rows, error = self._batch, None
        try:
            next(self._parts)
        except StopIteration:
            self._end_batch()
        except Exception as raised:
            self._end_batch()
            error = typed_memory_error(raised)
        self._cancel_late()
        if error is not None and len(rows) > 1:
            self._alone |= {row for row in rows if row in self._calls and not row.finished}
        elif error is not None and rows[0] in self._calls:
            self._end(self._calls[rows[0]], error)
        for row in rows:
            self._settle(row)

    def _settle(self, row: Row) -> None:
        """Finish the call of a row, if the row is finished and the last of its call."""
        call = self._calls.get(row)
        if call is None or not row.finished:
            return
        if row.error is not None:
            self._end(call, row.error)
            return
        del self._calls[row]
        self._alone.discard(row)
        if not self._is_open(call):
            self._finished.append(call)

    def _is_open(self, call: QueuedCall[Row]) -> bool:
        """Return whether rows of a call wait or are computed."""
        return any(row in self._calls for row in call.rows)

    def _end_batch(self) -> None:
        """Release what the batch holds."""
        parts, self._parts = self._parts, None
        self._batch, self.running_rows, self.running_requests = (), 0, 0
        close = getattr(parts, "close", None)  # of a generator
        if close is not None:
            close()
        self.memory.release_reservation()
