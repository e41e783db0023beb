"""What cannot be decoded step by step is refused with the operation and the user's own source line."""

from __future__ import annotations

import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from small_models import EXAMPLE, LENGTH, WIDTH, Mixer, Small, causal, joined, line_of
from torch import nn

from tformer_export import export
from tformer_runtime import UnsupportedModelError


class SdpaWithoutMask(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(q, k, v))  # HERE


class HandWrittenWithoutMask(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(8), -1)
        return joined(weights @ v)  # HERE


class MaskThatLooksOneAhead(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))  # HERE


class MeanOverTime(Mixer):
    def forward(self, x, tgt):
        return x - x.mean(1, keepdim=True)  # HERE


class CumsumOverTime(Mixer):
    def forward(self, x, tgt):
        return x.cumsum(1)  # HERE


class FlippedInTime(Mixer):
    def forward(self, x, tgt):
        return x.flip(1)  # HERE


class SoftmaxOverTime(Mixer):
    def forward(self, x, tgt):
        return torch.softmax(x, 1)  # HERE


class ConvolutionOverTime(Mixer):
    def forward(self, x, tgt):
        padded = F.pad(x.transpose(1, 2), (2, 0))  # HERE
        return self.convolution(padded).transpose(1, 2)


class ConvolutionThatPadsItself(Mixer):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x, tgt):
        weight, bias = self.convolution.weight, self.convolution.bias
        return F.conv1d(x.transpose(1, 2), weight, bias, padding=1).transpose(1, 2)  # HERE


class ShiftedInTime(Mixer):
    def forward(self, x, tgt):
        return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)  # HERE


class TableOfShares(Mixer):
    def forward(self, x, tgt):
        position = torch.arange(x.shape[1])[:, None]
        return x * (position / x.shape[1])  # HERE


class MaskCountedFromTheEnd(Mixer):
    """Causal at every length, but which of the past is read depends on how long the sequence is."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        time = x.shape[1]
        bias = torch.arange(time).expand(time, time) - torch.full((time, time), time)  # HERE
        bias = torch.where(causal(x), torch.sin(bias.float()), -math.inf)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


def refusal(mixer, tmp_path, **options):
    with pytest.raises(UnsupportedModelError) as caught:
        export(Small(mixer), tmp_path / "model.onnx", EXAMPLE, "tgt", **options)
    assert os.listdir(tmp_path) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mixer", "operation"),
    [
        (SdpaWithoutMask, "attention"),
        (HandWrittenWithoutMask, "attention"),
        (MaskThatLooksOneAhead, "attention"),
        (MeanOverTime, "aten.mean.dim"),
    ],
)
def test_what_looks_ahead(mixer, operation, tmp_path):
    message = refusal(mixer, tmp_path)
    assert operation in message.split(" at ")[0]
    assert f"{line_of(mixer, '# HERE')}: " in message
    assert "looks ahead: its value at a position depends on later positions of the step input" in message


@pytest.mark.parametrize(
    ("mixer", "operation"),
    [
        (CumsumOverTime, "aten.cumsum.default"),
        (FlippedInTime, "aten.flip.default"),
        (SoftmaxOverTime, "aten.softmax.int"),
        (ConvolutionThatPadsItself, "aten.conv"),
    ],
)
def test_what_mixes_positions(mixer, operation, tmp_path):
    message = refusal(mixer, tmp_path)
    assert operation in message.split(" at ")[0]
    assert f"{line_of(mixer, '# HERE')}: " in message
    assert "mixes different positions of the step input outside attention" in message


@pytest.mark.parametrize(
    ("mixer", "operation"), [(ConvolutionOverTime, "aten.pad.default"), (ShiftedInTime, "aten.slice.Tensor")]
)
def test_what_shifts_positions(mixer, operation, tmp_path):
    message = refusal(mixer, tmp_path)
    assert operation in message.split(" at ")[0]
    assert f"{line_of(mixer, '# HERE')}: " in message
    assert "positions are put in front, dropped or shifted inside the model" in message


@pytest.mark.parametrize("mixer", [TableOfShares, MaskCountedFromTheEnd])
def test_a_table_that_changes_with_the_length(mixer, tmp_path):
    message = refusal(mixer, tmp_path)
    assert f"{line_of(mixer, '# HERE')}: " in message
    assert "makes a table whose values change with the length of the sequence" in message


class FixedLength(Mixer):
    def forward(self, x, tgt):
        return x + x.reshape(-1, 5, WIDTH)


class FixedBatch(Mixer):
    def forward(self, x, tgt):
        return x.reshape(3, -1, WIDTH)


@pytest.mark.parametrize("mixer", [FixedLength, FixedBatch])
def test_a_size_that_the_code_fixes(mixer, tmp_path):
    message = refusal(mixer, tmp_path)
    assert message.startswith("the model's code fixes a batch or time axis to the example's size")


class NotANumber(Mixer):
    def forward(self, x, tgt):
        return torch.log(-1 - x.abs())


def test_logits_that_are_not_finite(tmp_path):
    message = refusal(NotANumber, tmp_path, max_length=12)
    assert "logits are not finite" in message
    assert "there is nothing to compare with" in message


class Branch(Mixer):
    def forward(self, x, tgt):
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_traced(tmp_path):
    assert refusal(Branch, tmp_path).startswith("torch.export cannot trace the model: ")


class Causal(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_length_beyond_the_position_table(tmp_path):
    message = refusal(Causal, tmp_path, max_length=LENGTH + 1)
    assert re.search(rf"cannot run at a length of {LENGTH + 1}\b", message)


class Pooled(Small):
    """A classifier: one row of logits a sequence."""

    def forward(self, tgt):
        return super().forward(tgt)[:, 0]


class Positionwise(Mixer):
    def forward(self, x, tgt):
        return torch.relu(x)


def test_logits_without_a_time_axis(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"\(batch, time, vocabulary\)"):
        export(Pooled(Positionwise), tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert os.listdir(tmp_path) == []
