"""Rewrites of the ONNX model, one per file; each is `run(model) → how many places it changed`."""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.passes import norms, projections, reshapes, scaled, scores, shared, strip, tied, turned, unused

STANDARD = (reshapes, norms, unused, tied, projections, unused, strip)
PASSES = (reshapes, norms, unused, scaled, shared, tied, turned, projections, unused, strip)


def run_passes(model: ir.Model, longest: int, target: str = "cpu") -> dict[str, int]:
    """Run the passes in order, for a portable file those that make standard operators; returns what each changed, by
    name.

    longest: the maximum length. What chooses among the CPU's kernels is for the CPU, and no CUDA graph holds the
    branches that it makes.
    """
    changed: dict[str, int] = {}
    for p in STANDARD if target == "portable" else PASSES:
        name = p.__name__.rsplit(".", 1)[1]
        changed[name] = changed.get(name, 0) + p.run(model)
    if target == "cpu":
        changed["scores"] = scores.run(model, longest)
    return changed
