"""Loops over positions as recurrences: the states that they carry, and the loops that are none."""

from __future__ import annotations

import copy

import pytest
import torch
from support.hand_graphs import BATCH, SOURCE_LENGTH, WIDTH, hand_graph, numbers, plan_of, solver_of
from torch import nn

from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.capture.scan import Scan
from tformer_export.common.fx_nodes import meta
from tformer_export.staging.recurrence import find_recurrence
from tformer_runtime import UnsupportedModelError

TIME = 6


def gru_cell(state, row, w_input, w_state):
    new = torch.gru_cell(row, state, w_input, w_state)
    return [new, new * 2]


def looped(body, function, constants=(), num_states=1, num_sequences=1, results=None):
    """Return a graph that ends in a loop, and its node.

    function: x and the constants → the operands of the loop.
    results: those of the loop, one for each of its operands that has the same form; by default one sequence, and the
        last states.
    """
    captured = hand_graph(function, constants)
    operands = [captured.output, *captured.extras.values()]
    graph = captured.graph
    (output,) = (n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        node = graph.call_function(Scan(body, num_states, num_sequences), tuple(operands))
    forms = results or [num_states, *range(num_states)]
    node.meta["val"] = [meta(operands[i]) for i in forms]
    output.args = ((node,),)
    captured.output, captured.extra_names = node, ()
    return captured, node


def gru(function=lambda x, w, u: (x.new_zeros(x.shape[0], WIDTH), x.relu().transpose(0, 1), w, u)):
    return looped(gru_cell, function, [numbers(3 * WIDTH, WIDTH, seed=1), numbers(3 * WIDTH, WIDTH, seed=2)])
