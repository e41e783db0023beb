"""Files in half precision have errors like PyTorch in half precision, against the float32 source.

Most tests run on the CPU. It runs float16 directly, and bfloat16 with casts around each operator, as the gate does
(`passes/half/emulate_half_on_cpu.py`).
"""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from test_families import draw_rows, step_logits

from tformer_runtime import DeviceError, Model
from tformer_runtime.backend.session import Session, find_missing_cuda
from tformer_runtime.engine.engine import Engine

TYPES_BY_PRECISION = {  # names and types in manifests, in onnx and in torch
    "fp16": ("float16", onnx.TensorProto.FLOAT16, torch.float16),
    "bf16": ("bfloat16", onnx.TensorProto.BFLOAT16, torch.bfloat16),
}
names = pytest.mark.parametrize("name", ["llama-sdpa", pytest.param("t5-eager", marks=pytest.mark.thorough)])
halves = pytest.mark.parametrize("precision", TYPES_BY_PRECISION)


@pytest.fixture(scope="module")
def file_of(exported):
    return lambda name, precision: exported(name, "cuda", precision=precision)


def logits(family, module, source, tokens):
    """Return the float32 logits (time, vocabulary) of a single row, from a transformers module of any precision."""
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        if family.decoder_only:
            return module(input_ids=ids, use_cache=False).logits[0].float().numpy()
        sources = torch.from_numpy(source)[None]
        return module(input_ids=sources, decoder_input_ids=ids, use_cache=False).logits[0].float().numpy()


@names
@halves
def test_errors_are_like_those_of_pytorch_in_half_precision(file_of, name, precision):
    file = file_of(name, precision)
    dtype, _, torch_dtype = TYPES_BY_PRECISION[precision]
    assert {cache.dtype for cache in file.engine.decode.caches} == {dtype}
    assert file.engine.manifest.precision == precision
    half_module = copy.deepcopy(file.family.module).to(torch_dtype)
    file_errors, pytorch_errors = [], []
    for source, row, actual in step_logits(file):
        expected = logits(file.family, file.family.module, source, row)
        assert actual.dtype == np.float32
        file_errors.append(actual - expected)
        pytorch_errors.append(logits(file.family, half_module, source, row) - expected)
    # Root mean squares over some thousand logits. Two samples of the same errors differ by a few per cent.
    error, yardstick = (
        float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) for errors in (file_errors, pytorch_errors)
    )
    assert 0 < error <= 1.5 * yardstick


@names
@halves
def test_gate_reports_errors_before_and_after_rounding(file_of, name, precision):
    parity = file_of(name, precision).report.parity
    assert parity.exact_error <= 1e-5  # the error before rounding to half precision
    assert parity.exact_error < parity.relative_error <= parity.tolerance
    # Of 36 tokens, bfloat16 may change those whose two best logits are almost equal.
    assert parity.tokens_equal >= parity.tokens - (3 if precision == "bf16" else 0)
    assert parity.device == "cpu"


@names
@halves
def test_weights_are_stored_once_in_half_precision(file_of, name, precision):
    file, tensor_type = file_of(name, precision), TYPES_BY_PRECISION[precision][1]
    graph = onnx.load(file.path).graph
    tensors = [tensor for tensor in graph.initializer if np.prod(tensor.dims) > 256]
    assert {tensor.data_type for tensor in tensors} <= {tensor_type, onnx.TensorProto.FLOAT}
    num_half_values = sum(int(np.prod(t.dims)) for t in tensors if t.data_type == tensor_type)
    weights = sum(p.numel() for p in {id(p): p for p in file.family.module.parameters()}.values())
    assert weights * 0.95 <= num_half_values <= weights * 1.3  # position tables are included
    kinds = [node.op_type for node in graph.node]
    if name == "llama-sdpa":
        assert kinds.count("GroupQueryAttention") == file.report.counts["attentions"]
        assert "Softmax" not in kinds
    else:  # the attention has a bias, which makes CUDA's operator slow
        assert file.report.counts["fused"] == 0


@names
@halves
def test_separate_stage_sessions_give_the_same_tokens(file_of, name, precision):
    """A GPU runs the two stages in separate sessions."""
    file = file_of(name, precision)
    split_stages = Model(Engine(Session(file.engine.session.path, "cpu", threads=1, split_stages=True)))
    rows = draw_rows(0, (5, 9, 2))
    expected, actual = (
        [r.token_ids for r in m.generate_batch(rows, max_new_tokens=12)] for m in (file.model, split_stages)
    )
    assert expected == actual


def test_caches_in_half_precision_take_2_bytes_and_follow_beams(file_of):
    """Each value has 2 bytes. Beams and finished rows move caches without changing the results."""
    file = file_of("llama-sdpa", "bf16")
    rows = draw_rows(0, (5, 9, 2))
    state = file.engine.start(None, 3)
    file.engine.step(state, np.array([[3, 7, 4]] * 3))
    layers = sum(2 * int(np.prod([s for s in c.shape if isinstance(s, int)])) for c in file.engine.decode.caches)
    assert state.nbytes == 3 * state.cache.slot_capacity * layers
    token_ids = [
        [r.token_ids for r in file.model.generate_batch(rows, max_new_tokens=10, num_beams=3, batch_size=size)]
        for size in (9, 3)
    ]
    assert token_ids[0] == token_ids[1]


def test_bfloat16_on_a_cpu_raises_device_error(file_of):
    path = file_of("llama-sdpa", "bf16").path
    for device in ("cpu", "auto") if find_missing_cuda() else ("cpu",):
        with pytest.raises(
            DeviceError, match=r"model\.onnx computes in bfloat16, which onnxruntime does on CUDA alone"
        ):
            Engine(path, device)


@pytest.mark.cuda
@pytest.mark.skipif(find_missing_cuda() is not None, reason=f"no CUDA: {find_missing_cuda()}")
@names
@halves
def test_gpu_logits_are_near_and_graphs_give_the_tokens_of_steps(file_of, name, precision):
    """Logits are as near as on the CPU, and CUDA graphs give the tokens of uncaptured steps."""
    file = file_of(name, precision)
    engine = Engine(file.path, "cuda")
    assert engine.session.captures_graphs
    rows = draw_rows(0, (5, 9, 2))
    requests = {file.family.request: rows} if file.family.request else None
    for tokens in (np.array([[3, 7, 4]] * 3), np.array([[5]] * 3)):
        states = [e.start(requests, 3) for e in (file.engine, engine)]
        expected, actual = (e.step(s, tokens) for e, s in zip((file.engine, engine), states, strict=True))
        allowed = file.report.parity.tolerance * np.ptp(expected)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=allowed)
    model, limited = Model(engine), Model(Engine(file.path, "cuda"), 2**30)  # a memory limit disables CUDA graphs
    expected, actual = ([r.token_ids for r in m.generate_batch(rows, max_new_tokens=40)] for m in (model, limited))
    assert expected == actual
