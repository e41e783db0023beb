"""Activations, gates and norms by native kernels: PyTorch's results but for last bits, and rows on their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.native_products import KERNELS, PATHS, Product, kernels_of, open_native_session, requires_kernels
from support.small_graphs import model_of
from support.stored_records import records_of

from tformer_runtime.backend.native_kernels import PRODUCTS_ALONE
from tformer_runtime.format.onnx_graph import parse_model
from tformer_runtime.rewriting.elementwise_rewrite import NATIVE_GATE, NATIVE_NORM, NORMS, Activation, ActivationKind
from tformer_runtime.rewriting.product_rewrite import DOMAIN, FLOAT_OPERATOR, replace_products

pytestmark = requires_kernels

PATH = kernels_of("scalar").attention_path if KERNELS is not None else None
INNER = 48  # of the product before
U = 2.0**-24  # float32's relative rounding
LANES = 64  # parts of a sum of the kernels
ROOT_2_OVER_PI = (2 / np.pi) ** 0.5
CONTRIB = "com.microsoft"
FORMS = {  # activation → its nodes, of "a" to "b"
    "Relu": [helper.make_node("Relu", ["a"], ["b"])],
    "Gelu": [helper.make_node("Gelu", ["a"], ["b"])],
    "Gelu, none": [helper.make_node("Gelu", ["a"], ["b"], approximate="none")],
    "Gelu, tanh": [helper.make_node("Gelu", ["a"], ["b"], approximate="tanh")],
    "QuickGelu": [helper.make_node("QuickGelu", ["a"], ["b"], domain=CONTRIB, alpha=1.0)],
    "QuickGelu without alpha": [helper.make_node("QuickGelu", ["a"], ["b"], domain=CONTRIB)],
    "Sigmoid, Mul": [helper.make_node("Sigmoid", ["a"], ["s"]), helper.make_node("Mul", ["a", "s"], ["b"])],
    "Mul, Sigmoid, Mul": [
        helper.make_node("Mul", ["alpha", "a"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["s"]),
        helper.make_node("Mul", ["s", "a"], ["b"]),
    ],
}
ALPHA = {"QuickGelu without alpha": 1.702, "Mul, Sigmoid, Mul": 1.5}


def expected_activation(form: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the activation of numbers in float64, and how far a result in float32 may be from it.

    Gelu: x · Φ(x) with Φ off by three roundings of numbers up to 1. x · sigmoid(z): e^z has the roundings of z, which
    count |z| times, and some of its own.
    """
    wide = torch.from_numpy(x).double()
    if form == "Relu":
        return wide.relu().numpy(), np.zeros_like(x)
    if form in ("Gelu", "Gelu, none"):
        return torch.nn.functional.gelu(wide).numpy(), 5 * U * np.abs(x)
    if form == "Gelu, tanh":
        # PyTorch's own function loses the numbers below -7 even in float64, by 1 + tanh(u) = 2 · sigmoid(2u).
        z = 2 * ROOT_2_OVER_PI * (wide + 0.044715 * wide**3)
        return (wide * z.sigmoid()).numpy(), np.abs(x) * z.sigmoid().numpy() * U * (8 + 8 * z.abs().numpy()) + 1e-35
    z = wide * ALPHA.get(form, 1.0)
    y = (wide * z.sigmoid()).numpy()
    return y, np.abs(y) * U * (8 + 2 * np.abs(z.numpy())) + 1e-35


def weights_of(columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    w = random.standard_normal((INNER, columns)).astype(np.float32)
    return {"w": w, "c": random.standard_normal(columns).astype(np.float32), "alpha": np.float32(1.5)}


def rows_of(rows: int, seed: int, size: int = INNER) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, size)) * 10.0 ** random.integers(-3, 2, (rows, 1))).astype(np.float32)


def activation_model(form: str, columns: int) -> bytes:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "c"], ["a"]), *FORMS[form]]
    return encoded(nodes, {"x": ["rows", INNER]}, {"b": ["rows", columns]}, weights_of(columns))


def gate_model(form: str, half: int, place: int, split: str = "sizes") -> bytes:
    """Return a product whose half `place` is activated and multiplied with the other one."""
    weights = weights_of(2 * half) | {"sizes": np.array([half, half])}
    names = ["a", "other"] if place == 0 else ["other", "a"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Split", ["p", "sizes"], names, axis=-1)
        if split == "sizes"
        else helper.make_node("Split", ["p"], names, axis=-1, num_outputs=2),
        *FORMS[form],
        helper.make_node("Mul", ["other", "b"], ["y"]),
    ]
    return encoded(nodes, {"x": ["rows", INNER]}, {"y": ["rows", half]}, weights)


def norm_model(op_type: str, size: int, residual: list[int | str] | None, has_bias: bool, keeps_sum: bool) -> bytes:
    """Return a product, the sum with a residual of a shape, if there is one, and a norm."""
    weights = weights_of(size) | {"g": weights_of(size, 1)["c"], "n": weights_of(size, 2)["c"]}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"])]
    inputs, outputs = {"x": ["rows", "length", INNER]}, {"y": None}
    if residual is not None:
        nodes.append(helper.make_node("Add", ["r", "p"], ["sum"]))
        inputs["r"] = residual
        if keeps_sum:
            outputs["sum"] = None
    names = ["p" if residual is None else "sum", "g", *(["n"] if has_bias else [])]
    nodes.append(helper.make_node(op_type, names, ["y"], axis=-1, epsilon=1e-5))
    return encoded(nodes, inputs, outputs, weights)


def encoded(nodes, inputs, outputs, weights) -> bytes:
    content: bytes = model_of(nodes, inputs, outputs, weights).SerializeToString()
    return content


def operators(model: bytes) -> list[str]:
    return [node.op_type for node in parse_model(model).graph.nodes]


def rewritten(model: bytes) -> list[str]:
    """Return the operators of a model whose products, activations, gates and norms are replaced."""
    return operators(
        replace_products(model, Path(), lambda p, f: 1, lambda p, f: 1, PATH, stored=records_of(model)).model
    )


def run(model: bytes, path: str, threads: int = 1, **feeds: np.ndarray) -> list[np.ndarray]:
    outputs: list[np.ndarray] = open_native_session(model, path, threads, products=None).run(None, feeds)
    return outputs


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


@given(st.sampled_from([*FORMS]), st.integers(22, 150), st.integers(1, 70), st.integers(0, 1000))
def test_activation_is_near_pytorchs_and_the_same_on_all_paths(form, columns, rows, seed):
    model, x = activation_model(form, columns), rows_of(rows, seed)
    assert rewritten(model) == [FLOAT_OPERATOR]
    (actual,) = run(model, "scalar", x=x)
    (product,) = run(model, f"scalar,{PRODUCTS_ALONE}", x=x)
    plain = onnx.ModelProto.FromString(model)
    plain.graph.output[0].name = "a"
    (before,) = run(plain.SerializeToString(), "scalar", x=x)
    expected, tolerance = expected_activation(form, before)
    assert (np.abs(actual - expected) <= tolerance).all()
    assert (np.abs(actual - product) <= 1e-6 * np.abs(before) + tolerance).all()  # of onnxruntime
    for path in PATHS:
        assert_same_bits(run(model, path, threads=2, x=x)[0], actual)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
def test_activation_of_extreme_numbers(form, path):
    """Numbers that are not finite are those of PyTorch; the product with the unit matrix leaves them as they are."""
    unit = np.eye(INNER, dtype=np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), *FORMS[form]]
    model = encoded(nodes, {"x": ["rows", INNER]}, {"b": ["rows", INNER]}, weights_of(INNER) | {"w": unit})
    x = np.zeros((8, INNER), np.float32)
    x[:, 0] = [np.nan, 3e38, -3e38, 90, -90, 1e-40, 20, -20]
    (actual,) = run(model, path, x=x)
    with np.errstate(over="ignore"):
        expected, tolerance = expected_activation(form, x)
    np.testing.assert_allclose(actual[1:], expected[1:], rtol=1e-6, atol=np.max(tolerance[1:][np.abs(x[1:]) < 100]))
    assert np.isnan(actual[0, 0])


@pytest.mark.parametrize("bits", [8, 4])
def test_activation_of_an_integer_product(bits):
    """The product has the bits of onnxruntime's operators."""
    proto = onnx.ModelProto.FromString(Product(64, 40, bits).model())
    proto.graph.node.append(helper.make_node("Gelu", ["y"], ["z"]))
    before = proto.SerializeToString()
    proto.graph.output[0].name = "z"
    model, x = proto.SerializeToString(), rows_of(9, 1, 64)[:, None]
    assert rewritten(model) == ["RowQuantizedMatMul"]
    (product,), (actual,) = run(before, "scalar", x=x), run(model, "scalar", x=x)
    expected, tolerance = expected_activation("Gelu", product)
    assert (np.abs(actual - expected) <= tolerance).all()
    for path in PATHS:
        assert_same_bits(run(model, path, x=x)[0], actual)


@given(st.sampled_from([*FORMS]), st.integers(11, 90), st.integers(0, 1), st.integers(1, 40), st.integers(0, 1000))
def test_gate_is_near_pytorchs_and_the_same_on_all_paths(form, half, place, rows, seed):
    model, x = gate_model(form, half, place, "sizes" if seed % 2 else "number"), rows_of(rows, seed)
    assert rewritten(model) == [FLOAT_OPERATOR, NATIVE_GATE]
    proto = onnx.ModelProto.FromString(model)
    proto.graph.output[0].name = "p"
    (product,) = run(proto.SerializeToString(), "scalar", x=x)
    halves = product[:, :half], product[:, half:]
    activated, tolerance = expected_activation(form, halves[place])
    (actual,) = run(model, "scalar", x=x)
    factor = halves[1 - place].astype(np.float64)
    expected = activated * factor
    assert (np.abs(actual - expected) <= tolerance * np.abs(factor) + 2 * U * np.abs(expected) + 1e-35).all()
    for path in PATHS:
        assert_same_bits(run(model, path, threads=2, x=x)[0], actual)


def expected_norm(op_type: str, x: np.ndarray, has_bias: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the norm of rows in float64, and how far a result in float32 may be from it.

    A sum has D / 64 roundings in a lane and six of the tree. The mean is off by so many roundings of the mean
    magnitude, the factor by half of the relative error of the variance, which the error of the mean is a part of.
    """
    size = x.shape[-1]
    weights = weights_of(size, 1)["c"].astype(np.float64), weights_of(size, 2)["c"].astype(np.float64)
    wide, roundings = x.astype(np.float64), size / LANES + 8
    mean = wide.mean(-1, keepdims=True) if op_type == "LayerNormalization" else 0.0
    factor = 1 / np.sqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    mean_error = roundings * U * np.abs(wide).mean(-1, keepdims=True) if op_type == "LayerNormalization" else 0.0
    deviation = (wide - mean) * factor
    relative = (roundings + 6) * U + 2 * mean_error * factor
    tolerance = np.abs(weights[0]) * (np.abs(deviation) * relative + mean_error * factor)
    y = deviation * weights[0] + (weights[1] if has_bias else 0.0)
    return y, tolerance + 2 * U * (np.abs(y) + np.abs(deviation * weights[0]))


@given(
    st.sampled_from(NORMS), st.integers(22, 200), st.integers(1, 40), st.sampled_from(["none", "sum", "hidden"]),
    st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_norm_is_near_the_formula_and_the_same_on_all_paths(op_type, size, rows, residual, has_bias, seed):
    has_bias = has_bias and op_type == "LayerNormalization"
    shape = None if residual == "none" else ["rows", "length", size]
    model = norm_model(op_type, size, shape, has_bias, residual == "sum")
    assert rewritten(model) == [FLOAT_OPERATOR, NATIVE_NORM]
    feeds = {"x": rows_of(rows, seed)[:, None]}
    if shape is not None:
        feeds["r"] = rows_of(rows, seed + 1, size)[:, None]
    actual = run(model, "scalar", **feeds)
    proto = onnx.ModelProto.FromString(model)
    proto.graph.output[0].name = "p"
    (value,) = run(proto.SerializeToString(), "scalar", **feeds)[:1]
    value = value + feeds["r"] if shape is not None else value
    expected, tolerance = expected_norm(op_type, value, has_bias)
    assert (np.abs(actual[0] - expected) <= tolerance).all()
    if residual == "sum":
        assert_same_bits(actual[1], value)
    for path in PATHS:
        for ours, scalars in zip(run(model, path, threads=2, **feeds), actual, strict=True):
            assert_same_bits(ours, scalars)


@pytest.mark.parametrize("path", PATHS)
def test_row_does_not_depend_on_neighbours_or_threads(path):
    rows, size = 400, 100
    x, r = rows_of(rows, 0)[:, None], rows_of(rows, 1, size)[:, None]
    norm = norm_model("LayerNormalization", size, ["rows", "length", size], True, False)
    (together,) = run(norm, path, threads=2, x=x, r=r)
    for row in (0, 7, rows - 1):
        assert_same_bits(run(norm, path, x=x[row : row + 1], r=r[row : row + 1])[0][0], together[row])
    gate = gate_model("Gelu", 300, 0)
    (gated,) = run(gate, path, threads=2, x=x[:, 0])
    assert_same_bits(run(gate, path, x=x[5:6, 0])[0][0], gated[5])


@pytest.mark.parametrize(
    "shape",
    [(1, 6, 40), (3, 1, 40), (6, 40), (40,), (3, 6, 1), (1,), (), (1, 3, 6, 40), (2, 1, 1, 40), (1,) * 6 + (3, 6, 40)],
)
def test_residual_of_another_shape_is_repeated(shape):
    """As NumPy does; the norm is that of the sum."""
    model = norm_model("LayerNormalization", 40, list(shape), True, True)
    random = np.random.default_rng(0)
    x, r = rows_of(18, 0).reshape(3, 6, INNER), random.standard_normal(shape).astype(np.float32)
    y, total = run(model, "scalar", x=x, r=r)
    proto = onnx.ModelProto.FromString(model)
    proto.graph.output[0].name = "p"
    product = run(proto.SerializeToString(), "scalar", x=x, r=r)[0]
    assert_same_bits(total, product + r)
    expected, tolerance = expected_norm("LayerNormalization", total, True)
    assert (np.abs(y - expected) <= tolerance).all()
    for path in PATHS:
        assert_same_bits(run(model, path, x=x, r=r)[0], y)


@pytest.mark.parametrize("path", PATHS)
def test_no_rows_give_no_results(path):
    x = np.zeros((0, INNER), np.float32)
    assert run(gate_model("Gelu", 20, 0), path, x=x)[0].shape == (0, 20)
    assert run(activation_model("Gelu", 30), path, x=x)[0].shape == (0, 30)
    norm = norm_model("LayerNormalization", 40, ["rows", "length", 40], True, True)
    r = np.zeros((0, 2, 40), np.float32)
    assert [y.shape for y in run(norm, path, x=x.reshape(0, 2, INNER), r=r)] == [r.shape, r.shape]


def test_sum_of_two_norms_is_computed_once():
    """The first norm makes the sum, and the second one reads it."""
    proto = onnx.ModelProto.FromString(norm_model("RMSNormalization", 40, ["rows", "length", 40], False, False))
    proto.graph.node.append(helper.make_node("RMSNormalization", ["sum", "c"], ["z"], axis=-1))
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    model, feeds = proto.SerializeToString(), {"x": rows_of(4, 0)[:, None], "r": rows_of(4, 1, 40)[:, None]}
    assert rewritten(model) == [FLOAT_OPERATOR, NATIVE_NORM, NATIVE_NORM]
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    for ours, theirs in zip(run(model, "scalar", **feeds), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def changed(model: bytes, op_type: str, **changes) -> bytes:
    """Return a model in which a node has other attributes; None removes one."""
    proto = onnx.ModelProto.FromString(model)
    (node,) = (node for node in proto.graph.node if node.op_type == op_type)
    for name, value in changes.items():
        for attribute in [a for a in node.attribute if a.name == name]:
            node.attribute.remove(attribute)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))
    return proto.SerializeToString()


def also_read(model: bytes, name: str) -> bytes:
    """Return a model in which a value is a result as well."""
    proto = onnx.ModelProto.FromString(model)
    proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto.SerializeToString()


def as_input(model: bytes, name: str) -> bytes:
    """Return a model in which a caller may replace a weight."""
    proto = onnx.ModelProto.FromString(model)
    proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto.SerializeToString()


def without_number(model: bytes, name: str) -> bytes:
    """Return a model with an attribute of 0 as writers of protobuf's third version write it: without the number."""
    proto = onnx.ModelProto.FromString(model)
    (attribute,) = (a for node in proto.graph.node for a in node.attribute if a.name == name)
    attribute.ClearField("f")
    attribute.ClearField("i")
    return proto.SerializeToString()


def with_weight(model: bytes, name: str, array: np.ndarray) -> bytes:
    proto = onnx.ModelProto.FromString(model)
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return proto.SerializeToString()


NORM = norm_model("LayerNormalization", 40, None, True, False)
GATE = gate_model("Gelu", 20, 0)
UNKNOWN = {
    "an activation of another kind": (changed(activation_model("Gelu", 40), "Gelu", approximate="sine"), "Gelu"),
    "an activation of no kind": (changed(activation_model("Gelu", 40), "Gelu", approximate=""), "Gelu"),
    "a factor of a caller": (as_input(activation_model("Mul, Sigmoid, Mul", 40), "alpha"), "Sigmoid"),
    "a product that is a result": (also_read(activation_model("Relu", 40), "a"), "Relu"),
    "a product with two readers": (also_read(activation_model("Sigmoid, Mul", 40), "a"), "Sigmoid"),
    "a sigmoid that is a result": (also_read(activation_model("Sigmoid, Mul", 40), "s"), "Sigmoid"),
    "a factor of several numbers": (
        with_weight(activation_model("Mul, Sigmoid, Mul", 40), "alpha", np.ones(40, np.float32)), "Sigmoid",
    ),
    "unequal halves": (with_weight(GATE, "sizes", np.array([15, 25])), "Split"),
    "a split of another axis": (changed(GATE, "Split", axis=1), "Split"),
    "halves of fewer numbers": (with_weight(GATE, "sizes", np.array([15, 15])), "Split"),
    "three parts": (changed(gate_model("Gelu", 20, 0, "number"), "Split", num_outputs=3), "Split"),
    "a half that is a result": (also_read(GATE, "other"), "Split"),
    "an activated half that is a result": (also_read(GATE, "b"), "Split"),
    "a norm of another axis": (changed(NORM, "LayerNormalization", axis=1), "LayerNormalization"),
    "a norm in another precision": (changed(NORM, "LayerNormalization", stash_type=10), "LayerNormalization"),
    "a norm with an unknown attribute": (changed(NORM, "LayerNormalization", other=1), "LayerNormalization"),
    "a weight of one number": (with_weight(NORM, "g", np.ones(1, np.float32)), "LayerNormalization"),
    "a bias of one number": (with_weight(NORM, "n", np.ones(1, np.float32)), "LayerNormalization"),
    "a weight of a caller": (as_input(NORM, "g"), "LayerNormalization"),
    "a norm of the axis 0": (
        without_number(changed(NORM, "LayerNormalization", axis=0), "axis"), "LayerNormalization",
    ),
    "a weight of two axes": (with_weight(NORM, "g", np.ones((1, 40), np.float32)), "LayerNormalization"),
    "a bias of another type": (with_weight(NORM, "n", np.ones(40)), "LayerNormalization"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_kernels_do_not_know_stays(name):
    model, op_type = UNKNOWN[name]
    assert op_type in rewritten(model)


def test_norm_whose_weight_is_computed_stays():
    proto = onnx.ModelProto.FromString(NORM)
    proto.graph.node[1].input[1] = "scaled"
    proto.graph.node.insert(1, helper.make_node("Neg", ["g"], ["scaled"]))
    assert "LayerNormalization" in rewritten(proto.SerializeToString())


def test_norm_before_a_scan_stays():
    """onnxruntime infers the shapes of the body's results from that of the norm."""
    body = helper.make_graph(
        [helper.make_node("Add", ["state", "row"], ["next"]), helper.make_node("Identity", ["next"], ["seen"])],
        "body",
        *([helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
          for names in (("state", "row"), ("next", "seen"))),
    )  # fmt: skip
    nodes = [
        helper.make_node("LayerNormalization", ["x", "n"], ["y"], axis=-1),
        helper.make_node("Scan", ["first", "y"], ["last", "rows"], body=body, num_scan_inputs=1),
        helper.make_node("MatMul", ["rows", "w"], ["p"]),
        helper.make_node("Add", ["p", "rows"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "n"], ["z"], axis=-1),
    ]
    weights = {"w": weights_of(INNER)["w"], "n": np.ones(INNER, np.float32)}
    model = encoded(nodes, {"x": ["rows", INNER], "first": [INNER]}, {"z": None}, weights)
    assert rewritten(model) == ["LayerNormalization", "Scan", FLOAT_OPERATOR, NATIVE_NORM]
    feeds = {"x": rows_of(5, 0), "first": np.zeros(INNER, np.float32)}
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    np.testing.assert_allclose(run(model, "scalar", **feeds)[0], plain, rtol=1e-4, atol=1e-4)


def test_sum_that_is_no_residual_stays():
    """A sum of values that no product computes, such as embeddings and positions, may have any shapes."""
    proto = onnx.ModelProto.FromString(norm_model("LayerNormalization", 40, ["rows", "length", 40], True, True))
    proto.graph.node[1].input[1] = "r"
    proto.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, None))
    assert rewritten(proto.SerializeToString()) == [FLOAT_OPERATOR, "Add", NATIVE_NORM]


def test_gate_of_another_value_stays():
    """It may have another type than float32."""
    proto = onnx.ModelProto.FromString(gate_model("Relu", 20, 0))
    proto.graph.node[1].input[0] = "wide"
    proto.graph.node.insert(1, helper.make_node("Cast", ["p"], ["wide"], to=TensorProto.DOUBLE))
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    model, x = proto.SerializeToString(), rows_of(4, 0)
    assert rewritten(model) == [FLOAT_OPERATOR, "Cast", "Split", "Relu", "Mul"]
    assert run(model, "scalar", x=x)[0].dtype == np.float64


@pytest.mark.parametrize(
    ("model", "name"),
    [(NORM, "epsilon"), (activation_model("QuickGelu", 40), "alpha")],
)
def test_attribute_without_its_number_is_zero(model, name):
    model, x = without_number(model, name), rows_of(3, 0) * np.float32(1e-3)
    x = x if name == "alpha" else x[:, None]
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(run(model, "scalar", x=x)[0], plain, rtol=1e-5, atol=1e-6)
    assert not any(name in NORMS for name in rewritten(model))


def test_attribute_that_is_given_twice_is_refused():
    """As onnxruntime does: which of the two holds is unknown."""
    proto = onnx.ModelProto.FromString(activation_model("Gelu, none", 40))
    proto.graph.node[-1].attribute.append(helper.make_attribute("approximate", "tanh"))
    with pytest.raises(Exception, match="approximate"):
        run(proto.SerializeToString(), "scalar", x=rows_of(2, 0))


def test_unequal_halves_of_three_numbers_are_repeated():
    """The first has two numbers and the second one, which Mul repeats."""
    weights = {"w": np.random.default_rng(0).standard_normal((512, 3)).astype(np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Split", ["p"], ["a", "other"], axis=-1, num_outputs=2),
        *FORMS["Relu"],
        helper.make_node("Mul", ["other", "b"], ["y"]),
    ]
    model, x = encoded(nodes, {"x": ["rows", 512]}, {"y": None}, weights), rows_of(4, 0, 512)
    product = x @ weights["w"]
    np.testing.assert_allclose(run(model, "scalar", x=x)[0], product[:, :2].clip(0) * product[:, 2:], rtol=1e-4)


def test_default_attributes_are_those_of_the_operator():
    model = changed(NORM, "LayerNormalization", axis=None, epsilon=None)
    x = rows_of(3, 0)[:, None] * np.float32(1e-3)
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(run(model, "scalar", x=x)[0], plain, rtol=1e-5, atol=1e-6)


def test_other_operators_stay_with_products_alone():
    path = f"scalar,{PRODUCTS_ALONE}"
    assert kernels_of(path).attention_path is None
    model, x = gate_model("Gelu", 20, 1), rows_of(5, 0)
    kept = replace_products(model, Path(), lambda p, f: 1, lambda p, f: 1)
    assert (operators(kept.model), kept.elementwise) == ([FLOAT_OPERATOR, "Split", "Gelu", "Mul"], 0)
    np.testing.assert_allclose(run(model, path, x=x)[0], run(model, "scalar", x=x)[0], rtol=1e-3, atol=1e-5)


ALPHAS = Activation(ActivationKind.GELU).attributes()
REFUSED = [
    (NATIVE_NORM, {"path": 99, "epsilon": 1e-5, "root_mean_square": 0}, {}, "lacks the path"),
    (NATIVE_NORM, {"path": PATH, "epsilon": 1e-5, "root_mean_square": 0}, {"g": (41,)}, "for each number of a row"),
    (NATIVE_NORM, {"path": PATH, "epsilon": 1e-5, "root_mean_square": 0}, {"r": (3, 40)}, "must have the same shape"),
    (NATIVE_NORM, {"path": PATH, "epsilon": 1e-5, "root_mean_square": 0}, {"g": (1, 40)}, "for each number of a row"),
    (NATIVE_GATE, {"path": PATH, "first": 0, **ALPHAS}, {"x": (2, 41)}, "an even length"),
    (NATIVE_GATE, {"path": PATH, "first": 0, **ALPHAS}, {"x": ()}, "1 to 32 axes"),
    (NATIVE_GATE, {"path": -1, "first": 0, **ALPHAS}, {}, "lacks the path"),
    (NATIVE_GATE, {"path": PATH, "first": 0, **ALPHAS, "activation": 5}, {}, "no such activation"),
    (NATIVE_GATE, {"path": PATH, "first": 0, **ALPHAS, "activation": -1}, {}, "no such activation"),
]


@pytest.mark.parametrize(("op_type", "attributes", "shapes", "words"), REFUSED)
def test_inputs_that_do_not_fit_are_refused(op_type, attributes, shapes, words):
    assert KERNELS is not None
    shapes = {"x": (2, 40), **({"r": (2, 40), "g": (40,)} if op_type == NATIVE_NORM else {}), **shapes}
    node = helper.make_node(op_type, [*shapes], ["y"], domain=DOMAIN, **attributes)
    model = model_of([node], {name: [None] * len(shape) for name, shape in shapes.items()}, {"y": None}, {})
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(KERNELS.file))
    with pytest.raises(Exception, match=words):
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
            None, {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        )
