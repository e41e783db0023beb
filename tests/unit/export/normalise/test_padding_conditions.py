"""Conditions on padding in the target are folded, for they have one answer for all valid tokens; others remain."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.small_models import EXAMPLE, VOCABULARY, Mixer, Small, captured_of, causal, joined

from tformer_export import export
from tformer_export.analysis.binding_time import Level, binding_times, padding_tests
from tformer_export.common.fx_nodes import meta
from tformer_export.normalise.padding_tests import fold_padding_tests
from tformer_runtime import Model
from tformer_runtime.engine.engine import Engine


class Masked(Mixer):
    """Causal attention with a mask from the tokens, valid(tgt).

    A position always sees itself. A position without keys would weigh all positions equally, including later ones."""

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
def test_condition_on_declared_padding_id_is_folded(form):
    valid, padding, valid_answer = ONE_ID[form]
    captured = captured_of(Small(lambda: Masked(valid)))
    tests = padding_tests(captured, "tgt")
    assert [(t.padding, t.usual) for t in tests] == [(padding, valid_answer)]
    fold_padding_tests(captured, padding)
    assert padding_tests(captured, "tgt") == []
    assert find_step_masks(captured) == []


@pytest.mark.parametrize("padding_id", [4, None])
def test_condition_on_undeclared_id_is_not_folded(padding_id):
    captured = captured_of(Small(lambda: Masked(lambda m, tgt: tgt != 5)))
    fold_padding_tests(captured, padding_id)
    assert [test.padding for test in padding_tests(captured, "tgt")] == [5]


def test_condition_that_every_id_meets_is_folded():
    captured = captured_of(Small(lambda: Masked(lambda m, tgt: tgt >= 0)))
    fold_padding_tests(captured, None)
    assert find_step_masks(captured) == []


def test_declared_padding_that_forward_hides_is_not_generated(tmp_path):
    """The module alone would generate it: its logits of the padding are the greatest."""
    torch.manual_seed(0)
    module = Small(lambda: Masked(lambda m, tgt: tgt != 4)).eval()
    with torch.no_grad():
        module.out.bias[4] += 100
    export(module, tmp_path / "model.onnx", EXAMPLE, "tgt", special_tokens={"pad_token_id": 4})
    model = Model.load(tmp_path / "model.onnx", "cpu")
    assert 4 not in model.generate([3, 5], max_new_tokens=5).token_ids
    assert 4 in model.generate([3, 5], max_new_tokens=5, suppress_tokens=[]).token_ids


SEVERAL_IDS = {
    "isin": lambda m, tgt: ~torch.isin(tgt, m.several),
    "greater": lambda m, tgt: tgt > 1,
    "range": lambda m, tgt: (tgt - 3).abs() > 1,
    "even": lambda m, tgt: tgt % 2 == 0,
}


@pytest.mark.parametrize("form", SEVERAL_IDS)
def test_condition_on_several_ids_is_not_folded(form):
    captured = captured_of(Small(lambda: Masked(SEVERAL_IDS[form])))
    assert padding_tests(captured, "tgt") == []
    fold_padding_tests(captured, 0)
    assert find_step_masks(captured)


def find_step_masks(captured):
    """Return boolean nodes that depend on the tokens of the step input."""
    level = binding_times(captured)
    return [node for node in captured.nodes if level[node] == Level.STEP and is_boolean(meta(node))]


def is_boolean(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def max_difference(module, path, token):
    """Return the largest difference of a logit from the source, for a sequence with this token in two calls."""
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
    """A condition on one token that is not padding, such as the end of a sentence."""

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
def test_conditions_on_other_tokens_are_exported(mixer, tmp_path):
    """The declared padding id is 0. The file must apply the conditions of the model on all other tokens."""
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
        assert max_difference(module, path, token) < 1e-4


def test_padding_mask_is_removed_for_valid_rows(tmp_path):
    module, path = Small(lambda: Masked(lambda m, tgt: tgt != 0)), tmp_path / "model.onnx"
    report = export(
        module,
        path,
        EXAMPLE,
        "tgt",
        max_length=24,
        special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
    )
    assert report.counts["fused"] == 1
    assert len(Engine(path, device="cpu").manifest.decode.caches) == 2
    assert max_difference(module, path, 9) < 1e-4
