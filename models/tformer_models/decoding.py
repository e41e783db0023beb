"""Greedy decoding in PyTorch, as plain as can be: the yardstick that faster decoders are measured by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tformer_models.data import pad_rows


@torch.inference_mode()
def greedy(
    model: nn.Module, rows: Sequence[Sequence[int]], *, start: int, end: int, pad: int, max_new_tokens: int
) -> list[list[int]]:
    """The most probable next token, again and again, until `end`: the new ids of each row, without start and end.

    The whole of forward(src, tgt) runs anew for each token.
    """
    src = pad_rows(rows, pad)
    tgt = torch.full((len(rows), 1), start)
    ended = torch.zeros(len(rows), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = model(src, tgt)[:, -1].argmax(-1).masked_fill(ended, pad)
        tgt = torch.cat([tgt, token[:, None]], dim=1)
        ended |= token == end
        if ended.all():
            break
    return [[token for token in row if token not in (end, pad)] for row in tgt[:, 1:].tolist()]
