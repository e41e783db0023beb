"""Files for CUDA in float16, run on the CPU: as near to the float32 source as PyTorch that computes it in float16."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from test_families import draw, stepped

from tformer_runtime import Model
from tformer_runtime.engine import Engine
from tformer_runtime.session import Session, cuda_missing

files = pytest.mark.parametrize("name", ["llama-sdpa", "t5-eager"])


def logits(family, module, source, tokens):
    """(time, vocabulary) of one row by a transformers module of any precision."""
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        if family.decoder_only:
            return module(input_ids=ids, use_cache=False).logits[0].float().numpy()
        sources = torch.from_numpy(source)[None]
        return module(input_ids=sources, decoder_input_ids=ids, use_cache=False).logits[0].float().numpy()


@files
def test_no_further_from_float32_than_pytorchs_float16(exported, name):
    file = exported(name, "cuda")
    assert {cache.dtype for cache in file.engine.decode.caches} == {"float16"}
    assert file.engine.manifest.precision == "fp16"
    half = copy.deepcopy(file.family.module).half()
    own, theirs = [], []
    for source, row, found in stepped(file):
        expected = logits(file.family, file.family.module, source, row)
        assert found.dtype == np.float32
        own.append(found - expected)
        theirs.append(logits(file.family, half, source, row) - expected)
    # Root mean squares over some thousand logits: that of two draws of the same errors differs by a few per cent.
    error, yardstick = (float(np.sqrt(np.mean(np.concatenate(each) ** 2))) for each in (own, theirs))
    assert 0 < error <= 1.5 * yardstick


@files
def test_what_the_gate_says(exported, name):
    parity = exported(name, "cuda").report.parity
    assert parity.exact_error <= 1e-5  # what it computes, before it is rounded
    assert parity.exact_error < parity.relative_error <= parity.tolerance
    assert parity.tokens_equal == parity.tokens
    assert parity.device == "cpu"


@files
def test_the_weights_are_in_half_and_nothing_is_kept_twice(exported, name):
    file = exported(name, "cuda")
    graph = onnx.load(file.path).graph
    held = [tensor for tensor in graph.initializer if np.prod(tensor.dims) > 256]
    assert {tensor.data_type for tensor in held} <= {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}
    half = sum(int(np.prod(t.dims)) for t in held if t.data_type == onnx.TensorProto.FLOAT16)
    weights = sum(p.numel() for p in {id(p): p for p in file.family.module.parameters()}.values())
    assert weights * 0.95 <= half <= weights * 1.3  # tables of positions are there besides
    kinds = [node.op_type for node in graph.node]
    if name == "llama-sdpa":
        assert kinds.count("GroupQueryAttention") == file.report.found["attentions"]
        assert "Softmax" not in kinds
    else:  # a bias, which CUDA's operator is slow with
        assert file.report.found["fused"] == 0


@files
def test_stages_apart_in_half(exported, name):
    """As a GPU has them."""
    file = exported(name, "cuda")
    apart = Model(Engine(Session(file.path, "cpu", threads=1, apart=True)))
    rows = draw(0, (5, 9, 2))
    whole, other = ([r.token_ids for r in m.generate_batch(rows, max_new_tokens=12)] for m in (file.model, apart))
    assert whole == other


@pytest.mark.cuda
@pytest.mark.skipif(cuda_missing() is not None, reason=f"no CUDA here: {cuda_missing()}")
@files
def test_on_a_gpu(exported, name):
    """As far from float32 as on the CPU, and its graphs find the tokens that its steps find."""
    file = exported(name, "cuda")
    engine = Engine(file.path, "cuda")
    assert engine.session.captures
    rows = draw(0, (5, 9, 2))
    requests = {file.family.request: rows} if file.family.request else None
    for tokens in (np.array([[3, 7, 4]] * 3), np.array([[5]] * 3)):
        states = [e.start(requests, 3) for e in (file.engine, engine)]
        expected, found = (e.step(s, tokens) for e, s in zip((file.engine, engine), states, strict=True))
        allowed = file.report.parity.tolerance * np.ptp(expected)
        np.testing.assert_allclose(found, expected, rtol=0, atol=allowed)
    model, limited = Model(engine), Model(Engine(file.path, "cuda"), 2**30)  # which captures nothing
    whole, other = ([r.token_ids for r in m.generate_batch(rows, max_new_tokens=40)] for m in (model, limited))
    assert whole == other
