"""Regions: operations that mix positions one by one and keep them apart together.

A mixture of experts sorts the rows of all positions by expert, multiplies them group by group and puts them back. An
attention with sinks appends a column to its scores and drops it after softmax. Each of these operations moves or mixes
positions. The region from where the rows go in to where they come out does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch.fx import Node

from tformer_export.analysis.binding_time import Level

MAX_REGION_NODES = 4000
MAX_TRIED_REGIONS = 60  # for one operation


def find_regions(
    exit: Node, level: Mapping[Node, Level], order: Mapping[Node, int], keeps_positions: Callable[[Node], bool]
) -> Iterator[tuple[Node, ...]]:
    """Yield the regions that end at `exit` and whose outside operands all keep positions apart, the smallest first.

    A constant whose axes are not simply positions, such as a mask with a column for a sink, is computed in the region.
    A region grows by the latest of its operands that do not keep positions apart, or of all operands if they all do.

    Cost: linear in the nodes of the largest region, and one trial for each yielded region.
    """
    inside = {exit}
    outside = _operands(exit, level, keeps_positions)
    trials = 0
    while outside and len(inside) < MAX_REGION_NODES and trials < MAX_TRIED_REGIONS:
        latest = max([n for n in outside if not keeps_positions(n)] or outside, key=order.__getitem__)
        if latest.op != "call_function":
            return
        outside.discard(latest)
        inside.add(latest)
        outside |= _operands(latest, level, keeps_positions) - inside
        if all(map(keeps_positions, outside)):
            trials += 1
            yield tuple(sorted(inside, key=order.__getitem__))


def _operands(node: Node, level: Mapping[Node, Level], keeps_positions: Callable[[Node], bool]) -> set[Node]:
    return {
        a
        for a in node.all_input_nodes
        if level[a] == Level.STEP or (level[a] == Level.CONSTANT and a.op == "call_function" and not keeps_positions(a))
    }
