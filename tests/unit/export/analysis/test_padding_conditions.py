"""A test for padding inside the target has one answer for every valid token; what else asks about a token stays."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.small_models import EXAMPLE, VOCABULARY, Mixer, Small, captured_of, causal, joined

from tformer_export import export
from tformer_export.analysis.binding_time import Level, binding_times, fold_padding_tests, padding_tests
from tformer_export.common.fx_nodes import meta
from tformer_runtime.engine.engine import Engine


class Masked(Mixer):
    """Causal attention under a mask of the tokens; `valid(tgt)` is what a test is about.

    A position sees itself, masked or not: one that sees nothing would weigh all positions alike, the later ones too.
    """

    def __init__(self, valid):
        super().__init__()
        self.valid = valid
        self.register_buffer("pad", torch.tensor(4))
        self.register_buffer("several", torch.tensor([0, 4]))

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        mask = self.valid(self, tgt)[:, None, None, :] & causal(x) | torch.eye(x.shape[1], dtype=torch.bool)
        scores = (q @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(~mask, -1e9)
        return joined(torch.softmax(scores, -1) @ v)


ONE_ID = {
    "ne": (lambda m, tgt: tgt != 0, 0, True),
    "not eq": (lambda m, tgt: ~(tgt == 0), 0, False),
    "method": (lambda m, tgt: tgt.ne(5), 5, True),
    "tensor": (lambda m, tgt: tgt != m.pad, 4, True),
    "literal tensor": (lambda m, tgt: tgt != torch.tensor(3), 3, True),
    "greater": (lambda m, tgt: tgt > 0, 0, True),
    "last id": (lambda m, tgt: tgt < VOCABULARY - 1, VOCABULARY - 1, True),
    "moved first": (lambda m, tgt: (tgt[:, None, :] != 0)[:, 0], 0, True),
    "cast first": (lambda m, tgt: tgt.to(torch.int32) != 0, 0, True),
    "isin": (lambda m, tgt: ~torch.isin(tgt, m.pad), 4, False),
    "truth": (lambda m, tgt: tgt.bool(), 0, True),
    "logical not": (lambda m, tgt: ~torch.logical_not(tgt), 0, False),
}


@pytest.mark.parametrize("form", ONE_ID)
def test_a_test_against_one_id_is_folded(form):
    valid, padding, usual = ONE_ID[form]
    captured = captured_of(Small(lambda: Masked(valid)))
    tests = padding_tests(captured, "tgt")
    assert [(t.padding, t.usual) for t in tests] == [(padding, usual)]
    fold_padding_tests(captured, padding)
    assert padding_tests(captured, "tgt") == []
    assert masks_of_the_step(captured) == []


@pytest.mark.parametrize("declared", [4, None])
def test_a_test_against_another_id_than_the_declared_one_is_not_folded(declared):
    captured = captured_of(Small(lambda: Masked(lambda m, tgt: tgt != 5)))
    fold_padding_tests(captured, declared)
    assert [test.padding for test in padding_tests(captured, "tgt")] == [5]


def test_a_test_that_every_id_passes_is_folded_whatever_is_declared():
    captured = captured_of(Small(lambda: Masked(lambda m, tgt: tgt >= 0)))
    fold_padding_tests(captured, None)
    assert masks_of_the_step(captured) == []


SEVERAL_IDS = {
    "isin": lambda m, tgt: ~torch.isin(tgt, m.several),
    "greater": lambda m, tgt: tgt > 1,
    "range": lambda m, tgt: (tgt - 3).abs() > 1,
    "even": lambda m, tgt: tgt % 2 == 0,
}


@pytest.mark.parametrize("form", SEVERAL_IDS)
def test_a_test_against_several_ids_is_not_folded(form):
    captured = captured_of(Small(lambda: Masked(SEVERAL_IDS[form])))
    assert padding_tests(captured, "tgt") == []
    fold_padding_tests(captured, 0)
    assert masks_of_the_step(captured)


def masks_of_the_step(captured):
    """Booleans that depend on the step input's tokens."""
    level = binding_times(captured)
    return [node for node in captured.nodes if level[node] == Level.STEP and is_boolean(meta(node))]


def is_boolean(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def differences(module, path, token):
    """The largest difference of a logit from the source for a sequence with this token in it, fed in two calls."""
    engine = Engine(path, device="cpu", threads=1)
    ids = np.array([[7, token, 3, token, 5]])
    state = engine.start(None, 1)
    logits = [
        engine.step(state, ids[:, :4], logit_positions="all").copy(),
        engine.step(state, ids[:, 4:], logit_positions="all"),
    ]
    with torch.no_grad():
        return np.abs(np.concatenate(logits, 1) - module(torch.from_numpy(ids)).numpy()).max()


class Separated(Mixer):
    """Asks about one token, which is no padding but the end of a sentence, say."""

    def forward(self, x, tgt):
        return x * (tgt == 9).unsqueeze(-1)


@pytest.mark.parametrize(
    "mixer",
    [
        Separated,
        lambda: Masked(lambda m, tgt: tgt != 9),
        lambda: Masked(lambda m, tgt: (tgt != 0) & (tgt != 9)),
        lambda: Masked(SEVERAL_IDS["range"]),
    ],
    ids=["feature", "mask", "mask of two", "mask of several"],
)
def test_tokens_that_are_not_the_padding_keep_their_meaning(mixer, tmp_path):
    """The padding is said to be 0: what the model does about any other token must be in the file."""
    module, path = Small(mixer), tmp_path / "model.onnx"
    export(
        module,
        path,
        EXAMPLE,
        "tgt",
        max_length=24,
        special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
    )
    for token in (4, 9, 11):
        assert differences(module, path, token) < 1e-4


def test_a_valid_row_is_computed_without_its_padding_mask(tmp_path):
    module, path = Small(lambda: Masked(lambda m, tgt: tgt != 0)), tmp_path / "model.onnx"
    report = export(
        module,
        path,
        EXAMPLE,
        "tgt",
        max_length=24,
        special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
    )
    assert report.found["fused"] == 1
    assert len(Engine(path, device="cpu").manifest.decode.caches) == 2
    assert differences(module, path, 9) < 1e-4
