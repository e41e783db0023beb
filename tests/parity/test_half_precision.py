"""Files for CUDA in half precision, on the CPU: as near to the float32 source as PyTorch that computes it in half.

The CPU runs float16 as it is, and bfloat16 with casts around each operator, as the gate does with both
(`passes/emulate_half_on_cpu.py`).
"""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from test_families import draw, stepped

from tformer_runtime import DeviceError, Model
from tformer_runtime.backend.session import Session, find_missing_cuda
from tformer_runtime.engine.engine import Engine

TYPES = {  # of manifests, of onnx and of torch
    "fp16": ("float16", onnx.TensorProto.FLOAT16, torch.float16),
    "bf16": ("bfloat16", onnx.TensorProto.BFLOAT16, torch.bfloat16),
}
names = pytest.mark.parametrize("name", ["llama-sdpa", pytest.param("t5-eager", marks=pytest.mark.thorough)])
halves = pytest.mark.parametrize("precision", TYPES)


@pytest.fixture(scope="module")
def file_of(exported):
    return lambda name, precision: exported(name, "cuda", precision=precision)


def logits(family, module, source, tokens):
    """(time, vocabulary) of one row by a transformers module of any precision."""
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        if family.decoder_only:
            return module(input_ids=ids, use_cache=False).logits[0].float().numpy()
        sources = torch.from_numpy(source)[None]
        return module(input_ids=sources, decoder_input_ids=ids, use_cache=False).logits[0].float().numpy()


@names
@halves
def test_no_further_from_float32_than_pytorchs_half(file_of, name, precision):
    file = file_of(name, precision)
    dtype, _, theirs_dtype = TYPES[precision]
    assert {cache.dtype for cache in file.engine.decode.caches} == {dtype}
    assert file.engine.manifest.precision == precision
    half = copy.deepcopy(file.family.module).to(theirs_dtype)
    own, theirs = [], []
    for source, row, found in stepped(file):
        expected = logits(file.family, file.family.module, source, row)
        assert found.dtype == np.float32
        own.append(found - expected)
        theirs.append(logits(file.family, half, source, row) - expected)
    # Root mean squares over some thousand logits: that of two draws of the same errors differs by a few per cent.
    error, yardstick = (float(np.sqrt(np.mean(np.concatenate(each) ** 2))) for each in (own, theirs))
    assert 0 < error <= 1.5 * yardstick


@names
@halves
def test_what_the_gate_says(file_of, name, precision):
    parity = file_of(name, precision).report.parity
    assert parity.exact_error <= 1e-5  # what it computes, before it is rounded
    assert parity.exact_error < parity.relative_error <= parity.tolerance
    assert parity.tokens_equal >= parity.tokens - (3 if precision == "bf16" else 0)  # of 36, where two are as likely
    assert parity.device == "cpu"


@names
@halves
def test_the_weights_are_in_half_and_nothing_is_kept_twice(file_of, name, precision):
    file, kept = file_of(name, precision), TYPES[precision][1]
    graph = onnx.load(file.path).graph
    held = [tensor for tensor in graph.initializer if np.prod(tensor.dims) > 256]
    assert {tensor.data_type for tensor in held} <= {kept, onnx.TensorProto.FLOAT}
    half = sum(int(np.prod(t.dims)) for t in held if t.data_type == kept)
    weights = sum(p.numel() for p in {id(p): p for p in file.family.module.parameters()}.values())
    assert weights * 0.95 <= half <= weights * 1.3  # tables of positions are there besides
    kinds = [node.op_type for node in graph.node]
    if name == "llama-sdpa":
        assert kinds.count("GroupQueryAttention") == file.report.found["attentions"]
        assert "Softmax" not in kinds
    else:  # a bias, which CUDA's operator is slow with
        assert file.report.found["fused"] == 0


@names
@halves
def test_stages_apart_in_half(file_of, name, precision):
    """As a GPU has them."""
    file = file_of(name, precision)
    apart = Model(Engine(Session(file.engine.session.path, "cpu", threads=1, split_stages=True)))
    rows = draw(0, (5, 9, 2))
    whole, other = ([r.token_ids for r in m.generate_batch(rows, max_new_tokens=12)] for m in (file.model, apart))
    assert whole == other


def test_caches_in_half_are_counted_and_moved_as_such(file_of):
    """Beams move them, and rows that leave; half the bytes of float32."""
    file = file_of("llama-sdpa", "bf16")
    rows = draw(0, (5, 9, 2))
    state = file.engine.start(None, 3)
    file.engine.step(state, np.array([[3, 7, 4]] * 3))
    layers = sum(2 * int(np.prod([s for s in c.shape if isinstance(s, int)])) for c in file.engine.decode.caches)
    assert state.nbytes == 3 * state.cache.slot_capacity * layers
    found = [
        [r.token_ids for r in file.model.generate_batch(rows, max_new_tokens=10, num_beams=3, batch_size=size)]
        for size in (9, 3)
    ]
    assert found[0] == found[1]


def test_bfloat16_on_a_cpu_is_refused_in_a_sentence(file_of):
    path = file_of("llama-sdpa", "bf16").path
    for device in ("cpu", "auto") if find_missing_cuda() else ("cpu",):
        with pytest.raises(
            DeviceError, match=r"model\.onnx computes in bfloat16, which onnxruntime does on CUDA alone"
        ):
            Engine(path, device)


@pytest.mark.cuda
@pytest.mark.skipif(find_missing_cuda() is not None, reason=f"no CUDA here: {find_missing_cuda()}")
@names
@halves
def test_on_a_gpu(file_of, name, precision):
    """As far from float32 as on the CPU, and its graphs find the tokens that its steps find."""
    file = file_of(name, precision)
    engine = Engine(file.path, "cuda")
    assert engine.session.captures_graphs
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
