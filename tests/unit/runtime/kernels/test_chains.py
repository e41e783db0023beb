"""Chains of native operators give the bits of the same operators apart, and no program of a chain can do harm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.native_attention import Attention
from support.native_products import PATHS, kernels_of, requires_kernels, session_of
from support.small_graphs import model_of

from tformer_export import Quantization
from tformer_runtime import Model
from tformer_runtime.backend.native_kernels import APART, VARIABLE, LoadingProducts
from tformer_runtime.format.onnx_graph import Tensor, parse_model
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.attention_rewrite import NATIVE_CONTEXT_ATTENTION
from tformer_runtime.rewriting.elementwise_rewrite import NATIVE_NORM
from tformer_runtime.rewriting.float_product import FloatProduct
from tformer_runtime.rewriting.operator_chain import CHAIN
from tformer_runtime.rewriting.product_rewrite import DOMAIN

pytestmark = requires_kernels

WIDTH = 32
WORDS = ["hello", "transformer", "a", "kernel"]


def open_rewritten(
    model: bytes, path: str, makes_chains: bool, threads: int = 1
) -> tuple[list[str], onnxruntime.InferenceSession]:
    """Return the operators of a model with native ones, and its session. threads: that may share a batch."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, max(threads, 2)
    with LoadingProducts(kernels_of(path), threads) as loading:
        rewritten = loading.rewrite(model, Path(), makes_chains=makes_chains)
        options.register_custom_ops_library(str(loading.kernels.file))
        session = onnxruntime.InferenceSession(rewritten, options, providers=["CPUExecutionProvider"])
    return [n.op_type for graph in parse_model(rewritten).graph.all_graphs() for n in graph.nodes], session


def open_sessions(
    model: bytes, path: str, threads: int = 1
) -> tuple[dict[str, list[str]], dict[str, onnxruntime.InferenceSession]]:
    """Return name of a form → its operators, and the sessions with operators apart and in chains."""
    operators, sessions = {}, {}
    for form, makes_chains in (("apart", False), ("chains", True)):
        operators[form], sessions[form] = open_rewritten(model, path, makes_chains, threads)
    return operators, sessions


def assert_same_results(sessions: dict[str, onnxruntime.InferenceSession], feeds: dict[str, np.ndarray]) -> None:
    for apart, chained in zip(*(session.run(None, feeds) for session in sessions.values()), strict=True):
        assert apart.shape == chained.shape
        np.testing.assert_array_equal(apart.view(np.int32), chained.view(np.int32))


class RandomGraph:
    """A graph of products, norms and sums, which kernels compute, and of other operators between them."""

    def __init__(self, seed: int, size: int, shape: Sequence[str | int] = ("rows", WIDTH)) -> None:
        """shape: of the input and of all results."""
        self.random = np.random.default_rng(seed)
        self.weights: dict[str, np.ndarray] = {}
        self.nodes = []
        values = ["x"]
        for i in range(size):
            values += self.add(i, values)
        results = {values[-1], *self.random.choice(values[1:], 2).tolist()}
        identities = [helper.make_node("Identity", [name], [f"out.{name}"]) for name in results]
        ports = {"x": [*shape]}, {f"out.{name}": [*shape] for name in results}
        self.model = model_of([*self.nodes, *identities], *ports, self.weights).SerializeToString()

    def draw(self, name: str, *shape: int) -> str:
        self.weights[name] = (self.random.standard_normal(shape) / WIDTH**0.5).astype(np.float32)
        return name

    def add(self, i: int, values: list[str]) -> list[str]:
        """Add an operator, and return the values that it computes."""
        recent = values[-6:]
        a, b = self.random.choice(recent, 2).tolist()
        kind = self.random.choice(["product", "product", "norm", "sum", "other", "branch"])
        y = f"v{i}"
        if kind == "product":
            new = [helper.make_node("MatMul", [a, self.draw(f"w{i}", WIDTH, WIDTH)], [y])]
        elif kind == "norm":
            new = [
                helper.make_node("LayerNormalization", [a, self.draw(f"g{i}", WIDTH), self.draw(f"h{i}", WIDTH)], [y])
            ]
        elif kind == "sum":
            new = [helper.make_node("Add", [a, b], [y])]
        elif kind == "other":
            new = [helper.make_node(str(self.random.choice(["Sin", "Relu", "Tanh"])), [a], [y])]
        else:
            new = self.branch(i, a, b, y)
        self.nodes += new
        return [y]

    def branch(self, i: int, a: str, b: str, y: str) -> list:
        """Return an `If` whose branches read values from outside, as the stages of a file do."""
        self.weights["condition"] = np.array(bool(self.random.integers(2)))
        graphs = []
        for name, operands in (("then", (a, b)), ("else", (b, a))):
            product = helper.make_node(
                "MatMul", [operands[0], self.draw(f"w{i}.{name}", WIDTH, WIDTH)], [f"{y}.{name}.p"]
            )
            norm = [f"{y}.{name}.p", self.draw(f"g{i}.{name}", WIDTH)]
            nodes = [
                product,
                helper.make_node("LayerNormalization", norm, [f"{y}.{name}.n"]),
                helper.make_node("Add", [f"{y}.{name}.n", operands[1]], [f"{y}.{name}"]),
            ]
            out = helper.make_tensor_value_info(f"{y}.{name}", TensorProto.FLOAT, None)
            graphs.append(helper.make_graph(nodes, name, [], [out]))
        then, other = graphs
        return [helper.make_node("If", ["condition"], [y], then_branch=then, else_branch=other)]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 30), rows=st.sampled_from([0, 1, 2, 7]))
def test_random_graph_has_the_same_bits_in_chains(seed, size, rows):
    model = RandomGraph(seed, size).model
    _, sessions = open_sessions(model, PATHS[0])
    x = np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)
    assert_same_results(sessions, {"x": x})


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(10, 30),
    batch=st.sampled_from([1, 2, 3, 8, 31]),
    threads=st.sampled_from([2, 3, 8]),
)
def test_threads_that_share_a_batch_give_the_same_bits(seed, size, batch, threads):
    """Chains have 1,000 weights for each product. So thousands of rows are worth a division of the batch."""
    model = RandomGraph(seed, size, ("batch", "length", WIDTH)).model
    _, sessions = open_sessions(model, PATHS[0], threads)
    x = np.random.default_rng(seed).standard_normal((batch, 4096 // batch, WIDTH)).astype(np.float32)
    assert_same_results(sessions, {"x": x})


def shared_rows_model(shapes: dict[str, list[int | str]]) -> bytes:
    """Return products, and norms of sums with inputs of other shapes, which sequences may share."""
    weights = {"g": np.linspace(0.5, 2, WIDTH, dtype=np.float32)}
    weights |= {f"w{i}": np.random.default_rng(i).standard_normal((WIDTH, WIDTH)).astype(np.float32) for i in range(8)}
    nodes, value = [], "x"
    for i, name in enumerate(shapes):
        nodes += [
            helper.make_node("MatMul", [value, f"w{i}"], [f"p{i}"]),
            helper.make_node("Add", [f"p{i}", name], [f"s{i}"]),
            helper.make_node("LayerNormalization", [f"s{i}", "g"], [f"n{i}"]),
        ]
        value = f"n{i}"
    nodes.append(helper.make_node("MatMul", [value, "w7"], ["y"]))
    inputs = {"x": ["batch", "length", WIDTH], **shapes}
    return model_of(nodes, inputs, {"y": ["batch", "length", WIDTH]}, weights).SerializeToString()


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["rows", "one", "length", "row", "number"]), min_size=1, max_size=7),
    st.sampled_from([1, 2, 4, 5]),
    st.integers(0, 1000),
)
def test_arrays_that_sequences_share_are_not_divided(kinds, batch, seed):
    length = 3000 // batch
    sizes = {
        "rows": [batch, length, WIDTH], "one": [1, length, WIDTH], "length": [length, WIDTH], "row": [WIDTH],
        "number": [batch, 1, WIDTH],
    }  # fmt: skip
    model = shared_rows_model({f"a{i}": sizes[kind] for i, kind in enumerate(kinds)})
    _, sessions = open_sessions(model, PATHS[0], threads=2)
    random = np.random.default_rng(seed)
    feeds = {f"a{i}": random.standard_normal(sizes[kind]).astype(np.float32) for i, kind in enumerate(kinds)}
    feeds["x"] = random.standard_normal((batch, length, WIDTH)).astype(np.float32)
    assert_same_results(sessions, feeds)


def test_error_of_a_part_of_a_batch_is_raised_and_leaves_the_chain_usable():
    """The second sequence has an index beyond the table."""
    program = "Lookup 2 1 - > 5\nNorm 5 0 3 - > 6\nPackedMatMul 6 > 4"
    weights = np.eye(WIDTH, dtype=np.float32)
    tensor = Tensor("w", weights.dtype, weights.shape, weights.tobytes())
    product = FloatProduct("a", "b", tensor, False, None, parse_model(long_chain()).graph.nodes[0])
    with WeightFiles(Path()) as files:
        handle = kernels_of(PATHS[0]).pack_float(product, files)
    norm = {"1.path": kernels_of("scalar").attention_path, "1.epsilon": 1e-5, "1.root_mean_square": 1}
    product_attributes = {"2.handle": handle, "2.activation": 0, "2.alpha": 1.0}
    node = helper.make_node(
        CHAIN, ["x", "ids", "table", "g"], ["y"], domain=DOMAIN, input_count=4, output_count=1, parts=2, loop="",
        program=program, **norm, **product_attributes,
    )  # fmt: skip
    weights = [
        numpy_helper.from_array(np.ones((9, WIDTH), np.float32), "table"),
        numpy_helper.from_array(np.ones(WIDTH, np.float32), "g"),
    ]
    session = session_of([node], [("x", TensorProto.FLOAT), ("ids", TensorProto.INT64)], weights)
    kernels_of(PATHS[0]).release(handle)
    x = np.random.default_rng(0).standard_normal((2, 4096, WIDTH)).astype(np.float32)
    feeds = {"x": x, "ids": np.zeros((2, 4096), np.int64)}
    expected = session.run(None, feeds)[0]
    for _ in range(3):
        with pytest.raises(Exception, match=r"idx=9 must be within the inclusive range \[-9,8\]"):
            session.run(None, feeds | {"ids": np.repeat([[0], [9]], 4096, 1)})
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_sum_with_an_array_without_sequences_is_an_error_for_threads_that_share_a_batch():
    """A part of one sequence alone would repeat it no times."""
    tensor = Tensor("w", np.dtype(np.float32), (WIDTH, WIDTH), np.eye(WIDTH, dtype=np.float32).tobytes())
    product = FloatProduct("a", "b", tensor, False, None, parse_model(long_chain()).graph.nodes[0])
    with WeightFiles(Path()) as files:
        handle = kernels_of(PATHS[0]).pack_float(product, files)
    product_attributes = {"1.handle": handle, "1.activation": 0, "1.alpha": 1.0}
    node = helper.make_node(
        CHAIN, ["x", "z"], ["y"], domain=DOMAIN, input_count=2, output_count=1, parts=2, loop="",
        program="Arithmetic 0 1 > 3\nPackedMatMul 3 > 2", **{"0.multiplies": 0}, **product_attributes,
    )  # fmt: skip
    session = session_of([node], [("x", TensorProto.FLOAT), ("z", TensorProto.FLOAT)], [])
    kernels_of(PATHS[0]).release(handle)
    x = np.ones((2, 4096, WIDTH), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "z": x})[0], x + x)
    with pytest.raises(Exception, match="must have the same shape"):
        session.run(None, {"x": x, "z": x[:0]})


def test_operators_between_others_become_few_chains():
    """Products and norms alternate. Each Tanh among them ends a chain."""
    nodes, weights = [], {}
    for i in range(12):
        weights |= {f"w{i}": np.eye(WIDTH, dtype=np.float32), f"g{i}": np.ones(WIDTH, np.float32)}
        nodes.append(helper.make_node("MatMul", [f"v{i}" if i else "x", f"w{i}"], [f"p{i}"]))
        nodes.append(helper.make_node("LayerNormalization", [f"p{i}", f"g{i}"], [f"n{i}"]))
        nodes.append(helper.make_node("Tanh" if i % 4 == 3 else "Identity", [f"n{i}"], [f"v{i + 1}"]))
        if i % 4 != 3:
            nodes.pop()
            nodes[-1].output[0] = f"v{i + 1}"
    ports = {"x": ["rows", WIDTH]}, {"v12": ["rows", WIDTH]}
    operators, sessions = open_sessions(model_of(nodes, *ports, weights).SerializeToString(), PATHS[0])
    assert operators["chains"] == [CHAIN, "Tanh"] * 3
    assert len(operators["apart"]) == 24 + 3
    assert_same_results(sessions, {"x": np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("quantization", [None, Quantization("int8")])
def test_shipped_model_gives_the_same_results_in_chains(path, quantization, g2p_file, monkeypatch):
    file = g2p_file(quantization or Quantization("none"), "throughput")
    results = []
    for kernels in (path, f"{path},{APART}"):
        monkeypatch.setenv(VARIABLE, kernels)
        model = Model.load(file, device="cpu", threads=2)
        words = WORDS * 3  # whose rows two threads share
        found = [*model.generate_batch(words, num_beams=4), *model.generate_batch(words, temperature=0.7, seed=1)]
        results.append([(r.token_ids, r.score) for r in found])
    assert results[0] == results[1]


def test_threads_that_run_a_chain_at_the_same_time_share_no_memory():
    model = RandomGraph(3, 25).model
    _, sessions = open_sessions(model, PATHS[0])
    inputs = [np.random.default_rng(i).standard_normal((1 + i % 9, WIDTH)).astype(np.float32) for i in range(40)]
    expected = [sessions["apart"].run(None, {"x": x}) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for found, wanted in zip(
            pool.map(lambda x: sessions["chains"].run(None, {"x": x}), inputs * 5), expected * 5, strict=True
        ):
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(a, b)


MEMORY = """
import resource, sys
import numpy as np
from unit.runtime.kernels.test_chains import long_chain, open_sessions
from support.native_products import PATHS
_, sessions = open_sessions(long_chain(), PATHS[0])
x = np.ones((1 << 16, 32), np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sessions["chains"].run(None, {"x": x})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / x.nbytes)
"""


def long_chain() -> bytes:
    nodes, weights = [], {"g": np.ones(WIDTH, np.float32)}
    for i in range(64):
        nodes.append(helper.make_node("LayerNormalization", [f"v{i}" if i else "x", "g"], [f"v{i + 1}"]))
    weights["w"] = np.eye(WIDTH, dtype=np.float32)
    nodes.append(helper.make_node("MatMul", ["v64", "w"], ["y"]))
    return model_of(nodes, {"x": ["rows", WIDTH]}, {"y": ["rows", WIDTH]}, weights).SerializeToString()


def test_values_between_operators_use_the_same_memory_again():
    """64 norms one after the other need memory for two values, and for the result."""
    tests = Path(__file__).parents[3]
    code = f"import sys; sys.path[:0] = [{str(tests)!r}]; {MEMORY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tests.parent)
    assert float(done.stdout) < 8


def chain_session(
    program: str,
    inputs: int = 2,
    outputs: int = 1,
    second: tuple[str, int] | None = None,
    results: Sequence[str] = ("y",),
    **attributes: float,
) -> onnxruntime.InferenceSession:
    """Return a session of a chain over x and g, a weight (32). second: name and type of an input instead of g."""
    norm = {"path": kernels_of("scalar").attention_path, "epsilon": 1e-5, "root_mean_square": 1}
    given = (
        {f"{i}.{name}": value for i in range(4) for name, value in norm.items()} | {"parts": 1, "loop": ""} | attributes
    )
    name = "g" if second is None else second[0]
    node = helper.make_node(
        CHAIN, ["x", name], results, domain=DOMAIN, input_count=inputs, output_count=outputs, program=program, **given
    )
    weights = [numpy_helper.from_array(np.ones(WIDTH, np.float32), "g")] if second is None else []
    return session_of([node], [("x", TensorProto.FLOAT), *([second] if second else [])], weights)


def test_written_program_runs():
    session = chain_session("Norm 0 - 1 - > 3 -\nNorm 3 - 1 - > 4\nNorm 4 3 1 > 2 -")
    x = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)
    y = x
    for _ in range(2):
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5)
    first = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    y = (y + first) / np.sqrt(((y + first) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "program",
    [
        "",  # lacks a result
        f"{NATIVE_NORM} 0 - 1 - > 3",  # the same
        "Sin 0 > 2",
        f"{CHAIN} 0 > 2",
        "Norm 0 - 1 - > 2\nNorm 2 - 1 - > 2",  # computes a value twice
        "Norm 0 - 1 - > 0",  # computes an input
        "Norm 3 - 1 - > 2",  # reads a value before it is computed
        "Norm 0 - 1 - > 2 2",
        "Norm - - 1 - > 2",  # lacks an input
        "Norm 0 > 2",
        "Norm 0 - 1 -",  # lacks a result
        "Norm 0 - 1 - > -",
        "Norm 0 - 1 - - > 2",  # too many operands
        "Norm 0 - 1 - > 2 3 4",
        "Norm 0 - x - > 2",
        "Norm 0 - -1 - > 2",
        "Norm 0 - 1 - > 99999999999999999999999",
        "Norm 0 - 1 - > 1048576",
        "Norm 0  - 1 - > 2",
        " Norm 0 - 1 - > 2",
        "Norm 0 - 1 - > 2\n\n",
    ],
)
def test_damaged_program_is_an_error(program):
    with pytest.raises(Exception, match="a chain"):
        chain_session(program)


@pytest.mark.parametrize(("inputs", "outputs"), [(-1, 1), (2, -1), (2, 2), (1 << 40, 1), (2, 1 << 40)])
def test_impossible_counts_are_an_error(inputs, outputs):
    with pytest.raises(Exception, match="chain"):
        chain_session("Norm 0 - 1 - > 2", inputs, outputs)


def test_more_inputs_than_the_node_has_are_an_error():
    """Value 2 is a third input, which the node does not have."""
    session = chain_session("Norm 0 - 2 - > 3", inputs=3)
    with pytest.raises(Exception, match="fewer inputs or results"):
        session.run(None, {"x": np.ones((1, WIDTH), np.float32)})


def test_value_of_another_type_is_an_error():
    """onnxruntime does not check it. Float32 numbers of the same count would reach beyond the memory of bytes."""
    nodes = [
        helper.make_node("Cast", ["x"], ["bytes"], to=TensorProto.UINT8),
        helper.make_node("MatMul", ["bytes", "w"], ["p"]),
        helper.make_node("LayerNormalization", ["p", "g"], ["y"]),
    ]
    weights = {"w": np.eye(WIDTH, dtype=np.float32), "g": np.ones(WIDTH, np.float32)}
    model = model_of(nodes, {"x": ["rows", WIDTH]}, {"y": ["rows", WIDTH]}, weights).SerializeToString()
    session = open_rewritten(model, PATHS[0], makes_chains=True)[1]
    with pytest.raises(Exception, match="reads a value of another type"):
        session.run(None, {"x": np.ones((3, WIDTH), np.float32)})


@pytest.mark.parametrize("last_type", [TensorProto.INT64, TensorProto.FLOAT])
def test_attention_in_a_chain_refuses_positions_of_another_type(last_type):
    attention = {"heads": 2, "groups": 2, "causal": 1, "scale": 0.25, "interleaved": 0}
    attributes = {f"0.{name}": value for name, value in attention.items()}
    program = "Attention 0 0 0 - - 1 1 - - - - > 2"
    session = chain_session(program, second=("last", last_type), **attributes)
    feeds = {"x": np.ones((1, 1, WIDTH), np.float32), "last": np.zeros(1, np.int64)}
    feeds["last"] = feeds["last"].astype(helper.tensor_dtype_to_np_dtype(last_type))
    with pytest.raises(Exception, match="reads a value of another type"):
        session.run(None, feeds)


def test_node_without_a_result_of_its_program_is_an_error():
    session = chain_session("Norm 0 - 1 - > 2\nNorm 0 - 1 - > 3", outputs=2, results=["", "y"])
    with pytest.raises(Exception, match="lacks a result"):
        session.run(None, {"x": np.ones((2, WIDTH), np.float32)})


def test_keys_without_positions_and_any_number_of_rows_are_an_error():
    """The number of rows times their width overflows to 0, by which the queries must not be divided."""
    shape = numpy_helper.from_array(np.array([1 << 32, 0, 1 << 32]), "shape")
    attributes = {"path": kernels_of("scalar").attention_path, "heads": 1, "scale": 1.0, "shared": 1}
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["k"]),
        helper.make_node(NATIVE_CONTEXT_ATTENTION, ["x", "k", "k", ""], ["y"], domain=DOMAIN, **attributes),
    ]
    session = session_of(nodes, [("x", TensorProto.FLOAT)], [shape])
    with pytest.raises(Exception, match="queries must be divided evenly"):
        session.run(None, {"x": np.ones((1, 1, 4), np.float32)})


def test_error_of_an_operator_leaves_the_chain_usable():
    session = chain_session("Norm 0 - 1 - > 3\nNorm 3 - 1 - > 2")
    feeds = {"x": np.ones((2, WIDTH), np.float32)}
    expected = session.run(None, feeds)[0]
    for _ in range(3):
        with pytest.raises(Exception, match="a norm's weight and bias must have a number for each"):
            session.run(None, {"x": np.ones((2, 5), np.float32)})
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_run_with_a_deadline_has_no_chains(g2p_file, monkeypatch):
    """onnxruntime stops a run between two operators, so that a chain would run on."""
    asked = []
    original = LoadingProducts.rewrite

    def rewrite(self, model, folder, is_float32, makes_chains, *rest):
        asked.append(makes_chains)
        return original(self, model, folder, is_float32, makes_chains, *rest)

    monkeypatch.setattr(LoadingProducts, "rewrite", rewrite)
    monkeypatch.setenv(VARIABLE, PATHS[0])
    file = g2p_file(Quantization("int8"), "throughput")
    Model.load(file, device="cpu", threads=1)
    Model.load(file, device="cpu", threads=1, max_run_seconds=60)
    assert asked == [True, False]


def shared_context_model(bias: str | None, sizes: str = "query", reads_twice: bool = False) -> bytes:
    """Return attention of queries over a context that neighbouring rows share, as the exporter writes it."""
    case = Attention(heads=2, groups=2, size=16, past=None, context=5, by_head=True)
    width, ints = case.heads * case.size, np.int64
    weights = {"rest": np.array([-1, width], ints), "ones": np.array([1, 1], ints), "one": np.array([1], ints)}
    weights["twos"] = np.array([1, 2], ints)
    nodes = [
        helper.make_node("Shape", ["q"], ["size"]),
        helper.make_node("Shape", ["k"], ["rows"], start=0, end=1),
        helper.make_node("Concat", ["rows", "rest"], ["merged_shape"], axis=0),
        helper.make_node("Reshape", ["q", "merged_shape"], ["merged"]),
        helper.make_node("Shape", ["merged"], ["positions"], start=1, end=2),
        helper.make_node("Concat", ["ones" if bias != "of heads" else "twos", "positions", "one"], ["wide"], axis=0),
        *([helper.make_node("Expand", ["bias", "wide"], ["expanded"])] if bias else []),
        helper.make_node(
            "MultiHeadAttention", ["merged", "k", "v", "", "", *(["expanded"] if bias else [])], ["together"],
            domain="com.microsoft", num_heads=case.heads, scale=0.25,
        ),
        helper.make_node("Reshape", ["together", "size" if sizes == "query" else "other"], ["y"]),
        *([helper.make_node("Sin", ["together"], ["z"])] if reads_twice else []),
    ]  # fmt: skip
    weights["other"] = np.array([-1, 1, width], ints)
    ports = {"q": ["rows", "n", width], "k": ["c", 2, "s", 16], "v": ["c", 2, "s", 16]}
    if bias:
        ports["bias"] = ["c or 1", 1, 1, "s"]
    outputs = {"y": [None] * 3, **({"z": [None] * 3} if reads_twice else {})}
    return model_of(nodes, ports, outputs, weights).SerializeToString()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bias", [None, "of rows", "of heads"])
@pytest.mark.parametrize(("rows", "contexts", "new"), [(4, 4, 1), (8, 2, 1), (6, 2, 3), (3, 1, 2), (1, 1, 1)])
def test_attention_over_a_shared_context_has_the_bits_of_that_with_reshapes(
    path, bias, rows, contexts, new, monkeypatch
):
    random = np.random.default_rng(rows)
    feeds = {
        "q": random.standard_normal((rows, new, 32)).astype(np.float32),
        "k": random.standard_normal((contexts, 2, 5, 16)).astype(np.float32),
        "v": random.standard_normal((contexts, 2, 5, 16)).astype(np.float32),
    }
    if bias:
        feeds["bias"] = random.standard_normal((contexts if rows > 4 else 1, 1, 1, 5)).astype(np.float32)
    model = shared_context_model(bias)
    operators, sessions = open_sessions(model, path)
    expansions = ["Expand"] if bias == "of heads" else []  # which says more than that all queries have the same bias
    assert [name for name in operators["apart"] if name in ("Reshape", "Expand")] == ["Reshape"] * len(
        expansions
    ) + expansions
    monkeypatch.setattr("tformer_runtime.rewriting.product_rewrite.share_contexts", lambda *arguments: None)
    plain, plain_sessions = open_sessions(model, path)
    assert plain["apart"].count("Reshape") == 2
    expected = plain_sessions["apart"].run(None, feeds)[0]
    for session in sessions.values():
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


@pytest.mark.parametrize("model", [shared_context_model(None, "other"), shared_context_model(None, reads_twice=True)])
def test_other_reshapes_stay(model):
    operators, _ = open_sessions(model, PATHS[0])
    assert operators["apart"].count("Reshape") == 2
