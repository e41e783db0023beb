"""The half-precision pass: which nodes compute in half, which in float32, and refused options.

The reference is PyTorch. The CPU runs models that `passes/half/emulate_half_on_cpu.py` has rewritten."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tformer_export import export
from tformer_export.passes.half import emulate_half_on_cpu
from tformer_export.passes.half.half_precision import HALVES, run
from tformer_runtime.base.errors import OptionError, ParityError, UnsupportedModelError

halves = pytest.mark.parametrize("half", HALVES)
ROUNDOFFS = {"fp16": 2.0**-11, "bf16": 2.0**-8}
DTYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def make_half_model(nodes, inputs, initializers, half="fp16", shape=("n", 4)):
    """Return a model in half with the output y. inputs: name → (numpy type, shape); initializers: name → array."""
    kinds = {np.float32: TensorProto.FLOAT, np.int64: TensorProto.INT64, np.bool_: TensorProto.BOOL}
    graph = helper.make_graph(
        [helper.make_node(op, operands, [result], **attributes) for op, operands, result, attributes in nodes],
        "test",
        [helper.make_tensor_value_info(name, kinds[kind], size) for name, (kind, size) in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    run(model, HALVES[half])
    return model


def output_dtype(model, op):
    """Return the type of the output of the only node with this operator."""
    (node,) = [node for node in model.graph if node.op_type == op]
    return node.outputs[0].dtype


def run_on_cpu(model, **feeds):
    emulate_half_on_cpu.run(model)
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(["y"], feeds)[0]


@halves
def test_products_are_in_half_and_outputs_in_float32(half):
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    model = make_half_model([("MatMul", ["x", "w"], "y", {})], {"x": (np.float32, ("n", 4))}, {"w": weight}, half)
    assert output_dtype(model, "MatMul") == DTYPES[half]
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    actual = run_on_cpu(model, x=x)
    assert actual.dtype == np.float32
    kind = DTYPES[half].numpy()
    exact = x.astype(kind).astype(np.float32) @ weight.astype(kind).astype(np.float32)
    np.testing.assert_allclose(actual, exact, rtol=ROUNDOFFS[half] * 1.01, atol=0)
    assert (actual != exact).any()  # each product is rounded


@halves
def test_cpu_emulation_matches_pytorch(half):
    """The result of each operator is rounded once."""
    kind = HALVES[half].torch_dtype
    random = np.random.default_rng(3)
    x, weight, bias = (random.standard_normal(size).astype(np.float32) for size in ((5, 4), (4, 4), (4,)))
    model = make_half_model(
        [("MatMul", ["x", "w"], "h", {}), ("Add", ["h", "b"], "s", {}), ("Relu", ["s"], "y", {})],
        {"x": (np.float32, ("n", 4))},
        {"w": weight, "b": bias},
        half,
    )
    x, weight, bias = (torch.from_numpy(array).to(kind) for array in (x, weight, bias))
    product = (x.double() @ weight.double()).to(kind)
    expected = torch.relu((product.double() + bias.double()).to(kind))
    np.testing.assert_array_equal(run_on_cpu(model, x=x.float().numpy()), expected.float().numpy())
    assert {node.op_type for node in model.graph} == {"Cast", "MatMul", "Add", "Relu"}


@pytest.mark.parametrize(("half", "expected"), [("fp16", ir.DataType.FLOAT16), ("bf16", ir.DataType.FLOAT)])
def test_operators_without_half_kernel_use_float32_until_next_product(half, expected):
    model = make_half_model(
        [
            ("MatMul", ["x", "w"], "h", {}),
            ("Clip", ["h", "low", "high"], "c", {}),
            ("Neg", ["c"], "n", {}),
            ("MatMul", ["n", "w2"], "y", {}),
        ],
        {"x": (np.float32, ("n", 4))},
        {
            "w": np.eye(4, dtype=np.float32), "w2": np.eye(4, dtype=np.float32),
            "low": np.float32(-1), "high": np.float32(1),
        },
        half,
    )  # fmt: skip
    assert output_dtype(model, "Clip") == output_dtype(model, "Neg") == expected
    assert {node.outputs[0].dtype for node in model.graph if node.op_type == "MatMul"} == {DTYPES[half]}
    np.testing.assert_array_equal(run_on_cpu(model, x=np.array([[0.5, 3, -2, 0]], np.float32)), [[-0.5, -1, 1, 0]])


def test_product_without_half_kernel_uses_float32():
    nodes = [("Einsum", ["x", "w"], "y", {"equation": "ab,bc->ac"})]
    initializers = {"w": np.full((4, 4), 0.1, np.float32)}
    for half, expected in (("fp16", ir.DataType.FLOAT16), ("bf16", ir.DataType.FLOAT)):
        assert (
            output_dtype(make_half_model(nodes, {"x": (np.float32, ("n", 4))}, initializers, half), "Einsum")
            == expected
        )


@halves
def test_rounding_error_is_added_to_exact_weights_too(half):
    """The errors are uniform, up to the roundoff of each number."""
    precision, random = HALVES[half], torch.Generator().manual_seed(0)
    assert precision.roundoff == ROUNDOFFS[half] == torch.finfo(precision.torch_dtype).eps / 2
    generic = torch.exp2(6 * torch.rand(200, 200, generator=random) - 3)
    for weight in (generic, generic.to(precision.torch_dtype).float()):
        error = ((precision.add_rounding_error(weight, random) - weight) / weight).abs()
        assert error.max() <= ROUNDOFFS[half] * 1.02
        # Mantissas m from 1 to 2 are spread as 1 / m here, so the mean is roundoff / 2 · E[1 / m] = roundoff / 4 ln 2.
        assert error.mean() == pytest.approx(ROUNDOFFS[half] / (4 * np.log(2)), rel=0.03)


@halves
def test_squares_beyond_half_range_are_summed_in_float32(half):
    """A norm by hand, √(mean(x²)): x is 300 and x² exceeds 65504."""
    axes, two, weight = np.array([-1]), np.array(2.0, np.float32), np.eye(4, dtype=np.float32)
    model = make_half_model(
        [
            ("MatMul", ["x", "w"], "h", {}),
            ("Pow", ["h", "two"], "square", {}),
            ("ReduceMean", ["square", "axes"], "mean", {}),
            ("Sqrt", ["mean"], "root", {}),
            ("Div", ["h", "root"], "y", {}),
        ],
        {"x": (np.float32, ("n", 4))},
        {"w": weight, "two": two, "axes": axes},
        half,
    )
    assert output_dtype(model, "MatMul") == DTYPES[half]
    assert output_dtype(model, "Div") == ir.DataType.FLOAT
    x = np.array([[300.0, -300.0, 300.0, 300.0]], np.float32)
    np.testing.assert_allclose(run_on_cpu(model, x=x), [[1, -1, 1, 1]], rtol=1e-3)


@halves
def test_mask_of_lowest_float32_stays_finite(half):
    """Rounded it would become −inf, and a fully masked row would become NaN."""
    low = np.array(np.finfo(np.float32).min)
    model = make_half_model(
        [
            ("MatMul", ["x", "w"], "scores", {}),
            ("Where", ["keep", "zero", "low"], "bias", {}),
            ("Add", ["scores", "bias"], "masked", {}),
            ("Softmax", ["masked"], "share", {}),
            ("MatMul", ["share", "w"], "y", {}),
        ],
        {"x": (np.float32, ("n", 4)), "keep": (np.bool_, ("n", 4))},
        {"w": np.eye(4, dtype=np.float32), "zero": np.zeros((), np.float32), "low": low},
        half,
    )
    assert output_dtype(model, "Softmax") == ir.DataType.FLOAT
    x, keep = np.zeros((2, 4), np.float32), np.array([[True, True, False, False], [False] * 4])
    np.testing.assert_allclose(run_on_cpu(model, x=x, keep=keep), [[0.5, 0.5, 0, 0], [0.25] * 4], atol=1e-3)


@halves
def test_positions_stay_exact(half):
    """Neither float16 nor bfloat16 represents 4097."""
    frequency = np.array([[1.0, 0.5, 0.25, 0.125]], np.float32)
    model = make_half_model(
        [
            ("Cast", ["p"], "f", {"to": TensorProto.FLOAT}),
            ("MatMul", ["f", "w"], "angle", {}),
            ("Sin", ["angle"], "y", {}),
        ],
        {"p": (np.int64, ("n", 1))},
        {"w": frequency},
        half,
    )
    p = np.array([[4097], [60001]])
    np.testing.assert_allclose(run_on_cpu(model, p=p), np.sin(p * frequency.astype(np.float64)), atol=5e-3)


def test_weight_beyond_half_range_is_refused():
    weight = np.full((4, 4), 1e5, np.float32)
    with pytest.raises(UnsupportedModelError, match=r"weight w holds numbers beyond 65504.*choose bf16 or fp32"):
        make_half_model([("MatMul", ["x", "w"], "y", {})], {"x": (np.float32, ("n", 4))}, {"w": weight})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "fp16 is for the target cuda"),
        ({"precision": "bf16"}, "bf16 is for the target cuda"),
        ({"precision": "fp8"}, "precision must be one of fp32, fp16, bf16"),
        (
            {"quantization": "int3"},
            "quantization must be one of none, int8, int4, mixed, or a Quantization, not 'int3'",
        ),
        ({"precision": "bf16", "target": "cuda", "quantization": "int4"}, "leave out bf16 or int4"),
        ({"precision": "fp16", "target": "cuda", "quantization": "int8"}, "leave out fp16 or int8"),
    ],
)
def test_invalid_precision_or_quantization_raises_option_error(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        export(nn.Linear(4, 4), tmp_path / "m.onnx", {"x": torch.zeros(2, 4)}, **options)


class Cancelling(nn.Module):
    """The result is the small difference of two large products, which rounding of either changes more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(8, 8, bias=False)
        self.other = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.other.weight.copy_(self.one.weight + 1e-3 * torch.randn(8, 8))

    def forward(self, x):
        return self.one(x) - self.other(x)


def test_model_that_is_sensitive_to_rounding_is_refused(tmp_path):
    with pytest.raises(
        ParityError, match=r"rounding the weights to bf16, and nothing else, moves .*choose fp16 or fp32"
    ):
        export(Cancelling(), tmp_path / "m.onnx", {"x": torch.randn(2, 3, 8)}, target="cuda", precision="bf16")
    assert not (tmp_path / "m.onnx").exists()


class LargeValues(nn.Module):
    """Values of about 10⁵, which a norm scales back to 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.out = nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 5)
        with torch.no_grad():
            self.one.weight *= 4e5

    def forward(self, x):
        return self.out(self.norm(self.one(x)))


def test_values_beyond_float16_are_refused_in_fp16_and_exported_in_bf16(tmp_path):
    call = {"example": {"x": torch.randn(2, 3, 64)}, "target": "cuda"}
    with pytest.raises(
        ParityError, match=r"^computed in fp16, .*: choose bf16, which has the range of float32, or fp32$"
    ):
        export(LargeValues(), tmp_path / "m.onnx", **call)
    assert not (tmp_path / "m.onnx").exists()
    parity = export(LargeValues(), tmp_path / "m.onnx", precision="bf16", **call).parity
    assert 1e-4 < parity.relative_error <= parity.tolerance < 0.1


def test_bfloat16_model_keeps_its_weights(tmp_path):
    """The weights are exact in bfloat16, so rounding preserves them. The results of operators are still rounded."""
    module = LargeValues().bfloat16()
    call = {"example": {"x": torch.randn(2, 3, 64).bfloat16()}, "target": "cuda", "precision": "bf16"}
    parity = export(module, tmp_path / "m.onnx", **call).parity
    assert parity.exact_error < 5e-5 < 1e-4 < parity.relative_error <= parity.tolerance < 0.1
    arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer]
    for weight in (module.one.weight, module.out.weight):
        expected = weight.detach().float().numpy()
        assert any(
            array.dtype == ml_dtypes.bfloat16
            and array.shape == expected.T.shape
            and (array.astype(np.float32) == expected.T).all()
            for array in arrays
        )
