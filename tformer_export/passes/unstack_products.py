"""Compute products with a stack of matrices as products with single matrices.

    MatMul(x, stack (…, K, N))

Experts, grouped layers and einsum multiply with such a constant. The rows of x are either the same for several matrices
of the stack, or each matrix has rows of its own:

    shared   one product with all matrices next to each other, (K, matrices · N), whose result is taken apart
    own      x is split, each part is multiplied with its own matrix, and the results are joined

Both give ordinary products. onnxruntime packs their matrices when it loads the file, which it does for no stack. They
are quantised, and other passes and the runtime find them. Figures: docs/design/kernels.md#stacks-of-matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import add_constant, constant, replace_node, weight_sizes
from tformer_export.sources.call.adapter_switch import FACTORS

MIN_OWN_VALUES = 1 << 17  # of a matrix with rows of its own; the operators around fewer int8 take longer than the stack
MAX_AXES = 16  # of a value
MAX_OWN_MATRICES = 256  # with rows of their own; each is a product in the file

Size = int | ir.SymbolicDim | None


def run(model: ir.Model) -> int:
    """Replace them in place, and return how many products with a stack were replaced. Linear in the number of nodes.

    A stack that is read in another way too, such as by Gather, stays, so that the file holds its numbers once. Nodes
    that nothing reads any more stay in the graph.
    """
    nodes = [node for graph in (model.graph, *model.graph.subgraphs()) for node in graph]
    by_stack: dict[ir.Value, list[_StackedProduct]] = {}
    for node in nodes:
        product = _StackedProduct.find(model, node)
        if product is not None:
            by_stack.setdefault(product.weight, []).append(product)
    replaced = [
        product
        for weight, products in by_stack.items()
        if len(products) == len(weight.uses()) and len({product.matrices for product in products}) == 1
        for product in products
    ]
    for product in replaced:
        product.rewrite()
    return len(replaced)


class _StackedProduct:
    """A product with a constant stack of matrices, aligned with its operand as MatMul aligns both.

    rows: the operand. It has fewer axes than the result if it is the same along leading axes of the stack.
    sizes: the size of the operand along each axis of the result but the last two; 1 for an axis that it does not have.
    stack: the size of the stack along each of these axes; 1 for an axis that it does not have.
    """

    def __init__(self, model: ir.Model, node: ir.Node, rows: ir.Value, weight: ir.Value) -> None:
        assert weight.const_value is not None
        self.model, self.node, self.rows, self.weight = model, node, rows, weight
        *stack, self.inner, self.columns = weight_sizes(weight.const_value)
        sizes = _sizes(rows)[:-2]
        self.axes = max(len(stack), len(sizes))
        self.absent = self.axes - len(sizes)  # leading axes that the operand does not have
        self.sizes: list[Size] = [*([1] * self.absent), *sizes]
        self.stack = [1] * (self.axes - len(stack)) + stack

    @classmethod
    def find(cls, model: ir.Model, node: ir.Node) -> _StackedProduct | None:
        """Return the product of a node if it has a stack that can be taken apart; else None."""
        if node.op_type != "MatMul" or node.domain:
            return None
        rows, weight = node.inputs
        tensor = weight.const_value if weight is not None else None
        if rows is None or weight is None or tensor is None or str(weight.name).endswith(FACTORS):
            return None
        if len(tensor.shape) < 3 or tensor.dtype != ir.DataType.FLOAT or len(_sizes(rows)) < 2:
            return None
        product = cls(model, node, _before_repetition(rows, weight_sizes(tensor)[:-2]), weight)
        return product if product._can_be_taken_apart() else None

    def _can_be_taken_apart(self) -> bool:
        matrices = math.prod(self.stack[axis] for axis in self._own_axes())
        is_small = matrices == 1 or self.inner * self.columns >= MIN_OWN_VALUES
        are_known = all(self.stack[axis] in (1, self.sizes[axis]) or self.sizes[axis] == 1 for axis in range(self.axes))
        return are_known and is_small and matrices <= MAX_OWN_MATRICES

    def _own_axes(self) -> list[int]:
        """Return the axes along which each matrix has rows of its own."""
        return [axis for axis in range(self.axes) if self.stack[axis] > 1 and self.sizes[axis] == self.stack[axis]]

    @property
    def matrices(self) -> tuple[int, ...]:
        """The axes along which the stack is taken apart, from its end. They determine the constants."""
        return tuple(self.axes - axis for axis in self._own_axes())

    def rewrite(self) -> None:
        name = self.node.name or f"product of {self.node.outputs[0].name}"
        nodes: list[ir.Node] = []
        self._append(nodes, name, self.rows, self._own_axes(), ())
        replace_node(self.node, nodes)

    def _append(
        self, nodes: list[ir.Node], name: str, rows: ir.Value, own: Sequence[int], chosen: tuple[tuple[int, int], ...]
    ) -> ir.Value:
        """Append the nodes of the product with a part of the stack, and return its result.

        own: the axes along which the rows are still to be split.
        chosen: axis and place of each axis that was split.
        """
        if not own:
            return self._append_shared(nodes, name, rows, dict(chosen))
        axis, count = own[0], self.stack[own[0]]
        split = ir.node("Split", [rows], {"axis": axis - self.absent, "num_outputs": count}, num_outputs=count)
        split.name = f"{name}.split"
        sizes = _sizes(rows)
        sizes[axis - self.absent] = 1
        for place, part in enumerate(split.outputs):
            part.name, part.dtype, part.shape = f"{split.name}.{place}", ir.DataType.FLOAT, ir.Shape(sizes)
        nodes.append(split)
        results = [
            self._append(nodes, f"{name}.{place}", part, own[1:], (*chosen, (axis, place)))
            for place, part in enumerate(split.outputs)
        ]
        return _add(nodes, "Concat", results, f"{name}.joined", axis=axis)

    def _append_shared(self, nodes: list[ir.Node], name: str, rows: ir.Value, chosen: dict[int, int]) -> ir.Value:
        """Append one product with all matrices that the rows are multiplied with, (K, matrices · N)."""
        shared = [
            axis
            for axis in range(self.axes)
            if axis < self.absent or (axis not in chosen and self.stack[axis] > 1 and self.sizes[axis] == 1)
        ]
        present = [axis - self.absent for axis in shared if axis >= self.absent]
        if present:
            rows = self._without_axes(nodes, name, rows, present)
        product = _add(nodes, "MatMul", [rows, self._matrix(shared, chosen)], name)
        kept = self.axes - len(shared)
        leading = _sizes(rows)[: kept + 1]
        count = math.prod(self.stack[axis] for axis in shared)
        product.shape = ir.Shape([*leading, count * self.columns])
        if not shared:
            return product
        sizes = [*[0] * (kept + 1), *(self.stack[axis] for axis in shared), self.columns]  # 0 copies a size
        apart = _add(nodes, "Reshape", [product, self._integers(sizes)], f"{name}.apart")
        apart.shape = ir.Shape([*leading, *sizes[kept + 1 :]])
        places = iter(range(kept))
        of_shared = {axis: kept + 1 + place for place, axis in enumerate(shared)}
        order = [of_shared[axis] if axis in of_shared else next(places) for axis in range(self.axes)]
        return _add(nodes, "Transpose", [apart], f"{name}.stacked", perm=[*order, kept, len(sizes) - 1])

    def _without_axes(self, nodes: list[ir.Node], name: str, rows: ir.Value, axes: list[int]) -> ir.Value:
        """Return the rows without axes of size 1."""
        above = rows.producer()
        if above is not None and above.op_type == "Unsqueeze" and above.inputs[0] is not None:
            added = [axis % len(_sizes(rows)) for axis in _integers_of(above.inputs[1]) or ()]
            if sorted(added) == axes and len(_sizes(above.inputs[0])) == len(_sizes(rows)) - len(axes):
                return above.inputs[0]
        squeezed = _add(nodes, "Squeeze", [rows, self._integers(axes)], f"{name}.rows")
        squeezed.shape = ir.Shape([size for axis, size in enumerate(_sizes(rows)) if axis not in axes])
        return squeezed

    def _matrix(self, shared: Sequence[int], chosen: dict[int, int]) -> ir.Value:
        """Return the constant (K, matrices · N) of the chosen places of the stack, computed on each access."""
        source = self.weight.const_value
        assert source is not None
        places = tuple(chosen.get(axis, slice(None) if axis in shared else 0) for axis in range(self.axes))
        places = places[self.axes - (len(source.shape) - 2) :]  # without the axes that the stack does not have
        shape = self.inner, math.prod(self.stack[axis] for axis in shared) * self.columns
        name = ".".join([str(self.weight.name), *("all" if isinstance(p, slice) else str(p) for p in places)])

        def compute() -> ir.TensorProtocol:
            matrices = source.numpy()[places]
            return ir.tensor(np.ascontiguousarray(np.moveaxis(matrices, -2, 0)).reshape(shape))

        if name not in self.model.graph.initializers:
            add_constant(self.model, ir.LazyTensor(compute, ir.DataType.FLOAT, ir.Shape(shape), name=name))
        return self.model.graph.initializers[name]

    def _integers(self, numbers: Sequence[int]) -> ir.Value:
        return constant(self.model, f"integers.{'.'.join(map(str, numbers))}", np.array(numbers, np.int64))


def _before_repetition(rows: ir.Value, stack: Sequence[int]) -> ir.Value:
    """Return the value of which `rows` is a repetition along axes of the stack alone; `rows` itself if there is none.

    Without the repetition the product has as many axes.
    """
    axes = max(len(stack), len(_sizes(rows)) - 2)
    while (found := _repeated(rows, stack)) is not None and max(len(stack), len(_sizes(found)) - 2) == axes:
        rows = found
    return rows


def _repeated(rows: ir.Value, stack: Sequence[int]) -> ir.Value | None:
    """Return the operand of the operator that repeats rows along axes of the stack; None for other operators."""
    node = rows.producer()
    source = node.inputs[0] if node is not None and node.op_type in ("Expand", "Tile", "Reshape") else None
    if node is None or source is None or node.domain:
        return None
    if node.op_type == "Reshape":  # Tile(x (M, K), (matrices, 1)) to (matrices, M, K)
        tile, sizes = source.producer(), _sizes(rows)
        if tile is None or tile.op_type != "Tile" or _integers_of(tile.inputs[1]) != [stack[-1], 1]:
            return None
        keeps_rows = len(sizes) == 3 and sizes[0] == stack[-1] and sizes[2] == _sizes(source)[1]
        return tile.inputs[0] if keeps_rows else None
    before, after = _sizes(source), _sizes(rows)
    if len(before) < 2 or len(after) < 2:
        return None
    before = [*([1] * (len(after) - len(before))), *before]
    repeats: Sequence[Size] | None = _integers_of(node.inputs[1]) if node.op_type == "Tile" else None
    if repeats is None:
        repeats = [1 if old == new and new is not None else new for old, new in zip(before, after, strict=True)]
    counts = [1] * len(after) + [*stack, 1, 1]
    fits = (
        times == 1 or (old == 1 and times == counts[axis - len(after)])
        for axis, (old, times) in enumerate(zip(before, repeats, strict=True))
    )
    return source if all(fits) else None


def _sizes(value: ir.Value) -> list[Size]:
    return [size if isinstance(size, int) or size.value is not None else None for size in value.shape or ()]


def _integers_of(value: ir.Value | None) -> list[int] | None:
    """Return the numbers of a constant; None for other values."""
    tensor = value.const_value if value is not None else None
    return None if tensor is None or tensor.size > MAX_AXES else [int(number) for number in tensor.numpy().reshape(-1)]


def _add(
    nodes: list[ir.Node], operator: str, inputs: Sequence[ir.Value], name: str, **attributes: int | list[int]
) -> ir.Value:
    node = ir.node(operator, inputs, attributes, name=name)
    node.outputs[0].name, node.outputs[0].dtype = f"{name}.out", ir.DataType.FLOAT
    nodes.append(node)
    return node.outputs[0]
