"""Branches that ask a tensor what is known from sizes alone, such as `if positions.max() + 1 > self.longest:`.

torch.export cannot follow them, for it has no values. Traced once more with the example's values, it goes the example's
way and asserts what it took for granted. That is looked at here at other lengths, and the greatest length for which it
holds becomes a limit of the file. A branch that depends on data stays refused.
"""

from __future__ import annotations

from torch.fx import Node

from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.analysis.interpreter import Constants
from tformer_export.capture.graph_cleanup import drop_assertions
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import FEW, MANY, aten, expression, meta
from tformer_runtime.base.errors import UnsupportedModelError


def limit_by_branches(captured: Captured) -> None:
    """Give the captured graph the limits within which its branches go the way that was traced, and drop the assertions.

    Raises UnsupportedModelError if one depends on data. Cost: what was asserted, at some twenty lengths.
    """
    if captured.undecided is None:
        return
    every_one = [n.args[0] for n in captured.nodes if n.target is aten._assert_scalar.default]
    asserted = [n for n in every_one if isinstance(n, Node) and str(meta(n)) != "True"]
    level = binding_times(captured)
    if captured.time is None or any(level[n] != Level.CONSTANT for n in asserted):
        raise UnsupportedModelError(captured.undecided)
    constants = Constants(captured, level)
    every = {s for node in captured.inputs.values() for size in meta(node).shape for s in expression(size).free_symbols}

    def hold(length: int) -> bool:
        sizes = {**dict.fromkeys(every, 2), captured.time: length}
        return all(constants.at(asserted, sizes).values())

    if not all(map(hold, range(2, FEW))):
        raise UnsupportedModelError(captured.undecided)
    low, high = FEW - 1, captured.limits.get(captured.time, MANY)
    if not hold(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if hold(middle) else (low, middle)
        captured.limits[captured.time] = low
    drop_assertions(captured.graph)
