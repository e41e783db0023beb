"""Stepping less: tokens are guessed, and one step of the model reads several of them.

A step over a token and k guesses gives the logits after each of them, at little more than the cost of a step over one
token. A row that reads ahead so keeps these logits; as long as the tokens that the search chooses are those that were
guessed, it hands them out without a step. At the first that is another, it forgets what it has read beyond. The search
sees the logits of one position after the other, as ever, so that rules, grammars, stop strings and all else hold by
themselves, and nothing of theirs is to be taken back.

Where few tokens have kernels of their own (`Decode.few_tokens`), a step with guesses stays within them: beyond,
activations are rounded otherwise than in a step without guesses, by more than a close choice between two tokens bears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.decoding.batch_rows import LiveRows, Starter
from tformer_runtime.decoding.drafting import Drafter, Guesser, Lookup, Pace
from tformer_runtime.decoding.sampling import Guess
from tformer_runtime.decoding.sequence import Task
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import Share
from tformer_runtime.engine.step_outputs import Trail

if TYPE_CHECKING:
    from tformer_runtime.decoding.options import Settings

PROMPT = "prompt"  # as a draft: what has been read and generated
MORE = 0.1  # of a step, for each token that it reads more: 6+6 layers, d=512, 2 to 13 tokens, 0.05–0.1 fp32, 0.1 int8
# … with kernels for few tokens: 134 M weights, two or three tokens, 0.3 int8, 0.4 int4; 0.2 in a balanced file
MORE_OF_FEW = 0.3


def speculates(settings: Settings, rows: int) -> bool:
    """Whether requests with these settings read ahead, in a batch of so many rows.

    It is done row by row, and several rows are faster side by side, where they give the same. Only what a draft model
    has drawn makes samples other ones of the same distribution: so that they do not depend on the call, it always does.
    """
    return (
        settings.draft is not None
        and settings.width == 1
        and (rows == 1 or (settings.sampling and settings.draft != PROMPT))
    )


class _Row:
    """A row that reads ahead, of a state of its own."""

    def __init__(self, engine: Engine, live: LiveRows, task: Task, guesser: Guesser) -> None:
        self._engine, self._task, self._guesser = engine, task, guesser
        self.live = live
        few, most = engine.decode.few_tokens, task.settings.num_draft_tokens
        self._pace = (
            Pace(MORE + guesser.cost, most) if few is None else Pace(MORE_OF_FEW + guesser.cost, min(most, few - 1))
        )
        self._kind = 0
        self._read = int(live.state.lengths[0])  # tokens that have come
        self._logits: Array = np.empty(0)  # after the latest token that the model was to read, and after each guess
        self._guesses: list[Guess] = []
        self._at = 0  # how many of them have come

    @property
    def guess(self) -> Guess | None:
        """The next."""
        return self._guesses[self._at] if self._at < len(self._guesses) else None

    def step(self, token: int) -> F32:
        """The logits after a token, (vocabulary,)."""
        self._guesser.take(token)
        if self.guess is not None and self.guess.token == token:
            self._at += 1
        else:
            self._look(token)
        self._read += 1
        self.live.record_given(0, [self._at])
        logits: F32 = self._logits[self._at]
        return logits

    def fit(self) -> bool:
        return any([self.live.fit(), self._guesser.fit()])

    def release(self) -> None:
        self.live.release()
        self._guesser.release()

    def _look(self, token: int) -> None:
        """Read a token, and guesses."""
        if self._guesses:
            self._pace.learn(self._kind, len(self._guesses), self._at)
        state, self._at = self.live.state, 0
        state.rewind(self._read)
        self._guesses = self._made()
        self._task.guessed += len(self._guesses)
        fed = np.array([[token, *(guess.token for guess in self._guesses)]])
        self._logits = self._engine.step(state, fed, want="all")[0]

    def _made(self) -> list[Guess]:
        left = self._task.longest - self._read - 1  # tokens that are still to be chosen
        kind = self._guesser.kind() if left > 1 else None
        if kind is None:
            return []
        self._kind = kind
        count = min(self._pace.count(kind), left - 1)
        return self._guesser.guess(count) if count else []


class Ahead:
    """Rows that read ahead, each by itself: what the scheduler asks of rows."""

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows

    def step(self, tokens: Ints) -> F32:
        found = [row.step(token) for row, token in zip(self._rows, tokens[:, 0].tolist(), strict=True)]
        return found[0][None] if len(found) == 1 else np.stack(found)

    def reorder(self, rows: Ints) -> None:
        """No row repeats: each is a request's only one."""
        kept = [self._rows[i] for i in rows.tolist()]
        for row in self._rows:
            if row not in kept:
                row.release()
        self._rows = kept

    def requests(self) -> None:
        return None

    def join(self, other: Ahead) -> None:
        self._rows += other._rows

    def fit(self) -> bool:
        fitted = [row.fit() for row in self._rows]
        return any(fitted)

    def trails(self) -> list[Trail] | None:
        found = [row.live.trails() for row in self._rows]
        return [trail for own in found if own for trail in own] or None

    def guesses(self) -> list[Guess | None]:
        return [row.guess for row in self._rows]

    def release(self) -> None:
        for row in self._rows:
            row.release()


class Speculator:
    """Begins tasks whose rows read ahead."""

    def __init__(self, engine: Engine, wanted: tuple[str, ...], budget: Share) -> None:
        self._engine, self._budget = engine, budget
        self._starter = Starter(engine, wanted, budget, joins=False)

    def begin(self, tasks: Sequence[Task]) -> tuple[Ahead, F32]:
        rows: list[_Row] = []
        logits = []
        try:
            for task in tasks:
                live, after = self._starter.begin([task])
                rows.append(_Row(self._engine, live, task, self._guesser(task)))
                logits.append(after)
        except BaseException:
            Ahead(rows).release()
            raise
        return Ahead(rows), np.concatenate(logits)

    def need(self, running: Sequence[Task], coming: Sequence[Task], rows: Ahead | None = None) -> int:
        return sum(self._need(task) for task in (*running, *coming))

    def _need(self, task: Task) -> int:
        draft = _draft(task)
        return self._starter.need((), [task]) + (Drafter.need(draft, self._engine, task) if draft else 0)

    def _guesser(self, task: Task) -> Guesser:
        draft = _draft(task)
        if draft is None:
            return Lookup.of(self._engine.manifest, task)
        return Drafter(draft, self._engine, task, self._budget)


def _draft(task: Task) -> Engine | None:
    """The draft model, if it is one."""
    draft = task.settings.draft
    return None if draft is None or isinstance(draft, str) else draft.engine
