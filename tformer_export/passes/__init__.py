"""Rewrites of the ONNX model, one per file; each is `run(model) → how many places it changed`."""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.forms import DEFAULTS, GIVEN, NORMS, PROJECTIONS, Forms
from tformer_export.passes import (
    norms,
    projections,
    reshapes,
    scaled,
    scores,
    shared,
    strip,
    tied,
    turned,
    unfused,
    unused,
)

STANDARD = (reshapes, norms, unused, tied, projections, unused, strip)
PASSES = (reshapes, norms, unused, scaled, shared, tied, turned, projections, unused, strip)


def run_passes(model: ir.Model, longest: int, forms: Forms = DEFAULTS, target: str = "cpu") -> dict[str, int]:
    """Run the passes in order, for a portable file those that make standard operators; returns what each changed, by
    name.

    longest: the maximum length. forms: those that are not the default leave a pass out, or take an operator apart
    again. What chooses among the CPU's kernels is for the CPU, and no CUDA graph holds the branches that it makes.
    """
    left_out = [p for choice, p in ((NORMS, norms), (PROJECTIONS, projections)) if choice.of(forms) != choice.default]
    if longest <= scores.SHORT or target != "cpu":
        left_out.append(scaled)
    changed: dict[str, int] = {}
    for p in STANDARD if target == "portable" else PASSES:
        name = p.__name__.rsplit(".", 1)[1]
        changed[name] = changed.get(name, 0) + (p.run(model) if p not in left_out else 0)
        if p is shared and GIVEN.of(forms) != GIVEN.default:  # not before: it knows the attention by its operator
            unfused.run(model, "decode/")
    if target == "cpu":
        changed["scores"] = scores.run(model, longest)
    return changed
