"""Modules whose forward drops the last position of the step input itself, as code for training does.

`forward(ids)` computes logits of `ids[:, :-1]`, to be compared with `ids[:, 1:]`. A file needs logits after every
position. So each call gets one position more, whose value has no influence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tformer_export.common.module_state import WriteUndo, unchanged
from tformer_export.sources.call.adapter import Adapter


def drops_last_position(adapter: Adapter, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return whether forward gives logits for all positions of the step input but the last.

    The last position must have no influence on them, and the one before it must have some: else the rows stand for
    other positions. Cost: four runs of forward.
    """
    name = adapter.step
    if name is None or inputs[name].dim() < 2 or inputs[name].shape[1] < 3:
        return False
    step = inputs[name]
    first = _run(adapter, inputs)
    if first is None or first.dim() != 3 or first.shape[:2] != (step.shape[0], step.shape[1] - 1):
        return False

    def changed(position: int, other: int) -> torch.Tensor | None:
        value = step.clone()
        value[:, position] = step[:, other].flip(0)
        return _run(adapter, {**inputs, name: value})

    alike = [changed(-1, other) for other in (0, 1)]
    before = changed(-2, 0)
    return (
        before is not None
        and not torch.equal(before, first)
        and all(result is not None and torch.equal(result, first) for result in alike)
    )


def _run(adapter: Adapter, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the logits; None if forward fails or returns something else. The state of the module is restored."""
    try:
        with torch.no_grad(), unchanged(adapter), WriteUndo(adapter, []), torch.random.fork_rng(devices=[]):
            output = adapter(*(value.clone() for value in inputs.values()))
    except Exception:  # the analysis reports errors of forward
        return None
    return output if isinstance(output, torch.Tensor) else None
