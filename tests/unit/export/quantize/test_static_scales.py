"""Activations with static scales: integer products, clipping and ranges that are learnt from data, against numpy and
PyTorch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tformer_export.calibration.samples import Samples, single_pass_sample
from tformer_export.common.onnx_writer import save
from tformer_export.compile import analyse
from tformer_export.quantize import BitPlanner, StaticScale, quantize_weights
from tformer_export.quantize.fixed_ranges import fit_range, learn_static_scales
from tformer_export.quantize.output_quality import read_vectors
from tformer_export.quantize.rounding.round_nearest import per_column
from tformer_export.quantize.simulate import Simulation
from tformer_export.sources.torch_module import from_module
from tformer_runtime.engine.engine import Engine

INNER, COLUMNS = 48, 40
STEPS = StaticScale(0.05, 70)


def product(before=None, gemm=False):
    """Return x → (an operator) → W, with a bias."""
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((INNER, COLUMNS)), "b": random.standard_normal(COLUMNS)}
    nodes = [helper.make_node(before, ["x"], ["a"])] if before else []
    read = "a" if before else "x"
    if gemm:
        nodes.append(helper.make_node("Gemm", [read, "w", "b"], ["y"], name="product"))
    else:
        nodes.append(helper.make_node("MatMul", [read, "w"], ["p"], name="product"))
        nodes.append(helper.make_node("Add", ["p", "b"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", INNER])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", COLUMNS])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def quantize_product(proto, steps, on_cpu):
    model = ir.from_proto(proto)
    quantization = quantize_weights(model, on_cpu=on_cpu, static_scales={"product": steps})
    return ir.to_proto(model), quantization


def run(proto, x, options=None):
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, {"x": x})[0]


def expected(proto, x, steps):
    """Return the result of integer arithmetic by numpy."""
    w, b = (numpy_helper.to_array(t) for t in proto.graph.initializer)
    integers, scale = per_column(w)
    q = (np.rint(x / np.float32(steps.scale)) + steps.zero).clip(0, 255).astype(np.int64)
    return ((q - steps.zero) @ integers.astype(np.int64)).astype(np.float64) * steps.scale * scale + b


def random_inputs(rows=7, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, INNER)).astype(np.float32)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("gemm", [True, False])
def test_products_match_integer_arithmetic(on_cpu, gemm):
    proto = product(gemm=gemm)
    after, quantization = quantize_product(proto, STEPS, on_cpu)
    actual = run(after, random_inputs())
    np.testing.assert_allclose(actual, expected(proto, random_inputs(), STEPS), rtol=1e-5, atol=1e-5)
    kinds = [node.op_type for node in after.graph.node]
    if on_cpu:
        assert kinds == ["QuantizeLinear", "MatMulIntegerToFloat"]
    else:
        assert {node.domain for node in after.graph.node} == {""}
    assert {"Abs", "ReduceMax", "Max"}.isdisjoint(kinds)
    assert (quantization.static_scales, quantization.row_scales, quantization.products["product"].static_scale) == (
        1,
        0,
        True,
    )


def test_rows_are_independent_and_large_activations_are_clipped():
    after, _ = quantize_product(product(), STEPS, True)
    x = random_inputs()
    batch = run(after, x)
    assert all(np.array_equal(run(after, x[i : i + 1])[0], batch[i]) for i in range(len(x)))
    with_loud_row = x.copy()
    with_loud_row[2] *= 100
    with_clipped_row = x.copy()
    with_clipped_row[2] = with_loud_row[2].clip(STEPS.scale * -STEPS.zero, STEPS.scale * (255 - STEPS.zero))
    actual = run(after, with_loud_row)
    assert np.array_equal(np.delete(actual, 2, 0), np.delete(batch, 2, 0))
    assert np.array_equal(actual, run(after, with_clipped_row))
    assert not np.allclose(actual[2], batch[2], atol=1)


def test_relu_is_replaced_by_clipping():
    proto = product("Relu")
    after, _ = quantize_product(proto, StaticScale(0.02, 0), True)
    assert "Relu" not in [node.op_type for node in after.graph.node]
    reference = expected(proto, np.maximum(random_inputs(), 0), StaticScale(0.02, 0))
    np.testing.assert_allclose(run(after, random_inputs()), reference, rtol=1e-5, atol=1e-5)


def test_empty_batch_is_computed():
    for on_cpu in (True, False):
        assert run(quantize_product(product(), STEPS, on_cpu)[0], random_inputs(0)).shape == (0, COLUMNS)


@given(st.floats(-1e3, 0, width=32), st.floats(2.0**-10, 1e3, width=32))
def test_steps_cover_the_range(low, high):
    fixed = StaticScale.between(low, high)
    x = np.linspace(low, high, 1001).astype(np.float32)
    q = np.rint(x / np.float32(fixed.scale)) + fixed.zero
    assert q.min() >= -1  # zero must be a step, which costs a step at one end
    assert q.max() <= 256
    assert np.abs(fixed.round(x) - x).max() <= fixed.scale * 1.01
    assert fixed.round(np.zeros(1, np.float32)) == 0


# -- learnt from data --------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH, LOUD_ID, LOUD_CHANNEL = 60, 32, 3, 5


class Small(nn.Module):
    """A model with an outlier in each operand.

    `first` reads embeddings with one loud row. `expand` alone reads a norm with a loud channel. `contract` reads a Relu
    with a loud channel. `out` reads a norm with a channel that is loud after one id.
    """

    def __init__(self):
        super().__init__()
        self.embed, self.spike = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        with torch.no_grad():
            self.embed.weight[LOUD_ID] *= 200
            self.contract.weight[LOUD_CHANNEL], self.contract.bias[LOUD_CHANNEL] = 0.0, 0.0
            self.spike.weight.zero_()[LOUD_ID, LOUD_CHANNEL] = 8.0
            self.expand.weight[LOUD_CHANNEL] *= 16.0
            self.contract.weight[:, LOUD_CHANNEL] /= 16.0
            for norm in self.norms:
                norm.weight[LOUD_CHANNEL] = 40.0

    def forward(self, src):
        x = self.norms[0](self.first(self.embed(src)))
        x = self.norms[1](self.contract(torch.relu(self.expand(x))) + self.spike(src))
        return self.out(x) + x


class Case:
    def __init__(self, folder):
        torch.manual_seed(0)
        self.module, self.folder = Small().eval(), folder
        ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
        compiled = analyse(from_module(self.module, {"src": ids}, None), "cpu").compile()
        self.model, self.manifest = compiled.model, compiled.manifest
        random = np.random.default_rng(0)
        self.samples = [single_pass_sample({"src": random.integers(0, VOCABULARY, 12)}) for _ in range(80)]
        self.engine = self.write_engine(self.model.clone(), "float.onnx")
        with torch.no_grad():
            self.expected = np.concatenate([self.module(torch.tensor(s.request["src"])[None])[0] for s in self.samples])

    def write_engine(self, model, name, **changes):
        path = save(model, replace(self.manifest, **changes), self.folder / name)
        return Engine(path, device="cpu", threads=1)

    def error(self, engine):
        """Return the mean squared error against PyTorch."""
        return float(np.square(read_vectors(engine, self.samples) - self.expected).mean())


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("fixed"))


@pytest.fixture(scope="module")
def learned_scales(case):
    model = case.model.clone()
    return model, learn_static_scales(model, case.manifest, case.samples, case.folder / "operands.onnx")


def nodes(model):
    return [node for graph in (model.graph, *model.graph.subgraphs()) for node in graph]


def test_operands_with_loud_rows_are_scaled_by_row(case, learned_scales):
    model, scales = learned_scales
    kinds = {}
    for node in nodes(model):
        if node.op_type in ("MatMul", "Gemm"):
            kinds[node.name] = node.inputs[0].producer().op_type
    assert sorted(kinds.values()) == ["Gather", "LayerNormalization", "Mul", "Mul"]
    assert {kinds[name] for name in scales} == set(kinds.values()) - {"Gather"}  # an embedding with loud rows
    divisions = [node for node in nodes(model) if node.op_type == "Mul" and str(node.name).endswith(".divided")]
    divided = {node.inputs[0].producer().op_type: node for node in divisions}
    assert set(divided) == {
        "LayerNormalization",
        "Relu",
    }  # the norm has a second reader; the gain of the other norm is divided in place
    assert len(divided["LayerNormalization"].inputs[0].uses()) == 2
    relu = next(name for name in scales if divided["Relu"] in operand_producers(model, name))
    assert scales[relu].zero == 0  # no steps are spent below zero


def operand_producers(model, name):
    """Return the producers of the operand of a product."""
    return [node.inputs[0].producer() for node in nodes(model) if node.name == name]


def test_dividing_channels_preserves_float_results(case, learned_scales):
    engine = case.write_engine(learned_scales[0].clone(), "divided.onnx")
    np.testing.assert_allclose(read_vectors(engine, case.samples), case.expected, rtol=1e-4, atol=1e-4)


def test_static_scales_are_as_near_to_pytorch_as_row_scales(case, learned_scales):
    files = {"rows": (case.model.clone(), {}), "fixed": (learned_scales[0].clone(), learned_scales[1])}
    full_range = StaticScale.between(-250, 250)  # the range of the loudest channel
    files["plain"] = case.model.clone(), dict.fromkeys(learned_scales[1], full_range)
    errors = {}
    for name, (model, fixed) in files.items():
        quantization = quantize_weights(model, on_cpu=True, static_scales=fixed)
        errors[name] = case.error(case.write_engine(model, f"{name}.onnx", quantization="int8"))
        assert (quantization.static_scales, quantization.row_scales) == ((0, 4) if name == "rows" else (3, 1))
    assert 0 < errors["fixed"] < 2 * errors["rows"]
    assert errors["fixed"] < errors["plain"] / 4


def test_simulation_matches_file_up_to_float_rounding(case):
    planner = BitPlanner(case.model, case.manifest, case.engine, lambda: Samples((), case.samples), case.folder)
    planner.learn_static_scales(case.samples)
    simulation = Simulation(
        planner.model, case.manifest, planner.rounding.dequantize, case.folder / "sim.onnx", planner.static_scales
    )
    simulation.set_bits({matrix.name: 8 for matrix in simulation.matrices})
    model = planner.model.clone()
    plan = planner.uniform(8)
    quantize_weights(model, plan.bits, integers=plan.integers, on_cpu=True, static_scales=planner.static_scales)
    engine = case.write_engine(model, "file.onnx", quantization="int8")
    simulated, actual = (read_vectors(e, case.samples) for e in (simulation.engine, engine))
    difference = np.sqrt(np.mean((simulated - actual) ** 2))
    assert difference < 0.05 * np.sqrt(case.error(engine))


def test_rare_extremes_are_clipped(case):
    """The range of least squared error is narrower than the full range, and has a smaller error."""
    random = np.random.default_rng(0)
    rows = random.standard_t(4, (4000, WIDTH)).astype(np.float32)
    importance = np.ones(WIDTH)
    actual = fit_range(rows, rows.min(), rows.max(), importance, None)
    widest = StaticScale.between(rows.min(), rows.max())
    assert actual.scale < 0.9 * widest.scale
    assert np.square(actual.round(rows) - rows).mean() < 0.9 * np.square(widest.round(rows) - rows).mean()
    assert fit_range(np.abs(rows), 0, np.abs(rows).max(), importance, 0.0).zero == 0
    row, channel = divmod(int(rows.argmax()), WIDTH)
    importance[channel] = 1e6  # an important channel must not be clipped
    kept = fit_range(rows, rows.min(), rows.max(), importance, None)
    assert kept.round(rows)[row, channel] == pytest.approx(rows.max(), rel=0.03)
    assert actual.round(rows)[row, channel] < 0.9 * rows.max()
