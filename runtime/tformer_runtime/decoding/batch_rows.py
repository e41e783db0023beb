"""The engine as the scheduler wants it: tasks become rows of a state that others join."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.decoding.sampling import log_normalizer
from tformer_runtime.decoding.sequence import Task, likeliest, padded
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import Share
from tformer_runtime.engine.state import State
from tformer_runtime.engine.step_outputs import Trail


class LiveRows:
    """Rows of a state, and what each step gave besides, if anything was asked for."""

    def __init__(self, engine: Engine, state: State) -> None:
        self._engine, self.state = engine, state
        self._trails: list[Trail | None] = [None] * state.rows

    def step(self, tokens: Ints) -> F32 | DeviceLogits:
        logits = self._engine.choose(self.state, tokens)
        self.record()
        return logits

    def reorder(self, rows: Ints) -> None:
        self._engine.reorder(self.state, rows)
        self._trails = [self._trails[i] for i in rows.tolist()]

    def requests(self) -> Ints | None:
        return self.state.held.requests if self._engine.decode.shares_context else None

    def join(self, other: LiveRows) -> None:
        self._engine.join(self.state, other.state)
        self._trails += other._trails

    def fit(self) -> bool:
        return self._engine.fit(self.state)

    def trails(self) -> list[Trail] | None:
        return [trail for trail in self._trails if trail is not None] if self.state.wanted else None

    def guesses(self) -> None:
        return None

    def release(self) -> None:
        self.state.release()

    def record_given(self, row: int, positions: Iterable[int]) -> None:
        """Note what a step over several tokens gave at some of a row's."""
        for at in positions if self.state.extras else ():
            values = {name: values[row, at].copy() for name, values in self.state.extras.items()}
            self._trails[row] = Trail(self._trails[row], values)

    def record(self) -> None:
        """Note what the latest step gave."""
        extras = self.state.extras
        if extras:
            self._trails = [
                Trail(before, {name: values[row].copy() for name, values in extras.items()})
                for row, before in enumerate(self._trails)
            ]


class Starter:
    """Begins tasks. wanted: names of the file's extras that are given. joins: whether tasks are to join others."""

    def __init__(self, engine: Engine, wanted: tuple[str, ...], budget: Share, joins: bool = True) -> None:
        self._engine, self._wanted, self._budget, self._joins = engine, wanted, budget, joins

    def begin(self, tasks: Sequence[Task]) -> tuple[LiveRows, F32]:
        """Encode the tasks' sources and read their prompts. Those that have a base go on from a copy of it."""
        if any(task.base is not None for task in tasks):
            return self._from_bases(tasks)
        names = tasks[0].sources
        sources = {name: [task.sources[name] for task in tasks] for name in names} or None
        state = self._engine.start(
            sources,
            len(tasks),
            extras=self._wanted,
            budget=self._budget,
            joins=self._joins,
            candidates=candidates_of(self._engine, tasks),
            most=[task.longest for task in tasks],
        )
        for i, task in enumerate(tasks):
            task.encoded = {name: values[i].copy() for name, values in state.encoded.items()}
        return self._read(state, tasks)

    def need(self, running: Sequence[Task], coming: Sequence[Task], rows: LiveRows | None = None) -> int:
        sizing, beside = self._engine.sizing, None if rows is None else rows.state
        slots, width = 0, sum(task.width for task in running)
        sizes: dict[str, int] = {}
        for task in (*running, *coming):
            slots = max(slots, task.longest)
            for axis, size in sizing.sizes(task.sources).items():
                sizes[axis] = max(sizes.get(axis, 0), size + self._engine.slack)  # the padding that joining wants
        width = max(width, beside.room if beside else 0) + sum(task.width for task in coming)
        listed = self._engine.decode.shortlist is not None
        chosen = [task for task in (*running, *coming) if listed and _may_do_with_some(task)]
        named = sum(len(_named(task)) for task in chosen) if chosen else None
        return sizing.need(slots, sizes, width, beside, named)

    def _from_bases(self, tasks: Sequence[Task]) -> tuple[LiveRows, F32]:
        """One after the other: rows that have a past read several tokens at once only alone."""
        rows: LiveRows | None = None
        logits = []
        try:
            for task in tasks:
                if task.base is None:
                    mine, after = self.begin([task])
                else:
                    copy = self._engine.copy(task.base, _FIRST, self._budget, self._wanted, [task.longest])
                    mine, after = self._read(copy, [task])
                logits.append(after.copy())
                if rows is None:
                    rows = mine
                else:
                    rows.join(mine)
        except BaseException:
            if rows is not None:
                rows.release()
            raise
        assert rows is not None
        return rows, np.concatenate(logits)

    def _read(self, state: State, tasks: Sequence[Task]) -> tuple[LiveRows, F32]:
        rows = LiveRows(self._engine, state)
        try:
            return rows, self._after_prompts(rows, tasks)
        except BaseException:  # which would hold them as long as somebody looks at it
            rows.release()
            raise

    def _after_prompts(self, rows: LiveRows, tasks: Sequence[Task]) -> F32:
        """Read what is new of the prompts; the logits after it."""
        tokens, counts = padded([task.unread for task in tasks])
        state = rows.state
        if any(task.given for task in tasks):
            every = self._engine.step(state, tokens, counts, want="all")
            for row, task in enumerate(tasks):
                chosen = range(counts[row] - task.given - 1, counts[row] - 1)  # where each of the prefix was
                rows.record_given(row, chosen)
                _note_given(task, every[row, list(chosen)])
            last = np.arange(len(tasks)), counts - 1
            state.extras = {name: values[last] for name, values in state.extras.items()}
            logits = every[last]
        else:
            logits = self._engine.step(state, tokens, counts)
        rows.record()
        return logits


_FIRST = np.zeros(1, np.int64)


def candidates_of(engine: Engine, tasks: Sequence[Task]) -> list[Ints | None] | None:
    """The ids that may come for each task, None for all: of one that does without the shortlist, or that may ask for
    any id."""
    shortlist = engine.shortlist
    if shortlist is None:
        return None
    return [shortlist.candidates(task.sources, _named(task)) if _may_do_with_some(task) else None for task in tasks]


def _may_do_with_some(task: Task) -> bool:
    """Whether a task need not have all ids to choose from, if there is a shortlist."""
    settings = task.settings
    return settings.shortlist and task.guide is None and settings.logits_processor is None


def _named(task: Task) -> list[int]:
    """Ids that a task's options name to come."""
    settings = task.settings
    first = [] if settings.forced_bos_token_id is None else [settings.forced_bos_token_id]
    return [*task.prefix.tolist(), *first, *(token for token, _ in settings.logit_bias)]


def _note_given(task: Task, logits: F32) -> None:
    """Note the log-probabilities of the prefix, and of what was likeliest there. logits: (prefix, vocabulary)."""
    ids = task.prefix
    logprobs = logits - log_normalizer(logits)[:, None]
    known = ids < logits.shape[-1]  # the step input may have ids that are never generated
    own = np.where(known, logprobs[np.arange(len(ids)), np.where(known, ids, 0)], -np.inf)
    task.given_logprobs = tuple(own.tolist())
    count = task.settings.top_logprobs
    task.given_alternatives = tuple(likeliest(row, count) for row in logprobs) if count else ()
