"""Simulated quantisation: the unquantised model, with weights that can be exchanged while it is loaded.

Every matrix is an initializer and a graph input; ONNX takes the initializer for the default value. So the session is
made once, and a plan is tried by binding other arrays. Before each product stands a rounding of its activations, with a
scale for each row or a static scale, like that of the integer kernels. It is switched on with the matrix. So logits
differ from a file with these integers by float32's rounding alone.

Time: a pass takes two to three times as long as in the unquantised file, because onnxruntime cannot pack a matrix that
    may change, and activations are rounded for all products, whether it is used or not. Memory: the float32 weights,
    and a second copy of the exchanged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from msgspec.structs import replace

from tformer_export.common.ir_edit import constant
from tformer_export.common.onnx_writer import save
from tformer_export.common.option_values import THROUGHPUT
from tformer_export.quantize.activations_int8 import (
    MAX_NEGATIVE_GELU,
    POSITIVE_STEPS,
    SIGNED_STEPS,
    StaticScale,
    is_gelu,
    is_positive,
)
from tformer_export.quantize.matrices import FLOAT_BITS, Matrix, find_matrices
from tformer_runtime.backend.binding import Binding
from tformer_runtime.backend.session import Session, SessionName
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest

Dequantize = Callable[[Matrix, int], np.ndarray]  # matrix, bits → float32 (K, N)
Bits = Mapping[str, int]  # name of a matrix → bits


class Simulation:
    """An engine whose weights are in the bits of a plan. It is not thread-safe.

    matrices: the matrices that can be exchanged.
    """

    def __init__(
        self,
        model: ir.Model,
        manifest: Manifest,
        dequantize: Dequantize,
        path: Path,
        static_scales: Mapping[str, StaticScale] = MappingProxyType({}),
        optimize_for: str = THROUGHPUT,
    ) -> None:
        """Write an instrumented copy of the model to `path`, as large as the float32 weights, and open it.

        static_scales: as in `quantize`.
        optimize_for: chooses the blocks of 4 bits.
        """
        copy = model.clone()
        self.matrices = find_matrices(copy, optimize_for)
        self._dequantized = dequantize
        _instrument(copy, self.matrices, static_scales)
        self._session = _ExchangeableSession(save(copy, replace(manifest, quantization="simulated"), path))
        self.engine = Engine(self._session)
        self._true = self._session.device_tensor(np.ones((), np.bool_))
        self._current: dict[
            str, tuple[int, dict[str, Any]]
        ] = {}  # matrix → its bits, and the values of its initializers

    def set_bits(self, bits: Bits) -> None:
        """Set the bits of matrices by name; others are float."""
        exchanged: dict[str, Any] = {}
        for matrix in self.matrices:
            matrix_bits = bits.get(matrix.name, FLOAT_BITS)
            current = self._current.pop(matrix.name, None)
            if matrix_bits == FLOAT_BITS:
                continue
            if current is None or current[0] != matrix_bits:
                current = matrix_bits, self._values(matrix, matrix_bits)
            self._current[matrix.name] = current
            exchanged |= current[1]
        self._session.exchanged = exchanged
        self.engine.drop_bindings()

    def _values(self, matrix: Matrix, bits: int) -> dict[str, Any]:
        array, session = self._dequantized(matrix, bits), self._session
        values = {
            name: session.device_tensor(np.ascontiguousarray(array.T if is_transposed else array))
            for name, is_transposed in matrix.initializers.items()
        }
        return values | {_switch(product): self._true for product in matrix.products}


class _ExchangeableSession(Session):
    """A session that binds the values in `exchanged` (name → value) in the place of initializers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "cpu", native_kernels=False)
        self.exchanged: dict[str, Any] = {}

    def new_binding(self, stage: SessionName) -> Binding:
        binding = super().new_binding(stage)
        for name, value in self.exchanged.items():
            binding.native.bind_ortvalue_input(name, value)
        return binding


def _switch(product: str) -> str:
    return f"{product}.rounds"


def _instrument(model: ir.Model, matrices: list[Matrix], static_scales: Mapping[str, StaticScale]) -> None:
    """Make matrices graph inputs, and round activations before products, switched off by default."""
    products = {product for matrix in matrices for product in matrix.products}
    exchanged = dict.fromkeys(name for matrix in matrices for name in matrix.initializers)
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
                scale = static_scales.get(node.name)
                new_nodes = _round_rows(model, value) if scale is None else _round_static(model, value, scale)
                graph.insert_before(node, new_nodes)
                rounded[id(graph), value] = new_nodes[-1].outputs[0]
            switch = model.graph.initializers[name]
            choice = ir.node("Where", [switch, rounded[id(graph), value], value], name=f"{name}.choice")
            choice.outputs[0].name = f"{name}.input"
            graph.insert_before(node, choice)
            node.replace_input_with(0, choice.outputs[0])
    model.graph.inputs.extend(model.graph.initializers[name] for name in exchanged)


def _round_rows(model: ir.Model, value: ir.Value) -> list[ir.Node]:
    """Return the nodes that round each row as `rewrite` does."""
    steps = POSITIVE_STEPS if is_positive(value) else SIGNED_STEPS
    axis = constant(model, "simulate.axis", np.array([-1], np.int64))
    lowest_maximum = constant(model, "simulate.least", np.float32(1e-12))
    step = constant(model, f"simulate.step.{steps}", np.float32(1 / steps))
    new_nodes: list[ir.Node] = []

    def add(operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(operator, inputs, attributes, name=f"{value.name}.simulated.{len(new_nodes)}")
        node.outputs[0].name = node.name
        new_nodes.append(node)
        return node.outputs[0]

    if is_gelu(value):
        lowest_maximum = constant(model, "simulate.gelu", np.float32(MAX_NEGATIVE_GELU))
    maximum = add("ReduceMax", value if is_gelu(value) else add("Abs", value), axis, keepdims=1)
    scale = add("Mul", add("Max", maximum, lowest_maximum), step)
    add("Mul", add("Round", add("Div", value, scale)), scale)
    return new_nodes


def _round_static(model: ir.Model, value: ir.Value, static_scale: StaticScale) -> list[ir.Node]:
    """Return the nodes that round all rows with a static scale."""
    name = f"{value.name}.simulated"
    scale = constant(model, f"{name}.scale", np.float32(static_scale.scale))
    zero = constant(model, f"{name}.zero", np.uint8(static_scale.zero))
    rounded = ir.node("QuantizeLinear", [value, scale, zero], name=f"{name}.uint8")
    dequantized = ir.node("DequantizeLinear", [rounded.outputs[0], scale, zero], name=f"{name}.float")
    for node in (rounded, dequantized):
        node.outputs[0].name = node.name
    return [rounded, dequantized]
