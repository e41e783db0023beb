"""Where a file that fails the parity gate begins to differ: the first context or cache that is not the source's value.

Contexts and caches are the intermediate values that every file has, one or two a layer, and each stands for a value of
the captured graph; so they tell the layer without another export. Runs only on failure, at the cost of one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.fx import Node

from tformer_export.analysis.batch_axes import Rows
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import source_line
from tformer_export.staging.auxiliary_outputs import Extra
from tformer_export.staging.emitter import CachedValue, Context

CLEAR = 1e-4  # of a value's range; what accumulates by rounding stays below


@dataclass(frozen=True)
class Landmarks:
    """The values of the captured graph that a file's contexts, caches and extras hold, in the file's order."""

    captured: Captured
    contexts: tuple[Context, ...]
    caches: tuple[CachedValue, ...]
    extras: tuple[Extra, ...] = ()

    def first_difference(
        self, inputs: Mapping[str, torch.Tensor], contexts: list[np.ndarray], caches: list[np.ndarray]
    ) -> str:
        """inputs: one row, unpadded, with its batch axis. contexts and caches: that row's, padded, without it."""
        values = run(self.captured, inputs)
        for context, found in zip(self.contexts, contexts, strict=True):
            if context.rows and _differ(_first_row(values[context.node], context.rows), found):
                return f"first in what is computed once a request: {_place(context.node)}"
        for cache, found in zip(self.caches, caches, strict=True):
            if _differ(_first_row(values[cache.node], cache.rows), found):
                return f"first in a cached value: {_place(cache.node)}"
        return "no context and no cached value differs, so it is in the last attention or after it"


def _first_row(value: torch.Tensor, rows: Rows) -> np.ndarray:
    apart: torch.Tensor = rows.split(lambda function, *args: function(*args), value)
    return apart.select(rows.own_axis, 0).numpy()


def _differ(expected: np.ndarray, found: np.ndarray) -> bool:
    """Whether they differ where both are valid: `found` is padded at the end of its free axes, or broadcasts."""
    if expected.ndim != found.ndim or expected.dtype.kind != "f":
        return False
    found = found[tuple(slice(0, size) for size in expected.shape)]
    finite = np.isfinite(expected) & (np.abs(expected) < 1e30)
    if not finite.any():
        return False
    span = float(np.ptp(expected[finite])) or 1.0
    return bool(np.abs(np.where(finite, expected - found, 0)).max() > CLEAR * span)


def _place(node: Node) -> str:
    """The module that made a value, as a path, and the source line."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    return f"{paths[-1] + ', ' if paths else ''}{source_line(node)}"
