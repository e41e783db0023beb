"""float32 products by native kernels: the same bits on all paths, in any batch, on any threads; a small error."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper
from support.native_products import (
    KERNELS,
    PATHS,
    Product,
    kernels_of,
    open_native_session,
    open_session,
    requires_kernels,
)
from support.small_graphs import model_of

from tformer_export import Quantization
from tformer_runtime import Model
from tformer_runtime.backend import native_kernels
from tformer_runtime.backend.native_kernels import ALL_BITS, BITS_OF_PATH, FLOAT_BITS, VARIABLE, LoadingProducts
from tformer_runtime.backend.session import Session
from tformer_runtime.format.model_file import read_manifest, read_mapped_model
from tformer_runtime.format.onnx_graph import parse_model
from tformer_runtime.rewriting.product_rewrite import DOMAIN, FLOAT_OPERATOR, Rewritten, replace_products

G2P_PRODUCTS = 49  # 24 of the encoder, 25 of the decoder
FORMS = ("MatMul", "MatMul of a transpose", "Gemm", "Gemm, transB", "FusedMatMul", "FusedMatMul, transB")
EPSILON = 2.0**-24


@dataclass(frozen=True)
class FloatCase:
    """A product x (rows, inner) → y (rows, columns) in one of FORMS."""

    inner: int
    columns: int
    form: str = "MatMul"
    has_bias: bool = True

    def weights(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        w = random.standard_normal((self.inner, self.columns)).astype(np.float32)
        return w, random.standard_normal(self.columns).astype(np.float32)

    def proto(self, seed: int = 0) -> onnx.ModelProto:
        w, b = self.weights(seed)
        operator, _, transposed = self.form.partition(",")
        attributes = {"transB": 1} if transposed else {}
        nodes, name = [], "w"
        if self.form == "MatMul of a transpose":
            operator, name = "MatMul", "columns"
            nodes.append(helper.make_node("Transpose", ["w"], ["columns"], perm=[1, 0]))
        stored = np.ascontiguousarray(w.T) if nodes or transposed else w
        inputs = ["x", name, "b"] if operator == "Gemm" and self.has_bias else ["x", name]
        adds = self.has_bias and operator != "Gemm"
        domain = "com.microsoft" if operator == "FusedMatMul" else ""
        nodes.append(helper.make_node(operator, inputs, ["p" if adds else "y"], domain=domain, **attributes))
        if adds:
            nodes.append(helper.make_node("Add", ["b", "p"], ["y"]))
        ports = {"x": ["rows", self.inner]}, {"y": ["rows", self.columns]}
        return model_of(nodes, *ports, {"w": stored, **({"b": b} if self.has_bias else {})})

    def model(self, seed: int = 0) -> bytes:
        content: bytes = self.proto(seed).SerializeToString()
        return content


def rows_of(inner: int, rows: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, inner)) * 10.0 ** random.integers(-3, 4, (rows, 1))).astype(np.float32)


def run(session: onnxruntime.InferenceSession, x: np.ndarray) -> np.ndarray:
    return session.run(None, {"x": x})[0]


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


def count_of(model: bytes) -> int:
    return replace_products(model, Path(), lambda product, files: 1, lambda product, files: 1)[1]


cases = st.builds(
    FloatCase, st.integers(32, 200), st.integers(32, 130), st.sampled_from(FORMS), st.booleans()
)  # at least 1024 numbers


@requires_kernels
@settings(max_examples=60)
@given(case=cases, rows=st.sampled_from([1, 2, 3, 5, 8, 13, 31, 50]), seed=st.integers(0, 1000))
def test_all_paths_have_the_bits_of_the_scalar_one(case, rows, seed):
    model, x = case.model(seed), rows_of(case.inner, rows, seed)
    expected = run(open_native_session(model, "scalar"), x)
    for path in PATHS:
        assert_same_bits(run(open_native_session(model, path), x), expected)


@requires_kernels
@settings(max_examples=30)
@given(case=cases, seed=st.integers(0, 1000))
def test_error_is_within_the_bound_of_one_chain(case, seed):
    """K roundings of the chain and one of the bias, each of at most 2⁻²⁴ of the largest partial sum."""
    x = rows_of(case.inner, 7, seed)
    w, b = (part.astype(np.float64) for part in case.weights(seed))
    bias = b if case.has_bias else 0 * b
    actual = run(open_native_session(case.model(seed), KERNELS.paths[0]), x)
    steps = (case.inner + 1) * EPSILON
    bound = steps / (1 - steps) * (np.abs(x.astype(np.float64)) @ np.abs(w) + np.abs(bias))
    assert (np.abs(actual - (x.astype(np.float64) @ w + bias)) <= bound).all()


@requires_kernels
def test_sum_is_one_chain_in_the_order_of_the_rows():
    """Each number is rounded once: 1 + 2⁻²⁴ + 2⁻²⁴ … stays 1, and 2⁻²⁴ + … + 1 does not."""
    w = np.ones((64, 32), np.float32)
    model = onnx.ModelProto.FromString(FloatCase(64, 32, has_bias=False).model())
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
    x = np.full((2, 64), EPSILON, np.float32)
    x[0, 0] = x[1, -1] = 1
    for path in PATHS:
        y = run(open_native_session(model.SerializeToString(), path), x)
        np.testing.assert_array_equal(y[0], np.ones(32, np.float32))
        np.testing.assert_array_equal(y[1], np.full(32, 1 + 2.0**-18, np.float32))


@requires_kernels
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("columns", [200, 1000])
def test_row_does_not_depend_on_neighbours_or_threads(path, columns):
    """Rows are divided into blocks of several sizes, and from 337 rows on by themselves alone."""
    case = FloatCase(96, columns)
    x = rows_of(96, 430)
    one, several = (open_native_session(case.model(), path, threads) for threads in (1, 3))
    whole = run(one, x)
    assert_same_bits(run(several, x), whole)
    for rows in (1, 2, 7, 12, 13, 25, 49, 97, 336, 337):
        assert_same_bits(run(several, x[-rows:]), whole[-rows:])
    shuffled = np.random.default_rng(0).permutation(430)
    assert_same_bits(run(several, x[shuffled]), whole[shuffled])


@requires_kernels
@pytest.mark.parametrize("path", PATHS)
def test_weights_are_packed_alike_on_any_number_of_threads(path):
    """A thread packs at least half a million weights: 1.6 million are packed by up to three."""
    case = FloatCase(800, 2000)
    x = rows_of(800, 2)
    one, several = (open_native_session(case.model(), path, threads) for threads in (1, 3))
    assert_same_bits(run(several, x), run(one, x))


@requires_kernels
@pytest.mark.parametrize("path", PATHS)
def test_no_rows_give_no_results(path):
    assert run(open_native_session(FloatCase(64, 48).model(), path), np.empty((0, 64), np.float32)).shape == (0, 48)


@requires_kernels
@pytest.mark.parametrize("path", PATHS)
def test_any_rank(path):
    proto = FloatCase(64, 48).proto()
    for port in (proto.graph.input[0], proto.graph.output[0]):
        port.type.tensor_type.ClearField("shape")
    session, x = open_native_session(proto.SerializeToString(), path), rows_of(64, 6)
    flat = run(session, x)
    assert_same_bits(run(session, x.reshape(1, 2, 3, 64)), flat.reshape(1, 2, 3, 48))
    assert_same_bits(run(session, x[0]), flat[0])


@requires_kernels
@pytest.mark.parametrize("path", PATHS)
def test_numbers_that_are_not_finite_are_as_in_ieee_arithmetic(path):
    w, b = (part.copy() for part in FloatCase(64, 48).weights())
    w[9, 3], w[5, 4], w[6, 4], b[7] = np.nan, np.inf, -np.inf, np.inf
    proto = FloatCase(64, 48).proto()
    for tensor, array in zip(proto.graph.initializer, (w, b), strict=True):
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    x = rows_of(64, 20)
    x[2, 5], x[3, 1], x[4, 7], x[5, 5] = np.nan, np.inf, -np.inf, 0
    with np.errstate(all="ignore"):
        exact = (x[:, :, None].astype(np.float64) * w).sum(1) + b
    actual = run(open_native_session(proto.SerializeToString(), path), x)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(exact))
    np.testing.assert_array_equal(actual[np.isinf(exact)], exact[np.isinf(exact)].astype(np.float32))
    assert (np.isfinite(actual) == np.isfinite(exact)).all()


@requires_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_form_is_replaced_with_its_bias(form, has_bias):
    case = FloatCase(64, 48, form, has_bias)
    rewritten, count, *_ = replace_products(case.model(), Path(), lambda product, files: 1, lambda product, files: 1)
    assert count == 1
    assert [node.op_type for node in parse_model(rewritten).graph.nodes] == [FLOAT_OPERATOR]
    onnx.ModelProto.FromString(rewritten)
    x = rows_of(64, 5)
    for path in PATHS:
        np.testing.assert_allclose(
            run(open_native_session(case.model(), path), x), run(open_session(case.model()), x), rtol=1e-4, atol=1e-4
        )


def set_attribute(name, value):
    return lambda proto: proto.graph.node[0].attribute.append(helper.make_attribute(name, value))


def make_weights_an_input(proto):
    proto.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [64, 48]))


def make_weights_half(proto):
    tensor = proto.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), "w"))


def transpose_otherwise(proto):
    proto.graph.node[0].attribute[0].ints[:] = [0, 1]


def swap_inputs(proto):
    proto.graph.node[0].input[:] = ["w", "x"]


UNLIKE = {
    "a factor": ("Gemm", set_attribute("alpha", 0.5)),
    "a factor of the bias": ("Gemm", set_attribute("beta", 0.5)),
    "a transposed input": ("Gemm", set_attribute("transA", 1)),
    "a factor of FusedMatMul": ("FusedMatMul", set_attribute("alpha", 0.125)),
    "a transposed input of FusedMatMul": ("FusedMatMul", set_attribute("transA", 1)),
    "a transposed batch": ("FusedMatMul", set_attribute("transBatchA", 1)),
    "another transpose": ("MatMul of a transpose", transpose_otherwise),
    "weights that a caller may give": ("MatMul", make_weights_an_input),
    "weights of another type": ("MatMul", make_weights_half),
    "weights on the left": ("MatMul", swap_inputs),
    "another domain": ("MatMul", lambda proto: setattr(proto.graph.node[0], "domain", "com.microsoft")),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_product_with_any_difference_stays(name):
    form, change = UNLIKE[name]
    proto = FloatCase(64, 48, form).proto()
    assert count_of(proto.SerializeToString()) == 1
    change(proto)
    assert count_of(proto.SerializeToString()) == 0


def test_small_product_stays():
    assert count_of(FloatCase(32, 31).model()) == 0


def test_bias_that_is_read_elsewhere_or_has_another_shape_stays_apart():
    """The product is replaced, the sum is not."""
    wide, read = FloatCase(64, 48).proto(), FloatCase(64, 48).proto()
    wide.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((1, 48), np.float32), "b"))
    read.graph.output.append(helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, None))
    for proto in (wide, read):
        model = proto.SerializeToString()
        rewritten, count, *_ = replace_products(model, Path(), lambda product, files: 1, lambda product, files: 1)
        assert (count, [node.op_type for node in parse_model(rewritten).graph.nodes]) == (1, [FLOAT_OPERATOR, "Add"])


def test_float_products_stay_without_their_kernels():
    model = FloatCase(64, 48).model()
    assert replace_products(model, Path(), lambda product, files: 1) == Rewritten(model)
    assert replace_products(model, Path(), lambda product, files: 1, lambda product, files: None) == Rewritten(model)


@requires_kernels
def test_product_in_the_body_of_a_loop_stays():
    """onnxruntime infers shapes of a body's results, which operators of kernels do not tell."""
    random, floats = np.random.default_rng(0), TensorProto.FLOAT
    weights = {name: random.standard_normal((48, 48)).astype(np.float32) for name in ("w", "v")}
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "w"], ["p"]),
            helper.make_node("Add", ["p", "row"], ["next"]),
            helper.make_node("Identity", ["next"], ["seen"]),
        ],
        "body",
        [helper.make_tensor_value_info(name, floats, shape) for name, shape in (("state", [1, 48]), ("row", [48]))],
        [helper.make_tensor_value_info(name, floats, None) for name in ("next", "seen")],
    )
    nodes = [
        helper.make_node("Scan", ["first", "x"], ["last", "rows"], body=body, num_scan_inputs=1),
        helper.make_node("MatMul", ["rows", "v"], ["y"]),
    ]
    weights["first"] = np.zeros((1, 48), np.float32)
    model = model_of(nodes, {"x": ["rows", 48]}, {"y": ["rows", 1, 48]}, weights).SerializeToString()
    x = rows_of(48, 5) * 0.1
    expected = run(open_session(model), x)
    for path in PATHS:
        np.testing.assert_allclose(run(open_native_session(model, path, products=1), x), expected, rtol=1e-4, atol=1e-4)


@requires_kernels
def test_matrix_of_two_readers_is_packed_once_and_stays_for_the_other():
    """As the embedding that is the output projection."""
    proto = FloatCase(64, 48, "FusedMatMul, transB", has_bias=False).proto()
    proto.graph.node.append(helper.make_node("FusedMatMul", ["x", "w"], ["z"], domain="com.microsoft", transB=1))
    proto.graph.node.append(helper.make_node("Gather", ["w", "first"], ["row"]))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
    proto.graph.output.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    proto.graph.output.append(helper.make_tensor_value_info("row", onnx.TensorProto.FLOAT, None))
    given = []
    model = proto.SerializeToString()
    _, count, *_ = replace_products(model, Path(), lambda p, f: None, lambda product, files: given.append(product) or 1)
    assert count == 2
    assert given[0].tensor == given[1].tensor
    session = open_native_session(model, "scalar", products=2)
    y, z, row = session.run(None, {"x": rows_of(64, 3)})
    assert_same_bits(z, y)
    assert_same_bits(row[0], FloatCase(64, 48).weights()[0][:, 0].copy())


@requires_kernels
@pytest.mark.parametrize("handle", ["none", "integers", "floats in the other operator"])
def test_handle_of_another_matrix_is_an_error(handle):
    kernels = kernels_of("scalar")
    if handle == "floats in the other operator":
        w = np.ones((64, 48), np.float32)
        number = kernels._pack_float(b"scalar", w.ctypes.data, 48, 1, 64, 48, None, None, 0)
        scaling = {"magnitude": 1, "zero": 128, "reciprocal": 0, "column_first": 0}
        scaling |= {"floor": 0.0, "step": 1 / 127, "fixed_scale": 0.0}
        node = helper.make_node("RowQuantizedMatMul", ["x"], ["y"], domain=DOMAIN, handle=number, **scaling)
    else:
        w, scale = np.ones((64, 48), np.int8), np.ones(48, np.float32)
        packed = kernels._pack8(b"scalar", w.ctypes.data, 48, 1, 0, 64, 48, scale.ctypes.data, None, None, 0)
        number = packed if handle == "integers" else 12345
        node = helper.make_node(FLOAT_OPERATOR, ["x"], ["y"], domain=DOMAIN, handle=number)
    model = model_of([node], {"x": ["rows", 64]}, {"y": ["rows", "columns"]}, {})
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(KERNELS.file))
    with pytest.raises(Exception, match="the handle is of no packed matrix"):
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@requires_kernels
@pytest.mark.parametrize(("inner", "columns"), [(0, 8), (8, 0), (65536, 1), (1, 2**24 + 1), (2**63, 2**63)])
def test_impossible_sizes_are_refused(inner, columns):
    w = np.ones(64, np.float32)
    assert kernels_of("scalar")._pack_float(b"scalar", w.ctypes.data, 8, 1, inner, columns, None, None, 0) < 0


@requires_kernels
@pytest.mark.parametrize("cut", range(1, 3000, 97))
def test_damaged_model_is_left_to_onnxruntime(cut):
    model = FloatCase(64, 48, "FusedMatMul, transB").model()
    damaged = model[:-cut] if cut % 2 else model[:cut] + bytes([model[cut] ^ 0x41]) + model[cut + 1 :]
    assert isinstance(replace_products(damaged, Path(), lambda p, f: 1, lambda p, f: 1)[0], bytes)


@pytest.fixture(scope="module")
def file(g2p_file):
    return g2p_file(Quantization("none"), "throughput")


@requires_kernels
def test_all_products_of_a_shipped_model_are_replaced(file):
    model, folder = read_mapped_model(file)
    rewritten, count, *_ = replace_products(model, folder, lambda product, files: 1, lambda product, files: 1)
    operators = [node.op_type for graph in parse_model(rewritten).graph.all_graphs() for node in graph.nodes]
    assert count == operators.count(FLOAT_OPERATOR) == G2P_PRODUCTS
    assert len(rewritten) < len(model)


@requires_kernels
def test_model_of_floats_names_its_kernels(file, monkeypatch):
    results = []
    for path in ("0", *PATHS):
        monkeypatch.setenv(VARIABLE, path)
        model = Model.load(file, device="cpu", threads=1)
        expected = None if path == "0" else f"native kernels {path}"
        assert (model.info()["kernels"], model.engine.session.kernels) == (expected, expected)
        results.append([result.token_ids for result in model.generate_batch(["hello", "kernel"], num_beams=4)])
    assert all(result == results[0] for result in results)
    assert Session(file, device="cpu", native_kernels=False).kernels is None


@requires_kernels
def test_kernels_of_floats_are_chosen_by_the_table(file, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    expected = FLOAT_BITS in BITS_OF_PATH[KERNELS.paths[0]]
    assert (Session(file, device="cpu").kernels is not None) == expected
    assert (Model.load(file, device="cpu").info()["kernels"] is not None) == expected


def kernels_with(bits):
    kernels = copy.copy(kernels_of("scalar"))
    kernels.bits = bits
    return kernels


@requires_kernels
@pytest.mark.parametrize("path", BITS_OF_PATH)
def test_products_of_floats_change_on_measured_paths_alone(path):
    model = FloatCase(64, 48).model()
    with LoadingProducts(kernels_with(BITS_OF_PATH[path])) as loading:
        rewritten = loading.rewrite(model, Path())
    assert (loading.count == 1, rewritten != model) == (path == "avx512vnni", path == "avx512vnni")


@requires_kernels
@pytest.mark.parametrize(
    ("quantization", "precision", "bits"),
    [("none", "fp32", {32}), ("none", "fp16", set()), ("int8", "fp32", {8}), ("int4", "fp32", {4}),
     ("mixed", "fp32", {4, 8, 32})],
)  # fmt: skip
def test_named_kernels_are_those_of_the_bits_of_the_file(file, monkeypatch, quantization, precision, bits):
    manifest = replace(read_manifest(file), quantization=quantization, precision=precision)
    for number in ALL_BITS:
        monkeypatch.setattr(native_kernels, "find_native_kernels", lambda _, number=number: kernels_with((number,)))
        assert (native_kernels.kernels_for(manifest) is not None) == (number in bits)


@requires_kernels
def test_float_product_in_a_quantised_file_runs_on_the_kernels():
    proto = onnx.ModelProto.FromString(Product(64, 48).model())
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((48, 48), np.float32), "float"))
    proto.graph.node.append(helper.make_node("MatMul", ["y", "float"], ["more"]))
    proto.graph.output.append(helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, None))
    open_native_session(proto.SerializeToString(), "scalar", products=2)
