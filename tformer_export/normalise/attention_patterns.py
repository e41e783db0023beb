"""Recognition of attention: each `softmax(scale · Q Kᵀ + bias) · V` becomes one `tformer::attention` node.

Both `scaled_dot_product_attention` and attention written by hand become this operation, with heads on an axis of their
own, merged with the batch, or without an axis. A causal mask is an ordinary bias of it, so staging proves that an
attention only looks back. Attention of any other form is not changed, and is staged operation by operation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION, NodeBuilder
from tformer_export.analysis.batch_axes import BatchAxis, find_rows, times_batch
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import arguments, aten, describe_node, expression, meta

MAX_MASK_FILL = -1e4  # a fill up to this masks a score: softmax gives it no weight next to ordinary scores
MAX_SEARCHED = 8  # operations of any kind between a sum and the product of queries and keys
SOFTMAX = (aten.softmax.int, aten._softmax.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
_PERMUTATIONS = (aten.permute.default, aten.transpose.int)
_CASTS = (aten._to_copy.default, aten.to.dtype)
_MULTIPLIED = (aten.mul.Tensor, aten.mul.Scalar)
_DIVIDED = (aten.div.Tensor, aten.div.Scalar)
_ARITHMETIC: dict[Any, Callable[..., float]] = {
    **dict.fromkeys(_MULTIPLIED, operator.mul),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), operator.add),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), operator.sub),
    aten.neg.default: operator.neg,
}


_CAPPED = (*PRODUCTS, *_MULTIPLIED, *_DIVIDED, *_PERMUTATIONS, *_CASTS)  # operations between a cap and the product
_SUMS = aten.add.Tensor, aten.sub.Tensor
_CUTS = {  # operations that move numbers, or put 0 in their place
    *_PERMUTATIONS,
    *_CASTS,
    aten.slice.Tensor,
    aten.select.int,
    aten.index.Tensor,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.reshape.default,
    aten.tril.default,
    aten.triu.default,
}


@dataclass(frozen=True)
class Recognition:
    """The attentions of a graph.

    count: their number.
    others: for each other softmax over positions, its line and a reason.
    fills: attention → the number that torch gives a query whose keys are all hidden.
    """

    count: int
    others: tuple[str, ...]
    fills: Mapping[Node, float] = field(default_factory=dict)


class UnknownFormError(Exception):
    """A softmax is not that of an attention of the recognised forms; the message says why."""


def recognise(captured: CapturedGraph) -> Recognition:
    """Rewrite the graph in place.

    Cost: linear in the number of nodes; two runs on the example if heads and batch are merged.
    """
    recogniser = _Recogniser(captured)
    count, others = 0, []
    for node in captured.nodes:
        try:
            if node.target is aten.scaled_dot_product_attention.default:
                recogniser.from_sdpa(node)
            elif node.target in SOFTMAX:
                recogniser.from_softmax(node)
            else:
                continue
            count += 1
        except UnknownFormError as reason:
            if not _is_over_positions(node):
                continue
            others.append(f"{describe_node(node)}: {reason}")
    captured.graph.eliminate_dead_code()
    captured.graph.lint()
    return Recognition(count, tuple(others), recogniser.fills)


def _is_over_positions(node: Node) -> bool:
    """Return whether a softmax is over an axis of a free size, and not over the experts of a mixture, for example."""
    return node.target not in SOFTMAX or isinstance(meta(node).shape[arguments(node)[1]], torch.SymInt)


@dataclass
class _Scores:
    """The operations between `Q Kᵀ` and softmax.

    scale: factor of the product. softcap: as in `attention`.
    biases: as they are met from softmax upwards.
    """

    product: Node
    scale: float
    softcap: float
    biases: list[Callable[[NodeBuilder], Node]] = field(default_factory=list)


@dataclass(frozen=True)
class _Layout:
    """How a value between two products has the axes of the weights (rows, queries, keys) or (·, ·, queries, keys).

    order: the axis of the value for each axis of the weights.
    sizes: the node with the sizes of the two axes in front, if the value has them merged.
    """

    order: tuple[int, ...]
    merged: Node | None = None

    def above(self, node: Node) -> _Layout:
        """Return the layout of the operand of a permutation."""
        permutation = _permutation(node)
        return _Layout(tuple(permutation[axis] for axis in self.order), self.merged)


def _permutation(node: Node) -> list[int]:
    rank = meta(node).dim()
    if node.target is aten.permute.default:
        return [axis % rank for axis in arguments(node)[1]]
    order = list(range(rank))
    first, second = (axis % rank for axis in arguments(node)[1:3])
    order[first], order[second] = second, first
    return order


@dataclass
class _ScorePath:
    """The operations from softmax upwards to a node.

    layout: of the value above them. rank: of the weights.
    factor: the number by which the operations between the node and softmax, or the cap, multiply.
    softcap, biases: as in `_Scores`.
    """

    layout: _Layout
    rank: int
    factor: float = 1.0
    softcap: float = 0.0
    biases: list[Callable[[NodeBuilder], Node]] = field(default_factory=list)

    def add_bias(self, build: Callable[[NodeBuilder], Node]) -> None:
        self.biases.append(_placed(self.layout, self.rank, build))

    def scores_of(self, product: Node) -> _Scores:
        """Return the scores of the product of queries and keys that the path leads to."""
        if self.layout.order != tuple(range(self.rank)) or self.layout.merged is not None:
            raise UnknownFormError("its scores have their axes in another order than its weights")
        factor = self.factor
        if product.target is aten.baddbmm.default:
            if self.softcap:
                raise UnknownFormError(f"{describe_node(product)} changes the scores before they are capped")
            beta, alpha = (float(product.kwargs.get(name, 1)) for name in ("beta", "alpha"))  # type: ignore[arg-type]
            self.add_bias(_scaled_bias(arguments(product)[0], beta * factor))
            factor *= alpha
        return _Scores(product, factor * (self.softcap or 1.0), self.softcap, self.biases)


@dataclass(frozen=True)
class _Mask:
    """A mask that puts `fill` in the place of scores, where it is `hides`."""

    scores: Any
    mask: Any
    hides: bool
    fill: float


class _Recogniser:
    """Rewrites attentions of one graph."""

    def __init__(self, captured: CapturedGraph) -> None:
        self.captured, self.graph = captured, captured.graph
        self._runs: tuple[Mapping[Node, Any], Mapping[Node, Any]] | None = None
        self.fills: dict[Node, float] = {}

    def _attend(self, make: NodeBuilder, fill: float, *args: Any) -> Node:
        """Return an attention. fill: what a query gets whose keys are all hidden. args: of the operation."""
        node = make(ATTENTION, *args)
        self.fills[node] = fill
        return node

    def from_sdpa(self, node: Node) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        by_name: dict[str, Any] = dict(zip(names, arguments(node), strict=False)) | dict(node.kwargs)
        query, key, value, bias = by_name["query"], by_name["key"], by_name["value"], by_name.get("attn_mask")
        if meta(query).dim() != 4:
            raise UnknownFormError(f"its queries have {meta(query).dim()} axes, not 4")
        make = NodeBuilder(self.graph, node)
        if by_name.get("is_causal"):
            ones = make(aten.ones.default, [make.size(query, 2), make.size(key, 2)], dtype=torch.bool)
            bias = make(aten.tril.default, ones)
        scale = by_name.get("scale")
        scale = float(meta(query).shape[-1]) ** -0.5 if scale is None else float(scale)
        node.replace_all_uses_with(self._attend(make, 0.0, query, key, value, bias, scale, 0.0))

    def from_softmax(self, softmax: Node) -> None:
        """Rewrite the attention around a softmax."""
        product, path = _value_product(softmax)
        rank = meta(arguments(product)[0]).dim()
        layout = _Layout(tuple(range(rank)))
        for node in path:
            layout = self._step_up(layout, node, rank)
        if layout.merged is not None or arguments(softmax)[1] % meta(softmax).dim() != layout.order[-1]:
            raise UnknownFormError("it is not over the keys, the last axis of the weights that multiply the values")
        scores = self._read_scores(softmax.args[0], layout, rank)
        query, transposed = arguments(scores.product)[-2:]
        value = arguments(product)[1]
        ranks = {meta(n).dim() for n in (query, transposed, value)}
        if ranks != {rank} or rank not in (3, 4):
            raise UnknownFormError(f"its products have {max(ranks | {rank})} axes, not 4 or 3")
        make = NodeBuilder(self.graph, product)
        bias = None
        for build in reversed(scores.biases):
            term = build(make)
            bias = term if bias is None else make(aten.add.Tensor, bias, term)
        key = _without_transpose(make, transposed)
        result = self._attention(make, query, key, value, bias, scores)
        product.replace_all_uses_with(result)

    def _attention(
        self, make: NodeBuilder, query: Node, key: Node, value: Node, bias: Node | None, scores: _Scores
    ) -> Node:
        """Return the attention, with the axes of the product that it replaces."""
        settings = scores.scale, scores.softcap
        if meta(query).dim() == 4:
            swapped = times_batch(self.captured, meta(query).shape[0]) != 1 and (
                times_batch(self.captured, meta(query).shape[1]) == 1
            )
            if swapped:  # heads in front of the batch
                query, key, value = (make(aten.transpose.int, n, 0, 1) for n in (query, key, value))
                bias = make(aten.transpose.int, _with_rank(make, bias, 4), 0, 1) if bias is not None else None
            heads, *others = (expression(meta(n).shape[1]) for n in (query, key, value))
            if len(set(others)) > 1 or others[0] not in (heads, 1):
                raise UnknownFormError("its queries, keys and values have different numbers of heads")
            result = self._attend(make, math.nan, query, key, value, bias, *settings)
            return make(aten.transpose.int, result, 0, 1) if swapped else result
        rows = self._rows(query)
        if rows.times == 1:
            query, key, value = (make(aten.unsqueeze.default, n, 1) for n in (query, key, value))
            bias = make(aten.unsqueeze.default, bias, 1) if bias is not None and meta(bias).dim() == 3 else bias
            return make(aten.squeeze.dim, self._attend(make, math.nan, query, key, value, bias, *settings), 1)
        query, key, value = (_split(make, rows, n) for n in (query, key, value))
        if bias is not None and meta(bias).dim() == 3:
            bias = make(aten.unsqueeze.default, bias, 0) if meta(bias).shape[0] == 1 else _split(make, rows, bias)
        return _merged(make, rows, self._attend(make, math.nan, query, key, value, bias, *settings))

    def _rows(self, query: Node) -> BatchAxis:
        """Return the rows on the first axis of the queries (rows, time, d)."""
        times = times_batch(self.captured, meta(query).shape[0])
        if times is None:
            raise UnknownFormError("the first of its three axes is not the batch, or heads of the batch")
        if times == 1:
            return BatchAxis(0)
        if self._runs is None:
            self._runs = _runs_with_other_row(self.captured)
        rows = find_rows(self.captured, meta(query).shape, *(values[query] for values in self._runs))
        if rows is None or rows.axis != 0:
            raise UnknownFormError("the order of heads and rows on its first axis is not known")
        return rows

    def _step_up(self, layout: _Layout, node: Node, rank: int) -> _Layout:
        """Return the layout of the first operand of an operation that only moves numbers."""
        if node.target in _PERMUTATIONS and layout.merged is None:
            return layout.above(node)
        if node.target is aten.reshape.default:
            return self._step_over_reshape(layout, node, rank)
        if node.target in _CASTS and meta(node).is_floating_point():
            return layout
        raise UnknownFormError(f"{describe_node(node)} is between the softmax and the product with the values")

    def _step_over_reshape(self, layout: _Layout, node: Node, rank: int) -> _Layout:
        """Step over a reshape that merges the two axes in front, or splits them."""
        operand = arguments(node)[0]
        below, above = meta(node), meta(operand)
        is_plain = layout.order == tuple(range(len(layout.order)))
        same_end = list(map(expression, below.shape[-2:])) == list(map(expression, above.shape[-2:]))
        if is_plain and same_end and {below.dim(), above.dim()} == {3, 4} and rank == 3:
            return _Layout(layout.order, operand if above.dim() == 4 else None)
        raise UnknownFormError(f"{describe_node(node)} changes the axes of the scores")

    def _read_scores(self, node: Any, layout: _Layout, rank: int) -> _Scores:
        """Follow scaling, casts, added biases and masks from the operand of softmax up to the one matrix product."""
        path = _ScorePath(layout, rank)
        while isinstance(node, Node) and node.op == "call_function":
            if path.softcap and node.target not in _CAPPED:
                raise UnknownFormError(f"{describe_node(node)} changes the scores before they are capped")
            if node.target in PRODUCTS:
                return path.scores_of(node)
            node = self._scores_above(node, path)
        raise UnknownFormError("there is no product of queries and keys above it")

    def _scores_above(self, node: Node, path: _ScorePath) -> Any:
        """Return the operand of an operation that holds the scores. Its effect on them is added to the path."""
        target, args = node.target, arguments(node)
        number = self._number(args[1]) if target in (*_MULTIPLIED, *_DIVIDED) else None
        if number is not None:
            path.factor = path.factor * number if target in _MULTIPLIED else path.factor / number
            return args[0]
        if target is aten.sub.Tensor and _is_maximum(args[1], args[0], path.layout):  # softmax does not see it
            return args[0]
        if target is aten.tanh.default and not path.softcap:
            path.softcap, path.factor = path.factor, 1.0
            return args[0]
        if target in (*_PERMUTATIONS, *_CASTS, aten.reshape.default):
            path.layout = self._step_up(path.layout, node, path.rank)
            return args[0]
        if (mask := self._read_mask(node)) is not None:
            path.add_bias(_mask_bias(mask.mask, mask.hides, mask.fill * path.factor))
            return mask.scores
        if target is aten.add.Tensor and not node.kwargs and all(isinstance(a, Node) for a in args):
            scores, bias = args if self._has_product_above(args[0]) else reversed(args)
            if not self._has_product_above(scores) or not meta(bias).is_floating_point():
                raise UnknownFormError(f"{describe_node(node)} adds no product of queries and keys")
            path.add_bias(_scaled_bias(bias, path.factor))
            return scores
        raise UnknownFormError(f"{describe_node(node)} is between the scores and the softmax")

    def _read_mask(self, node: Node) -> _Mask | None:
        target, args = node.target, arguments(node)
        if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            scores, mask, fill, hides = args[0], args[1], args[2], True
        elif target in (aten.where.ScalarOther, aten.where.self) and self._number(args[2]) is not None:
            scores, mask, fill, hides = args[1], args[0], args[2], False
        elif target in (aten.where.ScalarSelf, aten.where.self):
            scores, mask, fill, hides = args[2], args[0], args[1], True
        elif target in _SUMS:
            return self._read_mask_product(node)
        else:
            return None
        number = self._number(fill)
        return _Mask(scores, mask, hides, number) if number is not None and number <= MAX_MASK_FILL else None

    def _read_mask_product(self, node: Node) -> _Mask | None:
        """Read `scores * b - 1e10 * (1 - b)`, where b is 1 for keys that are seen and 0 for others."""
        kept, filled = arguments(node)[:2]
        if node.kwargs or not (_is_product(kept) and _is_product(filled)):
            return None
        for scores, seen in (kept.args, kept.args[::-1]):
            for number, hidden in (filled.args, filled.args[::-1]):
                fill = self._number(number)
                if fill is None or not self._is_complement(hidden, seen) or not self._is_zero_or_one(seen):
                    continue
                fill = -fill if node.target is aten.sub.Tensor else fill
                return _Mask(scores, seen, False, fill) if fill <= MAX_MASK_FILL else None
        return None

    def _is_complement(self, node: Any, other: Any) -> bool:
        """Return whether a value is 1 minus the other."""
        if not isinstance(node, Node) or node.kwargs or not isinstance(other, Node):
            return False
        if node.target is aten.rsub.Scalar:
            return bool(node.args[0] is other and node.args[1] == 1)
        return node.target is aten.sub.Tensor and node.args[1] is other and self._number(node.args[0]) == 1

    def _is_zero_or_one(self, node: Any) -> bool:
        """Return whether all numbers of a value are 0 or 1, by the constants from which it is cut."""
        while isinstance(node, Node):
            value = meta(node)
            if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
                return True
            if node.name in self.captured.constants:
                constant = self.captured.constants[node.name].float()
                return torch.equal(constant * constant, constant)
            if (number := self._number(node)) is not None:
                return number in (0, 1)
            if node.target not in _CUTS:
                return False
            node = node.args[0]
        return False

    def _has_product_above(self, node: Any) -> bool:
        """Return whether a product of queries and keys is above a value, within a few operations on scores."""
        for _ in range(MAX_SEARCHED):
            if not isinstance(node, Node) or node.op != "call_function":
                return False
            if node.target in PRODUCTS:
                return True
            mask = self._read_mask(node)
            node = mask.scores if mask is not None else next(iter(node.args), None)
        return False

    def _number(self, value: Any) -> float | None:
        """Return a number, or the one that all entries of a constant are; None for anything else."""
        if isinstance(value, (int, float)):
            return None if isinstance(value, bool) else float(value)
        if not isinstance(value, Node):
            return None
        if value.name in self.captured.constants:
            constant = self.captured.constants[value.name]
            is_uniform = (
                isinstance(constant, torch.Tensor) and constant.numel() and (constant == constant.flatten()[0]).all()
            )
            return float(constant.flatten()[0]) if is_uniform else None
        args = arguments(value)
        if value.target in (aten.full.default, aten.scalar_tensor.default):
            return self._number(args[1 if value.target is aten.full.default else 0])
        if value.target in _ARITHMETIC and not value.kwargs:
            numbers = [self._number(a) for a in args]
            return None if None in numbers else _ARITHMETIC[value.target](*numbers)
        return None


def _is_product(node: Any) -> bool:
    return isinstance(node, Node) and node.target in _MULTIPLIED and not node.kwargs


def _value_product(softmax: Node) -> tuple[Node, list[Node]]:
    """Return the product of the weights with the values, and the operations from it up to the softmax."""
    found: list[tuple[Node, list[Node]]] = []
    pending: list[tuple[Node, list[Node]]] = [(softmax, [])]
    while pending:
        node, path = pending.pop()
        for user in node.users:
            if user.target in PRODUCTS[:2] and user.args[0] is node:
                found.append((user, path[::-1]))
            elif user.target in (*_PERMUTATIONS, *_CASTS, aten.reshape.default):
                pending.append((user, [*path, user]))
    if len(found) != 1:
        raise UnknownFormError(
            "its weights are the first operand of several products" if found else "its weights multiply no values"
        )
    return found[0]


def _is_maximum(value: Any, scores: Node, layout: _Layout) -> bool:
    """Return whether a value is the maximum of the scores over the keys, with an axis of size 1 for them."""
    if isinstance(value, Node) and value.target is operator.getitem:
        value = value.args[0]
    if (
        not isinstance(value, Node)
        or value.target not in (aten.amax.default, aten.max.dim)
        or value.args[0] is not scores
    ):
        return False
    axes = arguments(value)[1]
    axes = [axes] if isinstance(axes, int) else axes
    return [axis % meta(scores).dim() for axis in axes] == [layout.order[-1]] and value.args[-1] is True


def _scaled_bias(bias: Node, factor: float) -> Callable[[NodeBuilder], Node]:
    return lambda make: bias if factor == 1.0 else make(aten.mul.Tensor, bias, factor)


def _mask_bias(mask: Node, masked: bool, fill: float) -> Callable[[NodeBuilder], Node]:
    """Return the additive form of a mask of truth values, or of 0 and 1: `fill` where mask == masked, else 0."""

    def build(make: NodeBuilder) -> Node:
        zero = make(aten.full.default, [], 0.0, dtype=torch.float32)
        low = make(aten.full.default, [], fill, dtype=torch.float32)
        condition = mask if meta(mask).dtype == torch.bool else make(aten.ne.Scalar, mask, 0)
        return make(aten.where.self, condition, *((low, zero) if masked else (zero, low)))

    return build


def _placed(layout: _Layout, rank: int, build: Callable[[NodeBuilder], Node]) -> Callable[[NodeBuilder], Node]:
    """Return a bias with its axes in the order of the weights."""
    if layout.merged is None and layout.order == tuple(range(rank)):
        return build

    def place(make: NodeBuilder) -> Node:
        bias = build(make)
        if layout.merged is None:
            return make(aten.permute.default, _with_rank(make, bias, rank), list(layout.order))
        if meta(bias).dim() <= 2:
            return bias
        sizes = [make.size(layout.merged, axis) for axis in (0, 1)]
        ends = [make.size(bias, axis) for axis in (-2, -1)]
        expanded = make(aten.expand.default, _with_rank(make, bias, 4), [*sizes, *ends])
        return make(aten.reshape.default, expanded, [-1, *ends])

    return place


def _with_rank(make: NodeBuilder, value: Node, rank: int) -> Node:
    while meta(value).dim() < rank:
        value = make(aten.unsqueeze.default, value, 0)
    return value


def _split(make: NodeBuilder, rows: BatchAxis, value: Node) -> Node:
    """Return (rows and heads, time, d) as (rows, heads, time, d)."""
    sizes = (-1, rows.times) if rows.outer else (rows.times, -1)
    split = make(aten.reshape.default, value, [*sizes, *(make.size(value, axis) for axis in (1, 2))])
    return split if rows.outer else make(aten.transpose.int, split, 0, 1)


def _merged(make: NodeBuilder, rows: BatchAxis, value: Node) -> Node:
    """Return (rows, heads, time, d) as (rows and heads, time, d)."""
    value = value if rows.outer else make(aten.transpose.int, value, 0, 1)
    return make(aten.reshape.default, value, [-1, *(make.size(value, axis) for axis in (2, 3))])


def _without_transpose(make: NodeBuilder, node: Node) -> Node:
    """Return the tensor whose last two axes `node` swaps, or else `node` with them swapped."""
    swapped = [*range(meta(node).dim() - 2), meta(node).dim() - 1, meta(node).dim() - 2]
    if node.target in _PERMUTATIONS and _permutation(node) == swapped:
        return node.args[0]  # type: ignore[return-value]
    return make(aten.transpose.int, node, -2, -1)


def _runs_with_other_row(captured: CapturedGraph) -> tuple[Mapping[Node, Any], Mapping[Node, Any]]:
    """Run the graph on two rows of the example, and with another second row."""
    two = {name: value[[0, -1]] if value.dim() else value for name, value in captured.example.items()}
    others = {}
    for name, value in two.items():
        moved = value[-1].roll(1, 0) if value.dim() > 1 else value
        is_moved = value.dim() > 1 and not torch.equal(value[-1], moved)
        others[name] = torch.stack([value[0], moved if is_moved else value[0]]) if value.dim() else value
    return run(captured, two), run(captured, others)
