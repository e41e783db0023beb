"""Activations with fixed scales: against numpy, each row for itself, clipped, in fewer steps, and learnt from data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tformer_export.calibration.samples import Samples, single_pass_sample
from tformer_export.common.onnx_writer import save
from tformer_export.compile import analyse
from tformer_export.quantize import BitPlanner, StaticScale, quantize
from tformer_export.quantize.fixed_ranges import _fit_range, learn_static_scales
from tformer_export.quantize.output_quality import read_vectors
from tformer_export.quantize.rounding.round_nearest import per_column
from tformer_export.quantize.simulate import Simulation
from tformer_export.sources.torch_module import from_module
from tformer_runtime.engine.engine import Engine

INNER, COLUMNS = 48, 40
STEPS = StaticScale(0.05, 70)


def product(before=None, gemm=False):
    """x → (an operator) → W, with a bias."""
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


def rewritten(proto, steps, on_cpu):
    model = ir.from_proto(proto)
    made = quantize(model, on_cpu=on_cpu, static_scales={"product": steps})
    return ir.to_proto(model), made


def run(proto, x, options=None):
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, {"x": x})[0]


def expected(proto, x, steps):
    """In integers, by numpy."""
    w, b = (numpy_helper.to_array(t) for t in proto.graph.initializer)
    held, scale = per_column(w)
    q = (np.rint(x / np.float32(steps.scale)) + steps.zero).clip(0, 255).astype(np.int64)
    return ((q - steps.zero) @ held.astype(np.int64)).astype(np.float64) * steps.scale * scale + b


def drawn(rows=7, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, INNER)).astype(np.float32)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("gemm", [True, False])
def test_products_are_those_of_integers(on_cpu, gemm):
    proto = product(gemm=gemm)
    after, made = rewritten(proto, STEPS, on_cpu)
    found = run(after, drawn())
    np.testing.assert_allclose(found, expected(proto, drawn(), STEPS), rtol=1e-5, atol=1e-5)
    kinds = [node.op_type for node in after.graph.node]
    if on_cpu:
        assert kinds == ["QuantizeLinear", "MatMulIntegerToFloat"]
    else:
        assert {node.domain for node in after.graph.node} == {""}
    assert {"Abs", "ReduceMax", "Max"}.isdisjoint(kinds)
    assert (made.fixed, made.by_row, made.products["product"].fixed) == (1, 0, True)


def test_a_row_is_its_own_and_what_is_too_loud_is_clipped():
    after, _ = rewritten(product(), STEPS, True)
    x = drawn()
    together = run(after, x)
    assert all(np.array_equal(run(after, x[i : i + 1])[0], together[i]) for i in range(len(x)))
    loud = x.copy()
    loud[2] *= 100
    clipped = x.copy()
    clipped[2] = loud[2].clip(STEPS.scale * -STEPS.zero, STEPS.scale * (255 - STEPS.zero))
    found = run(after, loud)
    assert np.array_equal(np.delete(found, 2, 0), np.delete(together, 2, 0))
    assert np.array_equal(found, run(after, clipped))
    assert not np.allclose(found[2], together[2], atol=1)


def test_a_relu_is_made_by_clipping():
    proto = product("Relu")
    after, _ = rewritten(proto, StaticScale(0.02, 0), True)
    assert "Relu" not in [node.op_type for node in after.graph.node]
    right = expected(proto, np.maximum(drawn(), 0), StaticScale(0.02, 0))
    np.testing.assert_allclose(run(after, drawn()), right, rtol=1e-5, atol=1e-5)


def test_no_rows():
    for on_cpu in (True, False):
        assert run(rewritten(product(), STEPS, on_cpu)[0], drawn(0)).shape == (0, COLUMNS)


@given(st.floats(-1e3, 0, width=32), st.floats(2.0**-10, 1e3, width=32))
def test_a_range_is_covered_by_its_steps(least, most):
    fixed = StaticScale.between(least, most)
    x = np.linspace(least, most, 1001).astype(np.float32)
    q = np.rint(x / np.float32(fixed.scale)) + fixed.zero
    assert q.min() >= -1  # a step is lost at an end, for zero has to be one
    assert q.max() <= 256
    assert np.abs(fixed.round(x) - x).max() <= fixed.scale * 1.01
    assert fixed.round(np.zeros(1, np.float32)) == 0


# -- learnt from data --------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH, LOUD, CHANNEL = 60, 32, 3, 5


class Small(nn.Module):
    """first reads embeddings, of which one is far louder; expand, a norm with a loud channel that it alone reads;
    contract, a Relu's result with a loud channel; out, a norm with a channel that is loud after one id, and that is
    added, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.spike = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        with torch.no_grad():
            self.embed.weight[LOUD] *= 200
            self.contract.weight[CHANNEL], self.contract.bias[CHANNEL] = 0.0, 0.0
            self.spike.weight.zero_()[LOUD, CHANNEL] = 8.0
            self.expand.weight[CHANNEL] *= 16.0
            self.contract.weight[:, CHANNEL] /= 16.0
            for norm in self.norms:
                norm.weight[CHANNEL] = 40.0

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
        self.engine = self.written(self.model.clone(), "float.onnx")
        with torch.no_grad():
            self.expected = np.concatenate([self.module(torch.tensor(s.request["src"])[None])[0] for s in self.samples])

    def written(self, model, name, **changes):
        written = save(model, replace(self.manifest, **changes), self.folder / name)
        return Engine(written, device="cpu", threads=1)

    def error(self, engine):
        """Mean square, of what PyTorch gives."""
        return float(np.square(read_vectors(engine, self.samples) - self.expected).mean())


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("fixed"))


@pytest.fixture(scope="module")
def learnt(case):
    model = case.model.clone()
    return model, learn_static_scales(model, case.manifest, case.samples, case.folder / "operands.onnx")


def nodes(model):
    return [node for graph in (model.graph, *model.graph.subgraphs()) for node in graph]


def test_what_is_fixed_and_what_is_scaled_by_row(case, learnt):
    model, fixed = learnt
    kinds = {}
    for node in nodes(model):
        if node.op_type in ("MatMul", "Gemm"):
            kinds[node.name] = node.inputs[0].producer().op_type
    assert sorted(kinds.values()) == ["Gather", "LayerNormalization", "Mul", "Mul"]
    assert {kinds[name] for name in fixed} == set(kinds.values()) - {"Gather"}  # which has loud rows
    more = [node for node in nodes(model) if node.op_type == "Mul" and str(node.name).endswith(".divided")]
    divided = {node.inputs[0].producer().op_type: node for node in more}
    assert set(divided) == {"LayerNormalization", "Relu"}  # a norm that is added too; its neighbour's gain is divided
    assert len(divided["LayerNormalization"].inputs[0].uses()) == 2
    relu = next(name for name in fixed if divided["Relu"] in graph_of(model, name))
    assert fixed[relu].zero == 0  # no steps are spent below zero


def graph_of(model, name):
    """What makes the operand of a product."""
    return [node.inputs[0].producer() for node in nodes(model) if node.name == name]


def test_dividing_channels_changes_no_float(case, learnt):
    engine = case.written(learnt[0].clone(), "divided.onnx")
    np.testing.assert_allclose(read_vectors(engine, case.samples), case.expected, rtol=1e-4, atol=1e-4)


def test_results_are_as_near_to_pytorch_s_as_row_by_row(case, learnt):
    files = {"rows": (case.model.clone(), {}), "fixed": (learnt[0].clone(), learnt[1])}
    whole = StaticScale.between(-250, 250)  # what the loudest channel would need
    files["plain"] = case.model.clone(), dict.fromkeys(learnt[1], whole)
    errors = {}
    for name, (model, fixed) in files.items():
        made = quantize(model, on_cpu=True, static_scales=fixed)
        errors[name] = case.error(case.written(model, f"{name}.onnx", quantization="int8"))
        assert (made.fixed, made.by_row) == ((0, 4) if name == "rows" else (3, 1))
    assert 0 < errors["fixed"] < 2 * errors["rows"]
    assert errors["fixed"] < errors["plain"] / 4


def test_a_simulation_is_the_file_but_for_float_rounding(case):
    planner = BitPlanner(case.model, case.manifest, case.engine, lambda: Samples((), case.samples), case.folder)
    planner.learn_static_scales(case.samples)
    simulation = Simulation(
        planner.model, case.manifest, planner.rounding.dequantize, case.folder / "sim.onnx", planner.static_scales
    )
    simulation.set_bits({matrix.name: 8 for matrix in simulation.matrices})
    model = planner.model.clone()
    plan = planner.uniform(8)
    quantize(model, plan.bits, integers=plan.integers, on_cpu=True, static_scales=planner.static_scales)
    engine = case.written(model, "file.onnx", quantization="int8")
    simulated, found = (read_vectors(e, case.samples) for e in (simulation.engine, engine))
    moved = np.sqrt(np.mean((simulated - found) ** 2))
    assert moved < 0.05 * np.sqrt(case.error(engine))


def test_extremes_that_are_rare_are_clipped(case):
    """The range of least squared error for a few numbers far out is narrower, and errs by less."""
    random = np.random.default_rng(0)
    rows = random.standard_t(4, (4000, WIDTH)).astype(np.float32)
    importance = np.ones(WIDTH)
    found = _fit_range(rows, rows.min(), rows.max(), importance, None)
    widest = StaticScale.between(rows.min(), rows.max())
    assert found.scale < 0.9 * widest.scale
    assert np.square(found.round(rows) - rows).mean() < 0.9 * np.square(widest.round(rows) - rows).mean()
    assert _fit_range(np.abs(rows), 0, np.abs(rows).max(), importance, 0.0).zero == 0
    row, channel = divmod(int(rows.argmax()), WIDTH)
    importance[channel] = 1e6  # must not be clipped
    kept = _fit_range(rows, rows.min(), rows.max(), importance, None)
    assert kept.round(rows)[row, channel] == pytest.approx(rows.max(), rel=0.03)
    assert found.round(rows)[row, channel] < 0.9 * rows.max()
