"""Rewrites of the ONNX model, one per file; each is `run(model) → how many places it changed`."""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.passes import projections, reshapes, strip, tied, unused

PASSES = (reshapes, unused, tied, projections, unused, strip)


def run_passes(model: ir.Model) -> dict[str, int]:
    """Run every pass in order; returns what each changed, by name."""
    changed: dict[str, int] = {}
    for p in PASSES:
        name = p.__name__.rsplit(".", 1)[1]
        changed[name] = changed.get(name, 0) + p.run(model)
    return changed
