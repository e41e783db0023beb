"""A source's own way from a text to results that are made of single tokens: spans, answers, filled masks.

Written anew in PyTorch after transformers' pipelines, so that the runtime's way is compared with another. A result is
the numbers that the runtime's task gives of its own (`Task.numbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Encoding

from tformer_export.sources.pooled_module import Answer
from tformer_export.sources.task_names import ANSWERS, FILLS, LABELS_TOKENS
from tformer_runtime.tasks.fill_mask import TOP_K
from tformer_runtime.tasks.question_answering import LONGEST, STRIDE, WINDOW

Outputs = tuple[torch.Tensor, ...]  # for one encoding, without batch axis
Run = Callable[[Encoding], Outputs]
Read = Callable[[Any, int | None, int | None], Sequence[Encoding]]
BY_TOKEN = (LABELS_TOKENS, ANSWERS, FILLS)


def answer_by_token(task: str, read: Read, run: Run, special: int | None) -> Answer:
    """read: a sample, cut to so many tokens; with a stride, a pair in windows whose second text shares so many.
    special: the id of the mask, or of the token that stands for no answer."""

    def answer(sample: Any, most: int | None) -> torch.Tensor:
        if task == ANSWERS:
            window = min(most or WINDOW, WINDOW)
            room, stride = window - len(read((sample[0], ""), None, None)[0].ids), min(window // 2, STRIDE)
            windows = read(sample, window, stride if stride < room else room // 2)
            return _answered([(run(each), each) for each in windows], sample[1], special)
        (found,) = read(sample, most, None)
        return _labelled(run(found)[0], found) if task == LABELS_TOKENS else _filled(run(found)[0], found, special)

    return answer


def _labelled(logits: torch.Tensor, read: Encoding) -> torch.Tensor:
    """(tokens, 3): of each token of the text the likeliest label's probability, and its place as a share of all."""
    own = torch.tensor(read.special_tokens_mask) == 0
    places = torch.tensor(read.offsets, dtype=torch.float64)[own]
    length = places[:, 1].max().clamp(min=1) if len(places) else 1
    scores = logits.double().softmax(-1).max(-1).values[own]
    return torch.cat([scores[:, None], places / length], 1)


def _filled(logits: torch.Tensor, read: Encoding, mask: int | None) -> torch.Tensor:
    """(masks, TOP_K): the probabilities of the likeliest tokens."""
    scores = logits[torch.tensor(read.ids) == mask].double().softmax(-1)
    return scores.topk(min(TOP_K, scores.shape[-1])).values


def _answered(windows: Sequence[tuple[Outputs, Encoding]], context: str, first: int | None) -> torch.Tensor:
    """(1,): the best answer's probability of all spans, or that there is none where nothing is found."""
    scores: dict[str, float] = {}
    nothing = torch.inf
    for (start, end), read in windows:
        of = torch.tensor([-1 if number is None else number for number in read.sequence_ids])
        seen = (of == 1) | (torch.tensor(read.ids) == (-1 if first is None else first))
        begins, ends = (
            logits.double().masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() for logits in (start, end)
        )
        nothing = min(nothing, float(begins[0] * ends[0]))
        spans = torch.outer(begins * (of == 1), ends * (of == 1)).triu().tril(LONGEST - 1).flatten()
        for place in spans.nonzero().flatten().tolist():
            text = context[_word(read, place // len(of))[0] : _word(read, place % len(of))[1]].lower()
            scores[text] = scores.get(text, 0.0) + float(spans[place])
    return torch.tensor([max(scores.values(), default=nothing)], dtype=torch.float64)


def _word(read: Encoding, token: int) -> tuple[int, int]:
    """The characters of a token's word, or its own where there are no words."""
    word = read.token_to_word(token)
    found = read.word_to_chars(word, 1) if word is not None else None
    return found if found is not None else read.offsets[token]
