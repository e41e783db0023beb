"""Matrices that are packed in the background are those that are packed at once, whatever else happens meanwhile."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from support.native_products import (
    KERNELS,
    PATHS,
    kernels_of,
    open_native_session,
    open_session,
    requires_kernels,
    run,
)
from support.small_graphs import model_of
from support.stored_records import records_of, with_records

from tformer_export.quantize import quantize_weights
from tformer_runtime.backend.native_kernels import LoadingProducts, NativeKernels, Packer
from tformer_runtime.format.onnx_graph import Tensor
from tformer_runtime.format.stored_forms import INT8_COLUMNS, MatrixSpec
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.float_product import FloatProduct
from tformer_runtime.rewriting.quantized_product import QuantizedProduct, RowScaling
from tformer_runtime.rewriting.stored_weights import StoredWeights

pytestmark = requires_kernels
requires_avx2 = pytest.mark.skipif("avx2" not in PATHS, reason="the processor has no AVX2")
INNER, WIDTH = 64, 96


def library() -> ctypes.CDLL:
    assert KERNELS is not None
    return ctypes.CDLL(str(KERNELS.file))


def add(kernels: NativeKernels, weights: np.ndarray, scale: np.ndarray, packer: Packer | None) -> int:
    """Pack int8 weights (inner, columns) and return their handle."""
    inner, columns = weights.shape
    pointers = weights.ctypes.data, columns, 1, 0, inner, columns, scale.ctypes.data, None
    return int(kernels._pack8(kernels.path.encode(), *pointers, packer and packer.pointer, 0))


def product(handle: int, x: np.ndarray, columns: int) -> np.ndarray:
    y = np.full((len(x), columns), np.nan, np.float32)
    multiply = library().tformer_kernels_multiply
    pointer, size, real, integer = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_float, ctypes.c_int32
    multiply.argtypes = [ctypes.c_int64, pointer, size, pointer, integer, real, real, integer, integer, real, integer]
    multiply.restype = ctypes.c_int64
    assert multiply(handle, x.ctypes.data, len(x), y.ctypes.data, 1, 0, 1 / 127, 128, 0, 0, 0) == 0
    return y


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 700)), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(0, 1000),
    st.sampled_from(PATHS),
)
def test_results_are_those_of_packing_at_once(shapes, threads, seed, path):
    kernels, random = kernels_of(path), np.random.default_rng(seed)
    matrices = [random.integers(-60, 61, shape).astype(np.int8) for shape in shapes]
    scales = [random.random(columns).astype(np.float32) for _, columns in shapes]
    with kernels.packer(threads) as packer:
        handles = [add(kernels, *each, packer) for each in zip(matrices, scales, strict=True)]
        assert packer.wait() == 0
    for handle, weights, scale in zip(handles, matrices, scales, strict=True):
        x = random.standard_normal((3, len(weights))).astype(np.float32)
        alone = add(kernels, weights, scale, None)
        columns = weights.shape[1]
        np.testing.assert_array_equal(product(handle, x, columns), product(alone, x, columns))
        kernels.release(handle)
        kernels.release(alone)


def test_large_matrices_on_several_threads():
    kernels, random = kernels_of(PATHS[0]), np.random.default_rng(0)
    weights = random.integers(-60, 61, (1024, 4096)).astype(np.int8)
    scale, x = np.ones(4096, np.float32), random.standard_normal((2, 1024)).astype(np.float32)
    with kernels.packer(3) as packer:
        handles = [add(kernels, weights, scale, packer) for _ in range(6)]
        assert packer.wait() == 0
        handles += [add(kernels, weights, scale, packer) for _ in range(2)]
        assert packer.wait() == 0
    expected = product(handles[0], x, 4096)
    for handle in handles:
        np.testing.assert_array_equal(product(handle, x, 4096), expected)
        kernels.release(handle)


def test_packer_that_is_closed_early_leaves_nothing():
    kernels = kernels_of(PATHS[0])
    gc.collect()
    before = library().tformer_kernels_matrices()
    weights, scale = np.ones((1024, 2048), np.int8), np.ones(2048, np.float32)
    for threads in (1, 3):
        with kernels.packer(threads) as packer:
            handles = [add(kernels, weights, scale, packer) for _ in range(8)]
        for handle in handles:
            kernels.release(handle)
    assert library().tformer_kernels_matrices() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_matrix_that_is_refused_at_last_has_no_handle(threads):
    """Without VNNI the sum of two products must fit 16 bits: 255 · (65 + 65) does not."""
    if "avx2" not in PATHS:
        pytest.skip("the processor has no AVX2")
    kernels, scale = kernels_of("avx2"), np.ones(WIDTH, np.float32)
    too_large, large = (np.full((INNER, WIDTH), number, np.int8) for number in (65, 64))
    with kernels.packer(threads) as packer:
        refused, packed = add(kernels, too_large, scale, packer), add(kernels, large, scale, packer)
        assert packer.wait() == 1
        assert packer.wait() == 1
    assert not kernels.has_matrix(refused)
    assert kernels.has_matrix(packed)
    kernels.release(packed)


def two_products(refused: int) -> bytes:
    """Return a model of two int8 products. refused: the one whose weights are too large for the path avx2."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((INNER, INNER)).astype(np.float32) for name in "vw"}
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"], name="first"),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="second"),
    ]
    float_model = ir.from_proto(model_of(nodes, {"x": ["rows", 1, INNER]}, {"y": ["rows", 1, INNER]}, weights))
    quantize_weights(float_model, 8, "throughput", "x", on_cpu=True)
    model: onnx.ModelProto = ir.to_proto(with_records(float_model))
    large = [each for each in model.graph.initializer if each.data_type == onnx.TensorProto.INT8][refused]
    name = large.name
    large.CopyFrom(numpy_helper.from_array(np.full((INNER, INNER), 100, np.int8), name))
    content: bytes = model.SerializeToString()
    return content


@requires_avx2
def test_product_that_is_refused_at_last_is_left_to_onnxruntime():
    model = two_products(refused=1)
    with LoadingProducts(kernels_of("avx2"), 2) as loading:
        rewritten = loading.rewrite(model, Path(), stored=records_of(model))
        assert loading.count == 1
        assert loading.weight_bytes == INNER * INNER
        operators = [node.op_type for node in onnx.load_from_string(rewritten).graph.node]
        assert operators.count("RowQuantizedMatMul") == 1
        assert {"MatMulInteger", "MatMulIntegerToFloat"} & {*operators}


@requires_avx2
def test_matrix_that_the_second_rewriting_alone_reaches_is_packed(monkeypatch):
    """The first rewriting has no memory for the second product, and the kernels refuse the first one."""
    model, calls, pack = two_products(refused=0), [], NativeKernels.pack

    def pack_with_little_memory(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError
        return pack(*arguments)

    monkeypatch.setattr(NativeKernels, "pack", pack_with_little_memory)
    session, x = open_native_session(model, "avx2"), np.random.default_rng(1).standard_normal((3, INNER))
    assert len(calls) == 3
    expected = run(open_session(model), x.astype(np.float32))
    np.testing.assert_array_equal(run(session, x.astype(np.float32)), expected)


@pytest.mark.parametrize("bits", [8, 32])
def test_sources_are_kept_before_the_kernels_read_them(bits):
    """Whatever interrupts the reading of the file afterwards, threads of the packer may still read the sources."""
    kernels = kernels_of(PATHS[0])
    seen = []

    class Recording(Packer):
        def keep(self, *sources):
            seen.append(library().tformer_kernels_matrices())
            super().keep(*sources)

    weights = np.ones((INNER, WIDTH), np.int8 if bits == 8 else np.float32)
    tensor = Tensor("w", weights.dtype, weights.shape, weights.tobytes())
    before = library().tformer_kernels_matrices()
    with kernels.packer(1) as packer, WeightFiles(Path()) as files:
        recording = Recording(packer.pointer, packer.wait)
        if bits == 8:
            stored = StoredWeights(MatrixSpec(INT8_COLUMNS, INNER, WIDTH, 32, tensor.name), tensor)
            scaling = RowScaling(True, 0.0, 1 / 127, 128)
            product = QuantizedProduct("x", "y", scaling, False, stored, np.ones(WIDTH, np.float32), None, None)
            handle = kernels.pack(product, files, recording)
        else:
            handle = kernels.pack_float(FloatProduct("x", "y", tensor, False, None, None), files, recording)
        recording.wait()
    assert seen == [before]
    kernels.release(handle)
