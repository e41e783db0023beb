"""Each pass, and each pair of passes, on graphs of random neighbours, with the outputs that onnxruntime gives before.

The parts are the operators that the passes rewrite and those next to them. A part reads any earlier results, so that
what one pass replaces is an operand of the form that another one looks for.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.small_graphs import make_port, model_of

from tformer_export import passes
from tformer_export.common.kernel_choices import DEFAULT_FORMS
from tformer_export.passes import (
    PASSES,
    Pass,
    PassSettings,
    check_graph,
    merge_projections,
    run_passes,
    tie_embeddings,
)
from tformer_runtime.base.errors import UnsupportedModelError

ROWS, NEW, WIDTH, VOCABULARY, CONTEXT_LENGTH = 2, 5, 8, 11, 3
SETTINGS = PassSettings(max_length=128, forms=DEFAULT_FORMS, target="cpu")
REWRITES = {one.name: one.rewrite for one in PASSES}
SEEDS = range(6)
UNUSED = ("packed_weights", "strip_debug_info")  # the graphs hold no integers of a source, and no metadata of torch
CONTRIB = "com.microsoft"
MARGIN = (
    1e-3  # sums in another order, through some ten operators; an operand too many or too few changes the first digit
)


class _Drawing:
    """Draws a model part by part. values: results (rows, new, WIDTH) that later parts may read."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.nodes, self.weights, self.values, self.outputs, self.count = [], {}, ["x"], [], 0
        self.table = self.weight("table", VOCABULARY, WIDTH)
        for name, number in {"half": 0.5, "one": 1.0, "root": 0.5**0.5, "two": 2.0, "epsilon": 1e-5}.items():
            self.weights[name] = np.array(number, np.float32)
        self.weights |= {"flat": np.array([-1, WIDTH]), "back": np.array([-1, NEW, WIDTH]), "last": np.array([-1])}
        self.weights |= {"ends": np.full(ROWS, NEW - 1, np.int32), "total": np.array(NEW, np.int32)}

    def weight(self, name, *shape):
        self.weights[name] = (self.random.standard_normal(shape) / 3).astype(np.float32)
        return name

    def add(self, operator, *inputs, outputs=1, **attributes):
        names = [f"{operator}.{self.count}.{i}" for i in range(outputs)]
        name = f"decode/{operator}.{self.count}"
        self.nodes.append(helper.make_node(operator, inputs, names, name=name, doc_string="a line", **attributes))
        self.count += 1
        return names[0] if outputs == 1 else names

    def product(self, x, width=WIDTH):
        """Return a product of x, half of the time with a bias."""
        result = self.add("MatMul", x, self.weight(f"w{self.count}", WIDTH, width))
        return self.add("Add", result, self.weight(f"b{self.count}", width)) if self.random.random() < 0.5 else result

    def recent(self):
        return self.values[-1 - int(self.random.integers(min(3, len(self.values))))]

    def products(self, x):
        self.values += [self.product(x) for _ in range(self.random.integers(2, 4))]

    def stacked(self, x):
        """Multiply with each matrix of a stack, and take one result."""
        stack, first = self.weight(f"w{self.count}", 2, 1, WIDTH, WIDTH), f"first{self.count}"
        self.weights[first] = np.array(0)
        self.values.append(self.add("Gather", self.add("MatMul", x, stack), first, axis=0))

    def flattened(self, x):
        rows = self.add("Reshape", x, "flat")
        matrix, bias = self.weight(f"w{self.count}", WIDTH, WIDTH), self.weight(f"b{self.count}", WIDTH)
        rows = self.add("Gemm", rows, matrix, bias, transB=int(self.random.integers(2)))
        self.values.append(self.add("Reshape", rows, "back"))

    def reshaped(self, x):
        """Reshape twice, in two steps, and leave a result that nothing reads."""
        rows = self.add("Reshape", self.add("Reshape", x, "flat"), "back")
        self.add("Neg", rows)
        self.values.append(self.add("Add", rows, x))

    def gelu(self, x):
        total = self.add("Add", self.add("Erf", self.add("Mul", x, "root")), "one")
        self.values.append(self.add("Mul", self.add("Mul", x, total), "half"))

    def rms_norm(self, x):
        mean = self.add("ReduceMean", self.add("Pow", x, "two"), "last")
        norm = self.add("Div", x, self.add("Sqrt", self.add("Add", mean, "epsilon")))
        self.values.append(self.add("Mul", norm, self.weight(f"w{self.count}", WIDTH)))

    def norm_of_sum(self, x):
        total = self.add("Add", x, self.recent())
        self.values.append(self.add("LayerNormalization", total, self.weight(f"w{self.count}", WIDTH), axis=-1))
        if self.random.random() < 0.5:
            self.values.append(total)

    def attention(self, x):
        if self.random.random() < 0.5:
            widths = f"widths{self.count}"
            self.weights[widths] = np.array([WIDTH] * 3)
            operands = self.add("Split", self.product(x, 3 * WIDTH), widths, outputs=3, axis=-1)
        else:
            operands = [self.product(x) for _ in range(3)]
        operands = [*operands, "past.0", "past.1", "ends", "total"]
        sizes = {"num_heads": 1, "kv_num_heads": 1, "scale": 0.3}
        self.values.append(self.add("GroupQueryAttention", *operands, outputs=3, domain=CONTRIB, **sizes)[0])

    def context_attention(self, x):
        operands = [self.product(x), "context.0", "context.1"]
        self.values.append(self.add("MultiHeadAttention", *operands, domain=CONTRIB, num_heads=1, scale=0.3))

    def embedded(self, x):
        self.values.append(self.add("Add", x, self.add("Gather", self.table, "ids")))

    def logits(self, x):
        """Project to the vocabulary by the transposed table, which is computed or a weight of its own."""
        turned = f"turned{self.count}"
        if self.random.random() < 0.5:
            self.weights[turned] = np.ascontiguousarray(self.weights[self.table].T)
        else:
            turned = self.add("Transpose", self.table, perm=[1, 0])
        self.outputs.append(self.add("MatMul", x, turned))


PARTS = (
    _Drawing.products, _Drawing.products, _Drawing.flattened, _Drawing.stacked, _Drawing.reshaped, _Drawing.gelu,
    _Drawing.rms_norm, _Drawing.norm_of_sum,
    _Drawing.attention, _Drawing.context_attention, _Drawing.embedded, _Drawing.logits,
)  # fmt: skip


@cache
def draw_model(seed):
    """Return a model with every part in a random order, and its outputs. Some inner results are outputs too."""
    drawing = _Drawing(seed)
    for part in drawing.random.permutation(len(PARTS)):
        PARTS[part](drawing, drawing.recent())
    read = {name for node in drawing.nodes for name in node.input}
    results = [v for v in drawing.values if v != "x" and (v not in read or drawing.random.random() < 0.2)]
    inputs = {"x": ["rows", NEW, WIDTH], "ids": (TensorProto.INT64, ["rows", NEW])}
    inputs |= {f"past.{i}": ["rows", 1, "slots", WIDTH] for i in range(2)}
    inputs |= {f"context.{i}": ["rows", 1, CONTEXT_LENGTH, WIDTH] for i in range(2)}
    outputs = {name: ["rows", NEW, WIDTH] for name in results}
    outputs |= {name: ["rows", NEW, VOCABULARY] for name in drawing.outputs}
    proto = model_of(drawing.nodes, inputs, outputs, drawing.weights)
    inner = [name for name in drawing.values if name not in outputs and name != "x"]
    proto.graph.value_info.extend(make_port(name, ["rows", NEW, WIDTH]) for name in inner)
    described = onnx.shape_inference.infer_shapes(proto)
    return described, outputs_of(ir.from_proto(described))


def outputs_of(model):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    random = np.random.default_rng(7)
    shapes = {"x": (ROWS, NEW, WIDTH)}
    shapes |= {f"past.{i}": (ROWS, 1, 0, WIDTH) for i in range(2)}
    shapes |= {f"context.{i}": (ROWS, 1, CONTEXT_LENGTH, WIDTH) for i in range(2)}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["ids"] = random.integers(0, VOCABULARY, (ROWS, NEW))
    names = {port.name for port in session.get_inputs()}
    return session.run(None, {name: array for name, array in feeds.items() if name in names})


def check_passes(seed, *names):
    proto, expected = draw_model(seed)
    model = ir.from_proto(proto)
    ports = check_graph.ports_of(model)
    check_graph.check_rewrite(model, "none", ports)
    counts = []
    for name in names:
        counts.append(REWRITES[name](model, SETTINGS))
        check_graph.check_rewrite(model, name, ports)
    for actual, wanted in zip(outputs_of(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=MARGIN, err_msg=str(names))
    return counts


@pytest.mark.parametrize("name", REWRITES)
def test_pass_keeps_the_results_of_random_graphs(name):
    counts = [check_passes(seed, name)[0] for seed in SEEDS]
    assert any(counts) or name in UNUSED


@pytest.mark.parametrize("first", REWRITES)
def test_pair_of_passes_keeps_the_results_of_a_random_graph(first):
    for seed, second in enumerate(REWRITES):
        if first != second:
            check_passes(seed % len(SEEDS), first, second)


@pytest.mark.parametrize("target", ["cpu", "portable", "web"])
def test_passes_of_a_file_keep_the_results_of_random_graphs(target):
    for seed in SEEDS:
        proto, expected = draw_model(seed)
        model = ir.from_proto(proto)
        run_passes(model, SETTINGS.max_length, target=target)
        for actual, wanted in zip(outputs_of(model), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=MARGIN)


def model_with(nodes, weights, outputs):
    return ir.from_proto(
        onnx.shape_inference.infer_shapes(
            model_of(nodes, {"x": [ROWS, NEW, WIDTH], "ids": (TensorProto.INT64, [ROWS, NEW])}, outputs, weights)
        )
    )


def weights_of(count, *shape):
    random = np.random.default_rng(0)
    return {f"w{i}": random.standard_normal(shape or (WIDTH, WIDTH)).astype(np.float32) for i in range(count)}


def test_products_of_a_product_that_is_merged_are_merged():
    """The merge of the products of x replaces the value of which the second pair are products."""
    pairs = [("x", "a"), ("x", "b"), ("b", "c"), ("b", "d"), ("d", "e"), ("d", "f")]
    nodes = [helper.make_node("MatMul", [read, f"w{i}"], [made]) for i, (read, made) in enumerate(pairs)]
    model = model_with(nodes, weights_of(len(pairs)), {name: [ROWS, NEW, WIDTH] for name in "acef"})
    expected, ports = outputs_of(model.clone()), check_graph.ports_of(model)
    assert merge_projections.run(model) == 3
    check_graph.check_rewrite(model, "merge_projections", ports)
    for actual, wanted in zip(outputs_of(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-4 * abs(wanted).max())


def test_table_that_is_the_transpose_of_another_table_is_tied_once():
    """Each is a transposed table, and the first that is replaced is gone for the other."""
    weights = weights_of(1, VOCABULARY, VOCABULARY)
    weights["w1"] = np.ascontiguousarray(weights["w0"].T)
    nodes = [helper.make_node("Gather", [f"w{i}", "ids"], [name]) for i, name in enumerate("ab")]
    model = model_with(nodes, weights, {"a": [ROWS, NEW, VOCABULARY], "b": [ROWS, NEW, VOCABULARY]})
    expected, ports = outputs_of(model.clone()), check_graph.ports_of(model)
    assert tie_embeddings.run(model) == 1
    check_graph.check_rewrite(model, "tie_embeddings", ports)
    np.testing.assert_array_equal(outputs_of(model), expected)


def remove_the_first_product(model, settings):
    product = next(node for node in model.graph if node.op_type == "MatMul")
    model.graph.remove(product)


def read_before_it_is_computed(model, settings):
    product = model.graph[0]
    model.graph.remove(product)
    model.graph.append(product)


def use_another_domain(model, settings):
    model.graph[0].domain = "com.unknown"


def use_an_unknown_attribute(model, settings):
    model.graph[0].attributes["epsilon"] = ir.AttrFloat32("epsilon", 1.0)


def add_an_operand(model, settings):
    product = model.graph[0]
    product.resize_inputs(3)
    product.replace_input_with(2, model.graph.inputs[0])


def multiply_integers_and_floats(model, settings):
    model.graph[0].replace_input_with(0, model.graph.inputs[1])


def name_a_value_twice(model, settings):
    model.graph[0].outputs[0].name = "x"


def rename_an_output(model, settings):
    model.graph.outputs[0].name = "another"


def drop_the_numbers_of_a_weight(model, settings):
    model.graph.initializers["w0"].const_value = None


BREAKS = {
    remove_the_first_product: "reads 'a', which no node before it computes",
    read_before_it_is_computed: "reads 'a', which no node before it computes",
    use_another_domain: "domain 'com.unknown'",
    use_an_unknown_attribute: "attribute 'epsilon'",
    add_an_operand: "has 3 inputs",
    multiply_integers_and_floats: "has 'w0' in another type",
    name_a_value_twice: "two values have the name 'x'",
    rename_an_output: "inputs or outputs have other names",
    drop_the_numbers_of_a_weight: "the weight 'w0' has no numbers",
}


@pytest.mark.parametrize("broken", BREAKS)
def test_invalid_graph_names_the_pass_that_made_it(broken, monkeypatch):
    nodes = [helper.make_node("MatMul", ["x", "w0"], ["a"]), helper.make_node("MatMul", ["a", "w1"], ["b"])]
    model = model_with(nodes, weights_of(2), {"b": [ROWS, NEW, WIDTH]})
    one, other = Pass("first", lambda model, settings: 0), Pass("second", lambda *_: broken(*_) or 1)
    monkeypatch.setattr(passes, "PASSES", (one, other, Pass("third", lambda model, settings: 0)))
    with pytest.raises(UnsupportedModelError, match="rewrite second made an invalid graph") as raised:
        run_passes(model, 8)
    assert BREAKS[broken] in str(raised.value)
