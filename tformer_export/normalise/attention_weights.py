"""Weights of attention as extra outputs.

Cross-attentions say how much each step attends to each position of the request. A single-pass model has the
weights of all its attentions instead.

A cross-attention is an attention whose queries come from the step input and whose keys come from the request. Its
weights are averaged over heads. On the layer the field does not agree: fairseq takes the last, Garg et al. 2019
("Jointly Learning to Align and Translate with Transformer Models") the one before it. The default is the mean over all
layers, which is near the best everywhere: docs/design/staging.md#cross-attention-and-attentions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION, NodeBuilder
from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import arguments, aten, expression, meta
from tformer_export.sources import Source
from tformer_runtime.base.errors import OptionError
from tformer_runtime.format.manifest import ATTENTIONS as ATTENTION_MAPS
from tformer_runtime.format.manifest import CROSS_ATTENTIONS

SOFTMAX = (aten.softmax.int, aten._softmax.default)
SHAPES = (aten.view.default, aten.reshape.default, aten.expand.default, aten.clone.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default)

AttentionSelection = bool | str | int | Sequence[int | tuple[int, int]]


@torch.library.custom_op("tformer::attention_weights", mutates_args=())
def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float,
    heads: list[int],
    each: bool,
) -> torch.Tensor:
    """Compute softmax(scale · query keyᵀ + bias) and sum it over `heads`: (batch, 1, new, slots).

    For the operands see `attention`.

    each: return the weights of each of the heads instead, (batch, heads, new, slots).
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-2, -1) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    weights = torch.softmax(scores, -1)[:, heads]
    return weights if each else weights.sum(1, keepdim=True)


@attention_weights.register_fake
def _(query, key, bias, scale, softcap, heads, each):  # type: ignore[no-untyped-def]
    return query.new_empty((query.shape[0], len(heads) if each else 1, query.shape[2], key.shape[2]))


WEIGHTS = torch.ops.tformer.attention_weights.default


def check_has_attentions(source: Source, cross_attentions: AttentionSelection | None, attentions: bool) -> None:
    """Raise OptionError for weights of attention that no model of this kind has, before the model is traced."""
    if attentions and source.step_input is not None:
        raise OptionError(
            f"attentions are outputs of a single-pass model, and this one has the step input {source.step_input!r}: "
            "use cross_attentions"
        )
    if attentions and source.series is not None:
        raise OptionError("attentions are not outputs of a forecaster: a series is cut, scaled and fed back")
    asked = cross_attentions is not None and cross_attentions is not False
    if asked and (source.step_input is None or not set(source.caller_inputs) - {source.step_input}):
        raise _no_cross_attention(source.step_input)


def add_cross_attentions(captured: CapturedGraph, selection: AttentionSelection) -> None:
    """Add the extra output `cross_attentions`, (batch, new, source positions): the mean of the selected heads.

    selection: True for every head of every cross-attention; "last" for the heads of the last one; or a list of layers
        and (layer, head). Layers are counted from 0 in the order in which the graph computes them.

    Raises OptionError for a layer or head that the model does not have.
    """
    layers = _cross_attentions(captured)
    heads = select_heads(selection, [int(meta(node.args[0]).shape[1]) for node in layers])
    lengths = {expression(meta(layers[i].args[1]).shape[2]) for i in heads}
    if len(lengths) > 1:
        raise OptionError("these layers attend to different inputs: name layers that read the same one")
    total: Node | None = None
    for layer, layer_heads in heads.items():
        make = NodeBuilder(captured.graph, layers[layer])
        query, key, _, bias, scale, softcap = arguments(layers[layer])
        summed = make(WEIGHTS, query, key, bias, scale, softcap, layer_heads, False)
        total = summed if total is None else make(aten.add.Tensor, total, summed)
    mean = make(aten.mul.Tensor, total, 1 / sum(map(len, heads.values())))
    captured.add_extra(CROSS_ATTENTIONS, make(aten.select.int, mean, 1, 0))


def add_attentions(captured: CapturedGraph) -> None:
    """Add the extra output `attentions`, (batch, layers, heads, positions, positions), in the order of computation.

    An entry is the weight of a position (last axis) in the result for another (second last). Cost of a run: computing
    the scores of all attentions a second time.

    Raises OptionError for a model without attention, or with attentions of several sizes.
    """
    weights = [w for node in captured.nodes if (w := _weights(captured, node)) is not None]
    if not weights:
        raise OptionError(
            "no attention was recognised in the model, so that the file cannot return its weights; attention written "
            "by hand is recognised as a softmax over (batch, heads, time, time) that is the first operand of a matrix "
            "product"
        )
    sizes = {tuple(map(expression, meta(node).shape[1:])) for node in weights}
    if len(sizes) > 1:
        shown = " and ".join(sorted(f"{heads} heads over {n} × {slots}" for heads, n, slots in sizes))
        raise OptionError(f"attentions are one array of all layers, but the layers of the model differ: {shown}")
    make = NodeBuilder(captured.graph, next(iter(weights[-1].users), weights[-1].next))
    captured.add_extra(ATTENTION_MAPS, make(aten.stack.default, weights, 1))


def _weights(captured: CapturedGraph, node: Node) -> Node | None:
    """Return the weights of an attention, (batch, heads, new, slots); None if the node is not an attention.

    An attention that is computed operation by operation is recognised by its softmax.
    """
    if node.target is ATTENTION:
        query, key, _, bias, scale, softcap = arguments(node)
        heads = list(range(int(meta(query).shape[1])))
        return NodeBuilder(captured.graph, node)(WEIGHTS, query, key, bias, scale, softcap, heads, True)
    if node.target not in SOFTMAX or meta(node).dim() != 4 or arguments(node)[1] not in (3, -1):
        return None
    last, users = node, list(node.users)
    while len(users) == 1 and users[0].target in SHAPES:
        last, users = users[0], list(users[0].users)
    return node if any(user.target in PRODUCTS and user.args[0] is last for user in users) else None


def _cross_attentions(captured: CapturedGraph) -> list[Node]:
    level: Mapping[Node, Level] = binding_times(captured)
    if captured.step is None or not any(level[node] == Level.REQUEST for node in captured.inputs.values()):
        raise _no_cross_attention(captured.step_name)
    attentions = [node for node in captured.nodes if node.target is ATTENTION]
    cross = [n for n in attentions if level[n.args[0]] == Level.STEP and level[n.args[1]] == Level.REQUEST]  # type: ignore[index]
    if not cross:
        raise OptionError(
            f"the model has no cross-attention for cross_attentions: none of the {len(attentions)} attentions "
            "recognised in it computes its keys from the encoder's inputs alone; attention written by hand is "
            "recognised as "
            "softmax(scale · Q Kᵀ + bias) · V over (batch, heads, time, size)"
        )
    return cross


def _no_cross_attention(step_input: str | None) -> OptionError:
    only = f"reads nothing but {step_input}" if step_input else "is a single-pass model"
    return OptionError(f"the model {only}: it has no cross-attention, so it has no cross_attentions")


def select_heads(selection: AttentionSelection, head_counts: list[int]) -> dict[int, list[int]]:
    """Return layer → its selected heads, in order. head_counts: the number of heads of each layer."""
    last = len(head_counts) - 1
    named: dict[Any, Sequence[int]] = {True: range(len(head_counts)), "last": [last]}
    if isinstance(selection, (bool, str)):
        items: Sequence[Any] = named.get(selection, ())
    else:
        items = [selection] if isinstance(selection, int) else selection
    heads: dict[int, set[int]] = {}
    for item in items:
        layer, head = (item, None) if isinstance(item, int) else item
        if not 0 <= layer <= last:
            raise OptionError(f"cross_attentions: there is no layer {layer}, the cross-attentions are 0 to {last}")
        if head is not None and not 0 <= head < head_counts[layer]:
            raise OptionError(
                f"cross_attentions: layer {layer} has no head {head}, its heads are 0 to {head_counts[layer] - 1}"
            )
        heads.setdefault(layer, set()).update(range(head_counts[layer]) if head is None else [head])
    if not heads:
        raise OptionError(f'cross_attentions are True, "last", layers, or pairs of layer and head, not {selection!r}')
    return {layer: sorted(heads[layer]) for layer in sorted(heads)}
