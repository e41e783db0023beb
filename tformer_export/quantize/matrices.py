"""The parts of a model that can be quantised: the constant matrices of its products, and its embedding tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from tformer_export.common.option_values import THROUGHPUT
from tformer_export.quantize.rewrite import MIN_WEIGHT_VALUES, constant_weight, embedding_table
from tformer_export.quantize.rounding import round_nearest
from tformer_export.quantize.weight_storage import digest

FLOAT_BITS = 32  # bits of a matrix that stays in float
MIN_TABLE_VALUES_IN_4_BITS = 1 << 16  # a smaller table saves little, and its lookup takes eight operators more
BIT_CHOICES = (4, 6, 8, FLOAT_BITS)


@dataclass
class Matrix:
    """A constant float matrix (K, N) that products have on their right, or an embedding table (N, K), or both.

    products: the names of the nodes that multiply with it.
    tables: the names of the initializers whose rows are looked up by token ids.
    initializers: name of each initializer that stores it → whether it is stored as (N, K).
    inputs: the other operands of the products.
    """

    shape: tuple[int, int]
    products: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    initializers: dict[str, bool] = field(default_factory=dict)
    inputs: list[ir.Value] = field(default_factory=list)
    optimize_for: str = THROUGHPUT

    @property
    def name(self) -> str:
        """Return the name of its first product, or of the table."""
        return self.readers[0]

    @property
    def readers(self) -> list[str]:
        """Return the names by which plans give it bits: of its products and tables."""
        return [*self.products, *self.tables]

    @property
    def is_table(self) -> bool:
        """Return whether it is an embedding table. If it has products too, it is stored once for both."""
        return bool(self.tables)

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the possible bits. Fewer bits are possible only if they need fewer bytes than all greater choices.

        4 bits may need as much as 8 for a small K: blocks are padded, and scales can take more than they save.
        A table has integers.
        """
        if self.is_table:
            is_large = math.prod(self.shape) >= MIN_TABLE_VALUES_IN_4_BITS and self.size(4) < self.size(8)
            return (4, 8) if is_large else (8,)
        return tuple(b for b in BIT_CHOICES if all(self.size(b) < self.size(more) for more in BIT_CHOICES if more > b))

    def at_least(self, bits: int) -> int:
        """Return the smallest possible number of bits that is at least `bits`, else the greatest possible."""
        return min(choice for choice in self.choices if choice >= bits or choice == max(self.choices))

    def uniform(self, bits: int) -> int:
        """Return the number of bits in a file whose products have `bits`.

        A table that is the output projection too has 8, because its errors change what the model reads and writes.
        """
        return self.at_least(max(bits, 8) if self.is_table and self.products else bits)

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
        if bits == 6:
            return -(-k // 4) * 3 * n + 4 * n
        rows = self.blocks.rows
        return -(-k // rows) * (rows // 2 + 1) * n + 4 * n


def find_matrices(model: ir.Model, optimize_for: str = THROUGHPUT) -> list[Matrix]:
    """Return the matrices that `quantize` would rewrite, in the order of their first readers.

    optimize_for: chooses the blocks of 4 bits.
    Cost: one pass over the weights.
    """
    matrices: dict[bytes, Matrix] = {}
    for node in _nodes(model):
        name = _table_name(node)
        if name in model.graph.initializers:
            table = _array(model.graph.initializers[name])
            matrix = matrices.setdefault(digest(table), Matrix(table.shape[::-1], optimize_for=optimize_for))
            matrix.tables += [name] if name not in matrix.tables else []
            matrix.initializers[name] = True
            continue
        weight = constant_weight(node)
        if weight is None or weight.value_count < MIN_WEIGHT_VALUES or node.inputs[0] is None:
            continue
        name = str(weight.initializer.name)
        if name not in model.graph.initializers:
            continue
        matrix = matrices.setdefault(digest(weight.array().T), Matrix(weight.shape, optimize_for=optimize_for))
        matrix.products.append(str(node.name))
        matrix.initializers[name] = weight.is_transposed
        matrix.inputs.append(node.inputs[0])
    return list(matrices.values())


def _table_name(node: ir.Node) -> str:
    """Return the name of the table whose rows a node looks up by token ids; empty for other nodes."""
    return str(node.inputs[0].name) if embedding_table(node) is not None and node.inputs[0] is not None else ""


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from list(graph)


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
