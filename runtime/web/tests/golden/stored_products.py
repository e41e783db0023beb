"""Products of quantised weights as the exporter stores them, as model files, with their values.

The weights of a file are its results for the rows of the identity matrix, whose integers are exact. Where activations
are rounded, the expected product is that of Python's onnxruntime.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from block_products import int8_weights
from golden_file import GoldenFile
from onnx import helper as h
from onnx import numpy_helper

REPOSITORY = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from support.small_graphs import model_of  # noqa: E402

from tformer_export.common.onnx_writer import save  # noqa: E402
from tformer_export.quantize.rewrite import quantize_weights  # noqa: E402
from tformer_runtime.base.extras import import_onnxruntime  # noqa: E402
from tformer_runtime.format import manifest as m  # noqa: E402
from tformer_runtime.format.stored_forms import INT8_ROWS, MatrixSpec, ProductSpec  # noqa: E402

onnxruntime = import_onnxruntime()

FLOATS, ROWS, FEW, ENCODE, SELECTED = "floats", "rows", "few", "encode", "selected"
MIN_ROWS = 4  # from here on the branch for many rows runs


def product(inner: int, columns: int, has_bias: bool, name: str, random: Any) -> onnx.ModelProto:
    """Return a model of x · W (+ b) · V: two products, the first also read by a third."""
    weights = {
        "w": random.standard_normal((inner, columns)).astype(np.float32) / 8,
        "other": random.standard_normal((inner, columns)).astype(np.float32) / 8,
    }
    nodes = [h.make_node("MatMul", ["x", "w"], ["first"], name="first")]
    first = "first"
    if has_bias:
        weights["bias"] = random.standard_normal(columns).astype(np.float32)
        nodes.append(h.make_node("Add", ["first", "bias"], ["biased"]))
        first = "biased"
    nodes.append(h.make_node("MatMul", ["x", "other"], ["second"], name="second"))
    nodes.append(h.make_node("Concat", [first, "second"], ["y"], axis=-1))
    shape, out = [m.BATCH_AXIS, "time", inner], [m.BATCH_AXIS, "time", 2 * columns]
    return model_of(nodes, {"x": shape}, {"y": out}, weights, name)


def selected(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with products of the rows of x that have a number above 10⁶, as an expert has them."""
    graph = model.graph
    added = {"limit": np.float32(1e6), "axis": np.array([-1], np.int64), "first": np.array([0], np.int64)}
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), f"select.{name}") for name, array in added.items()
    )
    before = [
        h.make_node("Squeeze", ["x", "select.first"], ["select.rows"]),
        h.make_node("ReduceMax", ["select.rows", "select.axis"], ["select.most"], keepdims=0),
        h.make_node("Greater", ["select.most", "select.limit"], ["select.flags"]),
        h.make_node("Compress", ["select.rows", "select.flags"], ["select.found"], axis=0),
    ]
    for node in graph.node:
        node.input[:] = ["select.found" if name == "x" else name for name in node.input]
        node.output[:] = ["select.y" if name == "y" else name for name in node.output]
    nodes = [*before, *graph.node, h.make_node("Unsqueeze", ["select.y", "select.first"], ["y"])]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def transposed(inner: int, columns: int, random: Any) -> onnx.ModelProto:
    """Return a product of integers whose weights are the rows of a table, as a tied output projection has them."""
    weights = {
        "table": int8_weights(inner, columns, random).T.copy(),
        "scale": (random.uniform(0.5, 1.5, columns) / 500).astype(np.float32),
        "zero": np.uint8(128),
        "levels": np.float32(127),
        "unit": np.float32(1),
        "last": np.array([2]),
    }
    nodes = [
        h.make_node("Transpose", ["table"], ["w"], perm=[1, 0]),
        h.make_node("Abs", ["x"], ["absolute"]),
        h.make_node("ReduceMax", ["absolute", "last"], ["most"], keepdims=1),
        h.make_node("Div", ["most", "levels"], ["by_row"]),
        h.make_node("Div", ["x", "by_row"], ["divided"]),
        h.make_node("QuantizeLinear", ["divided", "unit", "zero"], ["integers"]),
        h.make_node("MatMulInteger", ["integers", "w", "zero"], ["product"]),
        h.make_node("Cast", ["product"], ["number"], to=1),
        h.make_node("Mul", ["number", "by_row"], ["scaled"]),
        h.make_node("Mul", ["scaled", "scale"], ["y"]),
    ]
    return model_of(nodes, {"x": [m.BATCH_AXIS, "time", inner]}, {"y": [m.BATCH_AXIS, "time", columns]}, weights)


def table_records(inner: int, columns: int) -> m.StoredProducts:
    matrix = MatrixSpec(INT8_ROWS, inner, columns, 32, "table")
    return m.StoredProducts((matrix,), {"product": ProductSpec(0, "x", "y", "scale")})


def quantized(model: onnx.ModelProto, bits: int, form: str) -> ir.Model:
    parsed = ir.from_proto(model)
    options: dict[str, Any] = {
        FLOATS: {"float_activations": True},
        ROWS: {"on_cpu": True},
        ENCODE: {"on_cpu": True},
        FEW: {"step": "x"},
        SELECTED: {"float_activations": True},
    }[form]
    quantize_weights(parsed, bits, "latency" if form == FEW else "throughput", **options)
    return parsed


def write(model: ir.Model, stored: m.StoredProducts, inner: int, columns: int, path: Path) -> bytes:
    """Write a model file as the exporter does, with its large weights at places that can be mapped.

    stored: records of products that the exporter has not made.
    """
    encode = m.EncodeStage(
        (m.RequestInput("x", "float32", (m.BATCH_AXIS, "time", inner), "data"),),
        (m.TensorSpec("y", "float32", (m.BATCH_AXIS, "time", columns)),),
        ragged=False,
    )
    manifest = m.Manifest(max_length=0, encode=encode, decode=None, task="feature-extraction", stored_products=stored)
    save(model, manifest, path)
    return path.read_bytes()


def main() -> None:
    file, cases, random = GoldenFile(), [], np.random.default_rng(5)
    floats, rounded = ((96, 40, True), (200, 512, False), (72, 1024, True)), ((96, 40, True), (200, 512, True))
    kinds = [
        *((FLOATS, bits, *sizes) for bits in (8, 6, 4) for sizes in floats),
        *((form, bits, *sizes) for form in (ROWS, FEW, ENCODE) for bits in (8, 6, 4) for sizes in rounded),
        ("table", 8, 200, 512, False),
        (SELECTED, 4, 200, 512, True),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for form, bits, inner, columns, has_bias in kinds:
            if form == "table":
                model = ir.from_proto(transposed(inner, columns, random))
                stored = table_records(inner, columns)
            else:
                drawn = product(inner, columns, has_bias, ENCODE if form == ENCODE else "decode", random)
                model = quantized(selected(drawn) if form == SELECTED else drawn, bits, form)
                stored = m.StoredProducts()
            whole = write(
                model, stored, inner, columns if form == "table" else 2 * columns, Path(folder) / "model.onnx"
            )
            session = onnxruntime.InferenceSession(whole, providers=["CPUExecutionProvider"])
            if form == FLOATS:
                identity = np.concatenate([np.zeros((1, inner)), np.eye(inner)]).astype(np.float32)
                known = session.run(None, {"x": identity[None]})[0][0].astype(np.float64)
                bias, matrix = known[:1], known[1:] - known[:1]
            runs = []
            for rows in (1, 2, 17):
                x = random.standard_normal((rows, inner)).astype(np.float32)
                x[:, ::41] *= 8  # channels that are louder than others
                x[-1] *= rows < 17  # 1 and 2 rows end with one of zeros
                many = np.concatenate([x, np.ones((MIN_ROWS, inner), np.float32)])[None]
                expected = session.run(None, {"x": many})[0][0, :rows].astype(np.float64)
                if form == FLOATS:
                    expected = x.astype(np.float64) @ matrix + bias
                elif form == SELECTED:
                    x[3:4] *= 1e8  # of 17 rows one is chosen, of fewer none
                    expected = session.run(None, {"x": x[None]})[0][0].astype(np.float64)
                runs.append({"x": file.array(x), "expected": file.array(expected)})
            name = f"{form}, {bits} bits, {inner} × {columns}{', bias' * has_bias}"
            bytes_ = file.array(np.frombuffer(whole, np.uint8))
            cases.append({"name": name, "columns": columns, "form": form, "bits": bits, "file": bytes_, "runs": runs})
        file.write(cases)


main()
