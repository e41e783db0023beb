"""Rewrites of the ONNX model, one per file; each is `run(model) → how many places it changed`."""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.passes import norms, projections, reshapes, shared, strip, tied, turned, unused

STANDARD = (reshapes, norms, unused, tied, projections, unused, strip)
PASSES = (reshapes, norms, unused, shared, tied, turned, projections, unused, strip)


def run_passes(model: ir.Model, portable: bool = False) -> dict[str, int]:
    """Run the passes in order, if portable those that make standard operators; returns what each changed, by name."""
    changed: dict[str, int] = {}
    for p in STANDARD if portable else PASSES:
        name = p.__name__.rsplit(".", 1)[1]
        changed[name] = changed.get(name, 0) + p.run(model)
    return changed
