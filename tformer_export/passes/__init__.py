"""Rewrites of the ONNX model, one per file; each is `run(model) → how many places it changed`."""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.passes import strip

PASSES = (strip,)


def run_passes(model: ir.Model) -> dict[str, int]:
    """Run every pass in order; returns what each changed, by name."""
    return {p.__name__.rsplit(".", 1)[1]: p.run(model) for p in PASSES}
