"""Rules: what options do to the scores of the next token before it is chosen.

A rule sees all ids of a row and changes the row's scores in place. It holds nothing of a row, so that beams may be
copied and rows dropped without it. Scores are logits in greedy decoding and sampling, and log-probabilities in beam
search, as in transformers; repetition_penalty, which asks for their sign, does not mean quite the same in both.

The order is that of transformers' generate(), which two options are not part of:

1. logit_bias                            (sequence_bias of single tokens)
2. repetition_penalty
3. presence_penalty, frequency_penalty   (no option of generate(); where vLLM has them)
4. no_repeat_ngram                       (no_repeat_ngram_size)
5. suppress_sequences                    (bad_words_ids)
6. min_new_tokens
7. first_token                           (forced_bos_token_id)
8. suppress                              (suppress_tokens)
9. suppress_first                        (begin_suppress_tokens)
10. logits_processor                     (logits_processor)

The warping of a sampler comes after them (sampling.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from tformer_runtime.errors import OptionError
from tformer_runtime.manifest import SpecialTokens
from tformer_runtime.options import LogitsProcessor, Settings
from tformer_runtime.sampling import Floats, Ints


class Rule(Protocol):
    """One option's, or two options', effect on one row."""

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        """Change one row's scores (vocabulary,) in place. ids: all of the decoder so far, the first `prompt` of them
        its prompt, start tokens and a prefix included."""


def rules_of(settings: Settings, special: SpecialTokens, vocabulary: int) -> list[Rule]:
    """The rules that the settings ask for, in their order; none for most settings.

    vocabulary: how many scores there are. OptionError if an option names an id beyond them.

    A call of any rule costs at most some passes over its own ids and over the row's; only first_token and
    logits_processor touch all scores. suppress_sequences compares all of its sequences at once, no_repeat_ngram all
    n-grams.
    """
    _check(settings, vocabulary)
    first_token = None if settings.prefix else settings.first_token  # it is before the prefix, in the prompt
    lone_ends = {(end,) for end in special.end}
    sequences = [sequence for sequence in settings.suppress_sequences if sequence not in lone_ends]
    ends = [end for end in special.end if end < vocabulary]
    rules: list[Rule] = []
    if settings.logit_bias:
        rules.append(Bias(settings.logit_bias))
    if settings.repetition_penalty != 1:
        rules.append(RepetitionPenalty(settings.repetition_penalty))
    if settings.presence_penalty or settings.frequency_penalty:
        rules.append(CountPenalty(settings.presence_penalty, settings.frequency_penalty))
    if settings.no_repeat_ngram:
        rules.append(NoRepeatNgram(settings.no_repeat_ngram))
    if sequences:
        rules.append(SuppressSequences(sequences))
    if settings.min_new_tokens and ends:
        rules.append(SuppressUntil(ends, settings.min_new_tokens))
    if first_token is not None:
        rules.append(FirstToken(first_token))
    if settings.suppress:
        rules.append(Suppress(settings.suppress))
    if settings.suppress_first:
        rules.append(SuppressAt(settings.suppress_first, 0 if first_token is None else 1))
    if settings.logits_processor is not None:
        rules.append(Processor(settings.logits_processor))
    return rules


def _check(settings: Settings, vocabulary: int) -> None:
    named: dict[str, Iterable[int]] = {
        "first_token": () if settings.first_token is None else (settings.first_token,),
        "suppress": settings.suppress,
        "suppress_first": settings.suppress_first,
        "suppress_sequences": (token for sequence in settings.suppress_sequences for token in sequence),
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

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        scores[self._tokens] += self._added


class RepetitionPenalty:
    """Scores of all ids so far, the prompt's too, divided by the penalty if positive, else multiplied (Keskar et al.
    2019)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        seen = ids[ids < len(scores)]  # the step input may have ids that are never generated
        before = scores[seen]
        scores[seen] = np.where(before < 0, before * self._penalty, before / self._penalty)


class CountPenalty:
    """score -= presence · [count > 0] + frequency · count, over what has been generated."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        tokens, counts = np.unique(ids[prompt:], return_counts=True)
        scores[tokens] -= (self._presence + self._frequency * counts).astype(np.float32)


class NoRepeatNgram:
    """No n-gram comes twice: what has once followed the last n - 1 ids does not follow them again."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        starts = len(ids) - self._size + 1  # of the n-grams there are
        if starts < 1:
            return
        same = np.ones(starts, bool)
        for i, token in enumerate(ids[starts:]):
            same &= ids[i : i + starts] == token
        followed = ids[self._size - 1 :][same]
        scores[followed[followed < len(scores)]] = -np.inf


class SuppressSequences:
    """The last id of a sequence does not come after the ones before it."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        of_length: dict[int, list[tuple[int, ...]]] = {}
        for sequence in sequences:
            of_length.setdefault(len(sequence) - 1, []).append(sequence)
        tables = [(length, np.array(group, np.int64)) for length, group in of_length.items()]
        self._groups = [(length, table[:, :-1], table[:, -1]) for length, table in tables]

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        for length, before, last in self._groups:
            if length <= len(ids):
                scores[last[(before == ids[len(ids) - length :]).all(1)]] = -np.inf


class Suppress:
    """Some ids never come."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.array(list(tokens), np.int64)

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        scores[self._tokens] = -np.inf


class SuppressAt(Suppress):
    """Some ids do not come after so many generated ones."""

    def __init__(self, tokens: Iterable[int], generated: int) -> None:
        super().__init__(tokens)
        self._generated = generated

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        if len(ids) - prompt == self._generated:
            super().__call__(ids, prompt, scores)


class SuppressUntil(Suppress):
    """Some ids do not come before so many generated ones."""

    def __init__(self, tokens: Iterable[int], generated: int) -> None:
        super().__init__(tokens)
        self._generated = generated

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        if len(ids) - prompt < self._generated:
            super().__call__(ids, prompt, scores)


class FirstToken:
    """Generation begins with this id, at a score of 0: in beam search it costs nothing."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
        if len(ids) == prompt:
            scores[:] = -np.inf
            scores[self._token] = 0


class Processor:
    """The caller's own. It gets copies, so that it may keep them."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor

    def __call__(self, ids: Ints, prompt: int, scores: Floats) -> None:
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
