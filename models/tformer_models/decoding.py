"""Greedy decoding in plain PyTorch without a cache: the reference that faster decoders are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tformer_models.data import pad_rows


@torch.inference_mode()
def decode_greedily(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    bos_token_id: int,
    eos_token_id: int,
    pad_token_id: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the generated ids of each source row, without the start and end tokens.

    The most probable token is appended until every row has ended or has `max_new_tokens`. All of forward(src, tgt) is
    computed again for each token.
    """
    src = pad_rows(rows, pad_token_id)
    tgt = torch.full((len(rows), 1), bos_token_id)
    finished = torch.zeros(len(rows), dtype=torch.bool)
    for _ in range(max_new_tokens):
        next_tokens = model(src, tgt)[:, -1].argmax(-1).masked_fill(finished, pad_token_id)
        tgt = torch.cat([tgt, next_tokens[:, None]], dim=1)
        finished |= next_tokens == eos_token_id
        if finished.all():
            break
    return [[token for token in row if token not in (eos_token_id, pad_token_id)] for row in tgt[:, 1:].tolist()]
