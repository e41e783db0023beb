"""Replace matrix products with constant weights by integer ones, and embedding tables by their int8 form.

A product has two forms (`--optimize-for` says which of them a file has):

rows   Each row of the activations is scaled by its own maximum and rounded to uint8 around 128, multiplied with int8
       columns by MatMulInteger, and scaled back by row and column. All of it is standard operators, but for the CPU's
       encode stage, and a row's result is its own: it is the same alone and in any batch, bit for bit. Or, where it is
       asked for (`--activations fixed`, `fixed_ranges.py`), all rows have the same scale, which is known when the file
       is made: what is beyond it is clipped, and a row's result is still its own.
few    MatMulNBits, which rounds activations in blocks of a row and reads weights faster, 4-bit ones as such; for more
       than two rows, or three, it is slower. It is in a branch of the decode stage for so many (`few_rows_branch.py`).

Both have the same integers (`weight_storage.py`), so that they differ in the rounding of activations alone. What was
measured beside them (2 cores with AVX-512 VNNI; 6+6 layers, d = 512, 32k vocabulary; milliseconds a decode step at 1, 8
and 32 rows; float32 4.8, 6.6, 17.0):

======================================  ====  ====  ====  ==========================================================
rows                                    1.87  3.52   9.8
MatMulNBits, 8 bit, blocks of 128       1.25  3.59  11.4  rounds one row in another way than several: up to 0.5 % of
                                                          the logits' range between a row alone and in a batch
DynamicQuantizeMatMul                   1.4   2.9    8.2  one scale for all rows: a loud row costs the others 16 %
======================================  ====  ====  ====  ==========================================================

Of 134 M weights (12 layers, d = 768, ff = 2048, 32k vocabulary, without an encoder), milliseconds a step on one thread
for 1, 2, 3, 8 and 32 rows: rows 9.5, 10.7, 12.2, 16.5, 42.8; few, 8 bit, 7.2, then 0.87 and 0.95 × rows for 2 and 3
rows; 4 bit 4.7, then 0.56 and 0.75 ×. A second form gains the vocabulary's projection and the others about the same a
MB: 20 and 16 µs of 8 bits, 106 and 97 of 4. So a balanced file has it for large ones, which are few.

Around MatMulInteger, in µs on one thread, for 1, 8, 32 and 128 rows of 2048 numbers:

=============================================================  ===  ====  ====  =====
Abs, ReduceMax, Max, Mul, Div, QuantizeLinear                  5.7  14.0  44.0  155.2
without Max: a row of zeros is scaled back by zero             5.3  13.1  42.4  152.0
with Reciprocal and Mul for Div                                5.0  11.3  34.3  121.9
ReduceMin and ReduceMax for Abs and ReduceMax                  5.6  13.6  41.8  148.0
Relu before the first of these                                 6.1  15.7  50.5  179.3
Relu of the maximum alone, uint8 around 0 in steps of 1/255    4.9  10.1  29.2   99.3
=============================================================  ===  ====  ====  =====

For the CPU, QuantizeLinear in blocks as long as a row divides too, to the same integers: of 512 rows of 1536 numbers it
takes the 220 µs that it takes after Reciprocal and Mul, which took 300 (one thread, AVX-512 and AMX). It wants a zero
for each row, which one more QuantizeLinear makes. A Gelu's result is bounded by its maximum and 0.17, so that Abs, 270
µs there, is not needed behind it.

In the encode stage, whose rows are many, MatMulIntegerToFloat casts and scales by column as it multiplies: of 512 rows
of 384 × 1536 it takes 740 µs and MatMulInteger, Cast and Mul 950; for a step of one row it is no faster. Its scale of
activations is 1, for each row has its own.

With a fixed scale, QuantizeLinear and one MatMulIntegerToFloat, bias and both scales within, are a whole product, in
any stage. Times as fast as by row, everything around the product counted (widths of 384 to 2048, one thread, AVX-512
and AMX), and with the Mul that divides channels before it:

====================  ============  ==========  ==========  ==========
rows                  1             32          512         4096
====================  ============  ==========  ==========  ==========
fixed                 1.07 – 1.18   1.4 – 1.5   1.7 – 1.9   1.7 – 2.5
channels divided too  1.1           1.2 – 1.4   1.2 – 1.7   1.2 – 2.1
====================  ============  ==========  ==========  ==========

Whole models, times as fast as by row (medians of ratios by turns, one thread of the same machine, which others used
too): an encoder of 22 M, 6 layers, d = 384, with 16 tokens for 1, 8 and 32 rows 1.13, 1.20 and 1.28, with 128 tokens
1.17, 1.27 and 1.34; the same with the weights of all-MiniLM-L6-v2, 11 of whose 24 operands have channels to divide,
1.09, 1.17, 1.21, and 1.13, 1.23, 1.32. A step of the encoder-decoder above 0.99, 1.09 and 1.30, for 1, 8 and 32 rows,
and reading 24 tokens with the first step 1.05, 1.2 and 1.5.

Not faster behind it: DequantizeLinear by column or by row in the place of Cast and Mul, nor, for decoding,
MatMulIntegerToFloat (7640 µs for 64 rows of 512 × 32000 and a scale by row after it, against 7914; 26.3 for one row of
512 × 2048 against 22.2). Row and column scales multiplied first would save a pass of the three (6539), but onnxruntime
1.31 takes that for MatMulIntegerToFloat, which has one scale for all rows, and computes something else. Signed
activations were forty times slower, having no VNNI kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from tformer_export.common.quantization import BALANCED, LATENCY, THROUGHPUT
from tformer_export.passes import remove_unused
from tformer_export.quantize import few_rows_branch
from tformer_export.quantize.activations_int8 import Fixed, Operands, name_outputs
from tformer_export.quantize.rounding import round_nearest
from tformer_export.quantize.weight_storage import Matrix, Store, digest

SMALLEST = 1024  # numbers; smaller products gain nothing
LARGE = 1 << 22  # numbers of a matrix that has two forms in a balanced file
FEW = {8: 2, 4: 3}  # bits → new tokens up to which MatMulNBits is the faster
CONTRIB = "com.microsoft"
ENCODE = "encode"  # the graph whose products have many rows
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level

Bits = int | Mapping[str, int] | Callable[[str], int]
WANTED: dict[str, Callable[[int], bool]] = {
    THROUGHPUT: lambda numbers: False,
    LATENCY: lambda numbers: numbers >= SMALLEST,
    BALANCED: lambda numbers: numbers >= LARGE,
}


@dataclass(frozen=True)
class Product:
    """A quantised product (rows, inner) × (inner, columns). few: it has a form of its own for few rows. fixed: what it
    reads has a fixed scale."""

    inner: int
    columns: int
    bits: int
    few: bool
    fixed: bool = False


@dataclass
class Quantised:
    """What holds integers now. products: name in the graph → what it is. tables: embeddings. fixed, by_row: how many of
    the values that products read have a fixed scale, and how many one for each row. few_tokens: as `Decode` has it."""

    products: dict[str, Product] = field(default_factory=dict)
    tables: int = 0
    fixed: int = 0
    by_row: int = 0
    few_tokens: int | None = None

    @property
    def count(self) -> int:
        return len(self.products) + self.tables


def quantize(
    model: ir.Model,
    bits: Bits = 8,
    optimize_for: str = THROUGHPUT,
    step: str | None = None,
    ready: Mapping[str, round_nearest.Integers] = MappingProxyType({}),
    on_cpu: bool = False,
    few_rows: Mapping[int, int] | None = None,
    fixed: Mapping[str, Fixed] = MappingProxyType({}),
) -> Quantised:
    """Rewrite in place. One pass over the weights.

    bits: of the weights, 8 or 4, for all products or by a product's name; one of 16 or 32 stays in float. A matrix that
    is an embedding too has 8. optimize_for: which products have the form for few rows; none, all, or large ones.
    step: the graph input that tells how many new tokens there are; without it they are not known to be few.
    ready: integers of products by name, as `rounding` gives them; those that are not named are rounded to nearest.
    on_cpu: onnxruntime's own operators may be used, and what is fast there.
    few_rows: bits → new tokens up to which that form is run; none of it for bits that are not named. By default FEW.
    fixed: name of a product → the steps of what it reads; what is not named has steps of its own for each row.
    """
    wanted, few_rows = WANTED[optimize_for], FEW if few_rows is None else few_rows
    bits_of = _by_name(bits)
    products = [(node, weight) for node in model.graph.all_nodes() if (weight := _weight_of(node)) is not None]
    for node, _ in products:  # by which its copy in a branch is known
        node.name = node.name or f"product of {node.outputs[0].name}"
    decode = few_rows_branch.graph_of(model, step) if step is not None else None
    limits = [
        few_rows[width]
        for node, weight in products
        if node.graph is decode and wanted(weight.numbers) and (width := bits_of(str(node.name))) in few_rows
    ]
    branches = few_rows_branch.branch(model, decode, str(step), max(limits)) if limits and decode is not None else None
    rewriter = _Rewriter(model, bits_of, branches, wanted, ready, on_cpu, fixed)
    rewriter.made.few_tokens = max(limits) if branches else None
    for rewrite in (rewriter.product, rewriter.table):
        for graph in (model.graph, *model.graph.subgraphs()):
            for node in list(graph):
                rewrite(graph, node)
    remove_unused.run(model)
    rewriter.made.fixed, rewriter.made.by_row = rewriter.operands.fixed, rewriter.operands.by_row
    return rewriter.made


def _by_name(bits: Bits) -> Callable[[str], int]:
    if isinstance(bits, int):
        return lambda name: bits
    return (lambda name: bits.get(name, 8)) if isinstance(bits, Mapping) else bits


@dataclass(frozen=True)
class _Weight:
    """A constant float matrix on the right of a product, (K, N), or (N, K) turned round."""

    source: ir.Value
    turned: bool

    @property
    def shape(self) -> tuple[int, int]:
        assert self.source.const_value is not None
        first, second = (int(size) for size in self.source.const_value.shape)  # type: ignore[arg-type]
        return (second, first) if self.turned else (first, second)

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    def array(self) -> np.ndarray:
        assert self.source.const_value is not None
        held = self.source.const_value.numpy()
        return held.T if self.turned else held


class _Rewriter:
    """wanted: whether a matrix of so many numbers has a form for few rows."""

    def __init__(
        self,
        model: ir.Model,
        bits: Callable[[str], int],
        branches: few_rows_branch.Branches | None,
        wanted: Callable[[int], bool],
        ready: Mapping[str, round_nearest.Integers],
        on_cpu: bool,
        fixed: Mapping[str, Fixed],
    ) -> None:
        self.on_cpu, self.fixed = on_cpu, fixed
        self.model, self.bits, self.branches = model, bits, branches
        self.few = branches and branches.few
        self.made = Quantised()
        self.store = Store(model, ready)
        self.operands = Operands(self.store, on_cpu)
        graphs = (model.graph, *model.graph.subgraphs())
        self.tables = {
            digest(held.numpy()) for graph in graphs for node in graph if (held := _table_of(node)) is not None
        }
        self.with_few = {
            node.name for node in self.few or () if (weight := _weight_of(node)) is not None and wanted(weight.numbers)
        }

    def product(self, graph: ir.Graph, node: ir.Node) -> None:
        """A matrix product with a constant float matrix, with the bias that is added to it."""
        weight = _weight_of(node)
        if weight is None or weight.numbers < SMALLEST or node.inputs[0] is None:
            return
        name = str(node.name)
        matrix = self._matrix(name, weight, two := name in self.with_few)
        if matrix is None:
            return
        self.made.products[name] = Product(*matrix.shape, matrix.bits, two, name in self.fixed)
        if two and graph is self.few:
            self._few(graph, node, matrix)
        elif name in self.fixed:
            self._in_steps(graph, node, matrix, name)
        else:
            self._by_row(graph, node, matrix, name)

    def table(self, graph: ir.Graph, node: ir.Node) -> None:
        """An embedding: rows of a matrix looked up by ids."""
        held = _table_of(node)
        if held is None:
            return
        name = node.name or "table"
        quantised, scale = self.store.table(name, held.numpy())
        scales = self.store.constant(f"{quantised.name}.scales", scale[:, None])
        ids = node.inputs[1]
        rows = ir.node("Gather", [quantised, ids], {"axis": 0}, name=f"{name}.rows")
        number = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{name}.float")
        row_scale = ir.node("Gather", [scales, ids], {"axis": 0}, name=f"{name}.scale")
        scaled = ir.node("Mul", [number.outputs[0], row_scale.outputs[0]], name=f"{name}.scaled")
        _replace(graph, node, node, [rows, number, row_scale, scaled])
        if graph is not self.few:
            self.made.tables += 1

    def _matrix(self, name: str, weight: _Weight, two: bool) -> Matrix | None:
        """The integers of a weight; None if it is to stay in float."""
        key = self.store.fingerprint(weight.source, turned=not weight.turned)
        if key in self.tables:
            return self.store.matrix_of_table(name, key, lambda: weight.array().T)
        bits = self.bits(name)
        return self.store.matrix(name, key, weight.array, bits, two) if bits <= 8 else None

    def _home(self, graph: ir.Graph) -> ir.Graph:
        return self.branches.home(graph, self.model) if self.branches else self.model.graph

    def _few(self, graph: ir.Graph, node: ir.Node, matrix: Matrix) -> None:
        packed, scales = matrix.packed(self._home(graph))
        bias, last = _bias_of(node)
        whole = _is_column_each(bias, matrix)
        inner, columns = matrix.shape
        sizes = {"K": inner, "N": columns, "bits": matrix.bits, "block_size": matrix.block}
        product = ir.node(
            "MatMulNBits",
            [node.inputs[0], packed, scales, *((None, None, bias) if whole else ())],
            {**sizes, "accuracy_level": INT8_ACTIVATIONS},
            domain=CONTRIB,
            version=1,
            name=f"{node.name}.few",
        )
        self.model.graph.opset_imports.setdefault(CONTRIB, 1)
        _replace(graph, node, last, [product, *_added(product, None if whole else bias)])

    def _by_row(self, graph: ir.Graph, node: ir.Node, matrix: Matrix, name: str) -> None:
        rows, row_scale, zero = self.operands.rows(graph, node, matrix.shape[0])
        scale = self.store.constant(f"{matrix.name}.scale", matrix.scale)
        columns = matrix.columns(self._home(graph))
        if self.on_cpu and graph.name == ENCODE:
            inputs = [rows, columns, self.store.constant("quantise.unit", np.float32(1)), scale, zero]
            self.model.graph.opset_imports.setdefault(CONTRIB, 1)
            made = [ir.node("MatMulIntegerToFloat", inputs, domain=CONTRIB, version=1, name=f"{name}.by_column")]
            made.append(ir.node("Mul", [made[0].outputs[0], row_scale], name=f"{name}.by_row"))
        else:
            product = ir.node("MatMulInteger", [rows, columns, zero], name=f"{name}.integer")
            number = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{name}.float")
            by_row = ir.node("Mul", [number.outputs[0], row_scale], name=f"{name}.by_row")
            made = [product, number, by_row, ir.node("Mul", [by_row.outputs[0], scale], name=f"{name}.by_column")]
        bias, last = _bias_of(node)
        _replace(graph, node, last, [*made, *_added(made[-1], bias)])

    def _in_steps(self, graph: ir.Graph, node: ir.Node, matrix: Matrix, name: str) -> None:
        """A product that knows both scales, and its bias, when it is made."""
        steps, step, zero = self.operands.in_steps(graph, node, self.fixed[name])
        scale = self.store.constant(f"{matrix.name}.scale", matrix.scale)
        columns = matrix.columns(self._home(graph))
        bias, last = _bias_of(node)
        if self.on_cpu:
            whole = _is_column_each(bias, matrix)
            inputs = [steps, columns, step, scale, zero, None, bias if whole else None]
            self.model.graph.opset_imports.setdefault(CONTRIB, 1)
            made = [ir.node("MatMulIntegerToFloat", inputs, domain=CONTRIB, version=1, name=f"{name}.by_column")]
            bias = None if whole else bias
        else:
            product = ir.node("MatMulInteger", [steps, columns, zero], name=f"{name}.integer")
            number = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{name}.float")
            by_step = ir.node("Mul", [number.outputs[0], step], name=f"{name}.by_step")
            made = [product, number, by_step, ir.node("Mul", [by_step.outputs[0], scale], name=f"{name}.by_column")]
        _replace(graph, node, last, [*made, *_added(made[-1], bias)])


def _weight_of(node: ir.Node) -> _Weight | None:
    """The constant float matrix on a product's right."""
    if node.op_type not in ("MatMul", "FusedMatMul", "Gemm") or node.inputs[1] is None:
        return None
    source, turned = node.inputs[1], False
    above = source.producer()
    if above is not None and above.op_type == "Transpose" and above.inputs[0] is not None:
        source, turned = above.inputs[0], True  # a table that is the output projection too
    held = source.const_value
    if held is None or held.dtype != ir.DataType.FLOAT or len(held.shape) != 2:
        return None
    if node.op_type != "MatMul":
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transBatchA": 0, "transBatchB": 0}
        if any(name in node.attributes and node.attributes[name].value != value for name, value in plain.items()):
            return None
        flag = node.attributes.get("transB")
        turned ^= bool(flag is not None and flag.as_int())
    return _Weight(source, turned)


def _table_of(node: ir.Node) -> ir.TensorProtocol | None:
    """The table of an embedding by token ids; one over positions is small and stays exact."""
    if node.op_type != "Gather" or node.domain or node.inputs[0] is None:
        return None
    held, axis = node.inputs[0].const_value, node.attributes.get("axis")
    if held is None or held.dtype != ir.DataType.FLOAT or len(held.shape) != 2 or held.size < SMALLEST:
        return None
    if axis is not None and axis.as_int() != 0:
        return None
    ids = node.inputs[1]
    while (
        ids is not None and (above := ids.producer()) is not None and above.op_type in ("Reshape", "Unsqueeze", "Cast")
    ):
        ids = above.inputs[0]
    of_tokens = ids is not None and ids.is_graph_input() and not (ids.name or "").startswith("decode.")
    return held if of_tokens else None


def _bias_of(node: ir.Node) -> tuple[ir.Value | None, ir.Node]:
    """The bias that is added to a product, and the node that adds it: the product itself if it does, or none does."""
    if node.op_type == "Gemm":
        return (node.inputs[2] if len(node.inputs) > 2 else None), node
    users = list(node.outputs[0].uses())
    if len(users) == 1 and users[0].node.op_type == "Add" and not node.outputs[0].is_graph_output():
        adder = users[0].node
        other = adder.inputs[1 - users[0].idx]
        if other is not None and other.const_value is not None and len(other.const_value.shape) == 1:
            return other, adder
    return None, node


def _is_column_each(bias: ir.Value | None, matrix: Matrix) -> bool:
    """Whether it is a number for each column, which is what a product's operator takes; what Add and Gemm take besides
    is spread over the columns."""
    return bias is not None and bias.const_value is not None and list(bias.const_value.shape) == [matrix.shape[1]]


def _added(product: ir.Node, bias: ir.Value | None) -> list[ir.Node]:
    """The node that adds a bias to a product by itself, if there is one."""
    return [ir.node("Add", [product.outputs[0], bias], name=f"{product.name}.biased")] if bias is not None else []


def _replace(graph: ir.Graph, node: ir.Node, last: ir.Node, made: list[ir.Node]) -> None:
    """Put `made` in the place of node … last, whose result becomes that of the last of them."""
    result, new = last.outputs[0], made[-1].outputs[0]
    name_outputs(made)
    graph.insert_before(node, made)
    result.replace_all_uses_with(new, replace_graph_outputs=True)
    new.dtype, name = ir.DataType.FLOAT, result.name
    if last is not node:
        graph.remove(last, safe=True)
    graph.remove(node, safe=True)
    new.name = name
