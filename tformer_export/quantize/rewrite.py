"""Replace matrix products with constant weights by integer ones, and tables and stacks by their integer form.

A product has one of two forms, which `--optimize-for` selects:

rows   For any number of rows. Each row of the activations is divided by a scale, the row's own maximum, and rounded
       to uint8 around 128. MatMulInteger multiplies the row with int8 columns, and the product is multiplied by the
       scales of row and column. All operators are standard, except in the encode stage for the CPU. The result of a
       row is the same alone and in any batch, bit for bit. With `--activation-scales static` (`fixed_ranges.py`) one
       scale, which calibration fixes at export, holds for all rows, and values beyond its range are clipped.
few    For one or two rows, or three with 4-bit weights. MatMulNBits rounds activations in blocks of a row. It is faster
       for few rows, because it reads weights faster and does not unpack 4-bit weights to 8 bits. It is a branch of the
       decode stage that runs for so few rows only (`few_rows_branch.py`).

float  For the web: MatMulNBits multiplies float activations, and GatherBlockQuantized looks up rows of tables. Both
       have WebGPU kernels, and products of integers have none.

The first two forms read the same integers (`weight_storage.py`), so they differ in the rounding of activations alone.
The choice of operators was measured: docs/design/kernels.md#integer-products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import replace_node
from tformer_export.common.onnx_writer import DescribedProduct, describe_product
from tformer_export.common.option_values import LATENCY, THROUGHPUT
from tformer_export.passes import remove_unused
from tformer_export.quantize import few_rows_branch
from tformer_export.quantize.activations_int8 import ActivationScalings, StaticScale, name_outputs
from tformer_export.quantize.rounding import round_nearest
from tformer_export.quantize.weight_storage import StoredMatrix, WeightStore, digest
from tformer_runtime.format.stored_forms import CODE_STEP, number, product_of

MIN_WEIGHT_VALUES = 1024  # smaller products gain nothing
SMALL_BATCH_LIMIT = {8: 2, 6: 2, 4: 3}  # bits → number of new tokens up to which MatMulNBits is faster
CONTRIB = "com.microsoft"
SHAPING_OPERATORS = ("Transpose", "Reshape", "Unsqueeze", "Squeeze")  # between a lookup of matrices and a product
ENCODE = "encode"  # the graph whose products have many rows
FLOAT_ACTIVATIONS, INT8_ACTIVATIONS = 1, 4  # accuracy levels of MatMulNBits

Bits = int | Mapping[str, int] | Callable[[str], int]
# optimize_for → whether a matrix of this many numbers has the form for few rows
HAS_FEW_ROWS_FORM: dict[str, Callable[[int], bool]] = {
    THROUGHPUT: lambda weight_values: False,
    LATENCY: lambda weight_values: weight_values >= MIN_WEIGHT_VALUES,
}


@dataclass(frozen=True)
class Product:
    """A quantised product (rows, inner) × (inner, columns).

    few: whether it has a form for few rows too.
    static_scale: whether its activations have a static scale.
    """

    inner: int
    columns: int
    bits: int
    few: bool
    static_scale: bool = False


@dataclass
class QuantizedParts:
    """The parts of a model that hold integers.

    products: name in the graph → product.
    tables: the number of embeddings, and of lookups of matrices.
    static_scales, row_scales: how many inputs of products have a static scale, and how many a scale for each row.
    small_batch_limit: as in the manifest's decode stage.
    """

    products: dict[str, Product] = field(default_factory=dict)
    tables: int = 0
    static_scales: int = 0
    row_scales: int = 0
    small_batch_limit: int | None = None

    @property
    def count(self) -> int:
        return len(self.products) + self.tables


def quantize_weights(
    model: ir.Model,
    bits: Bits = 8,
    optimize_for: str = THROUGHPUT,
    step: str | None = None,
    integers: Mapping[str, round_nearest.Integers] = MappingProxyType({}),
    on_cpu: bool = False,
    few_rows: Mapping[int, int] | None = None,
    static_scales: Mapping[str, StaticScale] = MappingProxyType({}),
    float_activations: bool = False,
) -> QuantizedParts:
    """Quantise a model in place, in one pass over the weights, and return its quantised parts.

    bits: bits of the weights (8, 6 or 4; 16 and 32 keep a product in float), for all products or by name: of a product,
        or of the initializer of an embedding table. A table without bits has 8, and so has a product with a table.
    optimize_for: selects the products that have the form for few rows.
    step: the graph input that holds the new tokens; without it no product has the form for few rows.
    integers: name → integers, as `rounding` makes them; others are rounded to nearest.
    on_cpu: whether onnxruntime's own CPU operators may be used.
    few_rows: bits → number of new tokens up to which the form for few rows runs; products of other bits do not have it.
        None for SMALL_BATCH_LIMIT.
    static_scales: name of a product → static scale of its activations; other products scale each row.
    float_activations: whether products and tables have the form `float`, and no other. optimize_for then selects the
        blocks of 4 bits alone.
    """
    has_few_rows_form, few_rows = HAS_FEW_ROWS_FORM[optimize_for], SMALL_BATCH_LIMIT if few_rows is None else few_rows
    bits_of = _by_name(bits)
    table_bits = _by_name(8) if isinstance(bits, int) else bits_of
    products = [(node, weight) for node in model.graph.all_nodes() if (weight := constant_weight(node)) is not None]
    for node, _ in products:  # the name identifies the product's copy in a branch
        node.name = node.name or f"product of {node.outputs[0].name}"
    decode = few_rows_branch.find_decode_graph(model, step) if step is not None else None
    if float_activations:
        has_few_rows_form = HAS_FEW_ROWS_FORM[THROUGHPUT]
    limits = [
        few_rows[width]
        for node, weight in products
        if node.graph is decode
        and has_few_rows_form(weight.value_count)
        and (width := bits_of(str(node.name))) in few_rows
    ]
    branches = few_rows_branch.branch(model, decode, str(step), max(limits)) if limits and decode is not None else None
    rewriter = _QuantizationRewriter(
        model,
        bits_of,
        table_bits,
        branches,
        has_few_rows_form,
        integers,
        on_cpu,
        static_scales,
        optimize_for,
        float_activations,
    )
    rewriter.parts.small_batch_limit = max(limits) if branches else None
    for rewrite in (rewriter.rewrite_product, rewriter.rewrite_table, rewriter.rewrite_chosen_matrices):
        for graph in (model.graph, *model.graph.subgraphs()):
            for node in list(graph):
                rewrite(graph, node)
    remove_unused.run(model)
    parts = rewriter.parts
    parts.static_scales, parts.row_scales = rewriter.scalings.static_scales, rewriter.scalings.row_scales
    return parts


def _by_name(bits: Bits) -> Callable[[str], int]:
    if isinstance(bits, int):
        return lambda name: bits
    return (lambda name: bits.get(name, 8)) if isinstance(bits, Mapping) else bits


@dataclass(frozen=True)
class _Weight:
    """The constant float matrix (K, N) of a product, stored as (N, K) if it is transposed."""

    initializer: ir.Value
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        assert self.initializer.const_value is not None
        first, second = (int(size) for size in self.initializer.const_value.shape)  # type: ignore[arg-type]
        return (second, first) if self.is_transposed else (first, second)

    @property
    def value_count(self) -> int:
        return math.prod(self.shape)

    def array(self) -> np.ndarray:
        """Return the weights, (K, N)."""
        assert self.initializer.const_value is not None
        values = self.initializer.const_value.numpy()
        return values.T if self.is_transposed else values


class _Nodes:
    """New nodes in the order of computation. name: the beginning of their names."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[ir.Node] = []

    def add(self, operator: str, *inputs: ir.Value, suffix: str, **attributes: int) -> ir.Value:
        self.nodes.append(ir.node(operator, inputs, attributes, name=f"{self.name}.{suffix}"))
        return self.nodes[-1].outputs[0]


class _QuantizationRewriter:
    """Rewrites products and tables.

    has_few_rows_form: whether a matrix of this many numbers has the form for few rows.
    """

    def __init__(
        self,
        model: ir.Model,
        bits: Callable[[str], int],
        table_bits: Callable[[str], int],
        branches: few_rows_branch.Branches | None,
        has_few_rows_form: Callable[[int], bool],
        integers: Mapping[str, round_nearest.Integers],
        on_cpu: bool,
        static_scales: Mapping[str, StaticScale],
        optimize_for: str,
        float_activations: bool,
    ) -> None:
        self.float_activations = float_activations
        self.on_cpu, self.static_scales = on_cpu, static_scales
        self.model, self.bits, self.table_bits, self.branches = model, bits, table_bits, branches
        self.few_rows_graph = branches and branches.few
        self.parts = QuantizedParts()
        self.store = WeightStore(model, integers, optimize_for)
        self.scalings = ActivationScalings(on_cpu)
        graphs = (model.graph, *model.graph.subgraphs())
        self.tables = {  # the digest of a table → its initializer
            digest(table.numpy()): str(node.inputs[0].name)
            for graph in graphs
            for node in graph
            if (table := embedding_table(node)) is not None and node.inputs[0] is not None
        }
        self.few_rows_products = {
            node.name
            for node in self.few_rows_graph or ()
            if (weight := constant_weight(node)) is not None and has_few_rows_form(weight.value_count)
        }

    def rewrite_product(self, graph: ir.Graph, node: ir.Node) -> None:
        """Quantise a matrix product with a constant float matrix, and the bias that is added to it."""
        weight = constant_weight(node)
        if weight is None or weight.value_count < MIN_WEIGHT_VALUES or node.inputs[0] is None:
            return
        name = str(node.name)
        has_few = name in self.few_rows_products
        matrix = self._matrix(name, weight, has_few or self.float_activations)
        if matrix is None:
            return
        self.parts.products[name] = Product(*matrix.shape, matrix.bits, has_few, name in self.static_scales)
        if self.float_activations:
            self._packed_product(graph, node, matrix, FLOAT_ACTIVATIONS)
        elif has_few and graph is self.few_rows_graph:
            self._packed_product(graph, node, matrix, INT8_ACTIVATIONS)
        else:
            self._integer_product(graph, node, matrix, name)

    def rewrite_table(self, graph: ir.Graph, node: ir.Node) -> None:
        """Quantise an embedding table, whose rows are looked up by ids."""
        table = embedding_table(node)
        if table is None:
            return
        assert node.inputs[0] is not None
        assert node.inputs[1] is not None
        name, ids, nodes = str(node.inputs[0].name), node.inputs[1], _Nodes(node.name or "table")
        if self.float_activations:
            self._packed_table(graph, node, name, table.numpy(), ids)
            return
        if self.table_bits(name) == 4 and ids.shape is not None:
            matrix = self.store.matrix(name, digest(table.numpy()), lambda: table.numpy().T, 4, False)
            rows, scale = self._rows_of_4_bits(nodes, matrix, ids, self._home(graph)), matrix.scale
        else:
            stored, scale = self.store.table(name, table.numpy())
            rows = nodes.add("Gather", stored, ids, suffix="rows")
        number = nodes.add("Cast", rows, suffix="float", to=ir.DataType.FLOAT)
        scales = self.store.constant(f"{name}.row_scales", scale[:, None])
        nodes.add("Mul", number, nodes.add("Gather", scales, ids, suffix="scale"), suffix="scaled")
        _replace(node, node, nodes.nodes)
        if graph is not self.few_rows_graph:
            self.parts.tables += 1

    def rewrite_chosen_matrices(self, graph: ir.Graph, node: ir.Node) -> None:
        """Store a stack in int8 of which products read the matrices that data chooses, such as those of experts.

        Only the chosen matrices become floats in a step. WebGPU looks up floats alone.
        """
        if self.float_activations or not chooses_matrices(node):
            return
        stack, indices = node.inputs
        assert stack is not None
        assert indices is not None
        assert stack.const_value is not None
        name, nodes = str(stack.name), _Nodes(node.name or "matrices")
        stored, scales = self.store.stack(name, stack.const_value.numpy())
        chosen = nodes.add(node.op_type, stored, indices, suffix="chosen")
        number = nodes.add("Cast", chosen, suffix="float", to=ir.DataType.FLOAT)
        nodes.add("Mul", number, nodes.add(node.op_type, scales, indices, suffix="scale"), suffix="scaled")
        _replace(node, node, nodes.nodes)
        if graph is not self.few_rows_graph:
            self.parts.tables += 1

    def _packed_table(self, graph: ir.Graph, node: ir.Node, name: str, table: np.ndarray, ids: ir.Value) -> None:
        """Replace the lookup of rows by GatherBlockQuantized, which reads the integers of a product (N, K) as well."""
        bits = 4 if self.table_bits(name) == 4 else 8
        matrix = self.store.matrix(name, digest(table), lambda: table.T, bits, True)
        packed, scales, zeros = self.store.packed(self._home(graph), matrix)
        stored = self.store.rows_of(self._home(graph), matrix, packed)
        lookup = ir.node(
            "GatherBlockQuantized",
            [stored, ids, scales, *((zeros,) if zeros else ())],
            {"bits": matrix.packed_bits, "block_size": matrix.spec.block, "gather_axis": 0, "quantize_axis": 1},
            domain=CONTRIB,
            version=1,
            name=f"{node.name or 'table'}.rows",
        )
        self.model.graph.opset_imports.setdefault(CONTRIB, 1)
        found = [lookup]
        if matrix.spec.inner % matrix.spec.block:
            limits = (self.store.shape(size) for size in (0, matrix.spec.inner, -1))
            found.append(ir.node("Slice", [lookup.outputs[0], *limits], name=f"{lookup.name}.own"))
        _replace(node, node, found)
        self.parts.tables += 1

    def _rows_of_4_bits(self, nodes: _Nodes, matrix: StoredMatrix, ids: ir.Value, home: ir.Graph) -> ir.Value:
        """Look up rows of a table (N, K): int8 (…, K) for ids (…). One more lookup unpacks both numbers of a byte."""
        assert ids.shape is not None
        inner, rank, padded = matrix.spec.inner, len(ids.shape), matrix.spec.blocks * matrix.spec.block
        stored_bytes, stored_codes = (
            nodes.add(
                "Cast", nodes.add("Gather", stored, ids, suffix=suffix), suffix=f"{suffix}.int32", to=ir.DataType.INT32
            )
            for stored, suffix in ((matrix.values["weights"], "bytes"), (matrix.values["codes"], "codes"))
        )
        first = nodes.add("Mul", stored_codes, self.store.writer.constant(number("int32", CODE_STEP)), suffix="first")
        begin = nodes.add("Unsqueeze", first, self.store.shape(-1), suffix="begin")
        place = nodes.add("Add", stored_bytes, begin, suffix="place")
        pairs = nodes.add("Gather", self.store.pairs(home), place, suffix="pairs")  # (…, blocks, block / 2, 2)
        rows = nodes.add("Reshape", pairs, self.store.shape(*[0] * rank, padded), suffix="rows")
        if padded == inner:
            return rows
        limits = (self.store.shape(size) for size in (0, inner, -1))
        return nodes.add("Slice", rows, *limits, suffix="own")

    def _matrix(self, name: str, weight: _Weight, has_few: bool) -> StoredMatrix | None:
        """Return the integers of a weight; None if it stays in float."""
        key = self.store.fingerprint(weight.initializer, is_transposed=not weight.is_transposed)
        table = self.tables.get(key)
        bits = self.bits(name) if table is None else self.table_bits(table)
        if table is not None and bits != 4 and not self.float_activations:
            return self.store.matrix_of_table(table, key, lambda: weight.array().T)
        return self.store.matrix(name, key, weight.array, bits, has_few) if bits <= 8 else None

    def _home(self, graph: ir.Graph) -> ir.Graph:
        return self.branches.home(graph, self.model) if self.branches else self.model.graph

    def _packed_product(self, graph: ir.Graph, node: ir.Node, matrix: StoredMatrix, accuracy_level: int) -> None:
        """Replace a product by MatMulNBits, the form for few rows and for float activations."""
        packed, scales, zeros = self.store.packed(self._home(graph), matrix)
        bias, last = _bias_of(node)
        bias_fits = _is_bias_by_column(bias, matrix)
        inner, columns = matrix.shape
        sizes = {"K": inner, "N": columns, "bits": matrix.packed_bits, "block_size": matrix.spec.block}
        product = ir.node(
            "MatMulNBits",
            [node.inputs[0], packed, scales, *((zeros, None, bias) if bias_fits else (zeros,) if zeros else ())],
            {**sizes, "accuracy_level": accuracy_level},
            domain=CONTRIB,
            version=1,
            name=f"{node.name}.{'few' if accuracy_level == INT8_ACTIVATIONS else 'by_block'}",
        )
        self.model.graph.opset_imports.setdefault(CONTRIB, 1)
        assert node.inputs[0] is not None
        source, scale = str(node.inputs[0].name), str(self.store.scale_of_rows(matrix).name)
        own_bias = str(bias.name) if bias is not None and bias_fits else None
        describe_product(product, DescribedProduct(matrix.spec, source, scale, own_bias))
        _replace(node, last, [product, *_added(product, None if bias_fits else bias)])

    def _integer_product(self, graph: ir.Graph, node: ir.Node, matrix: StoredMatrix, name: str) -> None:
        """Replace a product by one that scales each row of its activations, or all rows by a static scale.

        On the CPU one operator scales by column where rows are many, and applies both scales and the bias if they are
        static.
        """
        assert node.inputs[0] is not None
        source, scaling = self.scalings.find(graph, node.inputs[0], self.static_scales.get(name))
        to_float = self.on_cpu and (bool(scaling.fixed_scale) or graph.name == ENCODE)
        bias, last = _bias_of(node)
        bias_fits = bias is not None and _is_bias_by_column(bias, matrix)
        scale = self.store.constant(f"{matrix.name}.scale", matrix.scale)
        values = {"source": source, "columns": self.store.columns(self._home(graph), matrix), "scale": scale}
        if bias is not None and bias_fits:
            values["bias"] = bias
        nodes = self.store.writer.product(
            graph,
            product_of(scaling, matrix.spec.inner, to_float, bias_fits),
            values,
            name,
            lambda new: graph.insert_before(node, new),
        )
        names = {name: str(value.name) for name, value in values.items() if name != "columns"}
        describe_product(nodes[0], DescribedProduct(matrix.spec, **names, scaling=scaling, followers=len(nodes) - 1))
        _replace(node, last, [*nodes, *_added(nodes[-1], None if bias_fits else bias)])


def constant_weight(node: ir.Node) -> _Weight | None:
    """Return the constant float matrix on the right of a product; None for other nodes."""
    if node.op_type not in ("MatMul", "FusedMatMul", "Gemm") or node.inputs[1] is None:
        return None
    source, is_transposed = node.inputs[1], False
    above = source.producer()
    if above is not None and above.op_type == "Transpose" and above.inputs[0] is not None:
        source, is_transposed = above.inputs[0], True  # an embedding table that is the output projection too
    weight = source.const_value
    if weight is None or weight.dtype != ir.DataType.FLOAT or len(weight.shape) != 2:
        return None
    if node.op_type != "MatMul":
        neutral = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transBatchA": 0, "transBatchB": 0}
        if any(name in node.attributes and node.attributes[name].value != value for name, value in neutral.items()):
            return None
        flag = node.attributes.get("transB")
        is_transposed ^= bool(flag is not None and flag.as_int())
    return _Weight(source, is_transposed)


def embedding_table(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the table of an embedding by token ids; None for other nodes.

    A table over positions is small and stays exact.
    """
    if node.op_type != "Gather" or node.domain or node.inputs[0] is None:
        return None
    table, axis = node.inputs[0].const_value, node.attributes.get("axis")
    if table is None or table.dtype != ir.DataType.FLOAT or len(table.shape) != 2 or table.size < MIN_WEIGHT_VALUES:
        return None
    if axis is not None and axis.as_int() != 0:
        return None
    ids = node.inputs[1]
    while (
        ids is not None and (above := ids.producer()) is not None and above.op_type in ("Reshape", "Unsqueeze", "Cast")
    ):
        ids = above.inputs[0]
    of_tokens = ids is not None and ids.is_graph_input() and not (ids.name or "").startswith("decode.")
    return table if of_tokens else None


def chooses_matrices(node: ir.Node) -> bool:
    """Return whether a node looks up matrices of a constant float stack, by indices that data gives, for a product."""
    if node.op_type not in ("Gather", "GatherND") or node.domain or any(a.as_int() for a in node.attributes.values()):
        return False  # of another axis than the first, or for each row of the batch
    stack, indices = node.inputs
    tensor = stack.const_value if stack is not None else None
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 3 or tensor.size < MIN_WEIGHT_VALUES:
        return False
    if indices is None or indices.const_value is not None or (node.op_type == "GatherND" and not _is_new_axis(indices)):
        return False
    pending = [node.outputs[0]]
    for value in pending:
        for use in value.uses():
            if use.node.op_type in ("MatMul", "Einsum"):
                return True
            pending += use.node.outputs if use.node.op_type in SHAPING_OPERATORS else ()
    return False


def _is_new_axis(indices: ir.Value) -> bool:
    """Return whether the last axis of indices is one that Unsqueeze adds: GatherND then looks up as Gather does."""
    above = indices.producer()
    axes = above.inputs[1] if above is not None and above.op_type == "Unsqueeze" else None
    return axes is not None and axes.const_value is not None and axes.const_value.numpy().tolist() == [-1]


def _bias_of(node: ir.Node) -> tuple[ir.Value | None, ir.Node]:
    """Return the bias that is added to a product, and the node that adds it.

    This node is the product itself if it adds the bias, or if there is no bias.
    """
    if node.op_type == "Gemm":
        return (node.inputs[2] if len(node.inputs) > 2 else None), node
    users = list(node.outputs[0].uses())
    if len(users) == 1 and users[0].node.op_type == "Add" and not node.outputs[0].is_graph_output():
        adder = users[0].node
        other = adder.inputs[1 - users[0].idx]
        if other is not None and other.const_value is not None and len(other.const_value.shape) == 1:
            return other, adder
    return None, node


def _is_bias_by_column(bias: ir.Value | None, matrix: StoredMatrix) -> bool:
    """Return whether a bias has one number for each column, as the product's operator requires.

    A bias of any other shape is broadcast by Add or Gemm.
    """
    return bias is not None and bias.const_value is not None and list(bias.const_value.shape) == [matrix.shape[1]]


def _added(product: ir.Node, bias: ir.Value | None) -> list[ir.Node]:
    """Return the node that adds a bias to a product, if there is a bias."""
    return [ir.node("Add", [product.outputs[0], bias], name=f"{product.name}.biased")] if bias is not None else []


def _replace(node: ir.Node, last: ir.Node, new_nodes: list[ir.Node]) -> None:
    """Put new nodes, whose result is float32, in the place of the chain node … last."""
    name_outputs(new_nodes)
    replace_node(node, new_nodes, last)
    new_nodes[-1].outputs[0].dtype = ir.DataType.FLOAT
