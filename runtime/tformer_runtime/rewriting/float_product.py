"""Recognition of float32 products: MatMul, Gemm or FusedMatMul with a matrix of the file, and the sum with its bias."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import F32
from tformer_runtime.format.onnx_graph import Attribute, Graph, Node, Tensor, tensor_array
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.quantized_product import CONTRIB, Readers
from tformer_runtime.rewriting.stored_weights import is_operator

FLOAT_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")
MIN_NUMBERS = 1024  # of a matrix: the exporter leaves smaller ones in float, and nothing is gained
# Attributes of a plain product, without the attribute that transposes the matrix
_PLAIN: dict[str, dict[str, Attribute]] = {
    "MatMul": {},
    "Gemm": {"alpha": 1.0, "beta": 1.0, "transA": 0},
    "FusedMatMul": {"alpha": 1.0, "transA": 0, "transBatchA": 0, "transBatchB": 0},
}


class FloatProduct(Struct, frozen=True):
    """A product that one operator can compute.

    source, result: names of its input (…, K) and output (…, N).
    tensor: the matrix (K, N); (N, K) if `is_transposed`.
    bias: (N,).
    last: the node that computes the result.
    """

    source: str
    result: str
    tensor: Tensor
    is_transposed: bool
    bias: F32 | None
    last: Node

    @property
    def columns(self) -> int:
        """Return N."""
        return self.tensor.shape[0 if self.is_transposed else 1]


def find_float_product(
    graph: Graph, node: Node, readers: Readers, inputs: set[str], files: WeightFiles
) -> FloatProduct | None:
    """Return the product of a node; None for other nodes, and for weights that are not of the file alone.

    inputs: names of the inputs of the model, whose values a caller gives.
    """
    transposes = _transposes(node)
    if transposes is None:
        return None
    weights = _matrix(graph, node.inputs[1], inputs)
    if weights is None or not files.is_whole(weights[0]):
        return None
    tensor, is_transposed = weights[0], weights[1] != transposes
    columns = tensor.shape[0 if is_transposed else 1]
    source, result, last, bias = node.inputs[0], node.outputs[0], node, None
    if len(node.inputs) == 3 and node.inputs[2]:
        bias = _bias(graph, node.inputs[2], columns, inputs, files)
        return None if bias is None else FloatProduct(source, result, tensor, is_transposed, bias, node)
    adder = readers.only_reader(result)
    if adder is not None and is_operator(adder, "Add", 2):
        other = adder.inputs[1] if adder.inputs[0] == result else adder.inputs[0]
        bias = _bias(graph, other, columns, inputs, files)
        last = node if bias is None else adder
    return FloatProduct(source, last.outputs[0], tensor, is_transposed, bias, last)


def _transposes(node: Node) -> bool | None:
    """Return whether a product transposes its matrix; None for other nodes, and for other products."""
    domain = CONTRIB if node.op_type == "FusedMatMul" else ""
    counts = (2, 3) if node.op_type == "Gemm" else (2,)
    if node.op_type not in _PLAIN or node.domain != domain or len(node.outputs) != 1 or len(node.inputs) not in counts:
        return None
    attributes = {**node.attributes()}
    transposes = attributes.pop("transB", 0) if node.op_type != "MatMul" else 0
    plain = _PLAIN[node.op_type]
    if any(name not in plain or plain[name] != value for name, value in attributes.items()) or transposes not in (0, 1):
        return None
    return transposes == 1


def _matrix(graph: Graph, name: str, inputs: set[str]) -> tuple[Tensor, bool] | None:
    """Return a float32 matrix of the file, and whether its transpose is meant; None for other values."""
    tensor, is_transposed = find_constant(graph, name, np.float32, inputs), False
    found = graph.find_producer(name)
    if tensor is None and found is not None:
        transpose, home = found
        if not is_operator(transpose, "Transpose", 1) or transpose.attributes() not in ({"perm": [1, 0]}, {}):
            return None
        tensor, is_transposed = find_constant(home, transpose.inputs[0], np.float32, inputs), True
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[0] * tensor.shape[1] < MIN_NUMBERS:
        return None
    return tensor, is_transposed


def _bias(graph: Graph, name: str, columns: int, inputs: set[str], files: WeightFiles) -> F32 | None:
    tensor = find_constant(graph, name, np.float32, inputs)
    if tensor is None or tensor.shape != (columns,) or not files.is_whole(tensor):
        return None
    array = tensor_array(tensor, files.read)
    return None if array is None else np.ascontiguousarray(array)


def find_constant(graph: Graph, name: str, dtype: type[np.generic], inputs: set[str]) -> Tensor | None:
    """Return a weight of a type that no caller replaces. inputs: see `find_float_product`."""
    tensor = graph.find_tensor(name)
    if tensor is None or tensor.dtype != dtype or name in inputs or graph.find_producer(name) is not None:
        return None
    return tensor
