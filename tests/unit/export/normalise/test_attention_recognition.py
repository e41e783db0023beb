"""Recognition of attention: each written form becomes one node with its scale and bias, and matches PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.small_models import HEADS, VOCABULARY, WIDTH, Mixer, Small, attention_nodes, captured_of, causal, joined
from torch import nn

from tformer_export.analysis.interpreter import run
from tformer_export.normalise.attention_patterns import recognise
from tformer_export.normalise.einsum import einsums_to_products

SCALE = 1 / math.sqrt(WIDTH / HEADS)
LOWEST_FLOAT = torch.finfo(torch.float32).min


class Attention(Mixer):
    """Attention by a function of queries, keys, values (batch, heads, time, d) and the causal mask (time, time)."""

    def __init__(self, attend, groups=HEADS):
        super().__init__()
        self.attend, self.groups = attend, groups
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("low", torch.tensor(-1e9))

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(self.attend(self, q, k[:, : self.groups], v[:, : self.groups], causal(x)))


def additive(mask, fill=-math.inf):
    return torch.zeros(mask.shape).masked_fill(~mask, fill)


def products(q, k):
    return q @ k.transpose(-2, -1)


SDPA = {
    "is_causal": (lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True), SCALE),
    "bool mask": (lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), SCALE),
    "float mask": (lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=additive(mask)), SCALE),
    "scale": (lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), 0.3),
    "no mask": (lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v), SCALE),
}
BY_HAND = {
    "scale after": (
        lambda m, q, k, v, mask: torch.softmax((products(q, k) / math.sqrt(8)).masked_fill(~mask, -math.inf), -1) @ v,
        SCALE,
    ),
    "multiplied, -1e9": (
        lambda m, q, k, v, mask: torch.softmax((products(q, k) * SCALE).masked_fill(~mask, -1e9), -1) @ v,
        SCALE,
    ),
    "lowest number": (
        lambda m, q, k, v, mask: torch.softmax((products(q, k) * SCALE).masked_fill(~mask, LOWEST_FLOAT), -1) @ v,
        SCALE,
    ),
    "scale after the mask": (
        lambda m, q, k, v, mask: torch.softmax(products(q, k).masked_fill(~mask, -1e9) * SCALE, -1) @ v,
        SCALE,
    ),
    "query scaled before": (
        lambda m, q, k, v, mask: torch.softmax(products(q * SCALE, k).masked_fill(~mask, -1e9), -1) @ v,
        1.0,
    ),
    "additive mask": (
        lambda m, q, k, v, mask: torch.softmax(products(q, k) * SCALE + additive(mask, -1e9), -1) @ v,
        SCALE,
    ),
    "mask first in the sum": (
        lambda m, q, k, v, mask: torch.softmax(additive(mask) + products(q, k) * SCALE, -1) @ v,
        SCALE,
    ),
    "mask added before the scale": (
        lambda m, q, k, v, mask: torch.softmax((products(q, k) + additive(mask, -1e9)) / math.sqrt(8), -1) @ v,
        SCALE,
    ),
    "two masks": (
        lambda m, q, k, v, mask: (
            torch.softmax(
                (products(q, k) * SCALE).masked_fill(~mask, LOWEST_FLOAT) + additive(mask, LOWEST_FLOAT) / 4, -1
            )
            @ v
        ),
        SCALE,
    ),
    "where": (
        lambda m, q, k, v, mask: torch.softmax(torch.where(mask, products(q, k) * SCALE, -1e9), -1) @ v,
        SCALE,
    ),
    "where a tensor": (
        lambda m, q, k, v, mask: (
            torch.softmax(torch.where(mask, products(q, k) * SCALE, torch.full((), -math.inf)), -1) @ v
        ),
        SCALE,
    ),
    "bias and mask": (
        lambda m, q, k, v, mask: (
            torch.softmax((products(q, k) * SCALE + bias_by_distance(mask)).masked_fill(~mask, -math.inf), -1) @ v
        ),
        SCALE,
    ),
    "dropout and a cast": (
        lambda m, q, k, v, mask: (
            m.dropout(
                F.softmax((products(q, k) * SCALE).masked_fill(~mask, -1e9), dim=-1, dtype=torch.float32).to(q.dtype)
            )
            @ v
        ),
        SCALE,
    ),
    "permuted keys": (
        lambda m, q, k, v, mask: (
            torch.softmax((torch.matmul(q, k.permute(0, 1, 3, 2)) * SCALE).masked_fill(~mask, -1e9), -1) @ v
        ),
        SCALE,
    ),
    "mask of ones and zeros": (
        lambda m, q, k, v, mask: torch.softmax((products(q, k) * SCALE).masked_fill(mask.float() == 0, -1e9), -1) @ v,
        SCALE,
    ),
    "no mask": (lambda m, q, k, v, mask: torch.softmax(products(q, k) * SCALE, -1) @ v, SCALE),
    "scaled by a tensor of one number": (
        lambda m, q, k, v, mask: (
            torch.softmax((products(q, k) * m.low / -1e9 * SCALE).masked_fill(~mask, -1e9), -1) @ v
        ),
        SCALE,
    ),
    "masked by a computed number": (
        lambda m, q, k, v, mask: (
            torch.softmax(torch.where(~mask, torch.ones_like(mask, dtype=q.dtype) * (-(2**32) + 1), products(q, k)), -1)
            @ v
        ),
        1.0,
    ),
    "the maximum subtracted": (
        lambda m, q, k, v, mask: without_maximum((products(q, k) * SCALE).masked_fill(~mask, -1e9)).softmax(-1) @ v,
        SCALE,
    ),
    "einsum": (
        lambda m, q, k, v, mask: torch.einsum(
            "bhqk,bhkd->bhqd",
            torch.softmax((torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE).masked_fill(~mask, -1e9), -1),
            v,
        ),
        SCALE,
    ),
    "einsum, one head of keys": (
        lambda m, q, k, v, mask: torch.einsum(
            "bhij,bjd->bhid",
            torch.softmax((torch.einsum("bhid,bjd->bhij", q, k[:, 0]) * SCALE).masked_fill(~mask, -1e9), -1),
            v[:, 0],
        ),
        SCALE,
    ),
    "einsum, time before heads": (
        lambda m, q, k, v, mask: torch.einsum(
            "bhqk,bkhd->bqhd",
            torch.softmax(
                (torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) * SCALE).masked_fill(
                    ~mask, -1e9
                ),
                -1,
            ),
            v.transpose(1, 2),
        ).transpose(1, 2),
        SCALE,
    ),
    "einsum, time first, softmax over the second axis": (
        lambda m, q, k, v, mask: torch.einsum(
            "ijbn,jbnd->bnid",
            torch.softmax(
                (torch.einsum("ibnd,jbnd->ijbn", time_first(q), time_first(k)) * SCALE).masked_fill(
                    ~mask[:, :, None, None], -math.inf
                ),
                1,
            ),
            time_first(v),
        ),
        SCALE,
    ),
    "a mask made by hstack": (
        lambda m, q, k, v, mask: (
            torch.softmax(products(q, k) * SCALE + torch.hstack((torch.zeros(mask.shape[0], 0), additive(mask))), -1)
            @ v
        ),
        SCALE,
    ),
    "heads merged with the batch": (
        lambda m, q, k, v, mask: torch.bmm(
            torch.softmax((torch.bmm(merged(q), merged(k).mT) * SCALE).masked_fill(~mask, -1e9), -1), merged(v)
        ).view(q.shape),
        SCALE,
    ),
    "heads merged in front of the batch": (
        lambda m, q, k, v, mask: (
            torch.bmm(
                torch.baddbmm(
                    additive(mask)[None], merged(q.transpose(0, 1)), merged(k.transpose(0, 1)).mT, alpha=SCALE
                ).softmax(-1),
                merged(v.transpose(0, 1)),
            )
            .view(HEADS, -1, *q.shape[2:])
            .transpose(0, 1)
        ),
        SCALE,
    ),
    "merged heads, masked apart": (
        lambda m, q, k, v, mask: torch.bmm(
            (torch.bmm(merged(q), merged(k).mT) * SCALE)
            .view(*q.shape[:3], -1)
            .masked_fill(~mask[None, None], -math.inf)
            .flatten(0, 1)
            .softmax(-1),
            merged(v),
        ).view(q.shape),
        SCALE,
    ),
    "heads in front": (
        lambda m, q, k, v, mask: (
            torch.softmax((products(q.transpose(0, 1), k.transpose(0, 1)) * SCALE).masked_fill(~mask, -1e9), -1)
            @ v.transpose(0, 1)
        ).transpose(0, 1),
        SCALE,
    ),
}


def without_maximum(scores):
    return scores - scores.amax(dim=-1, keepdim=True)


def time_first(heads):
    """Return (batch, heads, time, d) as (time, batch, heads, d)."""
    return heads.permute(2, 0, 1, 3)


def merged(heads):
    """Return (a, b, time, d) as (a · b, time, d)."""
    return heads.reshape(-1, *heads.shape[2:])


def bias_by_distance(mask):
    """Return the bias of ALiBi: −|i − j|, with another slope for each head."""
    position = torch.arange(mask.shape[0])
    return -(position[:, None] - position).abs() * torch.tensor([0.5, 0.25])[:, None, None]


def check(attend, groups=HEADS):
    """Rewrite the captured graph, compare its result with the module, and return its attention nodes."""
    module = Small(lambda: Attention(attend, groups))
    captured = captured_of(module)
    assert attention_nodes(captured) == []
    einsums_to_products(captured)
    num_recognised = recognise(captured).count
    nodes = attention_nodes(captured)
    assert len(nodes) == num_recognised
    tgt = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(run(captured, {"tgt": tgt})[captured.output], module(tgt))
    return nodes


@pytest.mark.parametrize(("attend", "scale"), SDPA.values(), ids=SDPA)
def test_scaled_dot_product_attention_is_recognised(attend, scale):
    (node,) = check(attend)
    assert node.args[4] == pytest.approx(scale)


@pytest.mark.parametrize(("attend", "scale"), BY_HAND.values(), ids=BY_HAND)
def test_attention_by_hand_is_recognised(attend, scale):
    (node,) = check(attend)
    assert node.args[4] == pytest.approx(scale)


def test_soft_cap_is_recognised():
    (node,) = check(
        lambda m, q, k, v, mask: torch.softmax((torch.tanh(products(q, k) / 7) * 5).masked_fill(~mask, -1e9), -1) @ v
    )
    assert node.args[4:] == (pytest.approx(5 / 7), 5.0)


def test_head_without_an_axis_is_recognised():
    (node,) = check(
        lambda m, q, k, v, mask: (
            torch.softmax((products(q[:, 0], k[:, 0]) * SCALE).masked_fill(~mask, -1e9), -1) @ v[:, 0]
        )[:, None].expand(-1, HEADS, -1, -1)
    )
    assert node.args[4] == pytest.approx(SCALE)


def test_grouped_heads_are_recognised():
    nodes = check(lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), groups=1)
    assert len(nodes) == 1


def test_two_attentions_are_recognised():
    def two_attentions(m, q, k, v, mask):
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.softmax((products(first, k) * SCALE).masked_fill(~mask, -1e9), -1) @ v

    assert len(check(two_attentions)) == 2


OTHER_FORMS = {
    "a small fill, which is not a mask": lambda m, q, k, v, mask: (
        torch.softmax((products(q, k) * SCALE).masked_fill(~mask, -3.0), -1) @ v
    ),
    "softmax over queries": lambda m, q, k, v, mask: (
        torch.softmax((products(q, k) * SCALE).masked_fill(~mask, -1e9), -2) @ v
    ),
    "weights used twice": lambda m, q, k, v, mask: weights_used_twice(
        torch.softmax((products(q, k) * SCALE).masked_fill(~mask, -1e9), -1), v
    ),
    "weights changed": lambda m, q, k, v, mask: (
        (torch.softmax((products(q, k) * SCALE).masked_fill(~mask, -1e9), -1) ** 2) @ v
    ),
    "scaled by a tensor": lambda m, q, k, v, mask: (
        torch.softmax((products(q, k) * torch.tensor([0.5, 0.25])[:, None, None]).masked_fill(~mask, -1e9), -1) @ v
    ),
    "added with a factor": lambda m, q, k, v, mask: (
        torch.softmax(torch.add(products(q, k) * SCALE, additive(mask, -1e9), alpha=0.5), -1) @ v
    ),
}


def weights_used_twice(weights, v):
    return weights @ v + weights @ (v * 2)


@pytest.mark.parametrize("attend", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_other_forms_are_not_rewritten(attend):
    """The fused operator has none of these forms."""
    assert check(attend) == []
