"""Greedy decoding and sampling: every row for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.backend.sampling_graph import TopLogits
from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.logit_rules import NO_IDS
from tformer_runtime.decoding.sampling import Guess, Sampler, log_normalizer, seed_of
from tformer_runtime.decoding.sequence import (
    NOTHING_LEFT,
    Alternatives,
    FinishReason,
    Hypothesis,
    Task,
    Token,
    likeliest,
    without,
)
from tformer_runtime.engine.step_outputs import Trail


class _Row:
    """One sample of a task, or its only sequence."""

    def __init__(self, task: Task, copy: int, seed: int) -> None:
        self.task, self.copy = task, copy
        self._ids: Ints = np.empty(task.longest, np.int64)
        self._ids[: len(task.prompt)] = task.prompt
        self.logprobs: list[float] = []
        self.alternatives: list[Alternatives] = []
        self.guide = task.guide.copy() if task.guide is not None else None
        self.stopped = task.stopped() if task.stopped is not None else None
        self.sampler = Sampler.of(task.settings, seed, task.index, copy) if task.settings.sampling else None
        self.free = not (task.rules or self.guide or task.settings.top_logprobs)

    @property
    def ids(self) -> Ints:
        """The prompt's, and those that were generated."""
        return self._ids[: len(self.task.prompt) + len(self.logprobs)]

    def forbidden(self) -> Ints | None:
        """The ids that may not come next, where it is the likeliest of all others that does; else None."""
        if self.sampler is not None:
            return None
        return self.task.forbidden(self.ids) if self.task.rules or self.guide else NO_IDS

    def choose(self, logits: F32, guess: Guess | None) -> int:
        """The token that follows, by the task's rules, grammar and way of choosing. guess: what may be it."""
        scores = self.task.ruled(self.ids, self.guide, logits)
        if self.sampler is None:
            token = int(scores.argmax())
            if scores[token] == -np.inf:
                raise OptionError(NOTHING_LEFT)
            return token
        return self.sampler(scores, guess)

    def take(self, token: int, logprob: float) -> FinishReason | None:
        self._ids[len(self.ids)] = token
        self.logprobs.append(logprob)
        if self.guide is not None:
            self.guide.accept(token)
        stopped = (self.stopped is not None and self.stopped(token)) or self.task.complete(self.guide)
        reason = self.task.reason(token, len(self.logprobs), stopped)
        if self.task.listen is not None:
            self.task.listen(Token(self.copy, token, logprob, reason))
        return reason

    def hypothesis(self, finish: FinishReason, trail: Trail | None) -> Hypothesis:
        ids = tuple(self.ids[len(self.task.prompt) :].tolist())
        score = float(sum(self.logprobs) / len(ids) ** self.task.settings.length_penalty)
        return Hypothesis(ids, tuple(self.logprobs), score, finish, tuple(self.alternatives), trail)


class _OnHost:
    """What a step gives: (rows, vocabulary) logits."""

    def __init__(self, logits: F32, rows: Sequence[_Row], at: Sequence[int]) -> None:
        """at: the row of logits of each row."""
        tokens = logits.argmax(-1)
        top = logits[np.arange(len(logits)), tokens]
        self._logits, self._norms = logits, log_normalizer(logits, top)
        self._tokens, self._possible = tokens.tolist(), (top != -np.inf).tolist()
        self._plain: set[_Row] = set()
        barred: dict[int, Ints] = {}  # of the rows whose likeliest may not come
        for row, i in zip(rows, at, strict=True):
            forbidden = row.forbidden()
            if forbidden is None:
                continue
            self._plain.add(row)
            if len(forbidden) and self._tokens[i] in forbidden:
                barred[i] = forbidden
        with without(logits, list(barred), list(barred.values())):
            for i in barred:
                self._tokens[i] = int(logits[i].argmax())
                self._possible[i] = bool(logits[i, self._tokens[i]] != -np.inf)

    def choose(self, row: _Row, at: int, guess: Guess | None) -> tuple[int, float]:
        """A row's next token and its log-probability. at: its row of logits."""
        if row not in self._plain:
            token = row.choose(self._logits[at], guess)
        elif self._possible[at]:
            token = self._tokens[at]
        else:
            raise OptionError(NOTHING_LEFT)
        count = row.task.settings.top_logprobs
        if count:
            row.alternatives.append(likeliest(self._logits[at] - self._norms[at], count))
        return token, float(self._logits[at, token] - self._norms[at])


class _OnDevice:
    """The same of logits that are on a device: rows come from there where less will not do.

    A greedy row needs what was chosen there, a sample without rules the head of its row. Whole rows are needed by rules
    that raise any token or have forbidden what was chosen, by grammars, which forbid most tokens, by top_logprobs, and
    by samples that have rules, or for which a head does not tell all that may be drawn (`sampling.warp_top_logits`).
    """

    def __init__(self, chosen: DeviceLogits, rows: Sequence[_Row], at: Sequence[int]) -> None:
        self._chosen = chosen
        self._tokens, self._logprobs = chosen.tokens.tolist(), chosen.logprobs.tolist()
        self._logits: F32 | None = None
        self._heads: list[TopLogits] = []
        drawn = [(i, row.sampler) for row, i in zip(rows, at, strict=True) if row.free and row.sampler is not None]
        if any(sampler.of_few for _, sampler in drawn):
            temperatures = np.ones(len(chosen), np.float32)
            for i, sampler in drawn:
                temperatures[i] = sampler.temperature
            self._heads = chosen.top_logits(temperatures)

    def choose(self, row: _Row, at: int, guess: Guess | None) -> tuple[int, float]:
        forbidden = None if row.task.settings.top_logprobs else row.forbidden()
        if forbidden is not None and not (len(forbidden) and self._tokens[at] in forbidden):
            return self._tokens[at], self._logprobs[at]
        if row.free and row.sampler is not None and row.sampler.of_few:
            head = self._heads[at]
            token = row.sampler.of_top_logits(head)
            if token is not None:
                behind = float(head.logits.max() - head.logits[np.searchsorted(head.tokens, token)])
                return token, self._logprobs[at] - behind
        if self._logits is None:
            self._logits = self._chosen.copy()
        return _OnHost(self._logits[at : at + 1], [row], [0]).choose(row, 0, guess)


class RowSearch:
    """Rows that each take one token a step. Cost of a step: one pass over the logits, and some microseconds a row.

    A task's samples begin as one row of logits and are rows of their own after the first token.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._rows: list[_Row] = []
        self._at: list[int] = []  # the row of logits of each
        self._done: dict[Task, dict[int, Hypothesis]] = {}

    @property
    def width(self) -> int:
        return self._at[-1] + 1 if self._at else 0

    def add(self, tasks: Sequence[Task]) -> None:
        for at, task in enumerate(tasks, self.width):
            seed = seed_of(task.settings)
            self.tasks.append(task)
            self._done[task] = {}
            self._rows += [_Row(task, copy, seed) for copy in range(task.settings.num_return_sequences)]
            self._at += [at] * task.settings.num_return_sequences

    def drop(self, over: Callable[[Task], bool]) -> Ints:
        stays = [i for i, row in enumerate(self._rows) if not over(row.task)]
        kept = sorted({self._at[i] for i in stays})
        moved = {at: i for i, at in enumerate(kept)}
        self._rows, self._at = [self._rows[i] for i in stays], [moved[self._at[i]] for i in stays]
        self._forget(over)
        return np.array(kept, np.int64)

    def renumber(self, rows: Ints) -> None:
        at = rows[self._at].tolist()
        order = sorted(range(len(at)), key=at.__getitem__)
        self._rows, self._at = [self._rows[i] for i in order], [at[i] for i in order]

    def advance(
        self,
        logits: F32 | DeviceLogits,
        trails: Sequence[Trail] | None = None,
        guesses: Sequence[Guess | None] | None = None,
    ) -> tuple[Ints, Ints]:
        given = (
            _OnDevice(logits, self._rows, self._at)
            if isinstance(logits, DeviceLogits)
            else _OnHost(logits, self._rows, self._at)
        )
        left, chosen = [], []
        for i, (row, at) in enumerate(zip(self._rows, self._at, strict=True)):
            task = row.task
            try:
                guess = guesses[at] if guesses else None
                token, logprob = given.choose(row, at, guess)
                if guess is not None and guess.token == token:
                    task.accepted += 1
                finish = row.take(token, logprob)
            except Exception as error:  # of the task's own rule or listener: it ends alone
                task.error = task.error or error
                continue
            if finish is None:
                left.append(i)
                chosen.append(token)
            else:
                self._done[task][row.copy] = row.hypothesis(finish, trails[at] if trails else None)
                self._finish(task)
        parents = np.array([self._at[i] for i in left], np.int64)
        if len(left) < len(self._rows) or self.width < len(self._rows):
            going = [not self._rows[i].task.over for i in left]  # a sample that failed takes the others with it
            left = [i for i, goes in zip(left, going, strict=True) if goes]
            chosen = [token for token, goes in zip(chosen, going, strict=True) if goes]
            parents = parents[going] if len(going) else parents
            self._rows = [self._rows[i] for i in left]
            self._at = list(range(len(left)))
            self._forget(lambda task: task.over)
        return parents, np.array(chosen, np.int64)

    def _finish(self, task: Task) -> None:
        done = self._done[task]
        if len(done) == task.settings.num_return_sequences and not task.over:
            task.found = [done[copy] for copy in range(len(done))]

    def _forget(self, over: Callable[[Task], bool]) -> None:
        self.tasks = [task for task in self.tasks if not over(task)]
        self._done = {task: done for task, done in self._done.items() if not over(task)}
