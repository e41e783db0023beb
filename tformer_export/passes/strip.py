"""Take out what torch.onnx left for debugging: stack traces and local paths, and shapes that are not a port's."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass


def run(model: ir.Model) -> int:
    result = ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "tformer", None
    ports = {id(v) for v in (*model.graph.inputs, *model.graph.outputs)}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if id(value) not in ports:
                value.shape = None
    return int(result.modified)
