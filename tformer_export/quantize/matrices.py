"""The parts of a model that can be quantised: the constant matrices of its products, and its embedding tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from tformer_export.common.option_values import THROUGHPUT
from tformer_export.quantize.rewrite import MIN_WEIGHT_VALUES, constant_weight, embedding_table
from tformer_export.quantize.rounding import round_nearest
from tformer_export.quantize.weight_storage import digest

FLOAT_BITS = 32  # bits of a matrix that stays in float
BIT_CHOICES = (4, 8, FLOAT_BITS)


@dataclass
class Matrix:
    """A constant float matrix (K, N) that one or several products have on their right.

    products: the names of these nodes.
    initializers: name of each initializer that stores it → whether it is stored as (N, K).
    inputs: the other operands of the products.
    is_table: whether it is an embedding table too, whose rows are looked up. It is then stored once for both, in int8.
    """

    shape: tuple[int, int]
    products: list[str] = field(default_factory=list)
    initializers: dict[str, bool] = field(default_factory=dict)
    inputs: list[ir.Value] = field(default_factory=list)
    is_table: bool = False
    optimize_for: str = THROUGHPUT

    @property
    def name(self) -> str:
        """Return the name of its first product."""
        return self.products[0]

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the possible bits. Fewer bits are possible only if they need fewer bytes than all greater choices.

        4 bits may need as much as 8 for a small K: blocks are padded, and scales can take more than they save.
        """
        if self.is_table:
            return (8,)
        return tuple(b for b in BIT_CHOICES if all(self.size(b) < self.size(more) for more in BIT_CHOICES if more > b))

    def at_least(self, bits: int) -> int:
        """Return the smallest possible number of bits that is at least `bits`, else the greatest possible."""
        return min(choice for choice in self.choices if choice >= bits or choice == max(self.choices))

    def read(self, model: ir.Model) -> np.ndarray:
        """Return the numbers, (K, N)."""
        name, is_transposed = next(iter(self.initializers.items()))
        array = _array(model.graph.initializers[name])
        return array.T if is_transposed else array

    @property
    def blocks(self) -> round_nearest.Blocks:
        """Return the blocks in 4 bits."""
        return round_nearest.int4_blocks(self.shape[0], self.optimize_for)

    def size(self, bits: int) -> int:
        """Return the bytes in the file in this number of bits, scales included."""
        k, n = self.shape
        if bits == FLOAT_BITS:
            return 4 * k * n
        if bits == 8:
            return k * n + 4 * n
        rows = self.blocks.rows
        return -(-k // rows) * (rows // 2 + 1) * n + 4 * n


def find_matrices(model: ir.Model, optimize_for: str = THROUGHPUT) -> list[Matrix]:
    """Return the matrices that `quantize` would rewrite, in the order of their first products.

    optimize_for: chooses the blocks of 4 bits.
    Cost: one pass over the weights.
    """
    matrices: dict[bytes, Matrix] = {}
    tables = {digest(_array(model.graph.initializers[name])) for name in find_tables(model)}
    for node in _nodes(model):
        weight = constant_weight(node)
        if weight is None or weight.value_count < MIN_WEIGHT_VALUES or node.inputs[0] is None:
            continue
        name = str(weight.initializer.name)
        if name not in model.graph.initializers:
            continue
        key = digest(weight.array().T)
        matrix = matrices.setdefault(key, Matrix(weight.shape, is_table=key in tables, optimize_for=optimize_for))
        matrix.products.append(str(node.name))
        matrix.initializers[name] = weight.is_transposed
        matrix.inputs.append(node.inputs[0])
    return list(matrices.values())


def find_tables(model: ir.Model) -> list[str]:
    """Return the names of the initializers that are embeddings by token ids."""
    names = [str(node.inputs[0].name) for node in _nodes(model) if embedding_table(node) is not None and node.inputs[0]]
    return [name for name in dict.fromkeys(names) if name in model.graph.initializers]


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from list(graph)


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
