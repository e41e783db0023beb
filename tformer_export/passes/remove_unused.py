"""Drop initializers and nodes that nothing reads any more."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def run(model: ir.Model) -> int:
    return int(RemoveUnusedNodesPass()(model).modified)
