"""Quantisation without its kernels: the unquantised model, with weights that can be exchanged while it is loaded.

Every matrix is a graph input besides being an initializer, which ONNX takes for a default value: the session is made
once, and a plan is tried by binding other arrays, the matrices as their integers make them, at no more cost than making
those. Before each product stands what rounds its activations as the integer kernels do, row by row or in fixed steps,
to be switched on with the matrix. So logits differ from those of a file with these integers by float32's rounding
alone.

Time: a pass takes two to three times as long as the unquantised file's, for onnxruntime packs no matrix beforehand that
may change, and activations are rounded for all products, whether switched on or not.
Memory: the float32 weights, and again those that are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant
from tformer_export.common.onnx_writer import save
from tformer_export.quantize.activations_int8 import GELU, LEVELS, POSITIVE, Fixed, is_gelu, is_positive
from tformer_export.quantize.matrices import FLOAT, Matrix, find_matrices, find_tables
from tformer_export.quantize.rounding import round_nearest
from tformer_runtime.backend.session import Part, Session
from tformer_runtime.base.arrays import Array
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest

Dequantised = Callable[[Matrix, int], np.ndarray]  # (K, N) float32 of a matrix in so many bits
Bits = Mapping[str, int]  # name of a matrix → bits


class Simulation:
    """An engine whose weights are as a plan has them. One at a time: it is for one thread.

    matrices: what can be exchanged. tables: the initializers that are embeddings.
    """

    def __init__(
        self,
        model: ir.Model,
        manifest: Manifest,
        dequantised: Dequantised,
        path: Path,
        fixed: Mapping[str, Fixed] = MappingProxyType({}),
    ) -> None:
        """Writes an instrumented copy of the model to `path`, once the float32 weights' size; the model stays.

        fixed: of products, as `quantize` takes it."""
        copy = model.clone()
        self.matrices, self.tables = find_matrices(copy), find_tables(copy)
        self._dequantised = dequantised
        _instrument(copy, self.matrices, self.tables, fixed)
        self._session = _Exchanging(save(copy, replace(manifest, quantization="simulated"), path))
        self.engine = Engine(self._session)
        self._on = self._session.tensor(np.ones((), np.bool_))
        self._made: dict[str, tuple[int, dict[str, Any]]] = {}  # matrix → its bits, and its initializers' values
        self._embeddings = {name: _table(copy.graph.initializers[name]) for name in self.tables}

    def use(self, bits: Bits, tables: bool = True) -> None:
        """Have the matrices in these bits, those that are not named in float. tables: embeddings are in int8."""
        exchanged: dict[str, Any] = {}
        if tables:
            exchanged |= {name: self._session.tensor(array) for name, array in self._embeddings.items()}
        for matrix in self.matrices:
            wanted = bits.get(matrix.name, FLOAT)
            made = self._made.pop(matrix.name, None)
            if wanted == FLOAT:
                continue
            if made is None or made[0] != wanted:
                made = wanted, self._values(matrix, wanted)
            self._made[matrix.name] = made
            exchanged |= made[1]
        self._session.exchanged = exchanged

    def _values(self, matrix: Matrix, bits: int) -> dict[str, Any]:
        array, session = self._dequantised(matrix, bits), self._session
        values = {
            name: session.tensor(np.ascontiguousarray(array.T if turned else array))
            for name, turned in matrix.held.items()
        }
        return values | {_switch(product): self._on for product in matrix.products}


class _Exchanging(Session):
    """A session that binds, instead of some initializers, what is `exchanged`: name → value."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "cpu")
        self.exchanged: dict[str, Any] = {}

    def binding(self, stage: Part) -> Any:
        io = super().binding(stage)
        for name, value in self.exchanged.items():
            io.bind_ortvalue_input(name, value)
        return io


def _table(held: ir.Value) -> Array:
    assert held.const_value is not None
    quantised, scale = round_nearest.per_column(held.const_value.numpy().T)
    return np.ascontiguousarray((quantised * scale).T)


def _switch(product: str) -> str:
    return f"{product}.rounds"


def _instrument(model: ir.Model, matrices: list[Matrix], tables: list[str], fixed: Mapping[str, Fixed]) -> None:
    """Make matrices and tables inputs, and put the rounding of activations before products, switched off."""
    products = {product for matrix in matrices for product in matrix.products}
    exchanged = dict.fromkeys([*(name for matrix in matrices for name in matrix.held), *tables])
    rounded: dict[tuple[int, ir.Value], ir.Value] = {}
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            if node.name not in products:
                continue
            value, name = node.inputs[0], _switch(node.name)
            assert value is not None
            constant(model, name, np.zeros((), np.bool_))
            exchanged[name] = None
            if (id(graph), value) not in rounded:
                steps = fixed.get(node.name)
                made = _rounding(model, value) if steps is None else _fixed(model, value, steps)
                graph.insert_before(node, made)
                rounded[id(graph), value] = made[-1].outputs[0]
            switch = model.graph.initializers[name]
            choice = ir.node("Where", [switch, rounded[id(graph), value], value], name=f"{name}.choice")
            choice.outputs[0].name = f"{name}.input"
            graph.insert_before(node, choice)
            node.replace_input_with(0, choice.outputs[0])
    model.graph.inputs.extend(model.graph.initializers[name] for name in exchanged)


def _rounding(model: ir.Model, value: ir.Value) -> list[ir.Node]:
    """Each row to 127 steps of its largest number, or 255 behind a Relu, as `rewrite` rounds it."""
    steps = POSITIVE if is_positive(value) else LEVELS
    axis = constant(model, "simulate.axis", np.array([-1], np.int64))
    least = constant(model, "simulate.least", np.float32(1e-12))
    step = constant(model, f"simulate.step.{steps}", np.float32(1 / steps))
    made: list[ir.Node] = []

    def add(operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(operator, inputs, attributes, name=f"{value.name}.simulated.{len(made)}")
        node.outputs[0].name = node.name
        made.append(node)
        return node.outputs[0]

    if is_gelu(value):
        least = constant(model, "simulate.gelu", np.float32(GELU))
    most = add("ReduceMax", value if is_gelu(value) else add("Abs", value), axis, keepdims=1)
    scale = add("Mul", add("Max", most, least), step)
    add("Mul", add("Round", add("Div", value, scale)), scale)
    return made


def _fixed(model: ir.Model, value: ir.Value, steps: Fixed) -> list[ir.Node]:
    """All rows to the same steps."""
    name = f"{value.name}.simulated"
    scale = constant(model, f"{name}.scale", np.float32(steps.scale))
    zero = constant(model, f"{name}.zero", np.uint8(steps.zero))
    rounded = ir.node("QuantizeLinear", [value, scale, zero], name=f"{name}.uint8")
    number = ir.node("DequantizeLinear", [rounded.outputs[0], scale, zero], name=f"{name}.float")
    for node in (rounded, number):
        node.outputs[0].name = node.name
    return [rounded, number]
