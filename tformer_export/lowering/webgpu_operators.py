"""The operators for which onnxruntime has WebGPU kernels, and those of a model for which it has none.

A node without a kernel runs on the CPU in the middle of a run on the GPU: its operands and results are copied there and
back at each step. The list is that of js/web/docs/webgpu-operators.md of onnxruntime, in the package onnxruntime-web
1.30.0; a test compares the two.
"""

from __future__ import annotations

import onnx_ir as ir

STANDARD = frozenset(
    {
        "Abs", "Acos", "Acosh", "Add", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "AveragePool",
        "BatchNormalization", "Cast", "Ceil", "Clip", "Concat", "Conv", "ConvTranspose", "Cos", "Cosh",
        "CumSum", "DFT", "DepthToSpace", "DequantizeLinear", "Div", "Einsum", "Elu", "Equal", "Erf", "Exp",
        "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm",
        "GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "GridSample", "HardSigmoid",
        "HardSwish", "If", "InstanceNormalization", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual",
        "Log", "MatMul", "MaxPool", "Mul", "Neg", "Not", "Pad", "Pow", "Range", "Reciprocal", "ReduceL1",
        "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
        "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Resize", "ScatterND", "Shape", "Sigmoid",
        "SimplifiedLayerNormalization", "Sin", "Sinh", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub",
        "Tan", "Tanh", "ThresholdedRelu", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
CONTRIB = frozenset(
    {
        "Attention", "BiasAdd", "BiasSplitGelu", "FastGelu", "FusedConv", "GatherBlockQuantized", "Gelu",
        "GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "QuickGelu", "RotaryEmbedding",
        "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    }
)  # fmt: skip
_OPERATORS = {"": STANDARD, "ai.onnx": STANDARD, "com.microsoft": CONTRIB}


def operators_without_kernel(model: ir.Model) -> list[str]:
    """Return the names of the operators of a model that have no WebGPU kernel, in alphabetical order.

    Three kinds of nodes do not count. onnxruntime computes the results of nodes over weights alone when it opens the
    file, and removes an Identity. Whole numbers and booleans are ids, lengths and masks: few numbers, which onnxruntime
    keeps on the CPU in part even where it has a kernel.
    """
    constants: set[ir.Value] = set()
    found = set()
    for node in model.graph.all_nodes():
        inputs = [value for value in node.inputs if value is not None]
        if all(value in constants or value.is_initializer() for value in inputs) and not _has_graph(node):
            constants.update(node.outputs)
        elif node.op_type not in _OPERATORS.get(node.domain, ()):
            found.update([node.op_type] if node.op_type != "Identity" and _gives_floats(node) else [])
    return sorted(found)


def _gives_floats(node: ir.Node) -> bool:
    return any(value.dtype is None or value.dtype.is_floating_point() for value in node.outputs)


def _has_graph(node: ir.Node) -> bool:
    return any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
    )
