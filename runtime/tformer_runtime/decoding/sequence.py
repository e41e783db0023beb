"""Tasks of the search: the state of a request while it is decoded, and the interface of a search.

This module knows no files and no sessions. A search holds rows of some tasks. It gets the logits of the rows, chooses
the next tokens, and returns the row that each of them continues. The result of a row does not depend on the other rows.
Tasks may join at any step (`scheduler.py`), with prompts of any lengths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from msgspec import Struct, field

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.rules.constraints import Guide
from tformer_runtime.decoding.rules.logit_rules import ForbiddingRule, Rule, forbidden_ids, read_length_alone
from tformer_runtime.decoding.sampling import Guess
from tformer_runtime.engine.step_outputs import StepHistory

if TYPE_CHECKING:
    from tformer_runtime.engine.state import State

NOT_FINITE = "the model gives no numbers for this input: its results are NaN or infinite"
NOTHING_LEFT = "the options leave no token that may come next: suppress less, or allow more beams"

FinishReason = Literal["end", "stop", "length"]
Alternatives = tuple[tuple[int, float], ...]  # ids and their log-probabilities, the likeliest first


class Token(Struct, frozen=True):
    """A generated token.

    copy: the number of the sample of the task.
    finish: set for the last token.
    alternatives: the likeliest tokens at its position, if the options ask for them.
    """

    copy: int
    id: int
    logprob: float
    finish: FinishReason | None
    alternatives: Alternatives = ()


class Hypothesis(Struct, frozen=True):
    """A complete sequence of generated ids, with the end token.

    score: Σ logprobs / length ** length_penalty.
    alternatives: of each position, if the options ask for them.
    history: the extra outputs of its steps.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    finish: FinishReason
    alternatives: tuple[Alternatives, ...] = ()
    history: StepHistory | None = None


class SequenceTask(Struct, eq=False, dict=True):
    """One request while it is decoded. Times are by `time.monotonic`.

    index: its number, which is part of the seed of samples.
    prompt: the decoder's ids before the first generated id.
    max_tokens: the maximum number of ids to generate.
    stop_checker: makes a function for a row. The function takes each generated id, and returns True when the text of
        the row has a stop string.
    truncates_text: returns whether the text of all generated ids has a stop string, for beams.
    on_token: called with each token of greedy decoding and sampling when it is chosen.
    prefix_tokens: the number of last ids of the prompt with which the result begins.
    prefix_logprobs, prefix_alternatives: of these ids.
    prefix_state: a state of one row that has read the first ids of the prompt.
    encoder_outputs: extra outputs of the encoder.
    deadline: the time at which the task must be finished.
    started_at, first_token_at, ended_at: when the request was made, had its first token, and was finished.
    guessed, accepted: the number of guessed tokens, and the number of guesses that came true.
    hypotheses: of the finished task, best first.
    error: the error that ended the task.
    """

    index: int
    prompt: Ints
    max_tokens: int
    settings: Settings
    end_ids: tuple[int, ...] = ()
    rules: Sequence[Rule] = ()
    guide: Guide | None = None
    stop_checker: Callable[[], Callable[[int], bool]] | None = None
    truncates_text: Callable[[Sequence[int]], bool] | None = None
    on_token: Callable[[Token], None] | None = None
    sources: Mapping[str, Array] = field(default_factory=dict)
    prefix_tokens: int = 0
    prefix_logprobs: tuple[float, ...] = ()
    prefix_alternatives: tuple[Alternatives, ...] = ()
    prefix_state: State | None = None
    encoder_outputs: Mapping[str, Array] = field(default_factory=dict)
    deadline: float | None = None
    started_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    ended_at: float = 0.0
    guessed: int = 0
    accepted: int = 0
    hypotheses: list[Hypothesis] | None = None
    error: BaseException | None = None

    @property
    def unread_prompt(self) -> Ints:
        """The ids of the prompt that `prefix_state` has not read."""
        return self.prompt if self.prefix_state is None else self.prompt[int(self.prefix_state.lengths[0]) :]

    @property
    def prefix(self) -> Ints:
        """The ids with which the result begins."""
        return self.prompt[len(self.prompt) - self.prefix_tokens :]

    @property
    def prefill_positions(self) -> int:
        """The positions that are computed before the first token. Batches are packed by it."""
        return len(self.unread_prompt) + sum(len(array) for array in self.sources.values() if array.ndim)

    @property
    def width(self) -> int:
        """The maximum number of rows of the task."""
        return self.settings.width

    @property
    def max_positions(self) -> int:
        """The maximum number of ids of a row: prompt and generated ids."""
        return len(self.prompt) + self.max_tokens

    @property
    def finished(self) -> bool:
        return self.hypotheses is not None or self.error is not None

    def finish_reason(self, token: int, length: int, stopped: bool) -> FinishReason | None:
        """Return why a sequence of `length` generated ids, with `token` as the last, ends; None if it continues."""
        if token in self.end_ids:
            return "end"
        return "stop" if stopped else "length" if length >= self.max_tokens else None

    def is_complete(self, guide: Guide | None) -> bool:
        """Return whether a constrained text is complete and the model has no end token for it."""
        return guide is not None and not self.end_ids and guide.must_end

    @cached_property
    def forbids_by_length(self) -> bool:
        """Whether `forbidden_ids` is the same for all rows of one length."""
        return self.guide is None and read_length_alone(self.rules)

    def forbidden_ids(self, ids: Ints) -> Ints | None:
        """Return the ids that may not be the next token of a row; None if rules or a grammar do more than forbid ids.
        Then use `apply_rules`.
        """
        return None if self.guide is not None else forbidden_ids(self.rules, ids, len(self.prompt))

    def constant_steps(self, generated: int) -> float:
        """Return for how many steps the forbidden ids are the same, the next step included. For a task that
        `forbids_by_length`. generated: the number of generated ids.
        """
        changes = [rule.next_change(generated) for rule in self.rules if isinstance(rule, ForbiddingRule)]
        return min((change - generated for change in changes if change is not None), default=math.inf)

    def apply_rules(self, ids: Ints, guide: Guide | None, scores: F32) -> F32:
        """Return the scores of a row's next token after rules and grammar; -inf forbids a token.

        If a grammar allows only the end of the text, the text ends, whatever the rules forbid.
        """
        if not self.rules and guide is None:
            return scores
        ruled = scores.copy()
        for rule in self.rules:
            rule(ids, len(self.prompt), ruled)
        if guide is not None:
            guide.mask(ruled)
            if ruled.max() == -np.inf and guide.must_end:
                np.copyto(ruled, scores)
                guide.mask(ruled)
        return ruled


class SequenceSearch(Protocol):
    """Tasks that are decoded together. Row numbers count within the search."""

    tasks: list[SequenceTask]

    @property
    def width(self) -> int:
        """The number of rows of logits that `advance` takes."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences that `advance` gives a token. The beams of a task are one sequence."""

    def add(self, tasks: Sequence[SequenceTask]) -> None:
        """Add tasks. Each gets one row in the next logits, after the existing rows."""

    def drop(self, over: Callable[[SequenceTask], bool]) -> Ints:
        """Remove tasks between two steps. Return the rows that stay."""

    def renumber(self, rows: Ints) -> None:
        """Map row i of the search to row rows[i] of the next logits."""

    def advance(
        self,
        logits: F32 | DeviceLogits,
        histories: Sequence[StepHistory] | None,
        guesses: Sequence[Guess | None] | None,
    ) -> tuple[Ints, Ints]:
        """Choose the next tokens. Return the row that each new row continues, and its token; both are (rows,).

        logits: (width, vocabulary), unchanged on return.
        histories: the extra outputs of each row, if any are recorded.
        guesses: the guess for each row, in speculative decoding.
        """


def top_alternatives(logprobs: F32, count: int) -> Alternatives:
    """Return the `count` likeliest tokens of a row with their log-probabilities, without forbidden tokens."""
    count = min(count, len(logprobs))
    if not count:
        return ()
    candidates = np.argpartition(-logprobs, count - 1)[:count]
    order = candidates[np.lexsort((candidates, -logprobs[candidates]))]
    order = order[logprobs[order] > -np.inf]  # a shortlist may have fewer
    return tuple(zip(order.tolist(), logprobs[order].tolist(), strict=True))
