"""Edits of an ONNX graph that several rewrites need: constants, derived weights, and replacement of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir


def constant(model: ir.Model, name: str, numbers: np.ndarray | np.generic) -> ir.Value:
    """Return the model's constant of this name, and add it with these numbers if the model does not have it yet."""
    if name not in model.graph.initializers:
        array = np.asarray(numbers)
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        model.graph.initializers[name] = value
    return model.graph.initializers[name]


def add_constant(model: ir.Model, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor to the model's constants under its own name, and return it as a value."""
    shape, dtype = ir.Shape(weight_sizes(tensor)), ir.TensorType(tensor.dtype)
    value = ir.Value(name=tensor.name, const_value=tensor, shape=shape, type=dtype)
    model.graph.initializers[str(tensor.name)] = value
    return value


def derived_tensor(
    source: ir.TensorProtocol,
    compute: Callable[[np.ndarray], np.ndarray],
    dtype: ir.DataType | None = None,
    name: str | None = None,
) -> ir.LazyTensor:
    """Return the tensor `compute(source)`, computed on each access, so that memory holds the source alone.

    compute: keeps the shape; it returns an array of `dtype`.
    dtype: None for the dtype of `source`.
    """
    dtype = source.dtype if dtype is None else dtype
    return ir.LazyTensor(
        lambda: ir.tensor(compute(source.numpy()), dtype=dtype), dtype, ir.Shape(weight_sizes(source)), name=name
    )


def weight_sizes(weight: ir.TensorProtocol) -> list[int]:
    """Return the shape of a weight as numbers. A weight has no symbolic sizes."""
    return [size for size in weight.shape if isinstance(size, int)]


def is_float_weight(value: ir.Value | None, rank: int) -> bool:
    """Return whether a value is a float32 constant of this rank."""
    tensor = value.const_value if value is not None else None
    return tensor is not None and len(tensor.shape) == rank and tensor.dtype == ir.DataType.FLOAT


def is_bias(value: ir.Value | None, weight: ir.TensorProtocol) -> bool:
    """Return whether a value is a float32 vector that has a number for each column of a weight, or one for all."""
    tensor = value.const_value if value is not None and is_float_weight(value, 1) else None
    return tensor is not None and tensor.size in (1, weight_sizes(weight)[-1])


def transposed_weight(value: ir.Value | None) -> ir.Value | None:
    """Return the float32 matrix of which a value is the transpose; None for other values."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Transpose" or node.domain or not is_float_weight(node.inputs[0], 2):
        return None
    order = node.attributes.get("perm")
    return node.inputs[0] if order is None or list(order.as_ints()) == [1, 0] else None


def only_user(value: ir.Value) -> ir.Node | None:
    """Return the node that reads a value, if it is the only reader and the value is not an output of its graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def copy_description(source: ir.Value, target: ir.Value) -> None:
    """Give `target` the name, the type and the shape of `source`."""
    target.name, target.shape, target.type = source.name, source.shape, source.type


def replace_value(old: ir.Value, new: ir.Value, old_name: str | None = None) -> None:
    """Let every reader of `old`, and the graph's outputs, take `new`, which gets the name, type and shape of `old`.

    The name moves too because it may be the name of a graph's output.

    old_name: the new name of `old`; by default its name with ".replaced".
    """
    name, new.shape = old.name, old.shape
    new.type = old.type or new.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = old_name or f"{name}.replaced"
    new.name = name


def replace_node(node: ir.Node, new_nodes: Sequence[ir.Node], last: ir.Node | None = None) -> None:
    """Put `new_nodes` in the place of a node; the outputs of the last of them replace the outputs of the node.

    last: the last node of a chain that begins with `node` and is replaced as a whole, such as a product and the sum
    with its bias; its outputs are replaced. By default the chain is `node` alone. Only both ends of the chain are
    removed.
    """
    last = node if last is None else last
    assert node.graph is not None
    node.graph.insert_before(node, new_nodes)
    for old, new in zip(last.outputs, new_nodes[-1].outputs, strict=True):
        replace_value(old, new)
    for removed in dict.fromkeys((last, node)):
        assert removed.graph is not None
        removed.graph.remove(removed, safe=True)
