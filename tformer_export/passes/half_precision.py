"""float32 → half precision, as autocast chooses it: products and caches in half, sums and ranges in float32.

What a value is computed in follows from the graph alone. Products, attention and caches take half. Exponentials,
powers and sums over an axis take float32, for half overflows at 65504, which is the square of 256; operators that
sum in float32 themselves, such as norms, take what they are given. Everything else is as wide as the widest of its
operands, so that what is made of sums stays float32 until the next product. Numbers made of integers, such as
positions, and constants that half cannot hold, such as the lowest float32 of a mask, stay float32 wherever they go.

float16 has 11 bits and ends at 65504, bfloat16 has 8 and float32's range: it is for models that were trained in it,
whose values are beyond float16. An operator that has no kernel for it on CUDA takes float32, as sums do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import onnx_ir as ir
import torch

from tformer_export.common.names import CONTEXT, ENCODED
from tformer_export.passes import remove_unused
from tformer_runtime.base.errors import UnsupportedModelError

PAST, PRESENT = "past.", "present."  # how inputs and outputs for the caches begin
# In half whatever comes in: these have no other kernels on CUDA, or write into what is kept in half.
_ALWAYS = {"GroupQueryAttention", "TensorScatter"}
_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "MultiHeadAttention"}
_SUMS = {
    "Softmax", "LogSoftmax", "Pow", "Exp", "Log", "Sqrt", "Reciprocal", "Sin", "Cos", "CumSum", "ReduceSum",
    "ReduceMean", "ReduceSumSquare", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
}  # fmt: skip
_FLOAT, _BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


# What onnxruntime's CUDA provider has a kernel of in bfloat16 at opset 24: 1.31 was asked for each, by
# `tests/benchmarks/stand_in/kernels.py`. Of what it has in float16 it lacks comparisons, Clip, Einsum, Pad, ReduceMax,
# Round, LeakyRelu, PRelu, Log, Reciprocal, CumSum, ConvTranspose, BatchNormalization and some more.
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
    """A half precision, in onnx and in torch. largest: the greatest finite number. least: the smallest normal one.

    roundoff: a number is rounded by so much of itself at most. operators: that have kernels; None if all have."""

    dtype: ir.DataType
    rounding: torch.dtype
    largest: float
    least: float
    roundoff: float
    operators: frozenset[str] | None = None

    def holds(self, array: np.ndarray) -> bool:
        """Whether all finite numbers are in its range, and one that stands alone is not lost to it."""
        sizes = np.abs(array, where=np.isfinite(array), out=np.zeros_like(array))
        scalar = array.size == 1 and 0 < float(sizes.max()) < self.least
        return bool(sizes.max(initial=0) <= self.largest) and not scalar

    def has(self, node: ir.Node) -> bool:
        """Whether CUDA has a kernel of an operator."""
        return self.operators is None or node.op_type in self.operators

    def rounded(self, value: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """Numbers off by as much as rounding puts any off, by what it does to numbers next to them: those of a model
        that was trained in this precision are exact in it, and what is computed with them is not."""
        noise = torch.rand(value.shape, generator=random, dtype=value.dtype) - 0.5
        near = value + torch.ldexp(
            self.roundoff * noise, torch.frexp(value).exponent
        )  # from a half step below to above
        return value + (near.to(self.rounding).to(value.dtype) - near)


HALVES = {
    "fp16": Precision(ir.DataType.FLOAT16, torch.float16, 65504.0, 2.0**-14, 2.0**-11),
    "bf16": Precision(ir.DataType.BFLOAT16, torch.bfloat16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-8, _BFLOAT16),
}


class Kind(IntEnum):
    """What a value is computed in; where two meet, the greater. SUM: float32, until a product. EXACT: float32."""

    HALF = 0
    SUM = 1
    EXACT = 2


def run(model: ir.Model, precision: Precision) -> int:
    """Rewrite a float32 model in place; returns how many nodes compute in half. Of its outputs, caches and context
    become half where they are computed so; all others stay float32.

    Cost: one pass over the nodes, and one over the weights, which are rounded when they are written.
    UnsupportedModelError for a weight of a product that half cannot hold.
    """
    halving = _Halving(model, precision)
    graph = model.graph
    choice = next((node for node in graph if node.op_type == "If"), None)
    halving.inputs([v for v in graph.inputs if not str(v.name).startswith(CONTEXT)])
    if choice is None:
        halving.nodes(graph)
        halving.outputs(graph, [v.name for v in graph.outputs])
    else:
        decode, encode = choice.attributes["then_branch"].as_graph(), choice.attributes["else_branch"].as_graph()
        names = [v.name for v in graph.outputs]
        halving.nodes(encode)
        for name, value in zip(names, encode.outputs, strict=True):
            if str(name).endswith(ENCODED) and halving.kinds.get(value) == Kind.HALF:
                halving.kept.add(str(name))
                halving.kept.add(str(name).removesuffix(ENCODED))
        halving.inputs([v for v in graph.inputs if str(v.name).startswith(CONTEXT)])
        halving.nodes(decode)
        for branch in (decode, encode):
            halving.outputs(branch, names)
        for value, made in zip(graph.outputs, decode.outputs, strict=True):
            value.type = made.type
    remove_unused.run(model)
    return halving.count


class _Halving:
    """kinds: of what is computed. kept: names of the contexts that are half."""

    def __init__(self, model: ir.Model, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self.kinds: dict[ir.Value, Kind] = {}
        self.kept: set[str] = set()
        self._holds: dict[ir.Value, bool] = {}
        self._cast: dict[tuple[ir.Value, bool, ir.Graph], ir.Value] = {}
        self.count = 0

    def inputs(self, values: list[ir.Value]) -> None:
        for value in values:
            if value.dtype == _FLOAT:
                half = str(value.name).startswith(PAST) or str(value.name) in self.kept
                self._give(value, Kind.HALF if half else Kind.SUM)

    def nodes(self, graph: ir.Graph) -> None:
        for node in list(graph):
            self._node(graph, node)

    def outputs(self, graph: ir.Graph, names: list[str | None]) -> None:
        """Make each output what its name says."""
        for i, (value, name) in enumerate(zip(list(graph.outputs), map(str, names), strict=True)):
            if not self._floating(value):
                continue
            half = name.startswith(PRESENT) or name in self.kept
            if _nothing(value):  # of the other stage
                self._empty(value, half)
                continue
            made = self._as(graph, value, half)
            if made is not value:
                made.shape = value.shape
                value.name, made.name = f"{value.name}.wide" if half else f"{value.name}.half", value.name
                graph.outputs[i] = made

    def _empty(self, value: ir.Value, half: bool) -> None:
        node, dtype = value.producer(), self.precision.dtype if half else _FLOAT
        assert node is not None
        held = node.attributes["value"].as_tensor().numpy().astype(dtype.numpy())
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(held, dtype=dtype))
        self._give(value, Kind.HALF if half else Kind.SUM)

    def _node(self, graph: ir.Graph, node: ir.Node) -> None:
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise UnsupportedModelError(f"a model with {node.op_type} cannot be computed in half: choose fp32")
        if node.op_type == "Cast" and not node.domain:
            self._cast_node(node)
            return
        given = [(i, v) for i, v in enumerate(node.inputs) if v is not None and self._floating(v)]
        made = [v for v in node.outputs if self._is_made(v, node, bool(given))]
        if not given:
            for value in made:  # a constant's, or one that is filled with a number
                self._filled(node, value)
            return
        kind = self._kind(node, [v for _, v in given])
        for i, value in given:
            node.replace_input_with(i, self._as(graph, value, kind == Kind.HALF))
        for value in made:
            self._give(value, kind)
        self.count += kind == Kind.HALF

    def _kind(self, node: ir.Node, given: list[ir.Value]) -> Kind:
        computed = [self.kinds[v] for v in given if v in self.kinds]
        widest = max((*computed, *(Kind.EXACT for v in given if v not in self.kinds and not self._fits(v))), default=0)
        if node.op_type in _ALWAYS:
            return Kind.HALF
        if node.op_type in _PRODUCTS and self.precision.has(node):
            for value in given:
                if value not in self.kinds and not self._fits(value):
                    raise UnsupportedModelError(
                        f"the weight {value.name} holds numbers beyond {self.precision.largest:g}, the greatest that "
                        "this precision has: choose bf16 or fp32"
                    )
            return Kind.EXACT if Kind.EXACT in computed else Kind.HALF
        if node.op_type in _SUMS:
            return Kind.SUM
        return Kind(widest) if self.precision.has(node) else Kind(max(widest, Kind.SUM))

    def _cast_node(self, node: ir.Node) -> None:
        """A cast to float32 changes nothing that is a float already; what it makes of integers is exact."""
        source, made = node.inputs[0], node.outputs[0]
        assert source is not None
        if ir.DataType(node.attributes["to"].as_int()) != _FLOAT:
            return
        if self._floating(source):
            fits = Kind.HALF if source in self.kinds or self._fits(source) else Kind.EXACT
            self._give(made, self.kinds.get(source, fits))
        else:
            self._give(made, Kind.HALF if source.dtype == _BOOL else Kind.EXACT)
        assert made.dtype is not None
        node.attributes["to"] = ir.AttrInt64("to", made.dtype)

    def _filled(self, node: ir.Node, value: ir.Value) -> None:
        held = node.attributes.get("value")
        if held is None or held.type != ir.AttributeType.TENSOR:
            self._give(value, Kind.EXACT)
            return
        number = held.as_tensor()
        fits = self.precision.holds(number.numpy())
        if fits:
            node.attributes["value"] = ir.AttrTensor("value", self._rounded(number))
        self._give(value, Kind.HALF if fits else Kind.EXACT)

    def _as(self, graph: ir.Graph, value: ir.Value, half: bool) -> ir.Value:
        """A value in half or in float32, rounded or cast once in each graph."""
        if half == (self.kinds.get(value) == Kind.HALF):  # constants are float32
            return value
        key = value, half, self.model.graph if value.const_value is not None else graph
        if key not in self._cast:
            self._cast[key] = self._constant(value) if value.const_value is not None else self._casted(graph, value)
        return self._cast[key]

    def _constant(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None
        made = ir.Value(name=f"{value.name}.half", shape=value.shape, const_value=self._rounded(value.const_value))
        made.dtype = self.precision.dtype
        self.model.graph.initializers[str(made.name)] = made
        return made

    def _casted(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        wanted = _FLOAT if value.dtype == self.precision.dtype else self.precision.dtype
        node = ir.node("Cast", [value], {"to": wanted}, name=f"{graph.name}/{value.name}.cast")
        made = node.outputs[0]
        made.name, made.dtype = f"{graph.name}/{value.name}.cast", wanted
        producer = value.producer()
        if producer is not None and producer.graph is graph:
            graph.insert_after(producer, node)
        else:
            graph.insert_before(graph[0], node)
        self.kinds[made] = Kind.HALF if wanted != _FLOAT else self.kinds[value]
        return made

    def _rounded(self, held: ir.TensorProtocol) -> ir.LazyTensor:
        """The numbers in half, a copy only while they are read."""
        dtype = self.precision.dtype
        shape = ir.Shape([size for size in held.shape if isinstance(size, int)])  # all of them are
        return ir.LazyTensor(lambda: ir.tensor(held.numpy().astype(dtype.numpy()), dtype=dtype), dtype, shape)

    def _fits(self, value: ir.Value) -> bool:
        assert value.const_value is not None
        if value not in self._holds:
            self._holds[value] = self.precision.holds(value.const_value.numpy())
        return self._holds[value]

    def _floating(self, value: ir.Value) -> bool:
        return value in self.kinds or (value.const_value is not None and value.const_value.dtype == _FLOAT)

    def _is_made(self, value: ir.Value, node: ir.Node, floats: bool) -> bool:
        """Whether a node's output is a float: by its type, or, where a rewrite gave it none, by what comes in."""
        held = node.attributes.get("value")
        if held is not None and held.type == ir.AttributeType.TENSOR:
            return held.as_tensor().dtype == _FLOAT
        if value.dtype is not None:
            return value.dtype == _FLOAT
        return floats and node.op_type not in ("Shape", "Size", "ArgMax", "IsNaN", "IsInf")

    def _give(self, value: ir.Value, kind: Kind) -> None:
        self.kinds[value] = kind
        value.type = ir.TensorType(self.precision.dtype if kind == Kind.HALF else _FLOAT)  # which others may share


def _nothing(value: ir.Value) -> bool:
    node = value.producer()
    held = node.attributes.get("value") if node is not None and node.op_type == "Constant" else None
    return held is not None and held.as_tensor().size == 0
