"""Continuous batching: many tasks in one batch that others join as soon as there is room.

Each step feeds every row the token that was chosen for it, and chooses the next. It ends there, so that a token is told
before the model reads it. Tasks that are over leave at once, and tasks that wait take their rows: they are encoded and
their prompts are read on their own, then they join. A task's result is its own, whoever is beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import DeadlineError, MemoryBudgetError
from tformer_runtime.decoding.beam_search import BeamSearch
from tformer_runtime.decoding.sampling import Guess
from tformer_runtime.decoding.sequence import Search, Task, in_place, placed
from tformer_runtime.decoding.token_search import RowSearch
from tformer_runtime.engine.memory_budget import Budget, Share, never_fits
from tformer_runtime.engine.step_outputs import Trail

ROWS = 32  # that are decoded at once
LATE = "the deadline passed before the request was finished"
POSITIONS = MappingProxyType({"cpu": 4096, "cuda": 16384})
"""Device → of prompts and sources, padded, that are computed at once before the first token.

More are no faster on two cores, and what attention writes grows with them: eight prompts of 1,024 tokens took a decoder
of 134 M in float32 8.5 s with 200 MB of scores, at 4,096 positions, and 10 s with 400 MB at once; 32 sources of 128
took an encoder-decoder of 60 M in int8 0.4 s at 1,024 as at 4,096."""


class Rows(Protocol):
    """What decoding needs of a model: some rows, and what they have cached."""

    def step(self, tokens: Ints) -> F32 | DeviceLogits:
        """Feed (rows, 1) tokens; logits (rows, vocabulary), which the next step overwrites."""

    def reorder(self, rows: Ints) -> None:
        """Row i becomes what row rows[i] was; rows may repeat, be fewer or be more."""

    def requests(self) -> Ints | None:
        """(rows,) numbers, equal for rows that are best beside each other; None if it does not matter."""

    def join(self, other: Any) -> None:
        """Append the other's rows; it is of no more use then."""

    def fit(self) -> bool:
        """Give back memory that is not used now. False if that is nothing to speak of."""

    def trails(self) -> list[Trail] | None:
        """What was recorded of each row up to the latest step, if anything is."""

    def guesses(self) -> list[Guess | None] | None:
        """What was read ahead of each row, if anything is: the logits after it, if it comes, cost no step."""

    def release(self) -> None:
        """Give the memory back."""


class Model(Protocol):
    """What starts rows."""

    def begin(self, tasks: Sequence[Task]) -> tuple[Rows, F32]:
        """A row for each task, which has read its prompt, and the logits (rows, vocabulary) after it.

        Raises if a task cannot be run; which one, is found by trying each alone.
        """

    def need(self, running: Sequence[Task], coming: Sequence[Task], rows: Any = None) -> int:
        """The most bytes that tasks may come to hold as rows of one batch. rows: those of the running ones."""


class Scheduler:
    """Tasks in, finished tasks out. To be used by one thread at a time.

    Memory: that of the rows that are alive, in buffers of at most four times their need. A step costs the model's
    step, one or two passes over the logits, and some microseconds a row.
    """

    def __init__(
        self, model: Model, rows: int = ROWS, positions: int = POSITIONS["cpu"], memory: Share | None = None
    ) -> None:
        """rows: decoded at once. positions: computed at once before first tokens. memory: what tasks may hold."""
        self._model, self._most_rows, self._positions = model, rows, positions
        self.memory = memory or Budget().share()
        self._waiting: deque[Task] = deque()
        self._searches: dict[object, Search] = {}
        self._places: dict[object, Ints] = {}  # the batch's row of each of a search's rows
        self._rows: Rows | None = None
        self._logits: F32 | DeviceLogits | None = None  # of the rows, until tokens are chosen by them
        self._tokens: Ints | None = None  # (rows, 1), chosen, until the rows have read them
        self._running: dict[Task, None] = {}
        self._over: list[Task] = []  # not yet told of
        self._dropped = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> list[Task]:
        return list(self._running)

    @property
    def wants_more(self) -> bool:
        """Whether it has fewer tasks than it could admit at its next step."""
        waiting = sum(task.width for task in self._waiting)
        return waiting < max(self._most_rows - sum(task.width for task in self._running), self._most_rows // 4, 1)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running and not self._over

    @property
    def stalled(self) -> bool:
        """Whether, after a step, nothing runs because others hold the memory that it would need."""
        return bool(self._waiting) and not self._running and not self._over

    def submit(self, task: Task) -> None:
        """Let a task wait for its turn. MemoryBudgetError if it can never fit, with what it would need."""
        limit = self.memory.limit
        if limit is not None and (need := self._model.need((), [task])) > limit:
            raise never_fits(need, limit)
        self._waiting.append(task)

    def cancel(self, task: Task, error: Exception) -> None:
        """End a task with an error; its rows are free at once."""
        if not task.over:
            task.error = error
            self._dropped = True
            if task in self._waiting:
                self._waiting.remove(task)
                self._over.append(task)

    def step(self, come: Callable[[], object] | None = None) -> list[Task]:
        """One token more for every row; returns the tasks that are over.

        The model reads the tokens of the step before, and the next are chosen. come: is called between the two, to
        submit and cancel what has come while the model was running.
        Where nothing runs, for want of memory that others hold, it waits for that, or does nothing (`Share`).
        """
        self._leave()
        if self._tokens is not None:
            self._read()
            if come is not None:
                come()
            self._leave()
        self._admit()
        if self._logits is not None:
            self._choose()
        self._take_out()
        if not self._running:
            self.release()
        over, self._over = self._over, []
        for task in over:
            task.ended = task.ended or time.monotonic()
        return over

    def turn(self, come: Callable[[], object] | None = None) -> list[Task]:
        """A step that raises nothing: what no single task did ends all that run, as they have lost their rows."""
        try:
            return self.step(come)
        except BaseException as error:
            return self.fail(error)

    def fail(self, error: BaseException) -> list[Task]:
        """End every task with an error, after a step that raised; those that were through before keep their result."""
        over = [*self._waiting, *self._running, *self._over]
        for task in over:
            if not task.over:
                task.error = error
            task.ended = task.ended or time.monotonic()
        self._waiting.clear()
        self._running.clear()
        self._over = []
        self.release()
        self.memory.leave()
        return over

    def release(self) -> None:
        """Give the memory back, when nothing runs."""
        if self._rows is not None:
            self._rows.release()
        self._rows = self._logits = self._tokens = None
        self._searches.clear()
        self._places.clear()
        self.memory.end()

    def _leave(self) -> None:
        """Tasks that are late or were cancelled run no longer."""
        self._expire()
        if self._dropped:
            self._drop()
        self._take_out()

    def _take_out(self) -> None:
        """Tasks that are over run no longer."""
        over = [task for task in self._running if task.over]
        for task in over:
            del self._running[task]
        self._over += over

    def _expire(self) -> None:
        now = time.monotonic()
        for task in [*self._waiting, *self._running]:
            if task.deadline is not None and now > task.deadline and not task.over:
                self.cancel(task, DeadlineError(LATE))

    def _drop(self) -> None:
        """Take the rows of cancelled tasks out, before or after the model has read the tokens that were chosen."""
        self._dropped = False
        if self._rows is None:
            return
        left = []
        for key, search in list(self._searches.items()):
            stays = search.drop(lambda task: task.over)
            self._places[key] = self._places[key][stays]
            left.append(self._places[key])
        kept = np.sort(np.concatenate(left))
        count = self._count
        if len(kept) == count:
            return
        if not len(kept):
            self.release()
            return
        places, order = placed(kept, self._rows.requests())
        where = np.zeros(count, np.int64)
        where[kept] = places
        if self._tokens is not None:
            self._tokens = self._tokens[order]
        elif self._logits is not None:
            self._logits = self._logits[order]  # while it is where it was made
        self._rows.reorder(order)
        self._places = {key: where[old] for key, old in self._places.items()}

    @property
    def _count(self) -> int:
        """How many rows there are."""
        held = self._logits if self._tokens is None else self._tokens
        return 0 if held is None else len(held)

    def _admit(self) -> None:
        """Begin tasks that wait, in their order, if enough rows are free for it to pay."""
        if not self._waiting:
            self.memory.leave()
            return
        used = sum(task.width for task in self._running)
        free = self._most_rows - used
        if used and free < min(self._most_rows // 4, sum(t.width for t in self._waiting)):
            return
        batch: list[Task] = []
        longest = 0
        while self._waiting:
            task = self._waiting[0]
            longest = max(longest, task.size)
            first = not batch and not used
            if (not first and free < task.width) or (batch and (len(batch) + 1) * longest > self._positions):
                break
            try:
                if not self._promised([*batch, task], idle=first):
                    break
                batch.append(task)
                free -= task.width
            except MemoryBudgetError as error:  # it does not fit beside what is kept
                task.error = error
                self._over.append(task)
            self._waiting.popleft()
        if batch:
            self._running |= dict.fromkeys(batch)
            self._begin(batch)

    def _promised(self, coming: Sequence[Task], idle: bool) -> bool:
        """Whether there will be memory for tasks beside those that run, to their end."""
        if self.memory.limit is None:
            return True
        if self.memory.ask(self._model.need(self.running, coming, self._rows), idle):
            return True
        if self._rows is None or not self._rows.fit():
            return False
        return self.memory.ask(self._model.need(self.running, coming, self._rows), idle)

    def _begin(self, tasks: Sequence[Task]) -> None:
        try:
            rows, logits = self._model.begin(tasks)
        except Exception as error:
            if len(tasks) == 1:
                tasks[0].error = error
                return
            for task in tasks:  # one that fails, fails alone
                self._begin([task])
            return
        first = self._count
        if self._rows is None or self._logits is None:
            self._rows, self._logits = rows, logits
        else:
            kept = self._logits.copy()
            try:
                self._rows.join(rows)
            except BaseException:
                rows.release()
                raise
            self._logits = np.concatenate([kept, logits])
        alike: dict[object, list[int]] = {}
        for i, task in enumerate(tasks):
            alike.setdefault(_kind(task), []).append(i)
        for key, numbers in alike.items():
            if key not in self._searches:
                self._searches[key] = BeamSearch() if key else RowSearch()
                self._places[key] = np.zeros(0, np.int64)
            self._searches[key].add([tasks[i] for i in numbers])
            self._places[key] = np.concatenate([self._places[key], first + np.array(numbers)])

    def _read(self) -> None:
        """Have the model read the tokens that were chosen."""
        assert self._rows is not None
        assert self._tokens is not None
        self._logits = self._rows.step(self._tokens)
        self._tokens = None

    def _choose(self) -> None:
        """Choose the rows' next tokens by their logits, and put the rows that go on in their places."""
        assert self._rows is not None
        assert self._logits is not None
        trails, guesses = self._rows.trails(), self._rows.guesses()
        parents, tokens, widths = [], [], []
        for key, search in self._searches.items():
            own = self._places[key]
            logits = self._logits if in_place(own, len(self._logits)) else self._logits[own]
            numbers = own.tolist()
            continued, new = search.advance(
                logits, trails and [trails[i] for i in numbers], guesses and [guesses[i] for i in numbers]
            )
            parents.append(own[continued])
            tokens.append(new)
            widths.append(len(new))
        now = time.monotonic()
        for task in self._running:
            task.first = task.first or now
            if task.over:
                task.ended = now
        if len(tokens) == 1 and in_place(parents[0], len(self._logits)):  # as at most steps: all rows go on as they are
            self._places = dict.fromkeys(self._searches, parents[0])
            self._logits, self._tokens = None, tokens[0][:, None]
            return
        every = np.concatenate(parents)
        if not len(every):
            self.release()
            return
        if in_place(every, len(self._logits)):
            places = every
        else:
            places, order = placed(every, self._rows.requests())
            self._rows.reorder(order)
        fed = np.empty((len(every), 1), np.int64)
        fed[places, 0] = np.concatenate(tokens)
        ends = np.cumsum(widths)
        for key, end, width in zip(list(self._searches), ends, widths, strict=True):
            own = places[end - width : end]
            order = own.argsort()
            self._places[key] = own[order]
            if not width:
                del self._searches[key], self._places[key]
            elif not in_place(order, width):  # rows in the batch's order: logits need not be put in the search's
                self._searches[key].renumber(order.argsort())
        self._logits, self._tokens = None, fed


def _kind(task: Task) -> object:
    """Tasks of one kind are advanced together: beams of a number, or rows that are each their own."""
    settings = task.settings
    return (settings.num_beams, settings.num_beam_groups) if settings.beams else 0
