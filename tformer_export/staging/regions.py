"""Regions: operations that keep positions apart together, though not each by itself.

A mixture of experts sorts the rows of all positions by expert, multiplies them group by group and puts them back; an
attention with sinks appends a column to its scores and drops it after softmax. Seen alone, each of these operations
moves or mixes positions; the region from where the rows go in to where they come out does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch.fx import Node

from tformer_export.analysis.binding_time import Level

MOST_NODES = 4000  # of one region
MOST_TRIALS = 60  # regions that are tried for one operation


def closing_regions(
    exit: Node, level: Mapping[Node, Level], order: Mapping[Node, int], is_apart: Callable[[Node], bool]
) -> Iterator[tuple[Node, ...]]:
    """The regions that end at `exit` and whose operands from outside all keep positions apart, the smallest first.
    A constant whose axes are not simply positions, such as a mask with a column for a sink, is computed in the region.

    A region grows by the latest of the step values that it reads and that do not keep positions apart, or of all that
    it reads, if they do. Cost: linear in the nodes that it takes in, plus one trial for each region given out.
    """
    inside = {exit}
    outside = _operands(exit, level, is_apart)
    trials = 0
    while outside and len(inside) < MOST_NODES and trials < MOST_TRIALS:
        latest = max([n for n in outside if not is_apart(n)] or outside, key=order.__getitem__)
        if latest.op != "call_function":
            return
        outside.discard(latest)
        inside.add(latest)
        outside |= _operands(latest, level, is_apart) - inside
        if all(map(is_apart, outside)):
            trials += 1
            yield tuple(sorted(inside, key=order.__getitem__))


def _operands(node: Node, level: Mapping[Node, Level], is_apart: Callable[[Node], bool]) -> set[Node]:
    return {
        a
        for a in node.all_input_nodes
        if level[a] == Level.STEP or (level[a] == Level.CONSTANT and a.op == "call_function" and not is_apart(a))
    }
