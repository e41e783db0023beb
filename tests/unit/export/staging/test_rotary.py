"""Rotary positions are known by what they do to queries and keys, however they are written."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from support.small_models import EXAMPLE, HEADS, LENGTH, Mixer, Small, causal, joined, staged
from torch import nn
from torch.nn import functional as F

from tformer_export import export
from tformer_export.staging.rotary import find_rotations
from tformer_runtime.engine.engine import Engine

SIZE = 16  # of a head: the least that the operator turns


def angles(size=SIZE, base=100.0):
    """(length, size / 2)"""
    return torch.outer(torch.arange(LENGTH).float(), base ** -(torch.arange(0, size, 2) / size))


class Rotary(Mixer):
    """Attention whose queries and keys a subclass turns: turn(x, time) of (batch, heads, time, d)."""

    def __init__(self):
        super().__init__()
        width = HEADS * SIZE
        self.projections = nn.ModuleList(nn.Linear(16, width) for _ in range(3))
        self.output = nn.Linear(width, 16)
        self.register_buffer("cosines", angles().cos())
        self.register_buffer("sines", angles().sin())

    def turned(self, q, k):
        return self.turn(q), self.turn(k)

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        q, k = self.turned(q, k)
        return self.output(joined(F.scaled_dot_product_attention(q, k, v, causal(x))))


class Halves(Rotary):
    """As Hugging Face's Llama: tables of both halves, and a rotated copy."""

    def turn(self, x):
        time = x.shape[2]
        c, s = (torch.cat([t, t], -1)[:time] for t in (self.cosines, self.sines))
        one, other = x.chunk(2, -1)
        return x * c + torch.cat([-other, one], -1) * s


class HalvesApart(Rotary):
    def turn(self, x):
        c, s = self.cosines[: x.shape[2]], self.sines[: x.shape[2]]
        one, other = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        return torch.cat([one * c - other * s, other * c + one * s], -1)


class Interleaved(Rotary):
    """As GPT-J."""

    def turn(self, x):
        c, s = self.cosines[: x.shape[2]], self.sines[: x.shape[2]]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


class Complex(Rotary):
    """As Llama's reference code: numbers turned in the complex plane, heads behind the time."""

    def turn(self, x):
        x = x.transpose(1, 2)
        turns = torch.polar(torch.ones_like(self.cosines), angles())[: x.shape[1], None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).transpose(1, 2)


class Matrix(Rotary):
    """By one matrix of each position."""

    def turn(self, x):
        half = torch.eye(SIZE)[:, torch.arange(SIZE).roll(SIZE // 2)]
        half = half * torch.cat([-torch.ones(SIZE // 2), torch.ones(SIZE // 2)])
        c, s = (torch.cat([t, t], -1)[: x.shape[2]] for t in (self.cosines, self.sines))
        return x * c + (x @ half) * s


class Computed(Rotary):
    """Angles made from the length in forward, once for each layer."""

    def turn(self, x):
        at = torch.arange(x.shape[2]).float()[:, None] * 100.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
        one, other = x.chunk(2, -1)
        return torch.cat([one * at.cos() - other * at.sin(), other * at.cos() + one * at.sin()], -1)


class Normed(Halves):
    """Queries and keys that are normalised first, as Qwen 3's."""

    def turned(self, q, k):
        return super().turned(F.normalize(q, dim=-1), F.normalize(k, dim=-1))


class Stretched(Halves):
    """Turned and made longer, as YaRN does with both."""

    def turn(self, x):
        return 1.1 * super().turn(x)


class Nothing(Rotary):
    def turn(self, x):
        return x


class QueryAlone(Halves):
    def turned(self, q, k):
        return self.turn(q), k


class Differently(Halves):
    def turned(self, q, k):
        return self.turn(q), 2 * self.turn(k)


class Partly(Rotary):
    """A quarter of the entries, as GPT-NeoX."""

    def turn(self, x):
        c, s = self.cosines[: x.shape[2], :2], self.sines[: x.shape[2], :2]
        one, other = x[..., :2], x[..., 2:4]
        return torch.cat([one * c - other * s, other * c + one * s, x[..., 4:]], -1)


class Warped(Halves):
    """What no rotation does."""

    def turn(self, x):
        return super().turn(x) + 0.1 * x.abs()


class EachHeadItsOwn(Rotary):
    def turn(self, x):
        by_head = angles()[: x.shape[2]] * torch.arange(1.0, HEADS + 1)[:, None, None]
        one, other = x.chunk(2, -1)
        return torch.cat([one * by_head.cos() - other * by_head.sin(), other * by_head.cos() + one * by_head.sin()], -1)


def found_in(mixer):
    with torch.no_grad():
        s = staged(Small(mixer).eval(), fuses=True)
        found = find_rotations(s.captured, s.level, s.constants, s.plan.fused.values(), LENGTH)
    assert len(s.plan.fused) == 1
    return list(found.values())


FOUND = [Halves, HalvesApart, Interleaved, Complex, Matrix, Computed, Normed, Stretched]
OTHERS = [Nothing, QueryAlone, Differently, Partly, Warped, EachHeadItsOwn]


@pytest.mark.parametrize("mixer", FOUND)
def test_the_angles_are_found(mixer):
    (rotation,) = found_in(mixer)
    length = 1.1 if mixer is Stretched else 1.0
    assert rotation.interleaved == (mixer in (Interleaved, Complex))
    # float32: the tables themselves, or made of the same angles in another order of operations; angles go to 40.
    for values, expected in ((rotation.cosines, angles().cos()), (rotation.sines, angles().sin())):
        torch.testing.assert_close(values, length * expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mixer", OTHERS)
def test_what_is_something_else_is_left(mixer):
    assert found_in(mixer) == []


@pytest.mark.parametrize("mixer", [*FOUND, Partly, QueryAlone])
def test_a_file_turns_as_the_model_does(mixer, tmp_path):
    """Rows of different lengths: a prompt, and single steps."""
    module, path = Small(mixer).eval(), tmp_path / "model.onnx"
    export(module, path, EXAMPLE, "tgt", max_length=LENGTH)
    graph = onnx.load(path, load_external_data=False).graph
    (attention,) = (node for node in graph.node if node.op_type == "GroupQueryAttention")
    turns = [a.i for a in attention.attribute if a.name == "do_rotary"]
    assert turns == ([1] if mixer in FOUND else [])
    rows = [torch.arange(3, 3 + n) for n in (12, 5, 20)]
    expected = [module(row[None])[0].detach().numpy() for row in rows]
    engine = Engine(path, "cpu", 1)
    state = engine.start(None, 3)
    tokens, counts = np.zeros((3, 9), np.int64), np.array([9, 2, 7])
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        tokens[i, :count] = row[:count]
    logits = engine.step(state, tokens, counts, logit_positions="all")
    tolerance = 1e-5 * max(np.abs(e).max() for e in expected) * math.sqrt(HEADS * SIZE)
    for i, count in enumerate(counts):
        np.testing.assert_allclose(logits[i, :count], expected[i][:count], rtol=0, atol=tolerance)
    for at in range(3):
        next_ones = np.array([[row[count + at]] for row, count in zip(rows, counts, strict=True)])
        logits = engine.step(state, next_ones)
        for i, count in enumerate(counts):
            np.testing.assert_allclose(logits[i], expected[i][count + at], rtol=0, atol=tolerance)
