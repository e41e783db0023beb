"""Greedy decoding and sampling, in which rows are independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.backend.sampling_graph import TopLogits
from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.decoding.row_placement import mask_forbidden
from tformer_runtime.decoding.rules.logit_rules import NO_IDS
from tformer_runtime.decoding.sampling import Guess, Sampler, log_normalizer, seed_or_random
from tformer_runtime.decoding.sequence import (
    NOT_FINITE,
    NOTHING_LEFT,
    Alternatives,
    FinishReason,
    Hypothesis,
    SequenceTask,
    Token,
    top_alternatives,
)
from tformer_runtime.engine.greedy_steps import GreedyPlan, GreedySteps
from tformer_runtime.engine.step_outputs import StepHistory


class SampledSequence:
    """One sample of a task, or its only sequence."""

    def __init__(self, task: SequenceTask, copy: int, seed: int) -> None:
        self.task, self.copy = task, copy
        self._ids: Ints = np.empty(task.max_positions, np.int64)
        self._ids[: len(task.prompt)] = task.prompt
        self.logprobs: list[float] = []
        self.alternatives: list[Alternatives] = []
        self.guide = task.guide.copy() if task.guide is not None else None
        self.has_stop_string = task.stop_checker() if task.stop_checker is not None else None
        self.sampler = Sampler.from_settings(task.settings, seed, task.index, copy) if task.settings.sampling else None
        self.is_greedy = (  # whether logits and forbidden ids alone choose its tokens
            self.sampler is None
            and self.has_stop_string is None
            and not task.settings.top_logprobs
            and task.forbids_by_length
        )
        self.unconstrained = not (task.rules or self.guide or task.settings.top_logprobs)

    @property
    def ids(self) -> Ints:
        """The ids of the prompt and the generated ids."""
        return self._ids[: len(self.task.prompt) + len(self.logprobs)]

    def forbidden(self) -> Ints | None:
        """Return the ids that may not be next if the row takes the likeliest of all other ids; otherwise None."""
        if self.sampler is not None:
            return None
        return self.task.forbidden_ids(self.ids) if self.task.rules or self.guide else NO_IDS

    def choose(self, logits: F32, guess: Guess | None) -> int:
        """Return the next token by the rules, the grammar and the sampling of the task. guess: a candidate for it."""
        scores = self.task.apply_rules(self.ids, self.guide, logits)
        if self.sampler is None:
            token = int(scores.argmax())
            if scores[token] == -np.inf:
                raise OptionError(NOTHING_LEFT)
            return token
        return self.sampler(scores, guess)

    def take(self, token: int, logprob: float) -> FinishReason | None:
        """Append a token. Return why the sequence ends, or None."""
        self._ids[len(self.ids)] = token
        self.logprobs.append(logprob)
        if self.guide is not None:
            self.guide.accept(token)
        stopped = (self.has_stop_string is not None and self.has_stop_string(token)) or self.task.is_complete(
            self.guide
        )
        reason = self.task.finish_reason(token, len(self.logprobs), stopped)
        if self.task.on_token is not None:
            alternatives = self.alternatives[-1] if self.alternatives else ()
            self.task.on_token(Token(self.copy, token, logprob, reason, alternatives))
        return reason

    def take_all(self, tokens: list[int], logprobs: list[float]) -> None:
        """Append tokens after which the sequence continues."""
        first = len(self.ids)
        self._ids[first : first + len(tokens)] = tokens
        self.logprobs += logprobs
        if self.task.on_token is not None:
            for token, logprob in zip(tokens, logprobs, strict=True):
                if self.task.finished:  # a callback has cancelled it
                    break
                self.task.on_token(Token(self.copy, token, logprob, None))

    def hypothesis(self, finish: FinishReason, history: StepHistory | None) -> Hypothesis:
        ids = tuple(self.ids[len(self.task.prompt) :].tolist())
        score = float(sum(self.logprobs) / len(ids) ** self.task.settings.length_penalty)
        return Hypothesis(ids, tuple(self.logprobs), score, finish, tuple(self.alternatives), history)


class _Planned:
    """Choices that the model has made by a plan."""

    def __init__(self, tokens: list[int], logprobs: list[float]) -> None:
        """tokens, logprobs: of each row of logits."""
        self._tokens, self._logprobs = tokens, logprobs

    def choose(self, row: SampledSequence, row_number: int, guess: Guess | None) -> tuple[int, float]:
        return self._tokens[row_number], self._logprobs[row_number]


class _OnHost:
    """Choices from logits (rows, vocabulary) on the host."""

    def __init__(self, logits: F32, rows: Sequence[SampledSequence], row_numbers: Sequence[int]) -> None:
        """row_numbers: the row of logits of each sequence."""
        tokens = logits.argmax(-1)
        max_logits = logits[np.arange(len(logits)), tokens]
        self._logits, self._norms = logits, log_normalizer(logits, max_logits)
        self._tokens, self._possible = tokens.tolist(), (max_logits != -np.inf).tolist()
        self._greedy_rows: set[SampledSequence] = set()
        forbidden_by_row: dict[int, Ints] = {}  # for rows whose likeliest token is forbidden
        for row, i in zip(rows, row_numbers, strict=True):
            forbidden = row.forbidden()
            if forbidden is None:
                continue
            self._greedy_rows.add(row)
            if len(forbidden) and self._tokens[i] in forbidden:
                forbidden_by_row[i] = forbidden
        with mask_forbidden(logits, list(forbidden_by_row), list(forbidden_by_row.values())):
            for i in forbidden_by_row:
                self._tokens[i] = int(logits[i].argmax())
                self._possible[i] = bool(logits[i, self._tokens[i]] != -np.inf)

    def choose(self, row: SampledSequence, row_number: int, guess: Guess | None) -> tuple[int, float]:
        """Return the next token of a sequence and its log-probability. row_number: its row of logits.

        Raise InputError if the logits are not numbers.
        """
        if not self._norms[row_number] < np.inf:
            raise InputError(NOT_FINITE)
        if row not in self._greedy_rows:
            token = row.choose(self._logits[row_number], guess)
        elif self._possible[row_number]:
            token = self._tokens[row_number]
        else:
            raise OptionError(NOTHING_LEFT)
        count = row.task.settings.top_logprobs
        if count:
            row.alternatives.append(top_alternatives(self._logits[row_number] - self._norms[row_number], count))
        return token, float(self._logits[row_number, token] - self._norms[row_number])


class _OnDevice:
    """Choices from logits on a device. Whole rows are copied to the host only if needed.

    A greedy row needs the likeliest token, which the device finds. A sample without rules needs the top logits of its
    row. A whole row is needed for rules that raise a token or forbid the likeliest one, for grammars, which forbid most
    tokens, for top_logprobs, for samples with rules, and if the top logits do not determine the sample
    (`sampling.warp_top_logits`).
    """

    def __init__(self, logits: DeviceLogits, rows: Sequence[SampledSequence], row_numbers: Sequence[int]) -> None:
        self._device_logits = logits
        self._tokens, self._logprobs = logits.tokens.tolist(), logits.logprobs.tolist()
        self._logits: F32 | None = None
        self._top_logits: list[TopLogits] = []
        samplers = [
            (i, row.sampler)
            for row, i in zip(rows, row_numbers, strict=True)
            if row.unconstrained and row.sampler is not None
        ]
        if any(sampler.draws_from_few for _, sampler in samplers):
            temperatures = np.ones(len(logits), np.float32)
            for i, sampler in samplers:
                temperatures[i] = sampler.temperature
            self._top_logits = logits.top_logits(temperatures)

    def choose(self, row: SampledSequence, row_number: int, guess: Guess | None) -> tuple[int, float]:
        if self._logprobs[row_number] != self._logprobs[row_number]:
            raise InputError(NOT_FINITE)
        forbidden = None if row.task.settings.top_logprobs else row.forbidden()
        if forbidden is not None and not (len(forbidden) and self._tokens[row_number] in forbidden):
            return self._tokens[row_number], self._logprobs[row_number]
        if row.unconstrained and row.sampler is not None and row.sampler.draws_from_few:
            top_logits = self._top_logits[row_number]
            token = row.sampler.draw_from_top_logits(top_logits)
            if token is not None:
                difference = float(
                    top_logits.logits.max() - top_logits.logits[np.searchsorted(top_logits.tokens, token)]
                )
                return token, self._logprobs[row_number] - difference
        if self._logits is None:
            self._logits = self._device_logits.copy()
        return _OnHost(self._logits[row_number : row_number + 1], [row], [0]).choose(row, 0, guess)


class TokenSearch:
    """Rows that take one token each in a step. Cost of a step: one pass over the logits, and some microseconds for each
    row.

    The samples of a task share one row of logits for the first token. Afterwards each sample has its own row.
    """

    def __init__(self) -> None:
        self.tasks: list[SequenceTask] = []
        self._rows: list[SampledSequence] = []
        self._row_numbers: list[int] = []  # the row of logits of each sequence
        self._hypotheses: dict[SequenceTask, dict[int, Hypothesis]] = {}
        self._planned: _Planned | None = None  # choices for the next logits, if they are known

    @property
    def width(self) -> int:
        return self._row_numbers[-1] + 1 if self._row_numbers else 0

    @property
    def num_sequences(self) -> int:
        return len(self._rows)

    def add(self, tasks: Sequence[SequenceTask]) -> None:
        self._planned = None
        for row_number, task in enumerate(tasks, self.width):
            seed = seed_or_random(task.settings)
            self.tasks.append(task)
            self._hypotheses[task] = {}
            self._rows += [SampledSequence(task, copy, seed) for copy in range(task.settings.num_return_sequences)]
            self._row_numbers += [row_number] * task.settings.num_return_sequences

    def drop(self, is_finished: Callable[[SequenceTask], bool]) -> Ints:
        self._planned = None  # of rows that may have gone
        kept = [i for i, row in enumerate(self._rows) if not is_finished(row.task)]
        kept_rows = sorted({self._row_numbers[i] for i in kept})
        new_numbers = {row_number: i for i, row_number in enumerate(kept_rows)}
        self._row_numbers = [new_numbers[self._row_numbers[i]] for i in kept]
        self._rows = [self._rows[i] for i in kept]
        self._remove(is_finished)
        return np.array(kept_rows, np.int64)

    def renumber(self, rows: Ints) -> None:
        self._planned = None
        row_numbers = rows[self._row_numbers].tolist()
        order = sorted(range(len(row_numbers)), key=row_numbers.__getitem__)
        self._rows, self._row_numbers = [self._rows[i] for i in order], [row_numbers[i] for i in order]

    def greedy_plan(self, max_steps: int) -> GreedyPlan | None:
        """Return how the model may choose the next tokens by itself; None if it may not do so for all rows.

        max_steps: the greatest number of steps.
        """
        if self.width != len(self._rows):
            return None
        forbidden: Ints | None = None
        steps: float = max_steps
        for row in self._rows:
            task, generated = row.task, len(row.logprobs)
            if not row.is_greedy:
                return None
            steps = min(steps, task.max_tokens - generated)
            own = NO_IDS
            if task.rules:
                ids = task.forbidden_ids(row.ids)
                if ids is None:
                    return None
                own, steps = ids, min(steps, task.constant_steps(generated))
            if forbidden is not None and own is not forbidden and not np.array_equal(own, forbidden):
                return None
            forbidden = own
        if steps < 2 or forbidden is None:
            return None
        ends = {end for row in self._rows for end in row.task.end_ids}
        return GreedyPlan(int(steps), tuple(ends), forbidden)

    def take_greedy(self, steps: GreedySteps) -> None:
        """Append the tokens that the model has chosen, but for those of the last step, which `advance` takes."""
        tokens = steps.tokens
        flat = steps.logits.reshape(tokens.size, -1)
        logprobs: F32 = flat[np.arange(tokens.size), tokens.ravel()] - log_normalizer(flat)
        logprobs = logprobs.reshape(tokens.shape)
        *earlier, last = tokens.tolist()
        for i, row in enumerate(self._rows if earlier else ()):
            try:
                row.take_all([step[i] for step in earlier], logprobs[:-1, i].tolist())
            except Exception as error:  # of the task's own callback: only this task ends
                row.task.error = row.task.error or error
        if np.isfinite(logprobs[-1]).all() and set(last).isdisjoint(steps.plan.forbidden.tolist()):
            self._planned = _Planned(last, logprobs[-1].tolist())

    def advance(
        self,
        logits: F32 | DeviceLogits,
        histories: Sequence[StepHistory] | None = None,
        guesses: Sequence[Guess | None] | None = None,
    ) -> tuple[Ints, Ints]:
        choices: _Planned | _OnDevice | _OnHost
        if self._planned is not None:
            choices, self._planned = self._planned, None
        elif isinstance(logits, DeviceLogits):
            choices = _OnDevice(logits, self._rows, self._row_numbers)
        else:
            choices = _OnHost(logits, self._rows, self._row_numbers)
        continuing, chosen = [], []
        for i, (row, row_number) in enumerate(zip(self._rows, self._row_numbers, strict=True)):
            task = row.task
            try:
                guess = guesses[row_number] if guesses else None
                token, logprob = choices.choose(row, row_number, guess)
                if guess is not None and guess.token == token:
                    task.accepted += 1
                finish = row.take(token, logprob)
            except Exception as error:  # of the task's own rule or callback: only this task ends
                task.error = task.error or error
                continue
            if finish is None:
                continuing.append(i)
                chosen.append(token)
            else:
                self._hypotheses[task][row.copy] = row.hypothesis(finish, histories[row_number] if histories else None)
                self._finish(task)
        parents = np.array([self._row_numbers[i] for i in continuing], np.int64)
        if len(continuing) < len(self._rows) or self.width < len(self._rows):
            going = [not self._rows[i].task.finished for i in continuing]  # the other samples of a failed task end, too
            continuing = [i for i, goes in zip(continuing, going, strict=True) if goes]
            chosen = [token for token, goes in zip(chosen, going, strict=True) if goes]
            parents = parents[going] if len(going) else parents
            self._rows = [self._rows[i] for i in continuing]
            self._row_numbers = list(range(len(continuing)))
            self._remove(lambda task: task.finished)
        return parents, np.array(chosen, np.int64)

    def _finish(self, task: SequenceTask) -> None:
        done = self._hypotheses[task]
        if len(done) == task.settings.num_return_sequences and not task.finished:
            task.hypotheses = [done[copy] for copy in range(len(done))]

    def _remove(self, is_finished: Callable[[SequenceTask], bool]) -> None:
        self.tasks = [task for task in self.tasks if not is_finished(task)]
        self._hypotheses = {task: done for task, done in self._hypotheses.items() if not is_finished(task)}
