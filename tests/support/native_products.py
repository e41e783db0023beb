"""Quantised products as the exporter writes them, in sessions with onnxruntime's operators and with native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from support.small_graphs import model_of
from support.stored_records import records_of, with_records
from tformer_export.quantize import StaticScale, quantize_weights
from tformer_runtime.backend.native_kernels import LoadingProducts, NativeKernels, load_kernels
from tformer_runtime.format.model_file import read_manifest, read_mapped_model
from tformer_runtime.format.onnx_graph import parse_model
from tformer_runtime.rewriting.product_rewrite import DOMAIN, replace_products

KERNELS = load_kernels(onnxruntime, "scalar")  # the path that every processor has
PATHS = KERNELS.paths if KERNELS is not None else ()
requires_kernels = pytest.mark.skipif(KERNELS is None, reason="native kernels are not built: make kernels")


@dataclass(frozen=True)
class Product:
    """A product x (rows, inner) → y (rows, columns), of x after an operator.

    graph: the name of its graph; "encode" has onnxruntime's MatMulIntegerToFloat.
    on_cpu: whether rows are quantised in blocks.
    is_static: whether activations have a static scale.
    optimize_for: "latency" for the packed form of 8 bits, and a branch for few rows.
    """

    inner: int
    columns: int
    bits: int = 8
    before: str | None = None
    graph: str = "graph"
    on_cpu: bool = True
    has_bias: bool = True
    is_static: bool = False
    optimize_for: str = "throughput"

    def model(self, seed: int = 0) -> bytes:
        """Return the quantised model."""
        random = np.random.default_rng(seed)
        weights = {"w": random.standard_normal((self.inner, self.columns)).astype(np.float32)}
        nodes = [helper.make_node(self.before, ["x"], ["a"])] if self.before else []
        nodes.append(helper.make_node("MatMul", ["a" if self.before else "x", "w"], ["p"], name="product"))
        if self.has_bias:
            weights["b"] = random.standard_normal(self.columns).astype(np.float32)
            nodes.append(helper.make_node("Add", ["p", "b"], ["y"]))
        else:
            nodes[-1].output[0] = "y"
        ports = {"x": ["rows", 1, self.inner]}, {"y": ["rows", 1, self.columns]}
        model = ir.from_proto(model_of(nodes, *ports, weights, self.graph))
        scales = {"product": StaticScale.between(-2, 3)} if self.is_static else {}
        parts = quantize_weights(
            model, self.bits, self.optimize_for, "x", on_cpu=self.on_cpu, static_scales=scales
        )  # fmt: skip
        assert parts.products or self.inner * self.columns < 1024
        content: bytes = ir.to_proto(with_records(model)).SerializeToString()
        return content


def kernels_of(path: str) -> NativeKernels:
    kernels = load_kernels(onnxruntime, path)
    assert kernels is not None
    return kernels


def native_operators(file: Path) -> set[str]:
    """Return the operators of a file after each product and attention that native kernels can compute is replaced."""

    def pack(product: object, files: object) -> int:
        return 1

    stored = read_manifest(file).stored_products
    model = replace_products(*read_mapped_model(file), pack, pack, attention_path=0, stored=stored).model
    return {node.op_type for graph in parse_model(model).graph.all_graphs() for node in graph.nodes}


def open_session(model: bytes, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def open_native_session(
    model: bytes, path: str, threads: int = 1, products: int | None = 1, attentions: bool = False
) -> onnxruntime.InferenceSession:
    """Return a session with the kernels of a path.

    products: the number of products that they must compute. attentions: whether they must compute attention.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    with LoadingProducts(kernels_of(path), threads) as loading:
        rewritten = loading.rewrite(model, Path(), stored=records_of(model))
        assert products is None or loading.count == products
        assert not attentions or loading.attentions
        if loading.count or loading.attentions:
            options.register_custom_ops_library(str(loading.kernels.file))
        return onnxruntime.InferenceSession(rewritten, options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, x: np.ndarray) -> np.ndarray:
    """Run a session on rows (rows, inner)."""
    (y,) = session.run(None, {"x": x[:, None]})
    return y[:, 0]


def session_of(nodes: list, inputs: list[tuple[str, int]], weights: list) -> onnxruntime.InferenceSession:
    """Return a session of operators of the library. inputs: names and types."""
    ports = [helper.make_tensor_value_info(*each, None) for each in inputs]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "y"]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "g", ports, outputs, weights)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(kernels_of(PATHS[0]).file))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
