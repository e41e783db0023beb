"""A position that reads the one before it, written as a rotation whose first row forward hides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.handwritten_case import VOCABULARY
from tiny import TinyDecoder

from tformer_export import export
from tformer_runtime import Model, UnsupportedModelError


class ShiftedDecoder(TinyDecoder):
    def forward(self, idx):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        x = x + self.mix(self.norm(x + self.before(x, idx)), idx)
        return self.head(self.final_norm(x + self.feed_forward(self.norm(x))))


class ZeroWritten(ShiftedDecoder):
    def before(self, x, idx):
        y = x.roll(1, 1)
        y[:, 0] = 0
        return y


class ZeroChosen(ShiftedDecoder):
    """Two positions back, and a row of weights in their place at the start."""

    def before(self, x, idx):
        is_start = torch.arange(x.shape[1]) < 2
        return torch.where(is_start[None, :, None], self.positions.weight[3], torch.roll(x, 2, dims=1))


class IdsBefore(ShiftedDecoder):
    """The embedding of the id before, and zeros at the start."""

    def before(self, x, idx):
        is_start = torch.arange(x.shape[1]) == 0
        return self.tokens(idx.roll(1, 1)).masked_fill(is_start[None, :, None], 0.0)


class AfterARareId(ShiftedDecoder):
    """The first position asks whether the last one has an id that few sequences have."""

    def before(self, x, idx):
        return 3 * (idx.roll(1, 1) == 31).float()[..., None] * self.positions.weight[3]


class HiddenByData(ShiftedDecoder):
    def before(self, x, idx):
        is_hidden = (torch.arange(x.shape[1]) == 0)[None, :] & (idx != 17)
        return torch.where(is_hidden[..., None], 0.0, x.roll(1, 1))


class KeptByData(ShiftedDecoder):
    def before(self, x, idx):
        y = x.roll(1, 1)
        y[:, 0] = y[:, 0] * (idx[:, :1] == 29)
        return y


class HidesTooFew(ShiftedDecoder):
    def before(self, x, idx):
        y = x.roll(2, 1)
        y[:, 0] = 0
        return y


class Wrapped(ShiftedDecoder):
    def before(self, x, idx):
        return x.roll(1, 1)


class Ahead(ShiftedDecoder):
    def before(self, x, idx):
        y = x.roll(-1, 1)
        y[:, -1] = 0
        return y


def example():
    return {"idx": torch.tensor([[3, 4, 5], [6, 7, 8]])}


def seeded(cls):
    torch.manual_seed(1)
    module = cls().eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.4)
    return module


@pytest.mark.parametrize("cls", [ZeroWritten, ZeroChosen, IdsBefore])
def test_step_reads_the_position_before(cls, tmp_path):
    module = seeded(cls)
    export(module, tmp_path / "model.onnx", example=example(), step_input="idx")
    rows = [np.random.default_rng(seed).integers(3, VOCABULARY, n) for seed, n in enumerate((1, 2, 6))]
    results = Model.load(tmp_path / "model.onnx", "cpu").generate_batch(rows, max_new_tokens=10)
    expected = []
    for row in rows:
        tokens = [*map(int, row)]
        for _ in range(10):
            with torch.no_grad():
                tokens.append(int(module(torch.tensor([tokens]))[0, -1].argmax()))
        expected.append(tokens[len(row) :])
    assert [[*map(int, result.token_ids)] for result in results] == expected
    assert len({token for row in expected for token in row}) > 3


@pytest.mark.parametrize("cls", [Wrapped, Ahead, AfterARareId, HiddenByData, KeptByData, HidesTooFew])
def test_rotation_that_looks_ahead_is_refused(cls, tmp_path):
    with pytest.raises(UnsupportedModelError, match="looks ahead"):
        export(seeded(cls), tmp_path / "model.onnx", example=example(), step_input="idx")
    assert not list(tmp_path.iterdir())
