"""Find each `softmax(scale · Q Kᵀ + bias) · V` in the captured graph and make it one `tformer::attention` node.

Both `scaled_dot_product_attention` and attention written by hand become that one operation, whose causal mask, if it
has one, is an ordinary bias: so whether it looks only back is for staging to prove, not for this file to believe.
What does not fit stays as it is and is staged operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import arguments, aten, meta

MASKED = -1e4  # a fill below this counts as "masked": softmax gives it nothing beside any ordinary score


@torch.library.custom_op("tformer::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """softmax(scale · query keyᵀ + bias) value, Vaswani et al. 2017, equation 1.

    query (batch, heads, new, d), key (batch, kv_heads, slots, d), value (batch, kv_heads, slots, d_v), with heads a
    multiple of kv_heads; bias broadcasts to (batch, heads, new, slots): added if it is a float, true = keep if bool.
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


def recognise(captured: Captured) -> int:
    """Rewrite the graph in place; returns how many attentions were found. Linear in the number of nodes."""
    found = 0
    for node in captured.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            found += _from_sdpa(captured.graph, node)
        elif node.target in (aten.softmax.int, aten._softmax.default):
            found += _from_softmax(captured.graph, node)
    captured.graph.eliminate_dead_code()
    captured.graph.lint()
    return found


class _Builder:
    """Inserts nodes before a given one, with their traced values."""

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
    """The fake tensor mode that the graph was traced in."""
    value = meta(node)
    return (value[0] if isinstance(value, (list, tuple)) else value).fake_mode


def _from_sdpa(graph: Graph, node: Node) -> bool:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = dict(zip(names, arguments(node), strict=False)) | dict(node.kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    if meta(query).dim() != 4:
        return False
    make = _Builder(graph, node)
    bias = given.get("attn_mask")
    if given.get("is_causal"):
        ones = make(aten.ones.default, [make.size(query, 2), make.size(key, 2)], dtype=torch.bool)
        bias = make(aten.tril.default, ones)
    scale = given.get("scale")
    scale = float(meta(query).shape[-1]) ** -0.5 if scale is None else float(scale)
    node.replace_all_uses_with(make(ATTENTION, query, key, value, bias, scale))
    return True


@dataclass
class _Scores:
    """What stands between `Q Kᵀ` and softmax, read from softmax upwards: scale, then the biases, in order of use."""

    product: Node
    scale: float = 1.0
    biases: list[Callable[[_Builder], Node]] = field(default_factory=list)


def _from_softmax(graph: Graph, softmax: Node) -> bool:
    """True if the softmax is the middle of a four-dimensional attention over its last axis."""
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
    make = _Builder(graph, product)
    bias = None
    for build in reversed(scores.biases):
        term = build(make)
        bias = term if bias is None else make(aten.add.Tensor, bias, term)
    key = _untransposed(make, transposed)
    product.replace_all_uses_with(make(ATTENTION, query, key, value, bias, scores.scale))
    return True


def _read_scores(node: Any) -> _Scores | None:
    """Follow scaling, casts, added biases and masks from softmax's operand up to the one matrix product."""
    factor = 1.0  # what the values found so far are still multiplied by on their way down
    biases: list[Callable[[_Builder], Node]] = []
    while isinstance(node, Node) and node.op == "call_function":
        target, args = node.target, arguments(node)
        if target is aten.matmul.default:
            return _Scores(node, factor, biases)
        if target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar) and _number(args[1]):
            factor = factor / args[1] if target in (aten.div.Tensor, aten.div.Scalar) else factor * args[1]
            node = _inner(node)
        elif target in (aten._to_copy.default, aten.to.dtype) and meta(node).is_floating_point():
            node = _inner(node)
        elif target is aten.add.Tensor and not node.kwargs and all(isinstance(a, Node) for a in args):
            scores, bias = args if _holds_product(args[0]) else reversed(args)
            if not _holds_product(scores) or _holds_product(bias) or not meta(bias).is_floating_point():
                return None
            biases.append(_scaled(bias, factor))
            node = scores
        elif target is aten.masked_fill.Scalar and args[2] <= MASKED:
            biases.append(_filled(args[1], True, float(args[2]) * factor))
            node = _inner(node)
        elif target is aten.where.ScalarOther and args[2] <= MASKED:
            biases.append(_filled(args[0], False, float(args[2]) * factor))
            node = _inner(node)
        elif target is aten.where.self and (fill := _constant_fill(args[2])) is not None and fill <= MASKED:
            biases.append(_filled(args[0], False, fill * factor))
            node = _inner(node)
        else:
            return None
    return None


def _holds_product(node: Any) -> bool:
    """Whether a matrix product is above this node within a few operations of any kind."""
    for _ in range(8):
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        if node.target is aten.matmul.default:
            return True
        node = _inner(node)
    return False


def _inner(node: Node) -> Any:
    """The operand in which an operation on scores has them; others are numbers, masks and fills."""
    return node.args[1] if node.target in (aten.where.ScalarOther, aten.where.self) else node.args[0]


def _scaled(bias: Node, factor: float) -> Callable[[_Builder], Node]:
    return lambda make: bias if factor == 1.0 else make(aten.mul.Tensor, bias, factor)


def _filled(mask: Node, masked: bool, fill: float) -> Callable[[_Builder], Node]:
    """The additive form of a boolean mask: `fill` where mask == masked, else 0."""

    def build(make: _Builder) -> Node:
        zero = make(aten.full.default, [], 0.0, dtype=torch.float32)
        low = make(aten.full.default, [], fill, dtype=torch.float32)
        return make(aten.where.self, mask, *((low, zero) if masked else (zero, low)))

    return build


def _constant_fill(node: Any) -> float | None:
    if isinstance(node, Node) and node.target in (aten.full.default, aten.scalar_tensor.default):
        args = arguments(node)
        fill = args[-1] if node.target is aten.full.default else args[0]
        return float(fill) if _number(fill) else None
    return None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _untransposed(make: _Builder, node: Node) -> Node:
    """The tensor whose last two axes `node` swapped, or `node` with them swapped."""
    if node.target is aten.transpose.int and {axis % 4 for axis in node.args[1:]} == {2, 3}:  # type: ignore[operator]
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.permute.default and [a % 4 for a in node.args[1]] == [0, 1, 3, 2]:  # type: ignore[union-attr,operator]
        return node.args[0]  # type: ignore[return-value]
    return make(aten.transpose.int, node, -2, -1)
