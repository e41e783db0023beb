"""Take out what torch.onnx left for debugging: stack traces and local paths, and shapes that are not a port's."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass


def run(model: ir.Model) -> int:
    result = ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.doc_string = None
    model.producer_name, model.producer_version = "tformer", None
    ports = {id(v) for v in (*model.graph.inputs, *model.graph.outputs)}
    made = [value for node in model.graph.all_nodes() for value in node.outputs]
    given = [v for graph in model.graphs() for v in (*graph.inputs, *graph.initializers.values())]
    for value in (*made, *given):  # which that pass leaves alone
        value.metadata_props.clear()
        value.doc_string = None
        held = value.const_value
        if held is not None and (held.metadata_props or held.doc_string):
            value.const_value = ir.tensor(held.numpy(), dtype=held.dtype, name=held.name)
    for value in made:
        if id(value) not in ports:
            value.shape = None
    return int(result.modified)
