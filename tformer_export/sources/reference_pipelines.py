"""Reference pipelines in PyTorch for results that consist of single tokens: spans, answers, filled masks.

They follow transformers' pipelines and share no code with the runtime, which is compared with them. A result has the
form of `numbers` of the runtime's task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Encoding

from tformer_export.sources.pooled_module import Pipeline
from tformer_export.sources.task_names import ANSWERS, FILLS, LABELS_TOKENS
from tformer_runtime.tasks.fill_mask import DEFAULT_TOP_K
from tformer_runtime.tasks.question_answering import DEFAULT_DOC_STRIDE, DEFAULT_MAX_ANSWER_TOKENS, DEFAULT_MAX_SEQ_LEN

Outputs = tuple[torch.Tensor, ...]  # for one encoding, without batch axis
Run = Callable[[Encoding], Outputs]
Read = Callable[[Any, int | None, int | None], Sequence[Encoding]]
TOKEN_TASKS = (LABELS_TOKENS, ANSWERS, FILLS)


def make_token_pipeline(task: str, read: Read, run: Run, special: int | None) -> Pipeline:
    """Make the pipeline of a task.

    read: tokenizes a sample, truncated to a number of tokens. With a stride it returns a pair in windows, in which the
        parts of the second text overlap by that number of tokens.
    run: the outputs of the model for an encoding.
    special: the id of the mask, or of the token that stands for no answer.
    """

    def answer(sample: Any, max_tokens: int | None) -> torch.Tensor:
        if task == ANSWERS:
            window = min(max_tokens or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
            room, stride = window - len(read((sample[0], ""), None, None)[0].ids), min(window // 2, DEFAULT_DOC_STRIDE)
            windows = read(sample, window, stride if stride < room else room // 2)
            return _answered([(run(each), each) for each in windows], sample[1], special)
        (encoding,) = read(sample, max_tokens, None)
        return (
            _labelled(run(encoding)[0], encoding)
            if task == LABELS_TOKENS
            else _filled(run(encoding)[0], encoding, special)
        )

    return answer


def _labelled(logits: torch.Tensor, read: Encoding) -> torch.Tensor:
    """Return (tokens, 3): for each token of the text its top probability, begin and end as shares of the text."""
    is_text = torch.tensor(read.special_tokens_mask) == 0
    places = torch.tensor(read.offsets, dtype=torch.float64)[is_text]
    length = places[:, 1].max().clamp(min=1) if len(places) else 1
    scores = logits.double().softmax(-1).max(-1).values[is_text]
    return torch.cat([scores[:, None], places / length], 1)


def _filled(logits: torch.Tensor, read: Encoding, mask: int | None) -> torch.Tensor:
    """Return (masks, DEFAULT_TOP_K): the probabilities of the likeliest tokens."""
    scores = logits[torch.tensor(read.ids) == mask].double().softmax(-1)
    return scores.topk(min(DEFAULT_TOP_K, scores.shape[-1])).values


def _answered(windows: Sequence[tuple[Outputs, Encoding]], context: str, first: int | None) -> torch.Tensor:
    """Return (1,): the probability of the best answer over all spans, or of no answer if there is no span."""
    scores: dict[str, float] = {}
    nothing = torch.inf
    for (start, end), read in windows:
        of = torch.tensor([-1 if number is None else number for number in read.sequence_ids])
        seen = (of == 1) | (torch.tensor(read.ids) == (-1 if first is None else first))
        begins, ends = (
            logits.double().masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() for logits in (start, end)
        )
        nothing = min(nothing, float(begins[0] * ends[0]))
        spans = torch.outer(begins * (of == 1), ends * (of == 1)).triu().tril(DEFAULT_MAX_ANSWER_TOKENS - 1).flatten()
        for place in spans.nonzero().flatten().tolist():
            text = context[_word(read, place // len(of))[0] : _word(read, place % len(of))[1]].lower()
            scores[text] = scores.get(text, 0.0) + float(spans[place])
    return torch.tensor([max(scores.values(), default=nothing)], dtype=torch.float64)


def _word(read: Encoding, token: int) -> tuple[int, int]:
    """Return the characters of a token's word, or of the token if the encoding has no words."""
    word = read.token_to_word(token)
    span = read.word_to_chars(word, 1) if word is not None else None
    return span if span is not None else read.offsets[token]
