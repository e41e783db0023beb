"""What of a model can be held in fewer bits: the constant matrices of its products, each once, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from tformer_export.quantize.rewrite import SMALLEST, _table_of, _weight_of
from tformer_export.quantize.rounding import round_nearest
from tformer_export.quantize.weight_storage import digest

FLOAT = 32  # bits of a matrix that is not quantised
CHOICES = (4, 8, FLOAT)


@dataclass
class Matrix:
    """A constant (K, N) float matrix that one or several products have on their right.

    products: the names of those nodes. held: the initializers that it is made from, and whether they are (N, K).
    inputs: the products' other operands. is_table: it is an embedding too, of which rows are looked up, and is held
    once for both: in int8.
    """

    shape: tuple[int, int]
    products: list[str] = field(default_factory=list)
    held: dict[str, bool] = field(default_factory=dict)
    inputs: list[ir.Value] = field(default_factory=list)
    is_table: bool = False

    @property
    def name(self) -> str:
        """That of its first product."""
        return self.products[0]

    @property
    def choices(self) -> tuple[int, ...]:
        """The bits that it may have, each of a smaller size than the next: blocks are filled up, so that 4 bits take as
        much as 8, or more, where K is 9, 17, 18 or below 9, and scales are more than what a K of 1 saves."""
        if self.is_table:
            return (8,)
        return tuple(b for b in CHOICES if all(self.size(b) < self.size(more) for more in CHOICES if more > b))

    def at_least(self, bits: int) -> int:
        """The fewest bits of its choices that are not fewer than these."""
        return min(choice for choice in self.choices if choice >= bits or choice == max(self.choices))

    def read(self, model: ir.Model) -> np.ndarray:
        """(K, N), from where the model holds it."""
        name, turned = next(iter(self.held.items()))
        array = _array(model.graph.initializers[name])
        return array.T if turned else array

    @property
    def block(self) -> int:
        """Rows of a block in 4 bits."""
        return round_nearest.block_of(self.shape[0])

    def size(self, bits: int) -> int:
        """Bytes in the file, scales included."""
        k, n = self.shape
        if bits == FLOAT:
            return 4 * k * n
        if bits == 8:
            return k * n + 4 * n
        blocks = -(-k // self.block)
        return blocks * self.block // 2 * n + blocks * n + 4 * n


def find_matrices(model: ir.Model) -> list[Matrix]:
    """Those that `quantize` would rewrite, in the order of their first products. Cost: one pass over the weights."""
    found: dict[bytes, Matrix] = {}
    tables = {digest(_array(model.graph.initializers[name])) for name in find_tables(model)}
    for node in _nodes(model):
        weight = _weight_of(node)
        if weight is None or weight.numbers < SMALLEST or node.inputs[0] is None:
            continue
        name = str(weight.source.name)
        if name not in model.graph.initializers:
            continue
        key = digest(weight.array().T)
        matrix = found.setdefault(key, Matrix(weight.shape, is_table=key in tables))
        matrix.products.append(str(node.name))
        matrix.held[name] = weight.turned
        matrix.inputs.append(node.inputs[0])
    return list(found.values())


def find_tables(model: ir.Model) -> list[str]:
    """Initializers that are embeddings by token ids."""
    names = [str(node.inputs[0].name) for node in _nodes(model) if _table_of(node) is not None and node.inputs[0]]
    return [name for name in dict.fromkeys(names) if name in model.graph.initializers]


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from list(graph)


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
