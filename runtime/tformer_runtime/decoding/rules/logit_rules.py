"""Rules: options that change the scores of the next token before it is chosen.

A rule gets all ids of a row and changes the row's scores in place. It has no state, so that beams can be copied and
rows dropped. Scores are logits in greedy decoding and sampling, and log-probabilities in beam search, as in
transformers. repetition_penalty depends on the sign of a score, so its effect differs a little between the two.

The order is that of transformers' generate(), with the options that it does not have:

1. logit_bias (sequence_bias of single tokens)
2. repetition_penalty
3. presence_penalty, frequency_penalty (no options of generate(); as in vLLM)
4. no_repeat_ngram_size
5. bad_words_ids
6. min_new_tokens
7. forced_bos_token_id
8. suppress_tokens
9. begin_suppress_tokens
10. logits_processor

Temperature, top-k, top-p and min-p come after the rules (sampling.py).

Most rules only forbid ids. They return these ids (`ForbiddingRule`), so that searches need not copy and rank whole rows
of scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import LogitsProcessor, Settings
from tformer_runtime.format.manifest import SpecialTokens

NO_IDS: Ints = np.zeros(0, np.int64)


class Rule(Protocol):
    """The effect of one or two options on one row."""

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        """Change the scores (vocabulary,) of a row in place.

        ids: all decoder ids of the row. The first `prompt` ids are the prompt, with start tokens and a forced prefix.
        """


class ForbiddingRule(ABC):
    """A rule that only forbids ids, at most steps.

    reads_length_alone: whether rows of the same length have the same forbidden ids.
    """

    reads_length_alone = False

    def next_change(self, generated: int) -> int | None:
        """Return the number of generated ids, greater than `generated`, at which the forbidden ids change; None if they
        stay. Only for rules that read lengths alone.
        """
        return None

    @abstractmethod
    def forbidden(self, ids: Ints, prompt: int) -> Ints | None:
        """Return the ids whose scores become -inf at this step; None if the rule does more.

        All ids have scores.
        """

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        scores[self.forbidden(ids, prompt)] = -np.inf


def forbidden_ids(rules: Sequence[Rule], ids: Ints, prompt: int) -> Ints | None:
    """Return the ids that several rules forbid, maybe with repetitions; None if a rule does more. Arguments: see
    `Rule`. Cost: that of the rules, and a microsecond if several rules forbid ids.
    """
    parts: list[Ints] = []
    for rule in rules:
        ids_of_rule = rule.forbidden(ids, prompt) if isinstance(rule, ForbiddingRule) else None
        if ids_of_rule is None:
            return None
        if len(ids_of_rule):
            parts.append(ids_of_rule)
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_IDS


def read_length_alone(rules: Sequence[Rule]) -> bool:
    """Return whether rules only forbid ids, the same for all rows of one length."""
    return all(isinstance(rule, ForbiddingRule) and rule.reads_length_alone for rule in rules)


def make_rules(settings: Settings, special: SpecialTokens, vocabulary: int) -> list[Rule]:
    """Return the rules of the settings, in their order; none for most settings.

    vocabulary: the number of scores. Raise OptionError if an option has an id that is not in the vocabulary. A rule
        costs at most a few passes over its own ids and over the ids of the row. Only forced_bos_token_id and
        logits_processor touch all scores. bad_words_ids looks up the last ids once for each length of its sequences.
        no_repeat_ngram_size compares all n-grams at once.
    """
    _check(settings, vocabulary)
    forced_bos_token_id = (
        None if settings.forced_prefix else settings.forced_bos_token_id
    )  # it is before the prefix, in the prompt
    lone_ends = {(end,) for end in special.eos_token_ids}
    sequences = [sequence for sequence in settings.bad_words_ids if sequence not in lone_ends]
    ends = [end for end in special.eos_token_ids if end < vocabulary]
    rules: list[Rule] = []
    if settings.logit_bias:
        rules.append(Bias(settings.logit_bias))
    if settings.repetition_penalty != 1:
        rules.append(RepetitionPenalty(settings.repetition_penalty))
    if settings.presence_penalty or settings.frequency_penalty:
        rules.append(CountPenalty(settings.presence_penalty, settings.frequency_penalty))
    if settings.no_repeat_ngram_size:
        rules.append(NoRepeatNgram(settings.no_repeat_ngram_size, vocabulary))
    if sequences:
        rules.append(SuppressSequences(sequences))
    if settings.min_new_tokens and ends:
        rules.append(SuppressUntil(ends, settings.min_new_tokens))
    if forced_bos_token_id is not None:
        rules.append(FirstToken(forced_bos_token_id))
    if settings.suppress_tokens:
        rules.append(Suppress(settings.suppress_tokens))
    if settings.begin_suppress_tokens:
        rules.append(SuppressAt(settings.begin_suppress_tokens, 0 if forced_bos_token_id is None else 1))
    if settings.logits_processor is not None:
        rules.append(Processor(settings.logits_processor))
    return rules


def _check(settings: Settings, vocabulary: int) -> None:
    named: dict[str, Iterable[int]] = {
        "forced_bos_token_id": () if settings.forced_bos_token_id is None else (settings.forced_bos_token_id,),
        "suppress_tokens": settings.suppress_tokens,
        "begin_suppress_tokens": settings.begin_suppress_tokens,
        "bad_words_ids": (token for sequence in settings.bad_words_ids for token in sequence),
        "logit_bias": (token for token, _ in settings.logit_bias),
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocabulary:
                raise OptionError(f"{name} names the id {token}, and the model's end at {vocabulary - 1}", option=name)


class Bias:
    """Adds numbers to the scores of some ids."""

    def __init__(self, bias: Iterable[tuple[int, float]]) -> None:
        pairs = list(bias)
        self._tokens = np.array([token for token, _ in pairs], np.int64)
        self._added = np.array([added for _, added in pairs], np.float32)

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        scores[self._tokens] += self._added


class RepetitionPenalty:
    """Divides positive scores of all ids so far, the prompt included, by the penalty, and multiplies negative ones
    (Keskar et al. 2019).
    """

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        seen = ids[ids < len(scores)]  # the step input may have ids that are never generated
        old_scores = scores[seen]
        scores[seen] = np.where(old_scores < 0, old_scores * self._penalty, old_scores / self._penalty)


class CountPenalty:
    """score -= presence · [count > 0] + frequency · count, with the counts of the generated ids."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        tokens, counts = np.unique(ids[prompt:], return_counts=True)
        scores[tokens] -= (self._presence + self._frequency * counts).astype(np.float32)


class NoRepeatNgram(ForbiddingRule):
    """Forbids repeated n-grams: an id that followed the last n - 1 ids before."""

    def __init__(self, size: int, vocabulary: int) -> None:
        self._size, self._vocabulary = size, vocabulary

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        starts = len(ids) - self._size + 1  # of the n-grams there are
        if starts < 1:
            return NO_IDS
        matches = np.ones(starts, bool)
        for i, token in enumerate(ids[starts:]):
            matches &= ids[i : i + starts] == token
        next_ids = ids[self._size - 1 :][matches]
        return next_ids[next_ids < self._vocabulary]  # the step input may have ids that are never generated


class SuppressSequences(ForbiddingRule):
    """Forbids the last id of a sequence after the other ids of the sequence."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        last_ids: dict[tuple[int, ...], list[int]] = {}
        for sequence in sequences:
            last_ids.setdefault(sequence[:-1], []).append(sequence[-1])
        self._last = {first_ids: np.array(tokens, np.int64) for first_ids, tokens in last_ids.items()}
        self._always = self._last.pop((), NO_IDS)
        self._lengths = sorted({len(first_ids) for first_ids in self._last})

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        latest = tuple(ids[max(0, len(ids) - max(self._lengths, default=0)) :].tolist())
        lengths = (length for length in self._lengths if length <= len(latest))
        parts = [self._last.get(latest[len(latest) - length :], NO_IDS) for length in lengths]
        parts = [tokens for tokens in parts if len(tokens)]
        return np.concatenate([self._always, *parts]) if parts else self._always


class Suppress(ForbiddingRule):
    """Forbids some ids at every step."""

    reads_length_alone = True

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.array([*dict.fromkeys(tokens)], np.int64)  # a step costs as much as the vocabulary at most

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        return self._tokens


class SuppressAt(Suppress):
    """Forbids some ids after exactly `generated` generated ids."""

    def __init__(self, tokens: Iterable[int], generated: int) -> None:
        super().__init__(tokens)
        self._generated = generated

    def next_change(self, generated: int) -> int | None:
        changes = (self._generated, self._generated + 1)
        return next((change for change in changes if change > generated), None)

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        return self._tokens if len(ids) - prompt == self._generated else NO_IDS


class SuppressUntil(Suppress):
    """Forbids some ids before `generated` generated ids."""

    def __init__(self, tokens: Iterable[int], generated: int) -> None:
        super().__init__(tokens)
        self._generated = generated

    def next_change(self, generated: int) -> int | None:
        return self._generated if generated < self._generated else None

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        return self._tokens if len(ids) - prompt < self._generated else NO_IDS


class FirstToken(ForbiddingRule):
    """Forces the first generated id, with a score of 0, so that it costs nothing in beam search."""

    reads_length_alone = True

    def __init__(self, token: int) -> None:
        self._token = token

    def next_change(self, generated: int) -> int | None:
        return 1 if generated < 1 else None

    def forbidden(self, ids: Ints, prompt: int) -> Ints | None:
        return None if len(ids) == prompt else NO_IDS

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        if len(ids) == prompt:
            scores[:] = -np.inf
            scores[self._token] = 0


class Processor:
    """The caller's logits_processor. It gets copies, so that it may keep them."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        try:
            returned = self._processor(ids.copy(), scores.copy())
        except Exception as error:
            error.add_note(f"raised by the caller's logits_processor, {self._processor!r}")
            raise
        try:
            logits = np.asarray(returned)
        except ValueError:  # lists of unequal lengths
            logits = np.array(None)
        if logits.dtype.kind not in "fiu" or logits.shape != scores.shape:
            description = f"{type(returned).__name__} of {logits.dtype} and the shape {logits.shape}"
            raise OptionError(
                f"logits_processor must return logits of the shape {scores.shape}, not a {description}",
                option="logits_processor",
            )
        if np.isnan(logits).any():
            raise OptionError(
                "logits_processor must return numbers, and some that it returned are NaN", option="logits_processor"
            )
        scores[:] = logits
