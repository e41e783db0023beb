"""Recognition of attention: each `softmax(scale · Q Kᵀ + bias) · V` becomes one `tformer::attention` node.

Both `scaled_dot_product_attention` and attention written by hand become this operation. A causal mask is an ordinary
bias of it, so staging proves that an attention only looks back. Attention of any other form is not changed, and is
staged operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import arguments, aten, meta

MAX_MASK_FILL = -1e4  # a fill up to this masks a score: softmax gives it no weight next to ordinary scores


@torch.library.custom_op("tformer::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Compute softmax(scale · query keyᵀ + bias) value (Vaswani et al. 2017, equation 1).

    query: (batch, heads, new, d).
    key: (batch, kv_heads, slots, d); heads is a multiple of kv_heads.
    value: (batch, kv_heads, slots, d_v).
    bias: broadcasts to (batch, heads, new, slots). A float is added; a bool keeps the scores where it is true.
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    return torch.softmax(scores, -1) @ value


@attention.register_fake
def _(query, key, value, bias, scale):  # type: ignore[no-untyped-def]
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


ATTENTION = torch.ops.tformer.attention.default


def recognise(captured: CapturedGraph) -> int:
    """Rewrite the graph in place, and return the number of attentions. Linear in the number of nodes."""
    count = 0
    for node in captured.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            count += _from_sdpa(captured.graph, node)
        elif node.target in (aten.softmax.int, aten._softmax.default):
            count += _from_softmax(captured.graph, node)
    captured.graph.eliminate_dead_code()
    captured.graph.lint()
    return count


class NodeBuilder:
    """Inserts nodes with their traced values before a node."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph, self.before = graph, before

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        traced = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode(self.before):
            node.meta["val"] = target(*traced[0], **traced[1])
        node.meta |= {k: self.before.meta[k] for k in ("stack_trace", "nn_module_stack") if k in self.before.meta}
        return node

    def size(self, node: Node, axis: int) -> Any:
        size = meta(node).shape[axis]
        return self(aten.sym_size.int, node, axis) if isinstance(size, torch.SymInt) else size


def fake_mode(node: Node) -> Any:
    """Return the fake tensor mode in which the graph was traced."""
    value = meta(node)
    return (value[0] if isinstance(value, (list, tuple)) else value).fake_mode


def _from_sdpa(graph: Graph, node: Node) -> bool:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments_by_name: dict[str, Any] = dict(zip(names, arguments(node), strict=False)) | dict(node.kwargs)
    query, key, value = arguments_by_name["query"], arguments_by_name["key"], arguments_by_name["value"]
    if meta(query).dim() != 4:
        return False
    make = NodeBuilder(graph, node)
    bias = arguments_by_name.get("attn_mask")
    if arguments_by_name.get("is_causal"):
        ones = make(aten.ones.default, [make.size(query, 2), make.size(key, 2)], dtype=torch.bool)
        bias = make(aten.tril.default, ones)
    scale = arguments_by_name.get("scale")
    scale = float(meta(query).shape[-1]) ** -0.5 if scale is None else float(scale)
    node.replace_all_uses_with(make(ATTENTION, query, key, value, bias, scale))
    return True


@dataclass
class _Scores:
    """The operations between `Q Kᵀ` and softmax: the scale, and the biases as they are met from softmax upwards."""

    product: Node
    scale: float = 1.0
    biases: list[Callable[[NodeBuilder], Node]] = field(default_factory=list)


def _from_softmax(graph: Graph, softmax: Node) -> bool:
    """Rewrite the attention around a softmax; return False if it is not attention in four dimensions."""
    if meta(softmax).dim() != 4 or softmax.args[1] not in (-1, 3):
        return False
    products = [n for n in softmax.users if n.target is aten.matmul.default and n.args[0] is softmax]
    if len(products) != 1:
        return False
    (product,) = products
    value = arguments(product)[1]
    scores = _read_scores(softmax.args[0])
    if scores is None or meta(value).dim() != 4:
        return False
    query, transposed = arguments(scores.product)
    heads = [meta(n).shape[1] for n in (query, transposed, value)]
    if meta(query).dim() != 4 or meta(transposed).dim() != 4 or len(set(heads)) != 1:
        return False
    make = NodeBuilder(graph, product)
    bias = None
    for build in reversed(scores.biases):
        term = build(make)
        bias = term if bias is None else make(aten.add.Tensor, bias, term)
    key = _without_transpose(make, transposed)
    product.replace_all_uses_with(make(ATTENTION, query, key, value, bias, scores.scale))
    return True


def _read_scores(node: Any) -> _Scores | None:
    """Follow scaling, casts, added biases and masks from the operand of softmax up to the one matrix product.

    Return None if there is another operation.
    """
    factor = 1.0  # by which operations between here and softmax multiply
    biases: list[Callable[[NodeBuilder], Node]] = []
    while isinstance(node, Node) and node.op == "call_function":
        target, args = node.target, arguments(node)
        if target is aten.matmul.default:
            return _Scores(node, factor, biases)
        if target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar) and _is_number(args[1]):
            factor = factor / args[1] if target in (aten.div.Tensor, aten.div.Scalar) else factor * args[1]
            node = _scores_operand(node)
        elif target in (aten._to_copy.default, aten.to.dtype) and meta(node).is_floating_point():
            node = _scores_operand(node)
        elif target is aten.add.Tensor and not node.kwargs and all(isinstance(a, Node) for a in args):
            scores, bias = args if _has_product_above(args[0]) else reversed(args)
            if not _has_product_above(scores) or _has_product_above(bias) or not meta(bias).is_floating_point():
                return None
            biases.append(_scaled_bias(bias, factor))
            node = scores
        elif target is aten.masked_fill.Scalar and args[2] <= MAX_MASK_FILL:
            biases.append(_mask_bias(args[1], True, float(args[2]) * factor))
            node = _scores_operand(node)
        elif target is aten.where.ScalarOther and args[2] <= MAX_MASK_FILL:
            biases.append(_mask_bias(args[0], False, float(args[2]) * factor))
            node = _scores_operand(node)
        elif target is aten.where.self and (fill := _constant_fill(args[2])) is not None and fill <= MAX_MASK_FILL:
            biases.append(_mask_bias(args[0], False, fill * factor))
            node = _scores_operand(node)
        else:
            return None
    return None


def _has_product_above(node: Any) -> bool:
    """Return whether a matrix product is above this node within a few operations of any kind."""
    for _ in range(8):
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        if node.target is aten.matmul.default:
            return True
        node = _scores_operand(node)
    return False


def _scores_operand(node: Node) -> Any:
    """Return the operand that holds the scores; the others are numbers, masks and fills."""
    return node.args[1] if node.target in (aten.where.ScalarOther, aten.where.self) else node.args[0]


def _scaled_bias(bias: Node, factor: float) -> Callable[[NodeBuilder], Node]:
    return lambda make: bias if factor == 1.0 else make(aten.mul.Tensor, bias, factor)


def _mask_bias(mask: Node, masked: bool, fill: float) -> Callable[[NodeBuilder], Node]:
    """Return the additive form of a boolean mask: `fill` where mask == masked, else 0."""

    def build(make: NodeBuilder) -> Node:
        zero = make(aten.full.default, [], 0.0, dtype=torch.float32)
        low = make(aten.full.default, [], fill, dtype=torch.float32)
        return make(aten.where.self, mask, *((low, zero) if masked else (zero, low)))

    return build


def _constant_fill(node: Any) -> float | None:
    if isinstance(node, Node) and node.target in (aten.full.default, aten.scalar_tensor.default):
        args = arguments(node)
        fill = args[-1] if node.target is aten.full.default else args[0]
        return float(fill) if _is_number(fill) else None
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _without_transpose(make: NodeBuilder, node: Node) -> Node:
    """Return the tensor whose last two axes `node` swaps, or else `node` with them swapped."""
    if node.target is aten.transpose.int and {axis % 4 for axis in node.args[1:]} == {2, 3}:  # type: ignore[operator]
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.permute.default and [a % 4 for a in node.args[1]] == [0, 1, 3, 2]:  # type: ignore[union-attr,operator]
        return node.args[0]  # type: ignore[return-value]
    return make(aten.transpose.int, node, -2, -1)
