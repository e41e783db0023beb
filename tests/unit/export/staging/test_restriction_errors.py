"""Operations that cannot be decoded step by step are refused: the error names operation, line, reason and advice."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.small_models import LENGTH, WIDTH, Mixer, Small, causal, here, joined, refusal
from torch import nn

from tformer_export import export
from tformer_runtime.base.errors import OptionError

SINGLE_PASS_ADVICE = "export the model without a step input (step_input=None) to run it once per input"
LOOKS_AHEAD = (
    "looks ahead: its value at a position depends on later positions of the step input, so it cannot be decoded step "
    "by step."
)


# -- looking ahead ----------------------------------------------------------------------------------------------------


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


class PrefixThatSeesItself(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        mask = causal(x) | (torch.arange(x.shape[1]) < 2)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))  # HERE


@pytest.mark.parametrize(
    "mixer", [SdpaWithoutMask, HandWrittenWithoutMask, MaskThatLooksOneAhead, PrefixThatSeesItself]
)
def test_attention_that_looks_ahead_is_refused(mixer, tmp_path):
    assert refusal(mixer, tmp_path) == (
        f"the attention at {here(mixer.forward)} {LOOKS_AHEAD} Give it a causal mask; if the model is to see the whole "
        f"sequence, {SINGLE_PASS_ADVICE}"
    )


class MeanOverTime(Mixer):
    def forward(self, x, tgt):
        return x - x.mean(1, keepdim=True)  # HERE


class SoftmaxOverTime(Mixer):
    def forward(self, x, tgt):
        return torch.softmax(x, 1)  # HERE


class FlippedInTime(Mixer):
    def forward(self, x, tgt):
        return x.flip(1)  # HERE


class ConvolutionThatSeesBothSides(Mixer):
    def forward(self, x, tgt):
        weight, bias = self.convolution.weight, self.convolution.bias
        return F.conv1d(x.transpose(1, 2), weight, bias, padding=1).transpose(1, 2)  # HERE


@pytest.mark.parametrize(
    ("mixer", "operation"),
    [
        (MeanOverTime, "mean"),
        (SoftmaxOverTime, "softmax"),
        (FlippedInTime, "flip"),
        (ConvolutionThatSeesBothSides, "conv1d"),
    ],
)
def test_other_operations_that_look_ahead_are_refused(mixer, operation, tmp_path):
    assert refusal(mixer, tmp_path) == (
        f"`{operation}` at {here(mixer.forward)} {LOOKS_AHEAD} If this is attention, give it a causal mask; if the "
        f"model is to see the whole sequence, {SINGLE_PASS_ADVICE}"
    )


class Encoder(Small):
    """A layer of torch.nn, for which the path of the module says more than its stack frames."""

    def __init__(self):
        super().__init__(Mixer)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, tgt):
        return self.out(self.encoder(self.embed(tgt)))  # HERE


def test_error_within_torch_nn_names_calling_line_and_module(tmp_path):
    message = refusal(Encoder, tmp_path)
    assert f"the attention at {here(Encoder.forward)} (in its `encoder.layers.0.self_attn`) looks ahead" in message


def test_error_in_model_of_torch_nn_modules_names_the_module(tmp_path):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(9, WIDTH), encoder, nn.Linear(WIDTH, 9))
    message = refusal(model, tmp_path, example={"input": torch.ones(2, 3, dtype=torch.int64)}, step_input="input")
    assert message.startswith("the attention at `1.layers.0.self_attn` looks ahead")


# -- other positions outside attention --------------------------------------------------------------------------------


class RolledInTime(Mixer):
    def forward(self, x, tgt):
        return x - x.roll(1, 1)  # HERE


def test_rotation_looks_ahead_at_the_first_position(tmp_path):
    message = refusal(RolledInTime, tmp_path)
    assert message.startswith(f"`roll` at {here(RolledInTime.forward)} {LOOKS_AHEAD}")


class BothDirections(Small):
    def __init__(self):
        super().__init__(Mixer)
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, tgt):
        x, _ = self.recurrent(self.embed(tgt))  # HERE
        return self.out(x)


def test_recurrent_layer_that_looks_ahead_is_refused(tmp_path):
    message = refusal(BothDirections, tmp_path)
    assert message.startswith(f"`nn.GRU` at {here(BothDirections.forward)} looks ahead")


class NumbersOfPositions(Mixer):
    def forward(self, x, tgt):
        state, states = torch.zeros_like(x[:, 0]), []
        for t, row in enumerate(x.unbind(1)):
            state = state / (t + 1) + row  # HERE
            states.append(state)
        return torch.stack(states, 1)


def test_loop_whose_runs_differ_is_refused(tmp_path):
    assert refusal(NumbersOfPositions, tmp_path) == (
        f"the loop over positions at {here(NumbersOfPositions.forward)} cannot be exported: a number differs from run "
        "to run. Each run has to do the same operations on the rows of its position, on values that all positions "
        "share, and on values of the run before, which keep their shape"
    )


# -- numbers and rows that follow from data ---------------------------------------------------------------------------


class BooleanIndex(Mixer):
    def forward(self, x, tgt):
        return x + x[tgt != 5].mean()  # HERE


class Nonzero(Mixer):
    def forward(self, x, tgt):
        return x + (tgt > 5).nonzero().sum()  # HERE


@pytest.mark.parametrize(("mixer", "operation"), [(BooleanIndex, "[…]"), (Nonzero, "nonzero")])
def test_size_that_depends_on_data_is_refused(mixer, operation, tmp_path):
    message = refusal(mixer, tmp_path)
    assert f"`{operation}` at {here(mixer.forward)} makes a tensor whose size depends on the data" in message
    assert "Keep a row for every position and hide what is not wanted, by torch.where, masked_fill or a mask" in message


class Item(Mixer):
    def forward(self, x, tgt):
        return x / x.abs().max().item()  # HERE


class ItemOfIds(Mixer):
    def forward(self, x, tgt):
        return x * tgt.max().item()  # HERE


@pytest.mark.parametrize("mixer", [Item, ItemOfIds])
def test_number_read_from_data_is_refused(mixer, tmp_path):
    assert refusal(mixer, tmp_path) == (
        f"forward reads a number out of the step input's data into Python, at {here(mixer.forward)}. It follows from "
        "all positions at once, while a step knows only those so far: compute it for each position, as a tensor"
    )


# -- tables -----------------------------------------------------------------------------------------------------------


class TableOfShares(Mixer):
    def forward(self, x, tgt):
        position = torch.arange(x.shape[1])[:, None]
        return x * (position / x.shape[1])  # HERE


class MaskCountedFromTheEnd(Mixer):
    """A mask that is causal at every length, and whose values for the past depend on the length."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        time = x.shape[1]
        bias = torch.arange(time).expand(time, time) - torch.full((time, time), time)  # HERE
        bias = torch.where(causal(x), torch.sin(bias.float()), -math.inf)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


class AnglesScaledByTheLength(Mixer):
    def forward(self, x, tgt):
        time = x.shape[1]
        frequency = 1 / torch.tensor(10000 * time / 4) ** (torch.arange(0, 8, 2) / 8)
        angle = torch.arange(time)[:, None] * frequency  # HERE
        angle = torch.cat([angle, angle], -1)

        def turned(y):
            return y * angle.cos() + torch.cat([-y[..., 4:], y[..., :4]], -1) * angle.sin()

        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))


@pytest.mark.parametrize("mixer", [TableOfShares, MaskCountedFromTheEnd, AnglesScaledByTheLength])
def test_table_that_varies_with_length_is_refused(mixer, tmp_path):
    message = refusal(mixer, tmp_path)
    assert (
        f"at {here(mixer.forward)} makes a table whose values change with the length of the sequence, so that what was "
        "cached would become wrong as the sequence grows; make it depend on positions alone, or fix its length"
    ) in message


class Causal(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_length_beyond_position_table_is_refused(tmp_path):
    table = here(Small.forward)
    message = refusal(Causal, tmp_path, max_length=LENGTH + 1)
    assert message == f"the model cannot run at a length of {LENGTH + 1}: at most {LENGTH} is possible, by {table}"


# -- outputs ----------------------------------------------------------------------------------------------------------


class FirstOnly(Small):
    def __init__(self):
        super().__init__(Mixer)

    def forward(self, tgt):
        return self.out(self.embed(tgt)[:, 0])  # HERE


class Pooled(FirstOnly):
    def forward(self, tgt):
        return self.out(self.embed(tgt).mean(1, keepdim=True))  # HERE


class OneMore(FirstOnly):
    def forward(self, tgt):
        return self.out(F.pad(self.embed(tgt), (0, 0, 0, 1)))  # HERE


class OneRow(FirstOnly):
    def forward(self, tgt):
        return self.out(self.embed(tgt)[:1])  # HERE


class Ids(FirstOnly):
    def forward(self, tgt):
        return self.out(self.embed(tgt)).argmax(-1)  # HERE


NO_ROW = "which has no row for each position of it: it is pooled, or one position is taken out"
OTHER_SHAPE = "which is not (batch, time, vocabulary)"


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (FirstOnly, "(batch, 23)", NO_ROW),
        (Pooled, "(batch, 1, 23)", NO_ROW),
        (OneMore, "(batch, time + 1, 23)", OTHER_SHAPE),
        (OneRow, "(1, time, 23)", OTHER_SHAPE),
        (Ids, "(batch, time)", OTHER_SHAPE),
    ],
)
def test_output_other_than_logits_of_all_positions_is_refused(model, shape, reason, tmp_path):
    assert refusal(model, tmp_path) == (
        f"forward returns {shape} first, at {here(model.forward)}, {reason}. To be stepped over 'tgt' it must return "
        "logits for every position, (batch, time, vocabulary); a model that gives one answer for its input is exported "
        "without a step input (step_input=None)"
    )


def test_step_input_of_embeddings_is_refused(tmp_path):
    with pytest.raises(OptionError) as raised:
        export(nn.Linear(8, 9), tmp_path / "model.onnx", {"input": torch.randn(2, 3, 8)}, "input")
    assert str(raised.value).startswith("forward returns 9 numbers per step and 8 are fed back: name the output")
    assert str(raised.value).endswith("A model of tokens needs a step input of ids")


class LargestScores(Mixer):
    def forward(self, x, tgt):
        scores = (x @ x.transpose(1, 2)).masked_fill(~causal(x), -1e9)
        least = scores.topk(min(4, x.shape[1]), -1).values[..., -1:]  # HERE
        return scores.masked_fill(scores < least, -1e9).softmax(-1) @ x


def test_number_of_values_that_changes_with_the_length_is_refused_by_its_reason(tmp_path):
    reason = "gives min(4, time) values, a number that changes with the length of the sequence"
    assert refusal(LargestScores, tmp_path).startswith(f"`topk` at {here(LargestScores.forward)} {reason}")


# -- torch.onnx -------------------------------------------------------------------------------------------------------


class WithoutOnnx(Mixer):
    def forward(self, x, tgt):
        return torch.special.bessel_j0(x)  # HERE


def test_operator_without_onnx_form_is_refused(tmp_path):
    assert refusal(WithoutOnnx, tmp_path) == (
        f"torch.onnx cannot translate `special_bessel_j0` at {here(WithoutOnnx.forward)}: it has no form of it. "
        "Write it there with other operations"
    )


# -- exported models -------------------------------------------------------------------------------------------------


class Normalised(Mixer):
    def __init__(self):
        super().__init__()
        self.normalise = nn.BatchNorm1d(WIDTH)

    def forward(self, x, tgt):
        return self.normalise(x.transpose(1, 2)).transpose(1, 2)


def test_batch_normalisation_by_running_statistics_is_exported(tmp_path):
    report = export(Small(Normalised), tmp_path / "model.onnx", {"tgt": torch.tensor([[3, 4, 5]])}, "tgt")
    assert report.max_abs_error < 1e-4
