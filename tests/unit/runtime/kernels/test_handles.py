"""Handles and sizes that do not fit are errors, never a crash: nothing in a file decides which memory is read."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from support.native_products import KERNELS, PATHS, Product, kernels_of, open_native_session, requires_kernels
from support.small_graphs import model_of

from tformer_runtime.rewriting.elementwise_rewrite import Activation
from tformer_runtime.rewriting.product_rewrite import DOMAIN, OPERATOR

pytestmark = requires_kernels

INNER, COLUMNS = 40, 24
NO_HANDLE, NEVER_GIVEN = -1, 12345


def library() -> ctypes.CDLL:
    assert KERNELS is not None
    return ctypes.CDLL(str(KERNELS.file))


def pack(inner: int = INNER, columns: int = COLUMNS, path: str = "scalar", pairs: int = 1) -> int:
    """Pack weights that are all `pairs`, and return their handle or the number of a refusal."""
    kernels = kernels_of("scalar")
    weights, scale = np.full((INNER, COLUMNS), pairs, np.int8), np.ones(COLUMNS, np.float32)
    pointers = weights.ctypes.data, COLUMNS, 1, 0, inner, columns, scale.ctypes.data, None
    return int(kernels._pack8(path.encode(), *pointers, None, 0))


def operator(handle: int, inner: int | str = INNER, **changes: int | float) -> onnxruntime.InferenceSession:
    """Return a session with one operator."""
    assert KERNELS is not None
    attributes = {
        "handle": handle, "magnitude": 1, "zero": 128, "reciprocal": 0, "column_first": 0, "floor": 0.0,
        "step": 1 / 127, "fixed_scale": 0.0, **Activation().attributes(), **changes,
    }  # fmt: skip
    node = helper.make_node(OPERATOR, ["x"], ["y"], domain=DOMAIN, **attributes)
    model = model_of([node], {"x": ["rows", inner]}, {"y": ["rows", "columns"]}, {})
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(KERNELS.file))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("handle", [0, 1, NO_HANDLE, NEVER_GIVEN, 2**63 - 1, -(2**63)])
def test_unknown_handle_is_an_error(handle):
    with pytest.raises(Exception, match="the handle is of no packed matrix"):
        operator(handle)


def test_released_handle_is_an_error_and_is_not_given_again():
    handle = pack()
    kernels_of("scalar").release(handle)
    kernels_of("scalar").release(handle)
    assert pack() > handle
    with pytest.raises(Exception, match="the handle is of no packed matrix"):
        operator(handle)


def test_session_keeps_its_matrix_after_the_release():
    handle = pack()
    session = operator(handle)
    kernels_of("scalar").release(handle)
    x = np.ones((3, INNER), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.full((3, COLUMNS), INNER, np.float32))


@pytest.mark.parametrize("inner", [INNER - 1, INNER + 1, 0])
def test_rows_of_another_length_are_an_error(inner):
    session = operator(pack(), "inner")
    with pytest.raises(Exception, match="as many numbers as the matrix has rows"):
        session.run(None, {"x": np.ones((2, inner), np.float32)})


@pytest.mark.parametrize("zero", [-1, 256, 2**40])
def test_zero_point_beyond_a_byte_is_an_error(zero):
    with pytest.raises(Exception, match="zero must be 0 to 255"):
        operator(pack(), zero=zero)


@pytest.mark.parametrize(("inner", "columns"), [(0, 8), (8, 0), (65536, 1), (1, 2**24 + 1), (2**63, 2**63)])
def test_impossible_sizes_are_refused(inner, columns):
    assert pack(inner, columns) < 0


def test_unknown_path_is_refused():
    assert pack(path="none") < 0


@pytest.mark.parametrize("path", PATHS)
def test_weights_that_would_saturate_are_left_to_onnxruntime(path):
    """Without VNNI the sum of two products must fit 16 bits: 255 · (65 + 65) does not."""
    assert pack(path=path, pairs=64) > 0
    assert (pack(path=path, pairs=65) > 0) == (path != "avx2")


@given(
    st.integers(1, 90),
    st.integers(1, 40),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(0, 1000),
)
def test_any_4_bit_weights_are_packed(inner, columns, block, seed):
    """Padding may hold any numbers, and each byte is a code."""
    kernels = kernels_of("scalar")
    blocks = -(-inner // block)
    random = np.random.default_rng(seed)
    stored = random.integers(0, 256, (columns, blocks, block // 2), np.uint8)
    codes = random.integers(0, 256, (columns, blocks), np.uint8)
    scale, pointers = np.ones(columns, np.float32), (stored.ctypes.data, codes.ctypes.data)
    handle = kernels._pack4(b"scalar", *pointers, block, inner, columns, scale.ctypes.data, None, None, 0)
    assert handle > 0
    x = np.ones((2, inner), np.float32)
    numbers = np.stack([stored & 15, stored >> 4], -1).reshape(columns, -1)[:, :inner].astype(int)
    m, z = (np.repeat(part, block, 1)[:, :inner].astype(int) for part in (codes % 8 + 1, codes // 8))
    expected = (m * numbers - m * z // 2).sum(1)
    actual = operator(handle, "inner").run(None, {"x": x})[0]
    np.testing.assert_array_equal(actual, np.broadcast_to(expected.astype(np.float32), (2, columns)))
    kernels.release(handle)


@pytest.mark.parametrize("block", [0, 1, 8, 24, 256, 512, 2**63])
def test_impossible_blocks_are_refused(block):
    data = np.zeros(4096, np.uint8)
    scale = np.ones(4, np.float32)
    handle = kernels_of("scalar")._pack4(
        b"scalar", data.ctypes.data, data.ctypes.data, block, 16, 4, scale.ctypes.data, None, None, 0
    )
    assert handle < 0


def test_closed_sessions_give_back_their_matrices():
    model = Product(64, 64).model()
    gc.collect()
    before = library().tformer_kernels_matrices()
    sessions = [open_native_session(model, "scalar") for _ in range(5)]
    assert library().tformer_kernels_matrices() == before + 5
    del sessions
    gc.collect()
    assert library().tformer_kernels_matrices() == before


def test_interface_of_onnxruntime_is_checked():
    """A table of functions with other functions is noticed before it is used for anything else."""
    code = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "status = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: None)\n"
        "table = (ctypes.c_void_p * 300)(*[ctypes.cast(status, ctypes.c_void_p).value] * 300)\n"
        "api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda version: ctypes.addressof(table))\n"
        "base = (ctypes.c_void_p * 2)(ctypes.cast(api, ctypes.c_void_p).value, None)\n"
        "library.RegisterCustomOps.restype = ctypes.c_void_p\n"
        "print(library.RegisterCustomOps(None, ctypes.byref(base)), library.tformer_kernels_registered())\n"
    )
    assert KERNELS is not None
    done = subprocess.run([sys.executable, "-c", code, str(KERNELS.file)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "0"]
