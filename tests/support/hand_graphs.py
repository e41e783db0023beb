"""Small graphs to stage, traced from a function of a few operations. No module is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tformer_export.analysis.binding_time import binding_times
from tformer_export.analysis.interpreter import Constants, run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.staging.plan import StagingPlan, make_plan
from tformer_export.staging.restriction import PROBE_LENGTH, RestrictionSolver

BATCH, SOURCE_LENGTH, WIDTH = 2, 5, 4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def causal(time: int) -> torch.Tensor:
    """Return a mask (time, time), true where a position may attend."""
    return torch.ones(time, time, dtype=torch.bool).tril()


def hand_graph(
    function: Callable[..., Any],
    constants: Sequence[torch.Tensor] = (),
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> CapturedGraph:
    """Return the graph of `function(*inputs, *constants)`, whose step input is the first input.

    inputs: by default `x` (batch, time, width). The first two axes of each are free. Axes of one size have one symbol.
    """
    inputs = inputs or {"x": numbers(BATCH, PROBE_LENGTH, WIDTH)}
    mode = FakeTensorMode(shape_env=ShapeEnv())
    free, fixed = DimDynamic.DUCK, DimDynamic.STATIC

    def fake(tensor: torch.Tensor, num_free: int) -> torch.Tensor:
        context = StatelessSymbolicContext([free if axis < num_free else fixed for axis in range(tensor.dim())])
        return mode.from_tensor(tensor, symbolic_context=context)

    operands = [*(fake(x, 2) for x in inputs.values()), *(fake(x, 0) for x in constants)]
    with mode:
        graph = make_fx(function, pre_dispatch=True)(*operands).graph
    places = graph.find_nodes(op="placeholder")
    step = places[0]
    (results,) = graph.output_node().args
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    graph.output_node().args = (tuple(results),)
    batch, time = (expression(size) for size in meta(step).shape[:2])
    return CapturedGraph(
        graph,
        {place.name: value for place, value in zip(places[len(inputs) :], constants, strict=True)},
        dict(zip(inputs, places, strict=False)),
        next(iter(inputs)),
        results[0],
        time,
        {},
        frozenset({batch}),
        dict(inputs),
        extra_names=tuple(f"extra_{i}" for i in range(1, len(results))),
    )


def solver_of(
    captured: CapturedGraph, values: torch.Tensor | None = None, others: torch.Tensor | None = None
) -> RestrictionSolver:
    """Return a solver. values, others: the step input of both runs; others has another second row."""
    inputs = dict(captured.example)
    name = captured.step_name or ""
    inputs[name] = inputs[name] if values is None else values
    if others is None:
        others = {
            n: torch.stack([x[0], x[1].flip(0) * 2 if x.is_floating_point() else x[1].flip(0)])
            for n, x in inputs.items()
        }
    else:
        others = {**inputs, name: others}
    level = binding_times(captured)
    return RestrictionSolver(captured, level, run(captured, inputs), run(captured, others), Constants(captured, level))


def plan_of(solver: RestrictionSolver, fuses: bool = False) -> StagingPlan:
    """Return the plan of the decode stage. fuses: whether the target has a fused operator for every attention."""
    return make_plan(solver.captured, solver.level, solver, lambda attention: fuses)


def the_node(captured: CapturedGraph, target: Any) -> Node:
    """Return the only node of an operation."""
    (node,) = (node for node in captured.nodes if node.target is target)
    return node
