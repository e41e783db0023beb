"""Models with random, NaN or infinite results, or with dependent rows, are refused with the operation in the error."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from support.small_models import EXAMPLE, WIDTH, Mixer, Small, here, joined, refusal
from torch import nn

from tformer_export import export

# -- randomness -------------------------------------------------------------------------------------------------------


class DropoutLeftOn(Mixer):
    def forward(self, x, tgt):
        return F.dropout(torch.relu(x), 0.3)  # HERE


class DropoutInAttention(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2))  # HERE


class Noise(Mixer):
    def forward(self, x, tgt):
        return x + 0.1 * torch.rand(x.shape)  # HERE


class Gumbel(Mixer):
    def forward(self, x, tgt):
        return F.gumbel_softmax(x, hard=True)  # HERE


class Sampling(Mixer):
    def forward(self, x, tgt):
        chosen = torch.multinomial(torch.softmax(x, -1).flatten(0, 1), 1)  # HERE
        return x + chosen.view(x.shape[0], -1, 1)


@pytest.mark.parametrize(
    ("mixer", "operation"),
    [
        (DropoutLeftOn, "`dropout`"),
        (DropoutInAttention, "`scaled_dot_product_attention`"),
        (Noise, "`rand`"),
        (Gumbel, "`gumbel_softmax`"),
        (Sampling, "`multinomial`"),
    ],
)
def test_random_operation_is_refused(mixer, operation, tmp_path):
    assert refusal(mixer, tmp_path) == (
        f"{operation} at {here(mixer.forward)} gives something else each time it runs, and the output with it, so no "
        "file could be compared with the model. Switch it off outside training (training=self.training), or draw its "
        "numbers once in __init__ and keep them as a buffer"
    )


class NoisyChoice(Mixer):
    def forward(self, x, tgt):
        noisy = x + torch.randn_like(x)  # HERE
        return noisy if int(noisy.mean((0, 1)).argmax()) % 2 else 2 * noisy


def test_random_operation_is_named_before_the_branch_that_it_decides(tmp_path):
    assert f"`randn_like` at {here(NoisyChoice.forward)} gives something else each time" in refusal(
        NoisyChoice, tmp_path
    )


class RandomInPython(Mixer):
    def forward(self, x, tgt):
        return x * random.random()


def test_randomness_of_python_is_refused(tmp_path):
    random.seed(1)
    message = refusal(RandomInPython, tmp_path)
    assert message.startswith("forward gives another output when it is called again with the same inputs: it draws ")


class NoiseUnread(Mixer):
    def forward(self, x, tgt):
        self.noise = torch.randn_like(x)
        return torch.tanh(x)


def test_unread_randomness_is_exported(tmp_path):
    report = export(Small(NoiseUnread), tmp_path / "model.onnx", EXAMPLE, "tgt", max_length=12)
    assert report.max_abs_error < 1e-5


# -- values that are not finite ---------------------------------------------------------------------------------------

FINITE_ADVICE = (
    "there is nothing to compare with. Keep them finite there: a row of attention whose keys are all masked, an "
    "overflow, a division by zero and a logarithm or root of a negative number are the usual causes"
)


class Logarithm(Mixer):
    def forward(self, x, tgt):
        return torch.log(-1 - x.abs())  # HERE


class Overflow(Mixer):
    def forward(self, x, tgt):
        return torch.exp(1000 + x.abs())  # HERE


class AllMasked(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(
            -1
        )  # all keys of the first position are masked
        scores = (q @ k.transpose(2, 3)).masked_fill(~mask, -math.inf)
        return joined(torch.softmax(scores, -1) @ v)  # HERE


@pytest.mark.parametrize(
    ("mixer", "place"),
    [
        (Logarithm, "NaN in `log`"),
        (Overflow, "infinite in `exp`"),
        (AllMasked, "NaN in the attention"),
    ],
)
def test_first_non_finite_operation_is_named(mixer, place, tmp_path):
    assert refusal(mixer, tmp_path) == (
        f"the model's output is not finite for random ids: the values first become {place} at {here(mixer.forward)}, "
        f"so {FINITE_ADVICE}"
    )


class WeightOfNan(Mixer):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), math.nan))

    def forward(self, x, tgt):
        return x * self.scale


def test_nan_weight_is_named(tmp_path):
    assert refusal(WeightOfNan, tmp_path) == (
        "the model's output is not finite, for its weight mix.scale holds NaN: there is nothing to compare with; load "
        "a checkpoint that holds numbers"
    )


# -- rows of a batch --------------------------------------------------------------------------------------------------


class Centred(Mixer):
    def forward(self, x, tgt):
        return torch.relu(x - x.mean(0, keepdim=True))  # HERE


def test_dependence_between_rows_is_refused(tmp_path):
    assert refusal(Centred, tmp_path) == (
        f"`-` at {here(Centred.forward)} lets the rows of a batch change each other, so that the "
        "result of a request would depend on the other requests in its batch. Compute each row from itself alone: "
        "batch normalisation, for example, must use its running statistics"
    )
