"""Forms of attention by hand: fused with their caches, or staged operation by operation with cached keys and values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.small_models import EXAMPLE, HEADS, VOCABULARY, WIDTH, Mixer, Small, causal, joined
from torch import nn

from tformer_export import export
from tformer_runtime.engine.engine import Engine

SCALE = 1 / math.sqrt(WIDTH / HEADS)


class Einsum(Mixer):
    def forward(self, x, tgt):
        q, k, v = (p(x).unflatten(2, (HEADS, -1)) for p in self.projections)  # (batch, time, heads, d)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
        weights = scores.masked_fill(~causal(x), -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


class Baddbmm(Mixer):
    """Scores over merged batch and head axes, as in several libraries."""

    def forward(self, x, tgt):
        batch, time, _ = x.shape
        q, k, v = (h.reshape(batch * HEADS, time, -1) for h in self.heads(x))
        bias = torch.zeros(time, time).masked_fill(~causal(x), -1e9)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=SCALE)
        return joined(torch.bmm(torch.softmax(scores, -1), v).reshape(batch, HEADS, time, -1))


class BaddbmmExpanded(Mixer):
    """The same with a mask for each merged entry, as in the documentation of baddbmm."""

    def forward(self, x, tgt):
        batch, time, _ = x.shape
        q, k, v = (h.reshape(batch * HEADS, time, -1) for h in self.heads(x))
        bias = torch.zeros(time, time).masked_fill(~causal(x), -1e9).expand(batch * HEADS, time, time)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=SCALE)
        return joined(torch.bmm(torch.softmax(scores, -1), v).reshape(batch, HEADS, time, -1))


class BaddbmmOfNothing(Mixer):
    """baddbmm for its factor only, with a mask afterwards over separate batch and heads."""

    def forward(self, x, tgt):
        batch, time, _ = x.shape
        q, k, v = (h.reshape(batch * HEADS, time, -1) for h in self.heads(x))
        nothing = torch.empty(batch * HEADS, time, time)
        scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=SCALE).view(batch, HEADS, time, time)
        weights = torch.softmax(scores.masked_fill(~causal(x), -1e9), -1).view(batch * HEADS, time, time)
        return joined(torch.bmm(weights, v).reshape(batch, HEADS, time, -1))


class SoftCapped(Mixer):
    """Logit soft-capping, cap · tanh(scores / cap), between scale and mask."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        scores = torch.tanh(q @ k.transpose(2, 3) * SCALE / 3) * 3
        return joined(torch.softmax(scores.masked_fill(~causal(x), -1e9), -1) @ v)


class Transposed(Mixer):
    """Scores as keys times queries, with the softmax over the first of both axes."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        scores = (k @ q.transpose(2, 3) * SCALE).masked_fill(~causal(x).T, -1e9)
        return joined(torch.softmax(scores, 2).transpose(2, 3) @ v)


class SingleHead(Mixer):
    """Attention with three dimensions."""

    def forward(self, x, tgt):
        q, k, v = (p(x) for p in self.projections)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(WIDTH)
        return torch.bmm(torch.softmax(scores + torch.full(scores.shape[1:], -1e9).triu(1), -1), v)


class Linear(Mixer):
    """relu(q) relu(k)ᵀ under a causal mask, divided by its sum: attention without a softmax."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        weights = (torch.relu(q) + 0.1) @ (torch.relu(k) + 0.1).transpose(2, 3) * causal(x)
        return joined(weights @ v / weights.sum(-1, keepdim=True))


class SlidingWindow(Mixer):
    """Each position reads itself and the three positions before it."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        near = causal(x) & ~torch.ones_like(causal(x)).tril(-4)
        return joined(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near))


class HeadOfFive(Mixer):
    """A head size that the fused operator does not support."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 10) for _ in range(3))
        self.output = nn.Linear(10, WIDTH)

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return self.output(joined(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)))


def max_difference(module, path):
    """Return the largest difference of a logit from each row alone: ragged prompts, ragged chunks, single tokens."""
    engine = Engine(path, device="cpu", threads=1)
    random = np.random.default_rng(0)
    rows, counts = random.integers(0, VOCABULARY, (3, 14)), np.array([5, 2, 8])
    state = engine.start(None, 3)
    logits = engine.step(state, rows[:, :8], counts, logit_positions="all").copy()
    row_logits = [[*logits[i, :n]] for i, n in enumerate(counts)]
    chunk_sizes = np.array([3, 1, 2])  # a ragged chunk after the prompt
    chunk = np.stack([row[n : n + 3] for row, n in zip(rows, counts, strict=True)])
    logits = engine.step(state, chunk, chunk_sizes, logit_positions="all").copy()
    for i, n in enumerate(chunk_sizes):
        row_logits[i] += list(logits[i, :n])
    counts = counts + chunk_sizes
    for step in range(3):
        logits = engine.step(state, np.array([[row[n + step]] for row, n in zip(rows, counts, strict=True)]))
        for i in range(3):
            row_logits[i].append(logits[i].copy())
    max_error = 0.0
    for row, values in zip(rows, row_logits, strict=True):
        with torch.no_grad():
            expected = module(torch.from_numpy(row[: len(values)])[None])[0].numpy()
        max_error = max(max_error, float(np.abs(np.stack(values) - expected).max()))
    return max_error


@pytest.mark.parametrize(
    "mixer",
    [
        Einsum,
        Baddbmm,
        SoftCapped,
        *(pytest.param(mixer, marks=pytest.mark.thorough) for mixer in (BaddbmmExpanded, SingleHead)),
    ],
)
def test_attention_of_another_form_is_fused_and_matches_pytorch(mixer, tmp_path):
    check(mixer, 1, tmp_path)


@pytest.mark.parametrize(
    "mixer",
    [
        Transposed,
        *(pytest.param(mixer, marks=pytest.mark.thorough) for mixer in (BaddbmmOfNothing, Linear, HeadOfFive)),
    ],
)
def test_unfused_attention_matches_pytorch(mixer, tmp_path):
    check(mixer, 0, tmp_path)


def check(mixer, num_fused, tmp_path):
    module, path = Small(mixer), tmp_path / "model.onnx"
    report = export(module, path, EXAMPLE, "tgt", max_length=24)
    assert report.counts["fused"] == num_fused
    assert report.counts["caches"] == 2
    assert max_difference(module, path) < 2e-5  # logits of about 3 after some 50 products: 2⁻²⁴ · 3 · 50 ≈ 1e-5


def test_sliding_window_is_fused_and_matches_pytorch(tmp_path):
    module, path = Small(SlidingWindow), tmp_path / "model.onnx"
    report = export(module, path, EXAMPLE, "tgt", max_length=24)
    assert report.counts["fused"] == 1
    assert max_difference(module, path) < 2e-5
