"""Queries whose keys are all hidden, with the number that torch gives them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set

import torch
from torch.fx import Node

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import aten, is_read_from_data, meta

_WITHOUT_VALUES = {  # operations that read the size of a tensor and none of its numbers
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


def fill_fully_masked(
    captured: CapturedGraph, fills: Mapping[Node, float], stepped: Set[Node], masks: Collection[str]
) -> int:
    """Give queries whose keys are all hidden what torch gives them, and return the number of changed attentions.

    The operators of onnxruntime average all values for such a query. torch's function gives 0, and a softmax that is
    written by hand gives NaN. Only a mask that follows from the content of an input can hide all keys: a row has a
    valid position, so that masks of padding leave one. Such attentions get one more operation.

    fills: attention → the number that such a query gets.
    stepped: nodes that follow from the step input. An attention whose keys and bias both do is left alone: a model
        whose positions see no key among the positions before them is refused.
    masks: names of the inputs that are masks of padding.
    """
    filled = 0
    for attention, fill in fills.items():
        bias = attention.args[3]
        if (
            not isinstance(bias, Node)
            or {bias, attention.args[1]} <= stepped
            or not _hides_by_content(captured, bias, masks, fill == 0)
        ):
            continue
        make = NodeBuilder(captured.graph, attention)
        sees = bias if meta(bias).dtype == torch.bool else make(aten.gt.Scalar, bias, -math.inf)
        fully_masked = make(aten.logical_not.default, make(aten.any.dim, sees, -1, True))
        with captured.graph.inserting_after(attention):
            result = captured.graph.call_function(aten.masked_fill.Scalar, (attention, fully_masked, fill))
        result.meta = dict(attention.meta)
        for user in [user for user in attention.users if user is not result]:
            user.replace_input_with(attention, result)
        filled += 1
    return filled


def _hides_by_content(captured: CapturedGraph, bias: Node, masks: Collection[str], computed: bool) -> bool:
    """Return whether a bias may hide a key, and follows from the content of an input that is not a mask of padding.

    computed: whether to expect a −inf that is computed: a logarithm, a quotient, or a sum of the lowest numbers.
    """
    largest = torch.finfo(torch.float32).max / 2
    hides, follows = meta(bias).dtype == torch.bool, False
    seen, pending = {bias}, [bias]
    inputs = {node: name for name, node in captured.inputs.items()}
    while pending and not (hides and follows):
        node = pending.pop()
        if isinstance(meta(node), (int, torch.SymInt)) and not is_read_from_data(node):
            continue
        constant = captured.constants.get(node.name)
        numbers = [number for number in node.args if isinstance(number, float)]
        if isinstance(constant, torch.Tensor) and constant.is_floating_point() and constant.numel():
            numbers += [float(constant.min()), float(constant.max())]
        hides |= -math.inf in numbers
        if computed:
            hides |= any(abs(number) > largest for number in numbers) or node.target in (
                aten.log.default,
                aten.div.Tensor,
            )
        follows |= node in inputs and inputs[node] not in masks
        operands = [] if node.target in _WITHOUT_VALUES else node.all_input_nodes
        pending += [operand for operand in operands if operand not in seen]
        seen.update(operands)
    return hides and follows
