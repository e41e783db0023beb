"""Rules: what options do to the scores of the next token before it is chosen.

A rule sees all ids of a row and changes the row's scores in place. It holds nothing of a row, so that beams may be
copied and rows dropped without it. Scores are logits in greedy decoding and sampling, and log-probabilities in beam
search, as in transformers; repetition_penalty, which asks for their sign, does not mean quite the same in both.

The order is that of transformers' generate(), which two options are not part of:

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

The warping of a sampler comes after them (sampling.py).

Most files ask for nothing but that some ids do not come. Rules that do no more say which (`Forbids`), so that searches
need not copy and rank whole rows of scores for them.
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
    """One option's, or two options', effect on one row."""

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        """Change one row's scores (vocabulary,) in place. ids: all of the decoder so far, the first `prompt` of them
        its prompt, start tokens and a prefix included."""


class Forbids(ABC):
    """A rule that does nothing, at most steps, but say that some ids do not come."""

    @abstractmethod
    def forbidden(self, ids: Ints, prompt: int) -> Ints | None:
        """Ids whose scores it makes -inf at this step, all of which have scores; None where it does anything else."""

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        scores[self.forbidden(ids, prompt)] = -np.inf


def forbidden_by(rules: Sequence[Rule], ids: Ints, prompt: int) -> Ints | None:
    """The ids that some rules forbid together, maybe repeated; None where one does anything else. As `Rule` for the
    arguments. Cost: that of the rules, and a microsecond where several forbid something."""
    every: list[Ints] = []
    for rule in rules:
        found = rule.forbidden(ids, prompt) if isinstance(rule, Forbids) else None
        if found is None:
            return None
        if len(found):
            every.append(found)
    return every[0] if len(every) == 1 else np.concatenate(every) if every else NO_IDS


def rules_of(settings: Settings, special: SpecialTokens, vocabulary: int) -> list[Rule]:
    """The rules that the settings ask for, in their order; none for most settings.

    vocabulary: how many scores there are. OptionError if an option names an id beyond them.

    A call of any rule costs at most some passes over its own ids and over the row's; only forced_bos_token_id and
    logits_processor touch all scores. bad_words_ids looks up the last ids for each length that its sequences have,
    no_repeat_ngram_size compares all n-grams at once.
    """
    _check(settings, vocabulary)
    forced_bos_token_id = (
        None if settings.forced_prefix else settings.forced_bos_token_id
    )  # it is before the prefix, in the prompt
    lone_ends = {(end,) for end in special.end}
    sequences = [sequence for sequence in settings.bad_words_ids if sequence not in lone_ends]
    ends = [end for end in special.end if end < vocabulary]
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
                raise OptionError(f"{name} names the id {token}, and the model's end at {vocabulary - 1}")


class Bias:
    """Numbers added to the scores of some ids."""

    def __init__(self, bias: Iterable[tuple[int, float]]) -> None:
        pairs = list(bias)
        self._tokens = np.array([token for token, _ in pairs], np.int64)
        self._added = np.array([added for _, added in pairs], np.float32)

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        scores[self._tokens] += self._added


class RepetitionPenalty:
    """Scores of all ids so far, the prompt's too, divided by the penalty if positive, else multiplied (Keskar et al.
    2019)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        seen = ids[ids < len(scores)]  # the step input may have ids that are never generated
        before = scores[seen]
        scores[seen] = np.where(before < 0, before * self._penalty, before / self._penalty)


class CountPenalty:
    """score -= presence · [count > 0] + frequency · count, over what has been generated."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        tokens, counts = np.unique(ids[prompt:], return_counts=True)
        scores[tokens] -= (self._presence + self._frequency * counts).astype(np.float32)


class NoRepeatNgram(Forbids):
    """No n-gram comes twice: what has once followed the last n - 1 ids does not follow them again."""

    def __init__(self, size: int, vocabulary: int) -> None:
        self._size, self._vocabulary = size, vocabulary

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        starts = len(ids) - self._size + 1  # of the n-grams there are
        if starts < 1:
            return NO_IDS
        same = np.ones(starts, bool)
        for i, token in enumerate(ids[starts:]):
            same &= ids[i : i + starts] == token
        followed = ids[self._size - 1 :][same]
        return followed[followed < self._vocabulary]  # the step input may have ids that are never generated


class SuppressSequences(Forbids):
    """The last id of a sequence does not come after the ones before it."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        last: dict[tuple[int, ...], list[int]] = {}
        for sequence in sequences:
            last.setdefault(sequence[:-1], []).append(sequence[-1])
        self._last = {before: np.array(tokens, np.int64) for before, tokens in last.items()}
        self._always = self._last.pop((), NO_IDS)
        self._lengths = sorted({len(before) for before in self._last})

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        latest = tuple(ids[max(0, len(ids) - max(self._lengths, default=0)) :].tolist())
        lengths = (length for length in self._lengths if length <= len(latest))
        found = [self._last.get(latest[len(latest) - length :], NO_IDS) for length in lengths]
        found = [tokens for tokens in found if len(tokens)]
        return np.concatenate([self._always, *found]) if found else self._always


class Suppress(Forbids):
    """Some ids never come."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.array(list(tokens), np.int64)

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        return self._tokens


class SuppressAt(Suppress):
    """Some ids do not come after so many generated ones."""

    def __init__(self, tokens: Iterable[int], generated: int) -> None:
        super().__init__(tokens)
        self._generated = generated

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        return self._tokens if len(ids) - prompt == self._generated else NO_IDS


class SuppressUntil(Suppress):
    """Some ids do not come before so many generated ones."""

    def __init__(self, tokens: Iterable[int], generated: int) -> None:
        super().__init__(tokens)
        self._generated = generated

    def forbidden(self, ids: Ints, prompt: int) -> Ints:
        return self._tokens if len(ids) - prompt < self._generated else NO_IDS


class FirstToken(Forbids):
    """Generation begins with this id, at a score of 0: in beam search it costs nothing."""

    def __init__(self, token: int) -> None:
        self._token = token

    def forbidden(self, ids: Ints, prompt: int) -> Ints | None:
        return None if len(ids) == prompt else NO_IDS

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        if len(ids) == prompt:
            scores[:] = -np.inf
            scores[self._token] = 0


class Processor:
    """The caller's own. It gets copies, so that it may keep them."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor

    def __call__(self, ids: Ints, prompt: int, scores: F32) -> None:
        given = self._processor(ids.copy(), scores.copy())
        try:
            logits = np.asarray(given)
        except ValueError:  # lists of unequal lengths
            logits = np.array(None)
        if logits.dtype.kind not in "fiu" or logits.shape != scores.shape:
            what = f"{type(given).__name__} of {logits.dtype} and the shape {logits.shape}"
            raise OptionError(f"logits_processor must return logits of the shape {scores.shape}, not a {what}")
        if np.isnan(logits).any():
            raise OptionError("logits_processor must return numbers, and some that it returned are NaN")
        scores[:] = logits
