"""Recognition of quantised products: the operators between float activations and the float result of a product.

`tformer_export/quantize/rewrite.py` writes them (its form `rows`):

    maximum = ReduceMax(Abs(x)), Relu(ReduceMax(x)) or Max(ReduceMax(x), floor)
    scale = maximum · step
    q = QuantizeLinear(x, scale, zero) in blocks of a row, or QuantizeLinear(x · Reciprocal(scale), 1, zero)
    y = Cast(MatMulInteger(q, weights, zero)) · scale · column scales, or MatMulIntegerToFloat(…) · scale
    y + bias

With a static scale q = QuantizeLinear(x, scale, zero) with constants. Each operator and each constant is checked, so
that a product with any difference is not recognised.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import F32
from tformer_runtime.format.onnx_fields import DATA_TYPE_FLOAT
from tformer_runtime.format.onnx_graph import Graph, Node, tensor_array
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.stored_weights import StoredWeights, find_stored_weights, is_operator

CONTRIB = "com.microsoft"


class RowScaling(Struct, frozen=True):
    """How a row of activations x becomes uint8: round(x / scale) + zero with scale = step · maximum.

    magnitude: whether the maximum is that of |x|; else it is that of x, and `floor` at least.
    reciprocal: whether x is multiplied by 1 / scale instead.
    fixed_scale: the scale of all rows, without a maximum; 0 for none.
    """

    magnitude: bool
    floor: float
    step: float
    zero: int
    reciprocal: bool = False
    fixed_scale: float = 0.0


class QuantizedProduct(Struct, frozen=True):
    """A product that one operator can compute.

    source, result: names of its float input (…, K) and output (…, N).
    column_first: whether sums are multiplied by the column's scale before the row's; with a fixed scale, whether
        `scale` contains it.
    scale, bias: float32 (N,).
    last: the node that computes the result.
    """

    source: str
    result: str
    scaling: RowScaling
    column_first: bool
    weights: StoredWeights
    scale: F32
    bias: F32 | None
    last: Node


class Readers:
    """The nodes of a graph that read each value; also how many nodes in branches do."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: dict[str, list[Node]] = {}
        self.outside = set(graph.outputs)
        for node in graph.nodes:
            for name in node.inputs:
                self.nodes.setdefault(name, []).append(node)
            for branch in node.branches.values():
                self.outside |= branch.names_read()

    def only_reader(self, name: str) -> Node | None:
        """Return the node that alone reads a value; None if several do, or if it is an output."""
        nodes = self.nodes.get(name, [])
        return nodes[0] if len(nodes) == 1 and name not in self.outside else None


def find_product(graph: Graph, node: Node, readers: Readers, files: WeightFiles) -> QuantizedProduct | None:
    """Return the product whose integers a node multiplies; None for other nodes, and for other forms of a product."""
    return _Finder(graph, files).find(node, readers)


class _Finder:
    def __init__(self, graph: Graph, files: WeightFiles) -> None:
        self.graph, self.files = graph, files

    def find(self, node: Node, readers: Readers) -> QuantizedProduct | None:
        to_float = node.op_type == "MatMulIntegerToFloat" and node.domain == CONTRIB
        if not to_float and not is_operator(node, "MatMulInteger", 3):
            return None
        inputs = [*node.inputs, "", "", ""]
        if to_float and (len(node.inputs) < 5 or inputs[5]):
            return None
        weights = find_stored_weights(self.graph, inputs[1], self.files)
        zero = self._uint8(inputs[4] if to_float else inputs[2])
        if weights is None or zero is None:
            return None
        rows = self._rows(inputs[0], weights.inner)
        if rows is None or rows[1].zero != zero:
            return None
        source, scaling, scale_name = rows
        return (self._to_float if to_float else self._integer)(node, readers, weights, source, scaling, scale_name)

    def _integer(
        self, node: Node, readers: Readers, weights: StoredWeights, source: str, scaling: RowScaling, scale_name: str
    ) -> QuantizedProduct | None:
        """Recognise Cast, the product with the scale of the row, and that with the scales of columns."""
        cast = readers.only_reader(node.outputs[0])
        if cast is None or not is_operator(cast, "Cast", 1) or cast.attributes() != {"to": DATA_TYPE_FLOAT}:
            return None
        by_row = readers.only_reader(cast.outputs[0])
        if by_row is None or not _multiplies(by_row, cast.outputs[0], scale_name):
            return None
        by_column = readers.only_reader(by_row.outputs[0])
        if by_column is None or not is_operator(by_column, "Mul", 2):
            return None
        scale = self._columns(_other(by_column, by_row.outputs[0]), weights.columns)
        if scale is None:
            return None
        return self._with_bias(by_column, readers, weights, source, scaling, False, scale)

    def _to_float(
        self, node: Node, readers: Readers, weights: StoredWeights, source: str, scaling: RowScaling, scale_name: str
    ) -> QuantizedProduct | None:
        """Recognise the product of MatMulIntegerToFloat with the scale of the row."""
        scale = self._columns(node.inputs[3], weights.columns)
        own_scale = self._float(node.inputs[2])
        if scale is None or own_scale is None:
            return None
        if scaling.fixed_scale:
            if own_scale != scaling.fixed_scale:
                return None
            bias = self._columns(node.inputs[6], weights.columns) if len(node.inputs) > 6 and node.inputs[6] else None
            if len(node.inputs) > 6 and node.inputs[6] and bias is None:
                return None
            scale = scale * np.float32(own_scale)
            if bias is None:
                return self._with_bias(node, readers, weights, source, scaling, True, scale)
            return QuantizedProduct(source, node.outputs[0], scaling, True, weights, scale, bias, node)
        by_row = readers.only_reader(node.outputs[0])
        if own_scale != 1 or len(node.inputs) > 6 or by_row is None:
            return None
        if not _multiplies(by_row, node.outputs[0], scale_name):
            return None
        return self._with_bias(by_row, readers, weights, source, scaling, True, scale)

    def _with_bias(
        self, last: Node, readers: Readers, weights: StoredWeights, source: str, scaling: RowScaling,
        column_first: bool, scale: F32,
    ) -> QuantizedProduct:  # fmt: skip
        bias = None
        adder = readers.only_reader(last.outputs[0])
        if adder is not None and is_operator(adder, "Add", 2):
            name = _other(adder, last.outputs[0])
            tensor = self.graph.find_tensor(name)
            if tensor is not None and tensor.shape == (weights.columns,):
                bias = self._columns(name, weights.columns)
                last = adder if bias is not None else last
        return QuantizedProduct(source, last.outputs[0], scaling, column_first, weights, scale, bias, last)

    def _rows(self, name: str, inner: int) -> tuple[str, RowScaling, str] | None:
        """Recognise quantised rows. Return their float source, their scaling, and the name of their scale."""
        quantize = self._node(name)
        if quantize is None or not is_operator(quantize, "QuantizeLinear", 3):
            return None
        attributes = quantize.attributes()
        source, scale_name, zero_name = quantize.inputs
        if "block_size" in attributes:
            if attributes != {"axis": -1, "block_size": inner}:
                return None
            centres = self._node(zero_name)
            if centres is None or not is_operator(centres, "QuantizeLinear", 3) or centres.attributes():
                return None
            zero = self._uint8(centres.inputs[2])
            is_never = self._float(centres.inputs[1]) == np.inf
            found = self._scale(scale_name, source) if is_never and zero is not None else None
            if found is None or zero is None or centres.inputs[0] != found[1]:
                return None
            magnitude, _, floor, step = found
            return source, RowScaling(magnitude, floor, step, zero), scale_name
        zero, scale = self._uint8(zero_name), self._float(scale_name)
        if attributes or zero is None or scale is None:
            return None
        ratio = self._node(source)
        inverse = self._node(ratio.inputs[1]) if ratio is not None and is_operator(ratio, "Mul", 2) else None
        if scale == 1 and ratio is not None and inverse is not None and is_operator(inverse, "Reciprocal", 1):
            found = self._scale(inverse.inputs[0], ratio.inputs[0])
            if found is not None:
                magnitude, _, floor, step = found
                return ratio.inputs[0], RowScaling(magnitude, floor, step, zero, reciprocal=True), inverse.inputs[0]
        if not 0 < scale < np.inf:
            return None
        return source, RowScaling(False, 0.0, 0.0, zero, fixed_scale=scale), scale_name

    def _scale(self, name: str, source: str) -> tuple[bool, str, float, float] | None:
        """Recognise the scale of rows. Return whether the maximum is of magnitudes, its name, floor and step."""
        scale = self._node(name)
        if scale is None or not is_operator(scale, "Mul", 2):
            return None
        step, maximum = self._float(scale.inputs[1]), self._node(scale.inputs[0])
        if step is None or maximum is None:
            return None
        if is_operator(maximum, "Slice", 4):  # of the shape alone, where there may be no rows
            bounds = [self._integer_of(name) for name in maximum.inputs[1:]]
            maximum = self._node(maximum.inputs[0]) if bounds == [0, 1, -1] else None
        if maximum is None:
            return None
        if is_operator(maximum, "ReduceMax", 2):
            size = self._node(maximum.inputs[0])
            if self._is_row_maximum(maximum) and size is not None and is_operator(size, "Abs", 1):
                return (True, scale.inputs[0], 0.0, step) if size.inputs[0] == source else None
            return None
        floor = 0.0 if is_operator(maximum, "Relu", 1) else None
        if is_operator(maximum, "Max", 2):
            floor = self._float(maximum.inputs[1])
        highest = self._node(maximum.inputs[0])
        if floor is None or highest is None or not self._is_row_maximum(highest) or highest.inputs[0] != source:
            return None
        return False, scale.inputs[0], floor, step

    def _is_row_maximum(self, node: Node) -> bool:
        is_reduction = is_operator(node, "ReduceMax", 2) and node.attributes() == {"keepdims": 1}
        return is_reduction and self._integer_of(node.inputs[1]) == -1

    def _node(self, name: str) -> Node | None:
        found = self.graph.find_producer(name)
        return found[0] if found is not None else None

    def _columns(self, name: str, columns: int) -> F32 | None:
        """Return a constant of one number for each column, or of one for all."""
        tensor = self.graph.find_tensor(name)
        if tensor is None or tensor.dtype != np.float32 or tensor.shape not in ((columns,), (), (1,)):
            return None
        array = tensor_array(tensor, self.files.read)
        return None if array is None else np.ascontiguousarray(np.broadcast_to(array, (columns,)), np.float32)

    def _number(self, name: str, kind: type[np.generic]) -> float | None:
        tensor = self.graph.find_tensor(name)
        if tensor is None or tensor.dtype != kind or tensor.shape not in ((), (1,)):
            return None
        array = tensor_array(tensor, self.files.read)
        return None if array is None else array.item()

    def _float(self, name: str) -> float | None:
        return self._number(name, np.float32)

    def _uint8(self, name: str) -> int | None:
        number = self._number(name, np.uint8)
        return None if number is None else int(number)

    def _integer_of(self, name: str) -> int | None:
        number = self._number(name, np.int64)
        return None if number is None else int(number)


def _multiplies(node: Node, name: str, other: str) -> bool:
    """Return whether a node multiplies these two values."""
    return is_operator(node, "Mul", 2) and sorted(node.inputs) == sorted((name, other))


def _other(node: Node, name: str) -> str:
    """Return the other input of a node with two."""
    return node.inputs[1] if node.inputs[0] == name else node.inputs[0]
