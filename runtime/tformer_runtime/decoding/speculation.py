"""Speculative decoding: tokens are guessed, and one step of the model reads several of them.

A step over a token and k guesses gives the logits after each of them, at little more than the cost of a step over one
token. A speculative row keeps these logits. As long as the search chooses the guessed tokens, the row returns the
logits without a step. At the first other token, the row discards the positions after it. The search sees the logits of
one position after another, as it does without guesses. So rules, grammars and stop strings need no change.

If a file has special kernels for small batches (`Session.small_batch_limit`), a step with guesses stays within the
limit. Beyond it, activations are rounded differently, which can change the choice between two tokens of almost equal
probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.decoding.batch_rows import EngineBatch, EngineStarter
from tformer_runtime.decoding.drafting import Drafter, DraftLengthController, Guesser, PromptLookup
from tformer_runtime.decoding.sampling import Guess
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.greedy_steps import Planner
from tformer_runtime.engine.memory_budget import MemoryShare
from tformer_runtime.engine.step_outputs import StepHistory

if TYPE_CHECKING:
    from tformer_runtime.decoding.options import Settings

# The cost of another token in a step, relative to a step over one token (docs/design/runtime.md#more-tokens-in-a-step).
TOKEN_COST = 0.1
SMALL_BATCH_TOKEN_COST = 0.3  # with kernels for small batches


def speculates(settings: Settings, rows: int) -> bool:
    """Return whether requests with these settings speculate in a batch of `rows` rows.

    Speculation works row by row. Batching several rows is faster and gives the same results. But sampling with a draft
    model draws other samples from the same distribution. It always speculates, so that samples do not depend on the
    batch.
    """
    return (
        settings.speculates
        and settings.width == 1
        and (rows == 1 or (settings.sampling and settings.draft_model is not None))
    )


class SpeculativeRow:
    """A row that speculates, with a state of its own."""

    def __init__(self, engine: Engine, batch: EngineBatch, task: SequenceTask, guesser: Guesser) -> None:
        self._engine, self._task, self._guesser = engine, task, guesser
        self.batch = batch
        batch_limit, max_guesses = engine.session.small_batch_limit, task.settings.num_draft_tokens
        self._batch_limit = batch_limit
        self._draft_length = (
            DraftLengthController(TOKEN_COST + guesser.cost, max_guesses)
            if batch_limit is None
            else DraftLengthController(SMALL_BATCH_TOKEN_COST + guesser.cost, min(max_guesses, batch_limit - 1))
        )
        self._kind = 0
        self._tokens_read = int(batch.state.lengths[0])  # without guesses
        self._latest_tokens: list[int] = []  # that the latest step read
        self._num_reread = 0  # of these, tokens that an earlier step had read
        self._logits: Array = np.empty(0)  # after the latest token, and after each guess
        self._guesses: list[Guess] = []
        self._accepted = 0  # guesses that came true

    @property
    def guess(self) -> Guess | None:
        """The guess for the next token."""
        return self._guesses[self._accepted] if self._accepted < len(self._guesses) else None

    def step(self, token: int) -> F32:
        """Return the logits (vocabulary,) after a token."""
        self._guesser.take(token)
        if self.guess is not None and self.guess.token == token:
            self._accepted += 1
        else:
            self._run_model(token)
        self._tokens_read += 1
        self.batch.record_positions(0, [self._num_reread + self._accepted])
        logits: F32 = self._logits[self._num_reread + self._accepted]
        return logits

    def fit(self) -> bool:
        return any([self.batch.fit(), self._guesser.fit()])

    def release(self) -> None:
        self.batch.release()
        self._guesser.release()

    def _run_model(self, token: int) -> None:
        """Run the model on a token and on guesses after it."""
        if self._guesses:
            self._draft_length.record(self._kind, len(self._guesses), self._accepted)
        state, self._accepted = self.batch.state, 0
        before = int(state.lengths[0]) - len(self._latest_tokens)
        state.rewind(self._tokens_read)
        # Carries go back to the time before the latest step. Its accepted tokens are read again.
        accepted = self._latest_tokens[int(state.lengths[0]) - before : self._tokens_read - before]
        self._num_reread = len(accepted)
        self._guesses = self._make_guesses()
        self._task.guessed += len(self._guesses)
        self._latest_tokens = [*accepted, token, *(guess.token for guess in self._guesses)]
        self._logits = self._engine.step(state, np.array([self._latest_tokens]), logit_positions="all")[0]

    def _make_guesses(self) -> list[Guess]:
        """Return guesses; no more than are expected to pay."""
        tokens_left = self._task.max_positions - self._tokens_read - 1  # until the maximum
        kind = self._guesser.kind() if tokens_left > 1 else None
        if kind is None:
            return []
        self._kind = kind
        count = min(self._draft_length.num_guesses(kind), tokens_left - 1)
        if self._batch_limit is not None:
            count = min(count, self._batch_limit - 1 - self._num_reread)
        return self._guesser.guess(count) if count > 0 else []


class SpeculativeBatch:
    """Rows that speculate, each by itself: a `RunningBatch` of the scheduler."""

    def __init__(self, rows: list[SpeculativeRow]) -> None:
        self._rows = rows

    def step(self, tokens: Ints) -> F32:
        logits = [row.step(token) for row, token in zip(self._rows, tokens[:, 0].tolist(), strict=True)]
        return logits[0][None] if len(logits) == 1 else np.stack(logits)

    def reorder(self, rows: Ints) -> None:
        """No row repeats, because each request has a single row."""
        kept_rows = [self._rows[i] for i in rows.tolist()]
        for row in self._rows:
            if row not in kept_rows:
                row.release()
        self._rows = kept_rows

    def requests(self) -> None:
        return None

    def join(self, other: SpeculativeBatch) -> None:
        self._rows += other._rows

    def fit(self) -> bool:
        results = [row.fit() for row in self._rows]
        return any(results)

    def histories(self) -> list[StepHistory] | None:
        histories = [row.batch.histories() for row in self._rows]
        return [history for row_histories in histories if row_histories for history in row_histories] or None

    def greedy_steps(self, tokens: Ints, make_plan: Planner) -> None:
        return None

    def guesses(self) -> list[Guess | None]:
        return [row.guess for row in self._rows]

    def release(self) -> None:
        for row in self._rows:
            row.release()


class SpeculativeStarter:
    """Starts tasks as rows that speculate."""

    def __init__(self, engine: Engine, extra_names: tuple[str, ...], budget: MemoryShare) -> None:
        self._engine, self._budget = engine, budget
        self._starter = EngineStarter(engine, extra_names, budget, joins=False)

    def begin(self, tasks: Sequence[SequenceTask]) -> tuple[SpeculativeBatch, F32]:
        rows: list[SpeculativeRow] = []
        logits = []
        try:
            for task in tasks:
                batch, row_logits = self._starter.begin([task])
                rows.append(SpeculativeRow(self._engine, batch, task, self.new_guesser(task)))
                logits.append(row_logits)
        except BaseException:
            SpeculativeBatch(rows).release()
            raise
        return SpeculativeBatch(rows), np.concatenate(logits)

    def begin_unread(self, task: SequenceTask) -> None:
        return None

    def bytes_needed(
        self, running: Sequence[SequenceTask], coming: Sequence[SequenceTask], rows: SpeculativeBatch | None = None
    ) -> int:
        return sum(self._task_bytes(task) for task in (*running, *coming))

    def _task_bytes(self, task: SequenceTask) -> int:
        draft = _draft(task)
        return self._starter.bytes_needed((), [task]) + (
            Drafter.bytes_needed(draft, self._engine, task) if draft else 0
        )

    def new_guesser(self, task: SequenceTask) -> Guesser:
        draft = _draft(task)
        if draft is None:
            return PromptLookup.of(self._engine.manifest, task)
        return Drafter(draft, self._engine, task, self._budget)


def _draft(task: SequenceTask) -> Engine | None:
    """Return the draft model of a task; None for prompt lookup."""
    draft = task.settings.draft_model
    return None if draft is None else draft.engine
