"""Remove initializers and nodes that nothing reads."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def run(model: ir.Model) -> int:
    """Remove them in place; return 1 if there were any, else 0."""
    return int(RemoveUnusedNodesPass()(model).modified)
