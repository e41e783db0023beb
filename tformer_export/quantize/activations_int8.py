"""What products read, as uint8: each row in steps of its own, or all rows in steps that are fixed.

`rewrite.py` has what either costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.quantize.weight_storage import Store

CENTRE = 128  # of uint8 rows
LEVELS = 127  # steps of a row's largest number, to either side of it
GELU = 0.1701  # x Φ(x) is above its negative, and so is the form with tanh
POSITIVE = 255  # steps of activations that are not negative
STEPS = 255  # of those that are fixed
WITHIN_ROWS = {
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
class Fixed:
    """uint8 q stands for scale · (q − zero); what would be beyond 0 … 255 is clipped."""

    scale: float
    zero: int

    @classmethod
    def between(cls, least: float, most: float) -> Fixed:
        """Steps from one to the other; least ≤ 0 ≤ most. Where both are zero, any."""
        scale = np.float32((most - least) / STEPS) or np.float32(1)
        return cls(float(scale), int(np.rint(-least / scale)))

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """float32: what the integers of x stand for."""
        scale, zero = np.float32(self.scale), np.float32(self.zero)
        q: np.ndarray = (np.rint(x / scale) + zero).clip(0, STEPS)
        return (q - zero) * scale


def row_by_row(value: ir.Value, rows: np.ndarray) -> np.ndarray:
    """What the integers of an operand's rows (R, K) stand for, where each row has steps of its own."""
    if is_positive(value):
        most, steps = rows.max(1, keepdims=True), POSITIVE
    elif is_gelu(value):
        most, steps = np.maximum(rows.max(1, keepdims=True), np.float32(GELU)), LEVELS
    else:
        most, steps = np.abs(rows).max(1, keepdims=True), LEVELS
    scale = np.where(most > 0, most, 1) / np.float32(steps)
    return np.rint(rows / scale) * scale


class Operands:
    """Makes the integers of each operand, once in a graph for all who read it.

    on_cpu: onnxruntime's own operators may be used. fixed, by_row: how many operands have steps of either kind.
    """

    def __init__(self, store: Store, on_cpu: bool) -> None:
        self.store, self.on_cpu = store, on_cpu
        self._rows: dict[tuple[int, ir.Value], tuple[ir.Value, ir.Value, ir.Value]] = {}
        self._steps: dict[tuple[int, ir.Value], tuple[ir.Value, ir.Value, ir.Value]] = {}

    @property
    def fixed(self) -> int:
        return len(self._steps)

    @property
    def by_row(self) -> int:
        return len(self._rows)

    def in_steps(self, graph: ir.Graph, node: ir.Node, fixed: Fixed) -> tuple[ir.Value, ir.Value, ir.Value]:
        """uint8 of a product's operand, their scale (), and where zero is among them. A Relu is made by clipping."""
        value = node.inputs[0]
        assert value is not None
        key = id(graph), value
        if key not in self._steps:
            above = value.producer()
            source = above.inputs[0] if above is not None and is_positive(value) and not fixed.zero else value
            name = f"{value.name}.steps"
            scale = self.store.constant(f"{name}.scale", np.float32(fixed.scale))
            zero = self.store.constant(f"{name}.zero", np.uint8(fixed.zero))
            made = ir.node("QuantizeLinear", [source, scale, zero], name=f"{name}.uint8")
            name_outputs([made])
            graph.insert_before(node, made)
            self._steps[key] = made.outputs[0], scale, zero
        return self._steps[key]

    def rows(self, graph: ir.Graph, node: ir.Node, inner: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        """uint8 rows of a product's operand (…, inner), their float scales (…, 1), and where zero is among the former.

        x · (1 / maximum) rounds to 1 + 2⁻²³ at most, so nothing is clipped but what Relu would take away. A row of
        zeros becomes anything, and is scaled back by zero.
        """
        value = node.inputs[0]
        assert value is not None
        key = id(graph), value
        if key not in self._rows:
            above, positive = value.producer(), is_positive(value)
            name, made = f"{value.name}.rows", []
            axis = self.store.constant("quantise.axis", np.array([-1], np.int64))
            if positive:
                assert above is not None
                assert above.inputs[0] is not None
                source, steps, centre = above.inputs[0], POSITIVE, 0
                made.append(ir.node("ReduceMax", [source, axis], {"keepdims": 1}, name=f"{name}.highest"))
                made.append(ir.node("Relu", [made[-1].outputs[0]], name=f"{name}.most"))
            elif is_gelu(value):
                source, steps, centre = value, LEVELS, CENTRE
                least = self.store.constant("quantise.gelu", np.float32(GELU))
                made.append(ir.node("ReduceMax", [source, axis], {"keepdims": 1}, name=f"{name}.highest"))
                made.append(ir.node("Max", [made[-1].outputs[0], least], name=f"{name}.most"))
            else:
                source, steps, centre = value, LEVELS, CENTRE
                made.append(ir.node("Abs", [source], name=f"{name}.size"))
                made.append(ir.node("ReduceMax", [made[-1].outputs[0], axis], {"keepdims": 1}, name=f"{name}.most"))
            empty = may_be_empty(value)
            if empty:  # of no rows, (0, K), onnxruntime 1.31 takes the maxima to be (0, K) too
                bounds = [self.store.constant(f"quantise.at.{i}", np.array([i], np.int64)) for i in (0, 1)]
                made.append(ir.node("Slice", [made[-1].outputs[0], *bounds, axis], name=f"{name}.single"))
            step = self.store.constant(f"quantise.step.{steps}", np.float32(1 / steps))
            zero = self.store.constant(f"quantise.zero.{steps}", np.uint8(centre))
            most = made[-1].outputs[0]
            scale = ir.node("Mul", [most, step], name=f"{name}.scale")
            made += [scale, *self._divided(name, source, most, scale.outputs[0], zero, 0 if empty else inner)]
            name_outputs(made)
            graph.insert_before(node, made)
            self._rows[key] = made[-1].outputs[0], scale.outputs[0], zero
        return self._rows[key]

    def _divided(
        self, name: str, source: ir.Value, most: ir.Value, scale: ir.Value, zero: ir.Value, inner: int
    ) -> list[ir.Node]:
        """Rows over their scales, rounded. inner: how long a row is, or 0 if there may be none, which the blocks of
        onnxruntime 1.31 cannot have."""
        if not self.on_cpu or not inner:
            inverse = ir.node("Reciprocal", [scale], name=f"{name}.inverse")
            ratio = ir.node("Mul", [source, inverse.outputs[0]], name=f"{name}.ratio")
            unit = self.store.constant("quantise.unit", np.float32(1))
            return [inverse, ratio, ir.node("QuantizeLinear", [ratio.outputs[0], unit, zero], name=f"{name}.uint8")]
        # Where zero is, for each row: what becomes of a number that is divided by infinity.
        never = self.store.constant("quantise.never", np.float32(np.inf))
        centres = ir.node("QuantizeLinear", [most, never, zero], name=f"{name}.centres")
        by_row = {"axis": -1, "block_size": inner}
        inputs = [source, scale, centres.outputs[0]]
        return [centres, ir.node("QuantizeLinear", inputs, by_row, name=f"{name}.uint8")]


def is_gelu(value: ir.Value) -> bool:
    """Whether a product's operand is a Gelu's result, which is nowhere below −GELU: what is largest bounds it."""
    above = value.producer()
    return above is not None and above.op_type == "Gelu"


def is_positive(value: ir.Value) -> bool:
    """Whether a product's operand is what a Relu gives it alone: then no steps are spent on what is below zero."""
    above = value.producer()
    alone = above is not None and above.op_type == "Relu" and len(list(value.uses())) == 1
    return alone and not value.is_graph_output()


def may_be_empty(value: ir.Value) -> bool:
    """Whether a value can be of no rows: it is made of some that were split by sizes which data tell, as those of a
    mixture's experts are, (rows, columns), of no rows where nothing was for an expert; or it is one stage's alone."""
    seen: set[ir.Value] = set()
    todo = [value]
    while todo:
        here = todo.pop()
        above = here.producer()
        if above is None or here in seen:
            continue
        seen.add(here)
        sizes = above.inputs[1] if above.op_type == "Split" and len(above.inputs) > 1 else None
        if above.op_type == "If" or (sizes is not None and sizes.const_value is None):
            return True
        if above.op_type in WITHIN_ROWS:
            todo += [v for v in above.inputs if v is not None]
    return False


def name_outputs(nodes: list[ir.Node]) -> None:
    for node in nodes:
        for value in node.outputs:
            value.name = value.name or f"{node.name}.out"
