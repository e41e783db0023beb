"""Stored weights of a product: found by their record, after the graph is compared with the record's expressions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.onnx_graph import Graph, Node, Tensor, tensor_array
from tformer_runtime.format.stored_forms import (
    INT8_BLOCKS,
    INT8_COLUMNS,
    PAIRS,
    Constant,
    Expression,
    MatrixSpec,
    columns_of,
    packed_of,
)
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.format.weight_forms import rows_of_6_bits


class StoredWeights(Struct, frozen=True):
    """Integer weights (K, N). The tensors are those of the record, and have all of their bytes.

    codes: None but for 4 bits. lower: None but for 6 bits.
    """

    spec: MatrixSpec
    tensor: Tensor
    codes: Tensor | None = None
    lower: Tensor | None = None

    @property
    def bits(self) -> int:
        """Return the bits that kernels read: 6 are unpacked to 8 first."""
        return 8 if self.codes is None else 4

    @property
    def has_columns(self) -> bool:
        """Whether the numbers of a row, one for each column, follow each other."""
        return self.spec.form == INT8_COLUMNS

    @property
    def is_raised(self) -> bool:
        """Whether 8 bits are stored plus 128."""
        return self.spec.form == INT8_BLOCKS


class Comparison:
    """Compares values of a model with expressions.

    files: has the constants of the model.
    """

    def __init__(self, files: WeightFiles) -> None:
        self.files = files
        self._constants: dict[tuple[int, int], tuple[Tensor, Constant]] = {}  # that are equal
        self._pairs: set[tuple[int, str, int]] = set()  # tables that equal PAIRS, as in `_equals`

    def equals(self, graph: Graph, name: str, expression: Expression, values: Mapping[str, str | Tensor]) -> bool:
        """Return whether a value is computed as an expression says. Cost: linear in the expression.

        graph: reads the value.
        values: name in the expression → constant, or name in the graph or around it.
        """
        return self._equals(graph, name, expression, values, set())

    def _equals(
        self,
        graph: Graph,
        name: str,
        expression: Expression,
        values: Mapping[str, str | Tensor],
        known: set[tuple[int, str, int]],
    ) -> bool:
        """Do as `equals` does. known: graphs, names and expressions of values that are equal."""
        if isinstance(expression, str):
            value = values.get(expression, "")
            return name == value if isinstance(value, str) else graph.find_tensor(name) is value
        if isinstance(expression, Constant):
            return self._has_numbers(graph.find_tensor(name), expression)
        found = graph.find_producer(name)
        if found is None:
            return False
        node, home = found
        key = id(home), name, id(expression)
        if key in known or key in self._pairs:
            return True
        if (
            node.op_type != expression.op_type
            or node.domain != expression.domain
            or len(node.inputs) != len(expression.inputs)
            or len(node.outputs) != 1
            or node.attributes() != expression.attributes
            or node.has_other_attributes  # such as the mode of a Pad
        ):
            return False
        pairs = zip(node.inputs, expression.inputs, strict=True)
        if not all(self._equals(home, each, above, values, known) for each, above in pairs):
            return False
        (self._pairs if expression is PAIRS else known).add(key)
        return True

    def _has_numbers(self, tensor: Tensor | None, expected: Constant) -> bool:
        if tensor is None or tensor.dtype != expected.dtype or tensor.shape != expected.shape:
            return False
        key = id(tensor), id(expected)
        if key not in self._constants:
            array = tensor_array(tensor, self.files.read)
            if array is None or array.reshape(-1).tolist() != list(expected.values):
                return False
            self._constants[key] = tensor, expected
        return True

    def find_columns(self, graph: Graph, name: str, matrix: MatrixSpec) -> StoredWeights | None:
        """Return the stored form of the int8 value (K, N) of this name; None if it is not that of its record."""
        return self._find(graph, name, matrix, columns_of(matrix, is_local=name != matrix.weights))

    def find_packed(self, graph: Graph, name: str, matrix: MatrixSpec) -> StoredWeights | None:
        """Do as `find_columns` does for the blocks (N, ⌈K / block⌉, bytes) of MatMulNBits."""
        return self._find(graph, name, matrix, packed_of(matrix, is_local=name != matrix.weights))

    def _find(self, graph: Graph, name: str, matrix: MatrixSpec, expression: Expression) -> StoredWeights | None:
        tensors: dict[str, Tensor] = {}
        for key, (stored, dtype, shape) in matrix.constants().items():
            tensor = graph.find_tensor(stored or "")
            if tensor is None or tensor.dtype != dtype or tensor.shape != shape or not self.files.is_whole(tensor):
                return None
            tensors[key] = tensor
        if not self.equals(graph, name, expression, tensors):
            return None
        return StoredWeights(matrix, tensors["weights"], tensors.get("codes"), tensors.get("lower"))


def read_rows_of_6_bits(stored: StoredWeights, files: WeightFiles) -> Array | None:
    """Return the int8 rows (N, K) of weights of 6 bits; None if the file does not have them."""
    assert stored.lower is not None
    upper, lower = tensor_array(stored.tensor, files.read), tensor_array(stored.lower, files.read)
    if upper is None or lower is None:
        return None
    rows = np.empty((stored.spec.columns, stored.spec.inner), np.int8)
    rows_of_6_bits(upper, lower, rows)
    return rows


def is_operator(node: Node, op_type: str, inputs: int) -> bool:
    """Return whether a node is this standard operator with so many inputs, and one output."""
    return node.op_type == op_type and not node.domain and len(node.inputs) == inputs and len(node.outputs) == 1
