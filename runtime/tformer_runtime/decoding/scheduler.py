"""Continuous batching: many tasks in one batch, which other tasks join as soon as there is room.

Each step feeds every row the token that was chosen for it, and chooses the next token. The step ends there, so that a
token is returned before the model reads it. Finished tasks leave at once, and waiting tasks take their rows: they are
encoded and their prompts are read separately, then they join. The result of a task does not depend on the other tasks
of the batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import DeadlineError, MemoryBudgetError, typed_memory_error
from tformer_runtime.decoding.beam_search import BeamSearch
from tformer_runtime.decoding.row_placement import is_identity, place_rows
from tformer_runtime.decoding.sampling import Guess
from tformer_runtime.decoding.sequence import SequenceSearch, SequenceTask
from tformer_runtime.decoding.token_search import TokenSearch
from tformer_runtime.engine.greedy_steps import GreedySteps, Planner
from tformer_runtime.engine.memory_budget import MemoryBudget, MemoryShare, never_fits_error
from tformer_runtime.engine.step_outputs import StepHistory

MAX_BATCH_ROWS = 32
DEADLINE_MESSAGE = "the deadline passed before the request was finished"
MAX_PREFILL_POSITIONS = MappingProxyType({"cpu": 4096, "cuda": 16384})
"""Device → the maximum number of padded prompt and source positions that one call computes before the first token.

More positions are no faster, and the memory of attention scores grows with them: docs/design/runtime.md."""


class RunningBatch(Protocol):
    """Rows of a model and their caches."""

    def step(self, tokens: Ints) -> F32 | DeviceLogits:
        """Feed (rows, 1) tokens. Return logits (rows, vocabulary), which the next step overwrites."""

    def greedy_steps(self, tokens: Ints, make_plan: Planner) -> GreedySteps | None:
        """Feed (rows, 1) tokens, and then the tokens that a plan chooses. Return None, and feed nothing, if the model
        cannot do so, or if there is no plan.
        """

    def reorder(self, rows: Ints) -> None:
        """Replace row i by row rows[i]. Rows may repeat, and there may be fewer or more of them."""

    def requests(self) -> Ints | None:
        """Return (rows,) numbers that are equal for rows that should be neighbours; None if places do not matter."""

    def join(self, other: Any) -> None:
        """Append the rows of another batch, which cannot be used afterwards."""

    def fit(self) -> bool:
        """Release unused memory. Return False if there is not enough of it to matter."""

    def histories(self) -> list[StepHistory] | None:
        """Return the extra outputs of each row up to the latest step; None if none are recorded."""

    def guesses(self) -> list[Guess | None] | None:
        """Return the guess for each row in speculative decoding. If the guess comes true, the next logits cost
        no step.
        """

    def release(self) -> None:
        """Release the memory."""


class BatchStarter(Protocol):
    """Starts tasks as rows of a batch."""

    def begin(self, tasks: Sequence[SequenceTask]) -> tuple[RunningBatch, F32]:
        """Return a row for each task, which has read its prompt, and the logits (rows, vocabulary) after it.

        Raise an error if a task cannot be run. To find this task, try each task alone.
        """

    def begin_unread(self, task: SequenceTask) -> RunningBatch | None:
        """Return a row for a task whose prompt is one id, which the first step reads; None if `begin` must read it.

        So the first step may be one of several greedy ones. Errors: see `begin`.
        """

    def bytes_needed(self, running: Sequence[SequenceTask], coming: Sequence[SequenceTask], rows: Any = None) -> int:
        """Return the maximum number of bytes of tasks in one batch. rows: of the running tasks."""


class Scheduler:
    """Decodes tasks in a batch. One thread at a time may use a scheduler.

    The memory is that of the running rows, in buffers of at most four times their need. A step costs the step of the
    model, one or two passes over the logits, and some microseconds for each row.
    """

    def __init__(
        self,
        model: BatchStarter,
        rows: int = MAX_BATCH_ROWS,
        positions: int = MAX_PREFILL_POSITIONS["cpu"],
        memory: MemoryShare | None = None,
    ) -> None:
        """model: starts and runs the batches; it is the attribute `starter`.
        rows: the maximum number of rows of the batch.
        positions: the maximum number of positions that are computed in one call before the first tokens.
        memory: the share of the memory budget that the tasks use.
        """
        self.starter, self._max_rows, self._positions = model, rows, positions
        self.memory = memory or MemoryBudget().new_share()
        self._waiting: deque[SequenceTask] = deque()
        self._searches: dict[object, SequenceSearch] = {}
        self._places: dict[object, Ints] = {}  # search → the row of the batch for each of its rows
        self._rows: RunningBatch | None = None
        self._logits: F32 | DeviceLogits | None = None  # of the rows, until tokens are chosen
        self._tokens: Ints | None = None  # (rows, 1) chosen tokens, until the model has read them
        self._running: dict[SequenceTask, None] = {}
        self._finished: list[SequenceTask] = []  # tasks that no step has returned yet
        self._unreturned: dict[SequenceTask, None] = {}  # all tasks, wherever a step that fails has left them
        self._has_cancelled_rows = False
        self.generated_tokens = 0  # so far; a step of beam search counts as one token

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> list[SequenceTask]:
        return list(self._running)

    @property
    def running_requests(self) -> int:
        return len(self._running)

    @property
    def running_rows(self) -> int:
        """The rows of the running tasks at most. Any thread may read it."""
        return sum(task.width for task in list(self._running))

    @property
    def accepts_tasks(self) -> bool:
        """Whether fewer tasks wait than the next step could admit."""
        waiting = sum(task.width for task in self._waiting)
        return waiting < max(self._max_rows - sum(task.width for task in self._running), self._max_rows // 4, 1)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running and not self._finished

    @property
    def waits_for_memory(self) -> bool:
        """Whether, after a step, no task runs because other requests hold the memory."""
        return bool(self._waiting) and not self._running and not self._finished

    def submit(self, task: SequenceTask) -> None:
        """Queue a task. Raise MemoryBudgetError, with the number of bytes, if the task can never fit into the
        memory.
        """
        limit = self.memory.limit
        if limit is not None and (need := self.starter.bytes_needed((), [task])) > limit:
            raise never_fits_error(need, limit)
        self._unreturned[task] = None
        self._waiting.append(task)

    def cancel(self, task: SequenceTask, error: Exception) -> None:
        """End a task with an error. Its rows are free at once."""
        if not task.finished:
            task.error = error
            self._has_cancelled_rows = True
            if task in self._waiting:
                self._waiting.remove(task)
                self._finished.append(task)

    def step(self, poll: Callable[[], object] | None = None) -> list[SequenceTask]:
        """Decode one token for every row. Return the finished tasks.

        The model reads the tokens of the step before, and the next tokens are chosen. poll: called between the two, to
        submit and cancel tasks that changed while the model was running. If no task runs because other requests hold
        the memory, the step waits for memory, or does nothing (`MemoryShare.blocking`).
        Raise OutOfMemoryError if the system refuses memory.
        """
        try:
            return self._step(poll)
        except MemoryError as error:
            raise typed_memory_error(error) from error

    def _step(self, poll: Callable[[], object] | None) -> list[SequenceTask]:
        """Step as `step` says."""
        self._remove_ended()
        if self._tokens is not None:
            self._run_model()
            if poll is not None:
                poll()
            self._remove_ended()
        self._admit()
        if self._logits is not None:
            self._choose()
        self._remove_finished()
        if not self._running:
            self.release()
        now = time.monotonic()
        finished, self._finished = self._finished, []
        for task in finished:
            task.ended_at = task.ended_at or now
            self._unreturned.pop(task, None)
        return finished

    def step_or_fail(self, poll: Callable[[], object] | None = None) -> list[SequenceTask]:
        """Step without raising an error. An error that belongs to no single task ends all tasks, which have lost their
        rows.
        """
        try:
            return self.step(poll)
        except BaseException as error:
            return self.fail(error)

    def fail(self, error: BaseException) -> list[SequenceTask]:
        """End every task with an error, after a step that raised it. Tasks that were finished before keep
        their result.
        """
        error = typed_memory_error(error)
        tasks = list(self._unreturned)
        self._unreturned.clear()
        for task in tasks:
            if not task.finished:
                task.error = error
            task.ended_at = task.ended_at or time.monotonic()
        self._waiting.clear()
        self._running.clear()
        self._finished = []
        self.release()
        self.memory.withdraw()
        return tasks

    def release(self) -> None:
        """Release the memory when no task runs."""
        if self._rows is not None:
            self._rows.release()
            self._rows = self._logits = self._tokens = None
            self._searches.clear()
            self._places.clear()
        self.memory.release_reservation()

    def _remove_ended(self) -> None:
        """Remove tasks that are late or cancelled."""
        self._cancel_late()
        if self._has_cancelled_rows:
            self._drop_cancelled_rows()
        self._remove_finished()

    def _remove_finished(self) -> None:
        """Remove finished tasks."""
        finished = [task for task in self._running if task.finished]
        for task in finished:
            del self._running[task]
        self._finished += finished

    def _cancel_late(self) -> None:
        now = time.monotonic()
        for task in [*self._waiting, *self._running]:
            if task.deadline is not None and now > task.deadline and not task.finished:
                self.cancel(task, DeadlineError(DEADLINE_MESSAGE))

    def _drop_cancelled_rows(self) -> None:
        """Remove the rows of cancelled tasks, before or after the model has read the chosen tokens."""
        self._has_cancelled_rows = False
        if self._rows is None:
            return
        rows_left = []
        for key, search in list(self._searches.items()):
            stays = search.drop(lambda task: task.finished)
            self._places[key] = self._places[key][stays]
            rows_left.append(self._places[key])
        kept_rows = np.sort(np.concatenate(rows_left))
        count = self._num_rows
        if len(kept_rows) == count:
            return
        if not len(kept_rows):
            self.release()
            return
        places, order = place_rows(kept_rows, self._rows.requests())
        new_rows = np.zeros(count, np.int64)
        new_rows[kept_rows] = places
        if self._tokens is not None:
            self._tokens = self._tokens[order]
        elif self._logits is not None:
            self._logits = self._logits[order]  # before the rows of the model move
        self._rows.reorder(order)
        self._places = {key: new_rows[old] for key, old in self._places.items()}

    @property
    def _num_rows(self) -> int:
        """The number of rows."""
        row_values = self._logits if self._tokens is None else self._tokens
        return 0 if row_values is None else len(row_values)

    def _admit(self) -> None:
        """Start waiting tasks in their order, if enough rows are free.

        Reading the prompts of new tasks delays the running rows. Therefore tasks wait until a quarter of the rows is
        free, or as many rows as all waiting tasks need.
        """
        if not self._waiting:
            self.memory.withdraw()
            return
        used_rows = sum(task.width for task in self._running)
        free_rows = self._max_rows - used_rows
        if used_rows and free_rows < min(self._max_rows // 4, sum(t.width for t in self._waiting)):
            return
        batch: list[SequenceTask] = []
        max_positions = 0
        while self._waiting:
            task = self._waiting[0]
            max_positions = max(max_positions, task.prefill_positions)
            first = not batch and not used_rows
            if (not first and free_rows < task.width) or (batch and (len(batch) + 1) * max_positions > self._positions):
                break
            try:
                if not self._reserve_memory([*batch, task], idle=first):
                    break
                batch.append(task)
                free_rows -= task.width
            except MemoryBudgetError as error:  # it does not fit next to persistent shares
                task.error = error
                self._finished.append(task)
            self._waiting.popleft()
        if batch:
            self._running |= dict.fromkeys(batch)
            self._begin(batch)

    def _reserve_memory(self, coming: Sequence[SequenceTask], idle: bool) -> bool:
        """Reserve memory for new tasks together with the running tasks. Return False if it is not free now."""
        if self.memory.limit is None:
            return True
        if self.memory.reserve(self.starter.bytes_needed(self.running, coming, self._rows), idle):
            return True
        if self._rows is None or not self._rows.fit():
            return False
        return self.memory.reserve(self.starter.bytes_needed(self.running, coming, self._rows), idle)

    def _begin(self, tasks: Sequence[SequenceTask], may_loop: bool = True) -> None:
        """Start tasks. may_loop: whether a task alone may run several steps at once, and end."""
        try:
            is_alone = may_loop and self._rows is None and len(tasks) == 1
            if is_alone and (rows := self.starter.begin_unread(tasks[0])) is not None:
                self._rows, self._tokens = rows, tasks[0].prompt[-1:, None]
                self._add_to_searches(tasks, 0)
                self._run_model()
                self._remove_ended()
                return
            rows, logits = self.starter.begin(tasks)
        except Exception as error:
            if len(tasks) == 1:
                tasks[0].error = typed_memory_error(error)
                if self._tokens is not None:  # of the first step, which failed
                    self.release()
                return
            for task in tasks:  # so that only the task with the error fails
                self._begin([task], may_loop=False)  # its end would release the memory that all have reserved
            return
        first = self._num_rows
        if self._rows is None or self._logits is None:
            self._rows, self._logits = rows, logits
        else:
            old_logits = self._logits.copy()
            try:
                self._rows.join(rows)
            except BaseException:
                rows.release()
                raise
            self._logits = np.concatenate([old_logits, logits])
        self._add_to_searches(tasks, first)

    def _add_to_searches(self, tasks: Sequence[SequenceTask], first: int) -> None:
        """Add tasks to the searches of their kinds. first: the row of the first task; the others follow."""
        task_numbers: dict[object, list[int]] = {}
        for i, task in enumerate(tasks):
            task_numbers.setdefault(_kind(task), []).append(i)
        for key, members in task_numbers.items():
            if key not in self._searches:
                self._searches[key] = BeamSearch() if key else TokenSearch()
                self._places[key] = np.zeros(0, np.int64)
            self._searches[key].add([tasks[i] for i in members])
            self._places[key] = np.concatenate([self._places[key], first + np.array(members)])

    def _run_model(self) -> None:
        """Run the model on the chosen tokens.

        If the likeliest tokens are the next ones, it may run several steps. All but the last choose their tokens here.
        """
        assert self._rows is not None
        assert self._tokens is not None
        search = self._only_token_search()
        steps = None if search is None else self._rows.greedy_steps(self._tokens, search.greedy_plan)
        if search is None or steps is None:
            self._logits = self._rows.step(self._tokens)
        else:
            search.take_greedy(steps)
            self._has_cancelled_rows |= any(task.error is not None for task in search.tasks)
            self.generated_tokens += (len(steps.tokens) - 1) * search.num_sequences
            self._logits = steps.logits[-1]
        self._tokens = None

    def _only_token_search(self) -> TokenSearch | None:
        """Return the search of all rows, if there is one alone without beams, and has them in their order."""
        (search,) = self._searches.values() if len(self._searches) == 1 else (None,)
        if not isinstance(search, TokenSearch) or self._tokens is None:
            return None
        (places,) = self._places.values()
        return search if is_identity(places, len(self._tokens)) else None

    def _choose(self) -> None:
        """Choose the next tokens of the rows, and move the rows that continue to their places."""
        assert self._logits is not None
        continuations = self._advance_searches(self._logits)
        self._note_times()
        parents = _joined([continuation.parents for continuation in continuations])
        in_place = is_identity(parents, len(self._logits))
        if in_place and len(continuations) == 1:  # frequent
            self._places[continuations[0].key] = parents
            self._logits, self._tokens = None, continuations[0].tokens[:, None]
        elif not len(parents):
            self.release()
        else:
            places = parents if in_place else self._move_rows(parents)
            tokens = np.empty((len(places), 1), np.int64)
            tokens[places, 0] = _joined([continuation.tokens for continuation in continuations])
            self._logits, self._tokens = None, tokens
            self._place_searches(continuations, places)

    def _advance_searches(self, logits: F32 | DeviceLogits) -> list[_Continuation]:
        """Choose the next tokens of each search. logits: of the rows of the batch."""
        assert self._rows is not None
        histories, guesses = self._rows.histories(), self._rows.guesses()
        continuations = []
        for key, search in self._searches.items():
            rows = self._places[key]
            self.generated_tokens += search.num_sequences
            continued, tokens = search.advance(
                logits if is_identity(rows, len(logits)) else logits[rows],
                histories and [histories[i] for i in rows.tolist()],
                guesses and [guesses[i] for i in rows.tolist()],
            )
            continuations.append(_Continuation(key, rows[continued], tokens))
        return continuations

    def _note_times(self) -> None:
        """Note the time of the first token, and of the end, of each task."""
        now = time.monotonic()
        for task in self._running:
            task.first_token_at = task.first_token_at or now
            if task.finished:
                task.ended_at = now

    def _move_rows(self, parents: Ints) -> Ints:
        """Replace the rows of the batch by those that continue `parents`. Return the place of each."""
        assert self._rows is not None
        places, order = place_rows(parents, self._rows.requests())
        self._rows.reorder(order)
        return places

    def _place_searches(self, continuations: Sequence[_Continuation], places: Ints) -> None:
        """Give each search its rows. places: of the rows of all searches, one after another."""
        first = 0
        for continuation in continuations:
            key, last = continuation.key, first + len(continuation.parents)
            own_places, first = places[first:last], last
            if not len(own_places):
                del self._searches[key], self._places[key]
                continue
            self._places[key] = rows = np.sort(own_places)
            if (rows != own_places).any():
                # The search takes the order of the batch, so that logits need not be reordered.
                self._searches[key].renumber(np.searchsorted(rows, own_places))


class _Continuation(Struct, eq=False):
    """The rows of a search that continue.

    key: of the search.
    parents: the row of the batch that each of them continues, before the rows move.
    tokens: the chosen token of each of them.
    """

    key: object
    parents: Ints
    tokens: Ints


def _joined(arrays: Sequence[Ints]) -> Ints:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _kind(task: SequenceTask) -> object:
    """Return the kind of a task: tasks of one kind are advanced together. All tasks without beams are of one kind, and
    beam search has a kind for each number of beams.
    """
    settings = task.settings
    return (settings.num_beams, settings.num_beam_groups) if settings.beams else 0
