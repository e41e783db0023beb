"""Removal of nodes that compute nothing from a traced graph: assertions, clones, whole slices, casts to the same dtype.

Operations that read only the size or the dtype of a tensor, such as `zeros_like`, no longer have it as an operand. A
scan of torch becomes an operation that holds its body (`capture/scan.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from tformer_export.capture.complex_numbers import move_pairs
from tformer_export.capture.scan import Scan
from tformer_export.common.fx_nodes import arguments, aten, describe_node, meta
from tformer_runtime.base.errors import UnsupportedModelError

_ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
}
_FILLS: dict[Any, float | None] = {  # operation → its fill value; None: the last argument
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.empty_like.default: 0,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_empty.default: 0,
    aten.new_full.default: None,
    aten.empty.memory_format: 0,
}
_LIKE = {  # they read only the sizes of their other tensor
    aten.expand_as.default: aten.expand.default,
    aten.view_as.default: aten.reshape.default,
    aten.reshape_as.default: aten.reshape.default,
}
_OF_BOOLS = {  # sums and products of bools, which ONNX does not have
    aten.add.Tensor: aten.logical_or.default,
    aten.mul.Tensor: aten.logical_and.default,
}
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_SDPA = aten.scaled_dot_product_attention.default
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_IDENTITIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}


def drop_assertions(graph: Graph) -> None:
    """Remove assertions, and nodes that are needed for nothing else."""
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def clean_graph(program: torch.export.ExportedProgram, assertions: bool) -> Graph:
    """Clean the graph of a program in place and return it. assertions: whether to remove assertions as well."""
    graph: Graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        _make_numbers_alike(node)
        if node.target in _FILLS:
            _fill_by_size(graph, node)
        elif node.target is aten.type_as.default:  # it reads only the dtype of its other tensor
            node.target, node.kwargs = aten._to_copy.default, {"dtype": meta(node).dtype}
            node.args = node.args[:1]
        elif node.target in _LIKE:
            node.args = (node.args[0], _sizes(graph, node, node.args[1]))
            node.target = _LIKE[node.target]
        elif node.target is torch.ops.higher_order.scan:
            _scan_with_its_body(program, node)
        elif isinstance(node.target, torch._ops.HigherOrderOperator) and _has_graphs(node):
            raise UnsupportedModelError(
                f"{describe_node(node)} chooses or repeats operations by its data, of which a file has no counterpart: "
                "compute both results and choose with torch.where, or write the loop in Python"
            )
        elif node.target is _SDPA and meta(node).dim() == 3:
            _add_head_axis(graph, node)
        elif node.target is aten.baddbmm.default and node.kwargs.get("beta", 1) == 0:
            _product_alone(graph, node)
        elif node.target in _OF_BOOLS and all(map(_is_bool, node.args)):
            node.target = _OF_BOOLS[node.target]
        elif node.target in (aten.squeeze.default, aten.squeeze.dims) and not _squeezes_nothing(node):
            node.target, node.args = aten.squeeze.dims, (node.args[0], _axes_of_one(node))
        elif node.target in _ASSERTIONS:
            if assertions:
                graph.erase_node(node)
        elif node.target in _IDENTITIES or any(keeps(node) for keeps in _KEEPING):
            node.replace_all_uses_with(arguments(node)[0])
            graph.erase_node(node)
        elif node.target in _VIEWS:  # a view may need the clone in front of it; a reshape does not
            node.target = aten.reshape.default
    move_pairs(graph)
    graph.eliminate_dead_code()
    return graph


def _has_graphs(node: Node) -> bool:
    """Return whether an operation runs graphs that it holds."""
    return any(operand.op == "get_attr" for operand in node.all_input_nodes)


def _make_numbers_alike(node: Node) -> None:
    """Make all number arguments of an operation on floats floats, if some are: `clamp(min=1e-6, max=10)`.

    torch takes both; torch.onnx makes constants of two types of them, which no operator takes.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(value := meta(node), torch.Tensor):
        return
    names = {a.name for a in node.target._schema.arguments if "number" in str(a.type)}  # Scalar, or Scalar?
    places = [i for i, a in enumerate(node.target._schema.arguments) if a.name in names and i < len(node.args)]
    numbers = [node.args[i] for i in places] + [node.kwargs[name] for name in names if name in node.kwargs]
    if value.is_floating_point() and {int, float} <= set(map(type, numbers)):
        for i in places:
            node.args = (*node.args[:i], _as_float(node.args[i]), *node.args[i + 1 :])
        node.kwargs = {name: _as_float(v) if name in names else v for name, v in node.kwargs.items()}


def _as_float(number: Any) -> Any:
    return float(number) if type(number) is int else number


def _fill_by_size(graph: Graph, node: Node) -> None:
    """Replace `zeros_like(x)`, `x.new_full(…)` and similar operations, which read no data, by `full(size, value)`."""
    value = meta(node)
    args = arguments(node)
    fill, source = _FILLS[node.target], args[0]
    fill = args[-1] if fill is None else fill
    sizes = args[1] if "new_" in str(node.target) else source if isinstance(source, (list, tuple)) else None
    sizes = _sizes(graph, node, source) if sizes is None else sizes
    with graph.inserting_before(node):
        full = graph.call_function(aten.full.default, (sizes, fill), {"dtype": value.dtype})
    full.meta = dict(node.meta)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def _sizes(graph: Graph, before: Node, source: Any) -> list[Any]:
    """Return the sizes of a value; free sizes are read by nodes in front of `before`."""
    sizes: list[Any] = []
    for axis, size in enumerate(meta(source).shape):
        if isinstance(size, torch.SymInt):
            with graph.inserting_before(before):
                sizes.append(graph.call_function(aten.sym_size.int, (source, axis)))
            sizes[-1].meta["val"] = size
        else:
            sizes.append(int(size))
    return sizes


def _axes_of_one(node: Node) -> list[int]:
    """Return the axes that a squeeze removes: those of size 1 in the trace, and none that is free."""
    sizes = meta(node.args[0]).shape
    named = arguments(node)[1] if len(node.args) > 1 else range(len(sizes))
    axes = {axis % len(sizes) for axis in named}
    return [axis for axis in sorted(axes) if isinstance(sizes[axis], int) and sizes[axis] == 1]


def _squeezes_nothing(node: Node) -> bool:
    """Return whether a squeeze names axes of other sizes than 1 alone. PyTorch keeps them, ONNX has an error."""
    return node.target in _SQUEEZES and meta(node).dim() == meta(node.args[0]).dim()


def _is_bool(value: Any) -> bool:
    return isinstance(meta(value), torch.Tensor) and meta(value).dtype == torch.bool


def _add_head_axis(graph: Graph, node: Node) -> None:
    """Give an attention of (batch, time, d) one head, (batch, 1, time, d), which is the form of all others."""
    args = arguments(node)
    attended = meta(node)

    def with_heads(operand: Any) -> Any:
        if not isinstance(operand, Node) or meta(operand).dim() < 3:
            return operand
        with graph.inserting_before(node):
            result = graph.call_function(aten.unsqueeze.default, (operand, 1))
        result.meta = {**node.meta, "val": meta(operand).unsqueeze(1)}
        return result

    node.args = tuple(map(with_heads, args))
    node.kwargs = {name: with_heads(value) for name, value in node.kwargs.items()}
    node.meta["val"] = attended.unsqueeze(1)
    with graph.inserting_after(node):
        result = graph.call_function(aten.squeeze.dim, (node, 1))
    result.meta = {**node.meta, "val": attended}
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _scan_with_its_body(program: torch.export.ExportedProgram, node: Node) -> None:
    """Make a scan of torch, whose body is a module of the program, an operation that holds its body.

    It returns its results before its last states.
    """
    body, states, sequences, others = arguments(node)
    target = Scan(getattr(program.graph_module, body.target), len(states), len(sequences))
    node.target, node.args = target, (*states, *sequences, *others)
    node.meta["val"] = [*meta(node)[len(states) :], *meta(node)[: len(states)]]
    for user in list(node.users):
        user.args = (node, (arguments(user)[1] - len(states)) % len(meta(node)))


def _product_alone(graph: Graph, node: Node) -> None:
    """Replace baddbmm with beta = 0 by bmm: it ignores its first tensor, which may be uninitialised."""
    _, left, right = arguments(node)
    with graph.inserting_before(node):
        product = graph.call_function(aten.bmm.default, (left, right))
        product.meta = dict(node.meta)
        alpha = node.kwargs.get("alpha", 1)
        result = graph.call_function(aten.mul.Tensor, (product, alpha)) if alpha != 1 else product
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_whole_slice(node: Node) -> bool:
    if node.target is not aten.slice.Tensor:
        return False
    args, defaults = arguments(node), [None, 0, 0, 2**63 - 1, 1]
    start, end, by = [*args, *defaults[len(args) :]][2:]
    return start in (0, None) and end == 2**63 - 1 and by == 1


def _is_same_cast(node: Node) -> bool:
    cast = {aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default}
    return node.target in cast and bool(meta(node).dtype == meta(node.args[0]).dtype)


def _is_no_dropout(node: Node) -> bool:
    return node.target in (aten.dropout.default, aten.native_dropout.default) and node.args[-1] in (False, None)


_KEEPING = _is_whole_slice, _is_same_cast, _is_no_dropout, _squeezes_nothing  # tests of operations that change nothing
