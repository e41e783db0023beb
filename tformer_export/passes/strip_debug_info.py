"""Remove the debug information of torch.onnx: stack traces, local paths, and shapes of intermediate values."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass


def run(model: ir.Model) -> int:
    """Clear it in place; return 1 if nodes had any, else 0. Shapes of the model's inputs and outputs stay."""
    result = ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.doc_string = None
    model.producer_name, model.producer_version = "tformer", None
    ports = {id(v) for v in (*model.graph.inputs, *model.graph.outputs)}
    outputs = [value for node in model.graph.all_nodes() for value in node.outputs]
    inputs = [v for graph in model.graphs() for v in (*graph.inputs, *graph.initializers.values())]
    for value in (*outputs, *inputs):  # which ClearMetadataAndDocStringPass does not clear
        value.metadata_props.clear()
        value.doc_string = None
        tensor = value.const_value
        if tensor is not None and (tensor.metadata_props or tensor.doc_string):
            value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
    for value in outputs:
        if id(value) not in ports:
            value.shape = None
    return int(result.modified)
