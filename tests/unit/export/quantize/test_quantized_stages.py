"""Each stage of a quantised file has a session of its own, and computes the same numbers there.

Such files compute weights that both stages read, or that onnxruntime packs, in nodes outside of the stages.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from tformer_export import Quantization, export
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime.backend.session import Session
from tformer_runtime.engine.engine import Engine

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


@pytest.mark.parametrize(("weights", "goal"), [("int8", "throughput"), ("int4", "throughput"), ("int4", "latency")])
def test_stages_of_a_quantised_file_compute_the_same_apart(weights, goal, tmp_path):
    torch.manual_seed(5)
    module = Seq2SeqTransformer(
        source_vocabulary=64, target_vocabulary=64, width=64, heads=2, encoder_layers=1, decoder_layers=1,
        feedforward=128, max_length=20, dropout=0.0,
    ).eval()  # fmt: skip
    path = tmp_path / "model.onnx"
    export(
        module, path, {"src": IDS, "tgt": IDS}, "tgt", quantization=Quantization(weights), optimize_for=goal,
        special_tokens={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )  # fmt: skip
    assert len(onnx.load(path).graph.node) > 1  # nodes outside of the If, without which nothing is tested
    whole, apart = (
        Engine(Session(path, "cpu", threads=1, split_stages=split_stages)) for split_stages in (False, True)
    )
    np.testing.assert_allclose(logits(apart), logits(whole), rtol=0, atol=1e-6 * np.ptp(logits(whole)))


def logits(engine):
    state = engine.start({"src": [np.array([3, 4, 5, 9]), np.array([6, 7])]}, 2)
    steps = [engine.step(state, np.array(tokens)) for tokens in ([[1], [1]], [[7], [30]], [[41], [12]])]
    return np.stack([step.copy() for step in steps])
