"""Rows of an engine's state, in the form that the scheduler needs: tasks become rows, and other rows join them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.decoding.row_placement import pad_rows
from tformer_runtime.decoding.sampling import log_normalizer
from tformer_runtime.decoding.sequence import SequenceTask, top_alternatives
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.greedy_steps import GreedySteps, Planner
from tformer_runtime.engine.memory_budget import MemoryShare
from tformer_runtime.engine.state import State
from tformer_runtime.engine.step_outputs import StepHistory


class EngineBatch:
    """Rows of a state, and the extra outputs of each step if they are needed."""

    def __init__(self, engine: Engine, state: State) -> None:
        self._engine, self.state = engine, state
        self._histories: list[StepHistory | None] = [None] * state.rows

    def step(self, tokens: Ints) -> F32 | DeviceLogits:
        logits = self._engine.step_one_token(self.state, tokens)
        self.record()
        return logits

    def greedy_steps(self, tokens: Ints, make_plan: Planner) -> GreedySteps | None:
        return self._engine.greedy_steps(self.state, tokens, make_plan)

    def reorder(self, rows: Ints) -> None:
        self._engine.reorder(self.state, rows)
        self._histories = [self._histories[i] for i in rows.tolist()]

    def requests(self) -> Ints | None:
        return self.state.encoder_context.requests if self._engine.decode.shares_context else None

    def join(self, other: EngineBatch) -> None:
        self._engine.join(self.state, other.state)
        self._histories += other._histories

    def fit(self) -> bool:
        return self._engine.fit(self.state)

    def histories(self) -> list[StepHistory] | None:
        return [history for history in self._histories if history is not None] if self.state.step_extras else None

    def guesses(self) -> None:
        return None

    def release(self) -> None:
        self._engine.release(self.state)

    def record_positions(self, row: int, positions: Iterable[int]) -> None:
        """Append the extra outputs of the latest step at some positions of a row to the history of the row."""
        for position in positions if self.state.extras else ():
            values = {name: values[row, position].copy() for name, values in self.state.extras.items()}
            self._histories[row] = StepHistory(self._histories[row], values)

    def record(self) -> None:
        """Append the extra outputs of the latest step to the history of each row."""
        extras = self.state.extras
        if extras:
            self._histories = [
                StepHistory(history, {name: values[row].copy() for name, values in extras.items()})
                for row, history in enumerate(self._histories)
            ]


class EngineStarter:
    """Starts tasks as rows of an engine's state."""

    def __init__(self, engine: Engine, extra_names: tuple[str, ...], budget: MemoryShare, joins: bool = True) -> None:
        """extra_names: the extra outputs that are returned.
        joins: whether tasks are to join other tasks.
        """
        self._engine, self._extra_names, self._budget, self._joins = engine, extra_names, budget, joins

    def begin(self, tasks: Sequence[SequenceTask]) -> tuple[EngineBatch, F32]:
        """Encode the sources of the tasks and read their prompts. A task with a cached prefix continues a copy of its
        cache.
        """
        if any(task.prefix_state is not None for task in tasks):
            return self._begin_with_prefixes(tasks)
        return self._read(self._start(tasks), tasks)

    def begin_unread(self, task: SequenceTask) -> EngineBatch | None:
        can_loop = self._engine.session.max_greedy_steps > 1 and not task.settings.beams
        if not can_loop or len(task.prompt) != 1 or task.prefix_state is not None:
            return None
        return EngineBatch(self._engine, self._start([task]))

    def _start(self, tasks: Sequence[SequenceTask]) -> State:
        """Encode the sources of the tasks."""
        names = tasks[0].sources
        sources = {name: [task.sources[name] for task in tasks] for name in names} or None
        state = self._engine.start(
            sources,
            len(tasks),
            extras=self._extra_names,
            budget=self._budget,
            joins=self._joins,
            candidates=candidates_of(self._engine, tasks),
            max_tokens=[task.max_positions for task in tasks],
        )
        for i, task in enumerate(tasks):
            task.encoder_outputs = {name: values[i].copy() for name, values in state.encoded.items()}
        return state

    def bytes_needed(
        self, running: Sequence[SequenceTask], coming: Sequence[SequenceTask], rows: EngineBatch | None = None
    ) -> int:
        estimate, running_state = self._engine.memory_estimate, None if rows is None else rows.state
        slots, num_rows = 0, sum(task.width for task in running)
        sizes: dict[str, int] = {}
        for task in (*running, *coming):
            slots = max(slots, task.max_positions)
            for axis, size in estimate.request_sizes(task.sources).items():
                sizes[axis] = max(sizes.get(axis, 0), size + self._engine.join_padding)  # padding that joining needs
        num_rows = max(num_rows, running_state.row_capacity if running_state else 0) + sum(
            task.width for task in coming
        )
        has_shortlist = self._engine.decode.shortlist is not None
        with_candidates = [task for task in (*running, *coming) if has_shortlist and _can_use_candidates(task)]
        num_named_ids = sum(len(_named_ids(task)) for task in with_candidates) if with_candidates else None
        return estimate.bytes_needed(slots, sizes, num_rows, running_state, num_named_ids)

    def _begin_with_prefixes(self, tasks: Sequence[SequenceTask]) -> tuple[EngineBatch, F32]:
        """Start the tasks one after the other: rows with a past can read several tokens in one step only alone."""
        rows: EngineBatch | None = None
        logits = []
        try:
            for task in tasks:
                if task.prefix_state is None:
                    task_rows, task_logits = self.begin([task])
                else:
                    copy = self._engine.copy(
                        task.prefix_state, _FIRST_ROW, self._budget, self._extra_names, [task.max_positions]
                    )
                    task_rows, task_logits = self._read(copy, [task])
                logits.append(task_logits.copy())
                if rows is None:
                    rows = task_rows
                else:
                    rows.join(task_rows)
        except BaseException:
            if rows is not None:
                rows.release()
            raise
        assert rows is not None
        return rows, np.concatenate(logits)

    def _read(self, state: State, tasks: Sequence[SequenceTask]) -> tuple[EngineBatch, F32]:
        try:
            rows = EngineBatch(self._engine, state)
            return rows, self._read_prompts(rows, tasks)
        except BaseException:  # whose traceback would keep the rows alive
            state.release()
            raise

    def _read_prompts(self, rows: EngineBatch, tasks: Sequence[SequenceTask]) -> F32:
        """Read the unread ids of the prompts, and return the logits after them."""
        tokens, counts = pad_rows([task.unread_prompt for task in tasks])
        state = rows.state
        if any(task.prefix_tokens for task in tasks):
            all_logits = self._engine.step(state, tokens, counts, logit_positions="all")
            for row, task in enumerate(tasks):
                prefix_positions = range(
                    counts[row] - task.prefix_tokens - 1, counts[row] - 1
                )  # of the logits for the prefix
                rows.record_positions(row, prefix_positions)
                _set_prefix_logprobs(task, all_logits[row, list(prefix_positions)])
            last_positions = np.arange(len(tasks)), counts - 1
            state.extras = {name: values[last_positions] for name, values in state.extras.items()}
            logits = all_logits[last_positions]
        elif len(tasks) == 1:
            logits = self._engine.step_in_parts(state, tokens)
        else:
            logits = self._engine.step(state, tokens, counts)
        rows.record()
        return logits


_FIRST_ROW = np.zeros(1, np.int64)


def candidates_of(engine: Engine, tasks: Sequence[SequenceTask]) -> list[Ints | None] | None:
    """Return the candidates (ids) of each task; None for a task that needs all ids, or without a shortlist.

    A task needs all ids if its options turn the shortlist off or may ask for any id.
    """
    shortlist = engine.shortlist
    if shortlist is None:
        return None
    return [
        shortlist.candidates(task.sources, _named_ids(task)) if _can_use_candidates(task) else None for task in tasks
    ]


def _can_use_candidates(task: SequenceTask) -> bool:
    """Return whether a task can choose among the candidates of a shortlist."""
    settings = task.settings
    return settings.shortlist and task.guide is None and settings.logits_processor is None


def _named_ids(task: SequenceTask) -> list[int]:
    """Return the ids that the options of a task ask for."""
    settings = task.settings
    first = [] if settings.forced_bos_token_id is None else [settings.forced_bos_token_id]
    return [*task.prefix.tolist(), *first, *(token for token, _ in settings.logit_bias)]


def _set_prefix_logprobs(task: SequenceTask, logits: F32) -> None:
    """Set the log-probabilities and the alternatives of the forced prefix. logits: (prefix, vocabulary)."""
    ids = task.prefix
    logprobs = logits - log_normalizer(logits)[:, None]
    has_logit = ids < logits.shape[-1]  # the step input may have ids that are never generated
    prefix_logprobs = np.where(has_logit, logprobs[np.arange(len(ids)), np.where(has_logit, ids, 0)], -np.inf)
    task.prefix_logprobs = tuple(prefix_logprobs.tolist())
    count = task.settings.top_logprobs
    task.prefix_alternatives = tuple(top_alternatives(row, count) for row in logprobs) if count else ()
