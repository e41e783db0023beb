"""Values that are neighbouring columns of another value: results of Split and Slice along the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class ColumnBlock:
    """The columns start … stop − 1 of the last axis of `source`, which no Split or Slice of this form computes."""

    source: ir.Value
    start: int
    stop: int

    def overlaps(self, other: ColumnBlock) -> bool:
        """Return whether two blocks of one source have a column in common."""
        return self.start < other.stop and other.start < self.stop


def find_column_block(value: ir.Value) -> ColumnBlock | None:
    """Return the columns of which a value consists, all of its own if it is not part of another value.

    Return None if the number of columns is unknown. Cost: the number of splits, one after another.
    """
    node = value.producer()
    part = None
    if node is not None and not node.domain and node.op_type == "Split":
        part = _split_bounds(node, value)
    elif node is not None and not node.domain and node.op_type == "Slice":
        part = _slice_bounds(node)
    if node is None or node.inputs[0] is None or part is None:
        width = _width(value)
        return None if width is None else ColumnBlock(value, 0, width)
    outer = find_column_block(node.inputs[0])
    return None if outer is None else ColumnBlock(outer.source, outer.start + part[0], outer.start + part[1])


def is_read_alone(block: ColumnBlock, value: ir.Value) -> bool:
    """Return whether `value` alone is computed from these columns of the block's source.

    Cost: the square of the number of parts into which the source is split.
    """
    if block.source.is_graph_output():
        return False
    others = (result for use in block.source.uses() for result in use.node.outputs if result is not value)
    found = [find_column_block(result) for result in others]
    return all(one is not None and one.source is block.source and not one.overlaps(block) for one in found)


def _split_bounds(node: ir.Node, part: ir.Value) -> tuple[int, int] | None:
    """Return the first and the last column, exclusive, of a part; None for another axis and unknown sizes."""
    axis, whole = node.attributes.get("axis"), node.inputs[0]
    if whole is None or not _is_last(axis.as_int() if axis is not None else 0, whole):
        return None
    width, parts = _width(whole), len(node.outputs)
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        sizes = _numbers(node.inputs[1])
    else:
        sizes = None if width is None or width % parts else [width // parts] * parts
    if sizes is None:
        return None
    index = node.outputs.index(part)
    return sum(sizes[:index]), sum(sizes[: index + 1])


def _slice_bounds(node: ir.Node) -> tuple[int, int] | None:
    """Return the first and the last column, exclusive, of a slice; None for others and unknown bounds."""
    whole, *bounds = node.inputs
    numbers = [_numbers(value) for value in bounds]
    width = _width(whole) if whole is not None else None
    if whole is None or width is None or len(numbers) not in (3, 4) or any(n is None or len(n) != 1 for n in numbers):
        return None
    start, stop, axis, step = [*(n[0] for n in numbers if n is not None), 1][:4]
    if step != 1 or not _is_last(axis, whole):
        return None
    start, stop, _ = slice(start, stop).indices(width)
    return (start, stop) if start < stop else None


def _is_last(axis: int, value: ir.Value) -> bool:
    return axis == -1 or (value.shape is not None and axis == len(value.shape) - 1)


def _width(value: ir.Value) -> int | None:
    """Return the number of columns."""
    width = value.shape[-1] if value.shape is not None and len(value.shape) > 0 else None
    return width if isinstance(width, int) else None


def _numbers(value: ir.Value | None) -> list[int] | None:
    tensor = value.const_value if value is not None else None
    return tensor.numpy().reshape(-1).tolist() if tensor is not None and tensor.dtype == ir.DataType.INT64 else None
