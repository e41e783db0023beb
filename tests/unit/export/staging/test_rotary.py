"""Rotary positions are recognised by their effect on queries and keys, in all written forms."""

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

HEAD_SIZE = 16  # the smallest head size that the operator rotates


def angles(size=HEAD_SIZE, base=100.0):
    """Return angles (length, size / 2)."""
    return torch.outer(torch.arange(LENGTH).float(), base ** -(torch.arange(0, size, 2) / size))


class Rotary(Mixer):
    """Attention with rotated queries and keys. A subclass has turn(x), x (batch, heads, time, d)."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_SIZE
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
    """The form of Llama in transformers: tables of both halves, and a rotated copy."""

    def turn(self, x):
        time = x.shape[2]
        c, s = (torch.cat([t, t], -1)[:time] for t in (self.cosines, self.sines))
        one, other = x.chunk(2, -1)
        return x * c + torch.cat([-other, one], -1) * s


class HalvesApart(Rotary):
    def turn(self, x):
        c, s = self.cosines[: x.shape[2]], self.sines[: x.shape[2]]
        one, other = x[..., : HEAD_SIZE // 2], x[..., HEAD_SIZE // 2 :]
        return torch.cat([one * c - other * s, other * c + one * s], -1)


class Interleaved(Rotary):
    """The form of GPT-J."""

    def turn(self, x):
        c, s = self.cosines[: x.shape[2]], self.sines[: x.shape[2]]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


class Complex(Rotary):
    """The form of the reference code of Llama: rotation in the complex plane, with heads after time."""

    def turn(self, x):
        x = x.transpose(1, 2)
        turns = torch.polar(torch.ones_like(self.cosines), angles())[: x.shape[1], None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).transpose(1, 2)


class Matrix(Rotary):
    """Rotation by one matrix for each position."""

    def turn(self, x):
        half = torch.eye(HEAD_SIZE)[:, torch.arange(HEAD_SIZE).roll(HEAD_SIZE // 2)]
        half = half * torch.cat([-torch.ones(HEAD_SIZE // 2), torch.ones(HEAD_SIZE // 2)])
        c, s = (torch.cat([t, t], -1)[: x.shape[2]] for t in (self.cosines, self.sines))
        return x * c + (x @ half) * s


class Computed(Rotary):
    """Angles that forward computes from the length, for each layer."""

    def turn(self, x):
        angle = torch.arange(x.shape[2]).float()[:, None] * 100.0 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        one, other = x.chunk(2, -1)
        return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


class Normed(Halves):
    """Queries and keys are normalised first, as in Qwen 3."""

    def turned(self, q, k):
        return super().turned(F.normalize(q, dim=-1), F.normalize(k, dim=-1))


class Stretched(Halves):
    """Rotated and scaled, as in YaRN."""

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
    """Rotation of a quarter of the entries, as in GPT-NeoX."""

    def turn(self, x):
        c, s = self.cosines[: x.shape[2], :2], self.sines[: x.shape[2], :2]
        one, other = x[..., :2], x[..., 2:4]
        return torch.cat([one * c - other * s, other * c + one * s, x[..., 4:]], -1)


class Warped(Halves):
    """A change that is not a rotation."""

    def turn(self, x):
        return super().turn(x) + 0.1 * x.abs()


class EachHeadItsOwn(Rotary):
    def turn(self, x):
        by_head = angles()[: x.shape[2]] * torch.arange(1.0, HEADS + 1)[:, None, None]
        one, other = x.chunk(2, -1)
        return torch.cat([one * by_head.cos() - other * by_head.sin(), other * by_head.cos() + one * by_head.sin()], -1)


def find_rotations_in(mixer):
    with torch.no_grad():
        stages = staged(Small(mixer).eval(), fuses=True)
        rotations = find_rotations(stages.captured, stages.level, stages.constants, stages.plan.fused.values(), LENGTH)
    assert len(stages.plan.fused) == 1
    return list(rotations.values())


ROTARY_FORMS = [Halves, HalvesApart, Interleaved, Complex, Matrix, Computed, Normed, Stretched]
OTHER_FORMS = [Nothing, QueryAlone, Differently, Partly, Warped, EachHeadItsOwn]


@pytest.mark.parametrize("mixer", ROTARY_FORMS)
def test_angles_are_found(mixer):
    (rotation,) = find_rotations_in(mixer)
    length = 1.1 if mixer is Stretched else 1.0
    assert rotation.interleaved == (mixer in (Interleaved, Complex))
    # float32: the tables themselves, or the same angles in another order of operations. Angles are at most 40.
    for values, expected in ((rotation.cosines, angles().cos()), (rotation.sines, angles().sin())):
        torch.testing.assert_close(values, length * expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mixer", OTHER_FORMS)
def test_other_position_encodings_are_not_recognised(mixer):
    assert find_rotations_in(mixer) == []


@pytest.mark.parametrize("mixer", [*ROTARY_FORMS, Partly, QueryAlone])
def test_file_with_rotary_positions_matches_model(mixer, tmp_path):
    """Rows have different lengths: a prompt, then single steps."""
    module, path = Small(mixer).eval(), tmp_path / "model.onnx"
    export(module, path, EXAMPLE, "tgt", max_length=LENGTH)
    graph = onnx.load(path, load_external_data=False).graph
    (attention,) = (node for node in graph.node if node.op_type == "GroupQueryAttention")
    turns = [a.i for a in attention.attribute if a.name == "do_rotary"]
    assert turns == ([1] if mixer in ROTARY_FORMS else [])
    rows = [torch.arange(3, 3 + n) for n in (12, 5, 20)]
    expected = [module(row[None])[0].detach().numpy() for row in rows]
    engine = Engine(path, "cpu", 1)
    state = engine.start(None, 3)
    tokens, counts = np.zeros((3, 9), np.int64), np.array([9, 2, 7])
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        tokens[i, :count] = row[:count]
    logits = engine.step(state, tokens, counts, logit_positions="all")
    tolerance = 1e-5 * max(np.abs(e).max() for e in expected) * math.sqrt(HEADS * HEAD_SIZE)
    for i, count in enumerate(counts):
        np.testing.assert_allclose(logits[i, :count], expected[i][:count], rtol=0, atol=tolerance)
    for at in range(3):
        next_ones = np.array([[row[count + at]] for row, count in zip(rows, counts, strict=True)])
        logits = engine.step(state, next_ones)
        for i, count in enumerate(counts):
            np.testing.assert_allclose(logits[i], expected[i][count + at], rtol=0, atol=tolerance)
