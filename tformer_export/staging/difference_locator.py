"""Locate where a file that fails the parity gate begins to differ: the first context or cache with another value.

Contexts and caches are intermediate values that every file has, one or two for each layer, and each stands for a value
of the captured graph. So they locate the layer without another export. This runs only on failure and costs one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import source_line
from tformer_export.staging.auxiliary_outputs import AuxiliaryOutput
from tformer_export.staging.emitter import CachedValue, ContextTensor

MAX_ACCUMULATED_ROUNDING = 1e-4  # of a value's range; accumulated rounding errors are smaller


@dataclass(frozen=True)
class DifferenceLocator:
    """The values of the captured graph that a file's contexts, caches and extras hold, in the file's order."""

    captured: CapturedGraph
    contexts: tuple[ContextTensor, ...]
    caches: tuple[CachedValue, ...]
    extras: tuple[AuxiliaryOutput, ...] = ()

    def first_difference(
        self, inputs: Mapping[str, torch.Tensor], contexts: list[np.ndarray], caches: list[np.ndarray]
    ) -> str:
        """Return the first difference as a part of a sentence.

        inputs: one row without padding, with its batch axis.
        contexts, caches: the values of that row in the file, padded, without the batch axis.
        """
        values = run(self.captured, inputs)
        for context, file_value in zip(self.contexts, contexts, strict=True):
            if context.rows and _differ(_first_row(values[context.node], context.rows), file_value):
                return f"first in what is computed once a request: {_place(context.node)}"
        for cache, file_value in zip(self.caches, caches, strict=True):
            if _differ(_cached_row(values[cache.node], cache), file_value):
                return f"first in a cached value: {_place(cache.node)}"
        return "no context and no cached value differs, so it is in the last attention or after it"


def _cached_row(value: Any, cache: CachedValue) -> np.ndarray:
    """Return the first row of a cache after all positions of a value."""
    if cache.state is not None:
        return _first_row(value[cache.state], cache.rows)
    layout = cache.layout
    count = value.shape[cache.time] - layout.rows(0) if layout.is_padded else value.shape[cache.time]
    if layout.is_padded:
        value = value.narrow(cache.time, layout.front, count)
    if cache.num_carried is not None:
        shape = [*value.shape[: cache.time], cache.num_carried, *value.shape[cache.time + 1 :]]
        value = torch.cat([value.new_zeros(shape), value], cache.time).narrow(cache.time, count, cache.num_carried)
    return _first_row(value, cache.rows)


def _first_row(value: torch.Tensor, rows: BatchAxis) -> np.ndarray:
    split: torch.Tensor = rows.split(lambda function, *args: function(*args), value)
    return split.select(rows.batch_axis, 0).numpy()


def _differ(expected: np.ndarray, file_value: np.ndarray) -> bool:
    """Return whether two values differ where both are valid. The file's value broadcasts, or is padded at its end."""
    if expected.ndim != file_value.ndim or expected.dtype.kind != "f":
        return False
    file_value = file_value[tuple(slice(0, size) for size in expected.shape)]
    finite = np.isfinite(expected) & (np.abs(expected) < 1e30)
    if not finite.any():
        return False
    span = float(np.ptp(expected[finite])) or 1.0
    return bool(np.abs(np.where(finite, expected - file_value, 0)).max() > MAX_ACCUMULATED_ROUNDING * span)


def _place(node: Node) -> str:
    """Return the module that computes a value, as a path, and the source line."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    return f"{paths[-1] + ', ' if paths else ''}{source_line(node)}"
