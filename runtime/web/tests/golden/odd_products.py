"""Packed products that are not quite as the exporter stores them, or read odd numbers, with their values in float64.

Branches with weights of one name, names that the rewriting of WebAssembly uses too, other constants, very long sums,
NaN and very small rows; then drawn sizes and forms.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from block_products import int8_weights, packed, write
from golden_file import GoldenFile
from msgspec.structs import replace
from onnx import TensorProto as T
from onnx import helper as h

from tformer_runtime.format import stored_forms as forms

CONTRIB = "com.microsoft"
Weights = dict[str, np.ndarray]
Model = tuple[Any, Weights, Any, forms.StoredProducts]  # nodes, weights, expected results, records


class Product:
    """A MatMulNBits as the exporter stores it: its weights are whole numbers times the scale of a column.

    prefix: of its names. mask: of the bits of a code that are a multiplier.
    """

    def __init__(
        self,
        bits: int,
        inner: int,
        columns: int,
        block: int,
        random: Any,
        prefix: str = "",
        x: str = "x",
        y: str = "y",
        bias: bool = False,
        mask: int = 7,
        integers: np.ndarray | None = None,
    ) -> None:
        self.inner, self.columns = inner, columns
        blocks = -(-inner // block)
        if integers is None:
            integers = random.integers(0, 2**bits, (inner, columns)).astype(np.uint8)
        scale = random.uniform(0.5, 1.5, (columns, 1)).astype(np.float32) / 2**bits / 8
        names = {name: f"{prefix}{name}" for name in ("W", "scale", "scales", "codes", "zeros", "bias")}
        self.weights: Weights = {names["W"]: packed(integers, bits, block), names["scale"]: scale}
        self.nodes: list[onnx.NodeProto] = []
        inputs = [x, names["W"], names["scales"]]
        each = np.arange(inner) // block
        numbers = integers.astype(np.int64) - 2 ** (bits - 1)
        if bits == 8:
            self.weights[f"{prefix}sizes"] = np.array([1, blocks])
            self.nodes.append(h.make_node("Expand", [names["scale"], f"{prefix}sizes"], [names["scales"]]))
        else:
            codes = random.integers(0, 256, (columns, blocks)).astype(np.uint8)
            multipliers, zeros = (codes & mask) + np.int64(1), codes >> 4
            numbers = (integers.astype(np.int64) - zeros.T[each]) * multipliers.T[each]
            self.weights |= {
                names["codes"]: codes,
                f"{prefix}m": np.uint8(mask),
                f"{prefix}one": np.float32(1),
                f"{prefix}four": np.uint8(4),
                f"{prefix}pads": np.array([0, 0, 0, 1]),
                f"{prefix}pairs": np.array([columns, -1, 2]),
                f"{prefix}places": np.array([1, 16], np.int32),
                f"{prefix}last": np.array([-1]),
            }
            self._add("BitwiseAnd", prefix, ["codes", "m"], "masked")
            self._add("Cast", prefix, ["masked"], "number", to=T.FLOAT)
            self._add("Add", prefix, ["number", "one"], "times")
            self._add("Mul", prefix, ["times", "scale"], "scales")
            self._add("BitShift", prefix, ["codes", "four"], "shifted", direction="RIGHT")
            if blocks % 2:
                self._add("Pad", prefix, ["shifted", "pads"], "padded")
            self._add("Reshape", prefix, ["padded" if blocks % 2 else "shifted", "pairs"], "two")
            self._add("Cast", prefix, ["two"], "wide", to=T.INT32)
            self._add("Mul", prefix, ["wide", "places"], "placed")
            self._add("ReduceSum", prefix, ["placed", "last"], "both", keepdims=0)
            self._add("Cast", prefix, ["both"], "zeros", to=T.UINT8)
            inputs.append(names["zeros"])
        self.bias = np.zeros(columns, np.float32)
        if bias:
            self.bias = random.standard_normal(columns).astype(np.float32)
            self.weights[names["bias"]] = self.bias
            inputs += [""] * (5 - len(inputs)) + [names["bias"]]
        attributes = {"K": inner, "N": columns, "bits": bits, "block_size": block, "accuracy_level": 1}
        self.nodes.append(h.make_node("MatMulNBits", inputs, [y], domain=CONTRIB, **attributes))
        self.matrix = numbers.astype(np.float64) * scale.astype(np.float64).T
        form = forms.INT8_BLOCKS if bits == 8 else forms.INT4_BLOCKS
        codes = names["codes"] if bits == 4 else None
        self.spec = forms.MatrixSpec(form, inner, columns, block, names["W"], codes)
        self.products = {y: forms.ProductSpec(0, x, y, names["scale"], names["bias"] if bias else None)}

    def _add(self, operator: str, prefix: str, inputs: list[str], output: str, **attributes: Any) -> None:
        names = [f"{prefix}{name}" for name in inputs]
        self.nodes.append(h.make_node(operator, names, [f"{prefix}{output}"], **attributes))

    def of(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return x.astype(np.float64) @ self.matrix + self.bias

    @property
    def stored(self) -> forms.StoredProducts:
        return forms.StoredProducts((self.spec,), self.products)

    @property
    def model(self) -> Model:
        return self.nodes, self.weights, self.of, self.stored

    def size_of(self, x: np.ndarray) -> np.ndarray:
        """Return the sums of the magnitudes of all terms, of which an error is a share."""
        return np.abs(x).astype(np.float64) @ np.abs(self.matrix) + np.abs(self.bias)


def branches(random: Any) -> Model:
    """Two branches, each with its own weights of the same names. Rows whose first number is above 0 take the first."""
    one, other = (Product(4, 96, 512, 32, random, prefix="b.", y=y) for y in ("first", "second"))
    graphs = [
        h.make_graph(
            p.nodes, y, [], [h.make_tensor_value_info(y, T.FLOAT, None)],
            [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in p.weights.items()],
        )
        for p, y in ((one, "first"), (other, "second"))
    ]  # fmt: skip
    nodes = [
        h.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        h.make_node("Greater", ["sum", "zero"], ["flag"]),
        h.make_node("If", ["flag"], ["y"], then_branch=graphs[0], else_branch=graphs[1]),
    ]
    expected = lambda x: (one if x.sum() > 0 else other).of(x)  # noqa: E731
    stored = forms.StoredProducts((one.spec,), one.products | other.products)
    return nodes, {"zero": np.float32(0)}, expected, stored


def shared(random: Any) -> Model:
    """Two products of the same packed weights, of which the second reads fewer rows."""
    one = Product(8, 96, 48, 32, random, y="first")
    nodes = [
        *one.nodes,
        h.make_node("Slice", ["x", "begin", "end", "axis"], ["part"]),
        h.make_node(
            "MatMulNBits", ["part", "W", "scales"], ["second"],
            domain=CONTRIB, K=80, N=48, bits=8, block_size=32, accuracy_level=1,
        ),
        h.make_node("Add", ["first", "second"], ["y"]),
    ]  # fmt: skip
    weights = one.weights | {"begin": np.array([0]), "end": np.array([80]), "axis": np.array([-1])}
    fewer = replace(one.spec, inner=80)
    second = {"second": forms.ProductSpec(1, "part", "second", "scale")}
    stored = forms.StoredProducts((one.spec, fewer), one.products | second)
    return nodes, weights, lambda x: one.of(x) + x[:, :80].astype(np.float64) @ one.matrix[:80], stored


def after(operator: str, random: Any, *others: float) -> Model:
    """A product whose rows are the result of an operator on the input."""
    product = Product(8, 96, 48, 32, random, x="z")
    weights = {f"other{i}": np.float32(other) for i, other in enumerate(others)}
    node = h.make_node(operator, ["x", *weights], ["z"])

    def expected(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return product.of(np.log(x) if operator == "Log" else x * np.float32(others[0]))

    return [node, *product.nodes], product.weights | weights, expected, product.stored


def constant_sum(inner: int, random: Any) -> Model:
    """A product whose sums are the largest that there are: all weights of a column are the lowest, or the highest."""
    integers = np.tile(np.array([0, 255, 0, 255], np.uint8), (inner, 1))
    product = Product(8, inner, 4, 32, random, integers=integers)
    return product.model


def wide_columns(has_axis: bool, random: Any) -> Model:
    """A product of bytes whose weights have a local name. has_axis: whether the axis 0 of their Concat is written."""
    weights = {
        "W": int8_weights(96, 512, random),
        "scale": np.float32(0.001),
        "zero": np.uint8(128),
    }
    local = h.make_node("Concat", ["W"], ["local"], axis=0)
    if not has_axis:
        local.attribute[0].ClearField("i")
    nodes = [
        local,
        h.make_node("QuantizeLinear", ["x", "scale", "zero"], ["bytes"]),
        h.make_node("MatMulInteger", ["bytes", "local", "zero"], ["product"]),
        h.make_node("Cast", ["product"], ["numbers"], to=T.FLOAT),
        h.make_node("Mul", ["numbers", "scale"], ["y"]),
    ]

    def expected(x: np.ndarray) -> np.ndarray:
        integers = np.clip(np.round(x / weights["scale"]), -128, 127)
        return integers.astype(np.float64) @ weights["W"].astype(np.float64) * np.float64(weights["scale"])

    matrix = forms.MatrixSpec(forms.INT8_COLUMNS, 96, 512, 32, "W")
    stored = forms.StoredProducts((matrix,), {"product": forms.ProductSpec(0, "x", "y", "scale")})
    return nodes, weights, expected, stored


def main() -> None:
    file, cases, random = GoldenFile(), [], np.random.default_rng(11)
    named = Product(4, 96, 512, 16, random, prefix="tformer.", bias=True)
    masked = Product(4, 96, 40, 32, random, mask=3)
    # title, model, inner, columns, operators that the rewriting leaves
    made: list[tuple[str, Model, int, int, dict[str, int]]] = [
        ("branches with weights of one name", branches(random), 96, 512, {"MatMulNBits": 0}),
        ("packed weights of two sizes", shared(random), 96, 48, {"MatMulNBits": 0}),
        ("names of the rewriting", named.model, 96, 512, {"MatMulNBits": 0}),
        ("another mask of codes", masked.model, 96, 40, {"MatMulNBits": 1}),
        ("NaN in rows", after("Log", random), 96, 48, {"MatMulNBits": 0}),
        ("very small rows", after("Mul", random, 1e-37), 96, 48, {"MatMulNBits": 0}),
        ("the longest sums", constant_sum(1 << 17, random), 1 << 17, 4, {"MatMulNBits": 0}),
        ("longer sums", constant_sum((1 << 17) + 32, random), (1 << 17) + 32, 4, {"MatMulNBits": 1}),
        ("a local name", wide_columns(True, random), 96, 512, {"Slice": 1}),
        ("a local name, with an axis without its number", wide_columns(False, random), 96, 512, {"Slice": 1}),
    ]
    sizes = {}
    for _ in range(24):
        bits, block = int(random.choice([4, 8])), int(random.choice([16, 32, 64, 128]))
        inner, columns = int(random.integers(1, 300)), int(random.choice([1, 7, 64, 512, 520, 1024]))
        bias = bool(random.integers(2))
        title = f"{bits} bits in blocks of {block}, {inner} × {columns}{', bias' * bias}"
        drawn = Product(bits, inner, columns, block, random, bias=bias)
        made.append((title, drawn.model, inner, columns, {"MatMulNBits": 0}))
        sizes[title] = drawn.size_of
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.onnx"
        for title, (nodes, weights, expected, stored), inner, columns, left in made:
            write(path, nodes, {name: np.asarray(array) for name, array in weights.items()}, inner, columns, stored)
            runs = []
            for rows in (1, 5):
                x = random.standard_normal((rows, inner)).astype(np.float32)
                if title.startswith("NaN"):
                    x = np.abs(x)
                    x[2:3, -1] = -1  # one row, and not the first number
                elif "sums" in title:
                    x = np.ones_like(x)
                values = np.asarray(expected(x), np.float64)
                size = (
                    sizes[title](x) if title in sizes else np.broadcast_to(np.abs(values).max(1)[:, None], values.shape)
                )
                runs.append({"x": file.array(x), "expected": file.array(values), "size": file.array(size)})
            bytes_ = file.array(np.frombuffer(path.read_bytes(), np.uint8))
            cases.append({"name": title, "left": left, "file": bytes_, "runs": runs})
        file.write(cases)


main()
