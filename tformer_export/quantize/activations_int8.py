"""Inputs of products as uint8, with a scale for each row or a static scale for all rows.

The costs of both are in docs/design/kernels.md#integer-products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_runtime.format.stored_forms import RowScaling

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


class ActivationScalings:
    """How the activations of products become integers, decided once in each graph for all their readers.

    on_cpu: whether onnxruntime's own operators may be used.
    """

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self._known: dict[tuple[int, ir.Value, bool], tuple[ir.Value, RowScaling]] = {}

    @property
    def static_scales(self) -> int:
        """The number of activations with a static scale."""
        return sum(is_static for _, _, is_static in self._known)

    @property
    def row_scales(self) -> int:
        """The number of activations with a scale for each row."""
        return len(self._known) - self.static_scales

    def find(self, graph: ir.Graph, value: ir.Value, static_scale: StaticScale | None) -> tuple[ir.Value, RowScaling]:
        """Return the value that is rounded for a product's operand, and how. Clipping replaces a Relu."""
        key = id(graph), value, static_scale is not None
        if key not in self._known:
            above, is_after_relu = value.producer(), is_positive(value)
            if static_scale is None:
                scaling = self._by_row(value)
            else:
                fixed, is_after_relu = np.float32(static_scale.scale), is_after_relu and not static_scale.zero
                scaling = RowScaling(False, 0.0, 0.0, static_scale.zero, fixed_scale=float(fixed))
            source = above.inputs[0] if above is not None and is_after_relu else value
            assert source is not None
            self._known[key] = source, scaling
        return self._known[key]

    def _by_row(self, value: ir.Value) -> RowScaling:
        """Return the scaling by the largest number of each row.

        x · (1 / maximum) is at most 1 + 2⁻²³ after rounding, so that only numbers which a Relu would remove are
        clipped. A row of zeros has arbitrary integers, which are scaled back by zero.
        """
        magnitude, floor, steps, centre = True, 0.0, SIGNED_STEPS, UINT8_CENTRE
        if is_positive(value):
            magnitude, steps, centre = False, POSITIVE_STEPS, 0
        elif is_gelu(value):
            magnitude, floor = False, float(np.float32(MAX_NEGATIVE_GELU))
        can_be_empty = may_be_empty(value)
        reciprocal = not self.on_cpu or can_be_empty  # onnxruntime 1.31 has no blocks for no rows
        step = float(np.float32(1 / steps))
        return RowScaling(magnitude, floor, step, centre, reciprocal, may_be_empty=can_be_empty)


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
