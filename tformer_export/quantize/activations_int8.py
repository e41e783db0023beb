"""Inputs of products as uint8, with a scale for each row or a static scale for all rows.

The costs of both are in docs/design/kernels.md#integer-products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.quantize.weight_storage import WeightStore

UINT8_CENTRE = 128  # the uint8 that stands for zero, with a scale for each row
SIGNED_STEPS = 127  # steps up to the largest magnitude of a row, on each side of zero
MAX_NEGATIVE_GELU = 0.1701  # x Φ(x) and its approximation with tanh are above −0.1701
POSITIVE_STEPS = 255  # steps up to the largest number of a row without negative numbers
STATIC_STEPS = 255  # steps from the smallest to the largest number, with a static scale
# Operators that keep the number of rows
ROWWISE_OPERATORS = {
    "MatMul",
    "Add",
    "Mul",
    "Sub",
    "Sigmoid",
    "Relu",
    "Gelu",
    "Tanh",
    "Erf",
    "Cast",
    "Split",
    "Slice",
    "Clip",
}


@dataclass(frozen=True)
class StaticScale:
    """A uint8 q stands for scale · (q − zero). Numbers outside 0 … 255 are clipped."""

    scale: float
    zero: int

    @classmethod
    def between(cls, lowest: float, highest: float) -> StaticScale:
        """Return the scale whose steps reach from the lowest to the highest number; lowest ≤ 0 ≤ highest."""
        scale = np.float32((highest - lowest) / STATIC_STEPS) or np.float32(1)
        return cls(float(scale), int(np.rint(-lowest / scale)))

    def round(self, x: np.ndarray) -> np.ndarray:
        """Return the numbers that the integers of x stand for, float32."""
        scale, zero = np.float32(self.scale), np.float32(self.zero)
        q: np.ndarray = (np.rint(x / scale) + zero).clip(0, STATIC_STEPS)
        return (q - zero) * scale


def round_by_row(value: ir.Value, rows: np.ndarray) -> np.ndarray:
    """Return the numbers that the integers of an operand's rows (R, K) stand for, with a scale for each row."""
    if is_positive(value):
        maximum, steps = rows.max(1, keepdims=True), POSITIVE_STEPS
    elif is_gelu(value):
        maximum, steps = np.maximum(rows.max(1, keepdims=True), np.float32(MAX_NEGATIVE_GELU)), SIGNED_STEPS
    else:
        maximum, steps = np.abs(rows).max(1, keepdims=True), SIGNED_STEPS
    scale = np.where(maximum > 0, maximum, 1) / np.float32(steps)
    return np.rint(rows / scale) * scale


class ActivationQuantizer:
    """Computes the integers of activations, once in each graph for all their readers.

    on_cpu: whether onnxruntime's own operators may be used.
    static_scales, row_scales: the numbers of activations with a static scale and with a scale for each row.
    """

    def __init__(self, store: WeightStore, on_cpu: bool) -> None:
        self.store, self.on_cpu = store, on_cpu
        self._by_row: dict[tuple[int, ir.Value], tuple[ir.Value, ir.Value, ir.Value]] = {}
        self._static: dict[tuple[int, ir.Value], tuple[ir.Value, ir.Value, ir.Value]] = {}

    @property
    def static_scales(self) -> int:
        return len(self._static)

    @property
    def row_scales(self) -> int:
        return len(self._by_row)

    def with_static_scale(
        self, graph: ir.Graph, node: ir.Node, static_scale: StaticScale
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the uint8 of a product's operand, their scale (), and their zero point. Clipping replaces a Relu."""
        value = node.inputs[0]
        assert value is not None
        key = id(graph), value
        if key not in self._static:
            above = value.producer()
            source = above.inputs[0] if above is not None and is_positive(value) and not static_scale.zero else value
            name = f"{value.name}.steps"
            scale = self.store.constant(f"{name}.scale", np.float32(static_scale.scale))
            zero = self.store.constant(f"{name}.zero", np.uint8(static_scale.zero))
            quantize = ir.node("QuantizeLinear", [source, scale, zero], name=f"{name}.uint8")
            name_outputs([quantize])
            graph.insert_before(node, quantize)
            self._static[key] = quantize.outputs[0], scale, zero
        return self._static[key]

    def with_row_scales(self, graph: ir.Graph, node: ir.Node, inner: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the uint8 rows of a product's operand (…, inner), their float scales (…, 1), and their zero point.

        x · (1 / maximum) is at most 1 + 2⁻²³ after rounding, so that only numbers which a Relu would remove are
        clipped. A row of zeros has arbitrary integers, which are scaled back by zero.
        """
        value = node.inputs[0]
        assert value is not None
        key = id(graph), value
        if key not in self._by_row:
            name = f"{value.name}.rows"
            source, new_nodes, steps, centre = self._maxima(value, name)
            can_be_empty = may_be_empty(value)
            if can_be_empty:  # for no rows, (0, K), onnxruntime 1.31 gives the maxima the shape (0, K) too
                axis = self.store.constant("quantize.axis", np.array([-1], np.int64))
                bounds = [self.store.constant(f"quantize.at.{i}", np.array([i], np.int64)) for i in (0, 1)]
                new_nodes.append(ir.node("Slice", [new_nodes[-1].outputs[0], *bounds, axis], name=f"{name}.single"))
            step = self.store.constant(f"quantize.step.{steps}", np.float32(1 / steps))
            zero = self.store.constant(f"quantize.zero.{steps}", np.uint8(centre))
            maxima = new_nodes[-1].outputs[0]
            scale = ir.node("Mul", [maxima, step], name=f"{name}.scale")
            block = 0 if can_be_empty else inner
            new_nodes += [scale, *self._divide(name, source, maxima, scale.outputs[0], zero, block)]
            name_outputs(new_nodes)
            graph.insert_before(node, new_nodes)
            self._by_row[key] = new_nodes[-1].outputs[0], scale.outputs[0], zero
        return self._by_row[key]

    def _maxima(self, value: ir.Value, name: str) -> tuple[ir.Value, list[ir.Node], int, int]:
        """Return the value to round, the nodes that compute the largest magnitude of each row, steps and zero point."""
        axis = self.store.constant("quantize.axis", np.array([-1], np.int64))
        if is_positive(value):
            above = value.producer()
            assert above is not None
            assert above.inputs[0] is not None
            source = above.inputs[0]
            highest = ir.node("ReduceMax", [source, axis], {"keepdims": 1}, name=f"{name}.row_maximum")
            return source, [highest, ir.node("Relu", [highest.outputs[0]], name=f"{name}.maximum")], POSITIVE_STEPS, 0
        if is_gelu(value):
            lowest_maximum = self.store.constant("quantize.gelu", np.float32(MAX_NEGATIVE_GELU))
            highest = ir.node("ReduceMax", [value, axis], {"keepdims": 1}, name=f"{name}.row_maximum")
            maximum = ir.node("Max", [highest.outputs[0], lowest_maximum], name=f"{name}.maximum")
            return value, [highest, maximum], SIGNED_STEPS, UINT8_CENTRE
        size = ir.node("Abs", [value], name=f"{name}.size")
        maximum = ir.node("ReduceMax", [size.outputs[0], axis], {"keepdims": 1}, name=f"{name}.maximum")
        return value, [size, maximum], SIGNED_STEPS, UINT8_CENTRE

    def _divide(
        self, name: str, source: ir.Value, maxima: ir.Value, scale: ir.Value, zero: ir.Value, inner: int
    ) -> list[ir.Node]:
        """Return the nodes that divide rows by their scales and round them.

        inner: the length of a row; 0 if there may be no rows, because onnxruntime 1.31 has no blocks for these.
        """
        if not self.on_cpu or not inner:
            inverse = ir.node("Reciprocal", [scale], name=f"{name}.inverse")
            ratio = ir.node("Mul", [source, inverse.outputs[0]], name=f"{name}.ratio")
            unit = self.store.constant("quantize.unit", np.float32(1))
            return [inverse, ratio, ir.node("QuantizeLinear", [ratio.outputs[0], unit, zero], name=f"{name}.uint8")]
        # The zero point of each row, computed as the integer of a number divided by infinity
        infinity = self.store.constant("quantize.never", np.float32(np.inf))
        centres = ir.node("QuantizeLinear", [maxima, infinity, zero], name=f"{name}.centres")
        by_row = {"axis": -1, "block_size": inner}
        inputs = [source, scale, centres.outputs[0]]
        return [centres, ir.node("QuantizeLinear", inputs, by_row, name=f"{name}.uint8")]


def is_gelu(value: ir.Value) -> bool:
    """Return whether a product's operand is the result of a Gelu, which is never below −MAX_NEGATIVE_GELU.

    The largest number then bounds the magnitude of a row.
    """
    above = value.producer()
    return above is not None and above.op_type == "Gelu"


def is_positive(value: ir.Value) -> bool:
    """Return whether a product's operand is the result of a Relu with no other reader. It needs no negative steps."""
    above = value.producer()
    has_one_reader = above is not None and above.op_type == "Relu" and len(list(value.uses())) == 1
    return has_one_reader and not value.is_graph_output()


def may_be_empty(value: ir.Value) -> bool:
    """Return whether a value can have no rows.

    So can the rows of a mixture's expert, which come from a split at sizes that depend on data, and values of one
    stage.
    """
    visited: set[ir.Value] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        above = current.producer()
        if above is None or current in visited:
            continue
        visited.add(current)
        sizes = above.inputs[1] if above.op_type == "Split" and len(above.inputs) > 1 else None
        if above.op_type == "If" or (sizes is not None and sizes.const_value is None):
            return True
        if above.op_type in ROWWISE_OPERATORS:
            pending += [v for v in above.inputs if v is not None]
    return False


def name_outputs(nodes: list[ir.Node]) -> None:
    for node in nodes:
        for value in node.outputs:
            value.name = value.name or f"{node.name}.out"
