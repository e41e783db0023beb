"""`tformer::attention`: the operation that each attention of a model becomes, in the captured graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from tformer_export.common.fx_nodes import aten, meta, origin


@torch.library.custom_op("tformer::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Compute softmax(scale · query keyᵀ + bias) value (Vaswani et al. 2017, equation 1).

    query: (batch, heads, new, d).
    key: (batch, kv_heads, slots, d); heads is a multiple of kv_heads.
    value: (batch, kv_heads, slots, d_v).
    bias: broadcasts to (batch, heads, new, slots). A float is added; a bool keeps the scores where it is true.
    softcap: scores s become softcap · tanh(s / softcap) before the bias is added (logit clipping, Bello et al. 2016);
        0: they do not.
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-2, -1) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    return torch.softmax(scores, -1) @ value


@attention.register_fake
def _(query, key, value, bias, scale, softcap=0.0):  # type: ignore[no-untyped-def]
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


ATTENTION = torch.ops.tformer.attention.default


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
        node.meta |= origin(self.before)
        return node

    def size(self, node: Node, axis: int) -> Any:
        size = meta(node).shape[axis]
        return self(aten.sym_size.int, node, axis) if isinstance(size, torch.SymInt) else size


def fake_mode(node: Node) -> Any:
    """Return the fake tensor mode in which the graph was traced."""
    value = meta(node)
    return (value[0] if isinstance(value, (list, tuple)) else value).fake_mode
