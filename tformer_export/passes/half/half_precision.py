"""Convert a float32 model to half precision by the rules of autocast: products and caches in half, sums in float32.

The precision of a value follows from the graph alone. Products, attention and caches are computed in half.
Exponentials, powers and sums over an axis are computed in float32, because half overflows at 65504, near the square of
256. Operators that sum in float32 internally, such as norms, take their operands as they are. Every other operator is
as wide as its widest operand, so that values computed from sums stay float32 until the next product. Positions and
other numbers that were computed from integers stay float32, and so do constants that half cannot represent, such as the
lowest float32 of a mask.

float16 has 11 bits and ends at 65504. bfloat16 has 8 bits and the range of float32; it is for models that were trained
in it and whose values exceed float16. An operator without a bfloat16 kernel on CUDA is computed in float32, as sums
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import onnx_ir as ir
import torch

from tformer_export.common.ir_edit import derived_tensor
from tformer_export.passes import remove_unused
from tformer_export.staging.emitter import CONTEXT, ENCODED
from tformer_runtime.base.errors import UnsupportedModelError

PAST, PRESENT = "past.", "present."  # prefixes of the names of cache inputs and outputs
# In half for any operands: these have no other kernels on CUDA, or write into caches, which are in half.
_ALWAYS = {"GroupQueryAttention", "TensorScatter"}
_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "MultiHeadAttention"}
_SUMS = {
    "Softmax", "LogSoftmax", "Pow", "Exp", "Log", "Sqrt", "Reciprocal", "Sin", "Cos", "CumSum", "ReduceSum",
    "ReduceMean", "ReduceSumSquare", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
}  # fmt: skip
_FLOAT, _BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


# Operators for which onnxruntime 1.31's CUDA provider has a bfloat16 kernel at opset 24, found by
# `tests/benchmarks/stand_in/kernels.py`. It has float16 kernels but no bfloat16 kernels for comparisons, Clip, Einsum,
# Pad, ReduceMax, Round, LeakyRelu, PRelu, Log, Reciprocal, CumSum, ConvTranspose, BatchNormalization and some more.
_BFLOAT16 = frozenset({
    "Abs", "Add", "Attention", "AveragePool", "BiasGelu", "Concat", "Conv", "Cos", "Div", "Erf", "Exp", "Expand",
    "FastGelu", "Flatten", "FusedMatMul", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "GroupQueryAttention",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LayerNormalization", "LpNormalization", "MatMul", "Max",
    "Min", "Mish", "Mod", "Mul", "MultiHeadAttention", "Neg", "Pow", "QuickGelu", "RMSNormalization", "ReduceL1",
    "ReduceMean", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "RotaryEmbedding", "ScatterElements", "ScatterND",
    "Shape", "Sigmoid", "Sign", "SimplifiedLayerNormalization", "Sin", "Size", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub",
    "Sum", "Swish", "Tanh", "TensorScatter", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """A half precision in onnx and in torch.

    dtype, torch_dtype: its types.
    largest: the largest finite number.
    smallest_normal: the smallest positive normal number.
    roundoff: the largest relative rounding error.
    operators: the operators that have CUDA kernels; None if all have.
    """

    dtype: ir.DataType
    torch_dtype: torch.dtype
    largest: float
    smallest_normal: float
    roundoff: float
    operators: frozenset[str] | None = None

    def can_represent(self, array: np.ndarray) -> bool:
        """Return whether the finite numbers are in range and a single number does not underflow."""
        sizes = np.abs(array, where=np.isfinite(array), out=np.zeros_like(array))
        scalar = array.size == 1 and 0 < float(sizes.max()) < self.smallest_normal
        return bool(sizes.max(initial=0) <= self.largest) and not scalar

    def has_kernel(self, node: ir.Node) -> bool:
        """Return whether CUDA has a kernel for an operator."""
        return self.operators is None or node.op_type in self.operators

    def add_rounding_error(self, value: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """Return the numbers with a random rounding error as large as the rounding of any number can be.

        The error is that of rounding a number next to each of them. Rounding the numbers themselves would change
        nothing in a model that was trained in this precision, because its weights are exact in it.
        """
        noise = torch.rand(value.shape, generator=random, dtype=value.dtype) - 0.5
        # At most half a step below or above the number.
        near = value + torch.ldexp(self.roundoff * noise, torch.frexp(value).exponent)
        return value + (near.to(self.torch_dtype).to(value.dtype) - near)


HALVES = {
    "fp16": Precision(ir.DataType.FLOAT16, torch.float16, 65504.0, 2.0**-14, 2.0**-11),
    "bf16": Precision(ir.DataType.BFLOAT16, torch.bfloat16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-8, _BFLOAT16),
}


class Kind(IntEnum):
    """The precision of a value. Where several meet, the greatest applies.

    HALF: half precision.
    SUM: float32 up to the next product.
    EXACT: float32 throughout.
    """

    HALF = 0
    SUM = 1
    EXACT = 2


def run(model: ir.Model, precision: Precision) -> int:
    """Convert a float32 model in place, and return the number of nodes that compute in half.

    Caches and contexts among its inputs and outputs become half where they are computed in half. All others stay
    float32.
    Cost: one pass over the nodes, and one over the weights, which are rounded when they are written.

    Raises UnsupportedModelError for a weight of a product that half cannot represent.
    """
    halving = _Halving(model, precision)
    graph = model.graph
    choice = next((node for node in graph if node.op_type == "If"), None)
    halving.mark_inputs([v for v in graph.inputs if not str(v.name).startswith(CONTEXT)])
    if choice is None:
        halving.convert_nodes(graph)
        halving.convert_outputs(graph, [v.name for v in graph.outputs])
    else:
        decode, encode = choice.attributes["then_branch"].as_graph(), choice.attributes["else_branch"].as_graph()
        names = [v.name for v in graph.outputs]
        halving.convert_nodes(encode)
        for name, value in zip(names, encode.outputs, strict=True):
            if str(name).endswith(ENCODED) and halving.kinds.get(value) == Kind.HALF:
                halving.half_contexts.add(str(name))
                halving.half_contexts.add(str(name).removesuffix(ENCODED))
        halving.mark_inputs([v for v in graph.inputs if str(v.name).startswith(CONTEXT)])
        halving.convert_nodes(decode)
        for branch in (decode, encode):
            halving.convert_outputs(branch, names)
        for value, branch_output in zip(graph.outputs, decode.outputs, strict=True):
            value.type = branch_output.type
    remove_unused.run(model)
    return halving.count


class _Halving:
    """Converts the nodes of a model. kinds: value → its kind; constants have none. half_contexts: their names."""

    def __init__(self, model: ir.Model, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self.kinds: dict[ir.Value, Kind] = {}
        self.half_contexts: set[str] = set()
        self._is_representable: dict[ir.Value, bool] = {}
        self._casts: dict[tuple[ir.Value, bool, ir.Graph], ir.Value] = {}
        self.count = 0

    def mark_inputs(self, values: list[ir.Value]) -> None:
        """Set the kind of float inputs: half for caches and half contexts, else SUM."""
        for value in values:
            if value.dtype == _FLOAT:
                half = str(value.name).startswith(PAST) or str(value.name) in self.half_contexts
                self._set_kind(value, Kind.HALF if half else Kind.SUM)

    def convert_nodes(self, graph: ir.Graph) -> None:
        for node in list(graph):
            self._convert_node(graph, node)

    def convert_outputs(self, graph: ir.Graph, names: list[str | None]) -> None:
        """Give each output the precision that its name requires."""
        for i, (value, name) in enumerate(zip(list(graph.outputs), map(str, names), strict=True)):
            if not self._is_float(value):
                continue
            half = name.startswith(PRESENT) or name in self.half_contexts
            if _is_empty_constant(value):  # an output of the other stage
                self._convert_empty(value, half)
                continue
            converted = self._in_precision(graph, value, half)
            if converted is not value:
                converted.shape = value.shape
                value.name, converted.name = f"{value.name}.wide" if half else f"{value.name}.half", value.name
                graph.outputs[i] = converted

    def _convert_empty(self, value: ir.Value, half: bool) -> None:
        node, dtype = value.producer(), self.precision.dtype if half else _FLOAT
        assert node is not None
        empty = node.attributes["value"].as_tensor().numpy().astype(dtype.numpy())
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(empty, dtype=dtype))
        self._set_kind(value, Kind.HALF if half else Kind.SUM)

    def _convert_node(self, graph: ir.Graph, node: ir.Node) -> None:
        """Convert the operands of a node to its precision, and set the kind of its results."""
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise UnsupportedModelError(f"a model with {node.op_type} cannot be computed in half: choose fp32")
        if node.op_type == "Cast" and not node.domain:
            self._convert_cast(node)
            return
        operands = [(i, v) for i, v in enumerate(node.inputs) if v is not None and self._is_float(v)]
        results = [v for v in node.outputs if self._is_float_output(v, node, bool(operands))]
        if not operands:
            for value in results:  # a constant, or a tensor filled with one number
                self._convert_fill(node, value)
            return
        kind = self._kind(node, [v for _, v in operands])
        for i, value in operands:
            node.replace_input_with(i, self._in_precision(graph, value, kind == Kind.HALF))
        for value in results:
            self._set_kind(value, kind)
        self.count += kind == Kind.HALF

    def _kind(self, node: ir.Node, values: list[ir.Value]) -> Kind:
        """Return the precision in which a node computes. values: its float operands."""
        computed = [self.kinds[v] for v in values if v in self.kinds]
        widest = max((*computed, *(Kind.EXACT for v in values if v not in self.kinds and not self._fits(v))), default=0)
        if node.op_type in _ALWAYS:
            return Kind.HALF
        if node.op_type in _PRODUCTS and self.precision.has_kernel(node):
            for value in values:
                if value not in self.kinds and not self._fits(value):
                    raise UnsupportedModelError(
                        f"the weight {value.name} holds numbers beyond {self.precision.largest:g}, the greatest that "
                        "this precision has: choose bf16 or fp32"
                    )
            return Kind.EXACT if Kind.EXACT in computed else Kind.HALF
        if node.op_type in _SUMS:
            return Kind.SUM
        return Kind(widest) if self.precision.has_kernel(node) else Kind(max(widest, Kind.SUM))

    def _convert_cast(self, node: ir.Node) -> None:
        """Convert a cast to float32. It keeps the kind of a float; cast integers are exact, and cast bools are half."""
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None
        if ir.DataType(node.attributes["to"].as_int()) != _FLOAT:
            return
        if self._is_float(source):
            fits = Kind.HALF if source in self.kinds or self._fits(source) else Kind.EXACT
            self._set_kind(result, self.kinds.get(source, fits))
        else:
            self._set_kind(result, Kind.HALF if source.dtype == _BOOL else Kind.EXACT)
        assert result.dtype is not None
        node.attributes["to"] = ir.AttrInt64("to", result.dtype)

    def _convert_fill(self, node: ir.Node, value: ir.Value) -> None:
        attribute = node.attributes.get("value")
        if attribute is None or attribute.type != ir.AttributeType.TENSOR:
            self._set_kind(value, Kind.EXACT)
            return
        number = attribute.as_tensor()
        fits = self.precision.can_represent(number.numpy())
        if fits:
            node.attributes["value"] = ir.AttrTensor("value", self._rounded(number))
        self._set_kind(value, Kind.HALF if fits else Kind.EXACT)

    def _in_precision(self, graph: ir.Graph, value: ir.Value, half: bool) -> ir.Value:
        """Return a value in half or in float32, rounded or cast once in each graph."""
        if half == (self.kinds.get(value) == Kind.HALF):  # constants have no kind
            return value
        key = value, half, self.model.graph if value.const_value is not None else graph
        if key not in self._casts:
            self._casts[key] = (
                self._constant(value) if value.const_value is not None else self._insert_cast(graph, value)
            )
        return self._casts[key]

    def _constant(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None
        constant = ir.Value(name=f"{value.name}.half", shape=value.shape, const_value=self._rounded(value.const_value))
        constant.dtype = self.precision.dtype
        self.model.graph.initializers[str(constant.name)] = constant
        return constant

    def _insert_cast(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        dtype = _FLOAT if value.dtype == self.precision.dtype else self.precision.dtype
        node = ir.node("Cast", [value], {"to": dtype}, name=f"{graph.name}/{value.name}.cast")
        result = node.outputs[0]
        result.name, result.dtype = f"{graph.name}/{value.name}.cast", dtype
        producer = value.producer()
        if producer is not None and producer.graph is graph:
            graph.insert_after(producer, node)
        else:
            graph.insert_before(graph[0], node)
        self.kinds[result] = Kind.HALF if dtype != _FLOAT else self.kinds[value]
        return result

    def _rounded(self, tensor: ir.TensorProtocol) -> ir.LazyTensor:
        """Return the numbers in half, rounded whenever they are read."""
        dtype = self.precision.dtype
        return derived_tensor(tensor, lambda array: array.astype(dtype.numpy()), dtype)

    def _fits(self, value: ir.Value) -> bool:
        assert value.const_value is not None
        if value not in self._is_representable:
            self._is_representable[value] = self.precision.can_represent(value.const_value.numpy())
        return self._is_representable[value]

    def _is_float(self, value: ir.Value) -> bool:
        return value in self.kinds or (value.const_value is not None and value.const_value.dtype == _FLOAT)

    def _is_float_output(self, value: ir.Value, node: ir.Node, has_float_operands: bool) -> bool:
        """Return whether an output of a node is a float: by its type, or by the operands if it has no type.

        An output without a name is one that the node does not compute.
        """
        if not value.name:
            return False
        attribute = node.attributes.get("value")
        if attribute is not None and attribute.type == ir.AttributeType.TENSOR:
            return attribute.as_tensor().dtype == _FLOAT
        if value.dtype is not None:
            return value.dtype == _FLOAT
        return has_float_operands and node.op_type not in ("Shape", "Size", "ArgMax", "IsNaN", "IsInf")

    def _set_kind(self, value: ir.Value, kind: Kind) -> None:
        self.kinds[value] = kind
        value.type = ir.TensorType(
            self.precision.dtype if kind == Kind.HALF else _FLOAT
        )  # a new object, because values may share a type


def _is_empty_constant(value: ir.Value) -> bool:
    node = value.producer()
    attribute = node.attributes.get("value") if node is not None and node.op_type == "Constant" else None
    return attribute is not None and attribute.as_tensor().size == 0
