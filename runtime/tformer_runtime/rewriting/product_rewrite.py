"""Replace operators by those of native kernels in a model that is being loaded.

The file keeps its standard operators: only the model that onnxruntime gets at load is rewritten. Weights are packed by
the kernels (`Packer`) and removed from the model, if nothing else reads them.

A file for latency or with 4 bits has the decode stage twice, as the branches of an `If` on the number of new tokens
(`tformer_export/quantize/few_rows_branch.py`). If all products of the branch for many rows are replaced, it serves any
number of rows, and the `If` is replaced by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.manifest import DecodeStage
from tformer_runtime.format.onnx_fields import MODEL_OPSET_IMPORT, OPERATOR_SET_ID_DOMAIN, OPERATOR_SET_ID_VERSION
from tformer_runtime.format.onnx_graph import Graph, Node, new_node, parse_model, remove_unread, rename_values
from tformer_runtime.format.onnx_wire import WireError, bytes_field, varint_field
from tformer_runtime.format.stored_forms import StoredProducts
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.attention_rewrite import (
    ATTENTION,
    CONTEXT_ATTENTION,
    find_attention,
    merge_branches,
    share_contexts,
)
from tformer_runtime.rewriting.elementwise_rewrite import COLUMNS, Activation, ElementwiseRewriting
from tformer_runtime.rewriting.float_product import FLOAT_PRODUCTS, FloatProduct, find_float_product
from tformer_runtime.rewriting.greedy_loop import make_greedy_loop
from tformer_runtime.rewriting.operator_chain import make_chains
from tformer_runtime.rewriting.quantized_product import QuantizedProduct, Readers, find_product
from tformer_runtime.rewriting.stored_weights import Comparison, is_operator

DOMAIN = "ai.tformer"
OPERATOR, FLOAT_OPERATOR = "RowQuantizedMatMul", "PackedMatMul"
PRODUCTS = ("MatMulInteger", "MatMulIntegerToFloat")
PACKED_PRODUCT = "MatMulNBits"  # of the form for few rows
# Operators with graphs of their own that `onnx_graph` does not parse: what they read is unknown.
UNPARSED_BRANCHES = (b"SequenceMap", b"BeamSearch", b"GreedySearch", b"Sampling")
# Errors that a damaged graph causes: no message, names that are not texts, nodes without inputs, values that depend on
# themselves, sizes without bytes.
DAMAGE = (WireError, LookupError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)
KNOWN_DOMAINS = ("", "ai.onnx", "com.microsoft")  # branches of other operators would be unknown

# Packs the weights of a product and returns a handle of the kernels; None to leave the product as it is.
Packer = Callable[[QuantizedProduct, WeightFiles], int | None]
FloatPacker = Callable[[FloatProduct, WeightFiles], int | None]


class Rewritten(NamedTuple):
    """A model, and the numbers of its operators of native kernels."""

    model: bytes
    products: int = 0
    attentions: int = 0
    elementwise: int = 0  # activations, gates and norms
    has_greedy_loop: bool = False  # whether the decode stage has the input GREEDY_PLAN


def replace_products(
    model: bytes,
    folder: Path,
    pack: Packer,
    pack_float: FloatPacker | None = None,
    attention_path: int | None = None,
    chains: int = 0,
    decode: DecodeStage | None = None,
    stored: StoredProducts | None = None,
) -> Rewritten:
    """Return a model in which operators of native kernels compute products, attentions, norms, gates and activations.

    Operators that are not recognised stay as they are, and so do quantised products without a record.

    model: as `model_file.read_mapped_model` returns it; it is returned unchanged if nothing is replaced.
    folder: of the files with the weights.
    pack_float: None to leave float32 products to onnxruntime.
    attention_path: the place of the path that computes all but products in the library; None to leave it to
        onnxruntime. The model's floats are float32 then.
    chains: the number of threads that may share a batch in operators that follow each other and become one
        (`operator_chain`); 0 to leave them apart.
    decode: the decode stage, if it may run several steps at once (`greedy_loop`).
    stored: the records of quantised products.
    Raise ModelFileError if the model has such operators itself: they hold handles of this process's memory.
    """
    if OPERATOR.encode() in model:
        raise ModelFileError(f"the file's graph has operators of {DOMAIN}, which exist in memory alone")
    names = [*PRODUCTS, *(FLOAT_PRODUCTS if pack_float is not None else ())]
    names += [ATTENTION, CONTEXT_ATTENTION] if attention_path is not None else []
    if not any(name.encode() in model for name in names) or any(name in model for name in UNPARSED_BRANCHES):
        return Rewritten(model)  # without parsing it
    try:
        return _rewritten(model, folder, pack, pack_float, attention_path, chains, decode, stored or StoredProducts())
    except ModelFileError:
        raise
    except DAMAGE:
        return Rewritten(model)  # onnxruntime says what is wrong


def _rewritten(
    model: bytes,
    folder: Path,
    pack: Packer,
    pack_float: FloatPacker | None,
    attention_path: int | None,
    chains: int,
    decode: DecodeStage | None,
    stored: StoredProducts,
) -> Rewritten:
    """Do as `replace_products` does, for a model that has products or attentions."""
    parsed = parse_model(model)
    domains = {node.domain for graph in parsed.graph.all_graphs() for node in graph.nodes}
    if DOMAIN in domains:
        raise ModelFileError(f"the file's graph has operators of {DOMAIN}, which exist in memory alone")
    if not domains <= set(KNOWN_DOMAINS):
        return Rewritten(model)
    with WeightFiles(folder) as files:
        has_scans = any(node.op_type == "Scan" for graph in parsed.graph.all_graphs() for node in graph.nodes)
        replacement = _Replacement(
            Comparison(files), stored, pack, pack_float, parsed.graph.input_names(), has_scans, attention_path
        )
        graphs = list(_without_loops(parsed.graph))
        products = sum(replacement.replace_in(graph) for graph in graphs)
        attentions = sum(replacement.replace_attentions(graph) for graph in graphs)
        elementwise = sum(replacement.replace_elementwise(graph) for graph in graphs)
    if not products and not attentions:
        return Rewritten(model)
    for graph in graphs:
        merge_branches(graph, DOMAIN)
    remove_unread(parsed.graph)
    for graph in list(parsed.graph.all_graphs()):
        _remove_few_rows_branches(graph)
    remove_unread(parsed.graph)  # what the branches for few rows alone have read
    has_loop = False
    if chains:
        has_loop = decode is not None and make_greedy_loop(parsed.graph, decode, DOMAIN, chains)
        for graph in list(_without_loops(parsed.graph)):
            make_chains(graph, DOMAIN, chains)
    opset = bytes_field(OPERATOR_SET_ID_DOMAIN, DOMAIN.encode()) + varint_field(OPERATOR_SET_ID_VERSION, 1)
    parsed.rest.append(bytes_field(MODEL_OPSET_IMPORT, opset))
    return Rewritten(parsed.encode(), products, attentions, elementwise, has_loop)


def _without_loops(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and the branches within it, without the bodies of loops.

    onnxruntime must know the shapes of a body's results before it runs, and it infers none behind these operators.
    """
    yield graph
    for node in graph.nodes:
        for branch in node.branches.values() if node.op_type == "If" else ():
            yield from _without_loops(branch)


class _Replacement(Struct, frozen=True):
    """inputs: names of the inputs of the model. has_scans: whether it has a Scan."""

    comparison: Comparison
    stored: StoredProducts
    pack: Packer
    pack_float: FloatPacker | None
    inputs: set[str]
    has_scans: bool
    attention_path: int | None = None

    @property
    def files(self) -> WeightFiles:
        return self.comparison.files

    def replace_attentions(self, graph: Graph) -> int:
        """Replace the attentions of one graph, without its branches, and return their number."""
        if self.attention_path is None or not any(n.op_type in (ATTENTION, CONTEXT_ATTENTION) for n in graph.nodes):
            return 0
        count, read, has_contexts = 0, graph.names_read(), False
        for i, node in enumerate(graph.nodes):
            new = find_attention(graph, node, read, self.files, self.inputs, DOMAIN, self.attention_path)
            if new is not None:
                graph.nodes[i], count = new, count + 1
                has_contexts = has_contexts or node.op_type == CONTEXT_ATTENTION
        graph.index()
        if has_contexts:
            share_contexts(graph, self.files, self.inputs, DOMAIN)
        return count

    def replace_elementwise(self, graph: Graph) -> int:
        """Replace the activations, gates and norms of one graph, without its branches, and return their number."""
        if self.attention_path is None:
            return 0
        products, path = (OPERATOR, FLOAT_OPERATOR), self.attention_path
        rewriting = ElementwiseRewriting(graph, self.files, self.inputs, self.has_scans, DOMAIN, products, path)
        return rewriting.replace_all()

    def replace_in(self, graph: Graph) -> int:
        """Replace the products of one graph, without its branches, and return their number."""
        if not any(node.op_type in (*PRODUCTS, *FLOAT_PRODUCTS) for node in graph.nodes):
            return 0
        readers = Readers(graph)
        new_nodes: dict[int, Node] = {}  # of the last node of a product
        for node in graph.nodes:
            found = self._new_node(graph, node, readers)
            if found is not None:
                last, new = found
                new_nodes[id(last)] = new
        graph.replace_nodes(new_nodes)
        return len(new_nodes)

    def _new_node(self, graph: Graph, node: Node, readers: Readers) -> tuple[Node, Node] | None:
        """Return the last node of the product of a node, and the new node; None for other nodes."""
        if node.op_type in PRODUCTS:
            product = find_product(graph, node, self.stored, self.comparison)
            handle = self.pack(product, self.files) if product is not None else None
            return (product.last, _operator(product, handle)) if product is not None and handle is not None else None
        if node.op_type in FLOAT_PRODUCTS and self.pack_float is not None:
            floats = find_float_product(graph, node, readers, self.inputs, self.files)
            handle = self.pack_float(floats, self.files) if floats is not None else None
            if floats is not None and handle is not None:
                attributes = {"handle": handle, COLUMNS: floats.columns, **Activation().attributes()}
                return floats.last, new_node(FLOAT_OPERATOR, DOMAIN, [floats.source], [floats.result], attributes)
        return None


def _operator(product: QuantizedProduct, handle: int) -> Node:
    scaling = product.scaling
    attributes: dict[str, int | float] = {
        "handle": handle,
        "magnitude": int(scaling.magnitude),
        "zero": scaling.zero,
        "reciprocal": int(scaling.reciprocal),
        "column_first": int(product.column_first),
        "floor": float(scaling.floor),
        "step": float(scaling.step),
        "fixed_scale": float(scaling.fixed_scale),
        COLUMNS: product.weights.spec.columns,
        **Activation().attributes(),
    }
    return new_node(OPERATOR, DOMAIN, [product.source], [product.result], attributes)


def _remove_few_rows_branches(graph: Graph) -> None:
    """Replace each `If` on the number of new tokens by its branch for many rows, if kernels compute it all."""
    nodes: list[Node] = []
    for node in graph.nodes:
        many_rows = node.branches.get("else_branch")
        if many_rows is None or not _chooses_few_rows(graph, node) or _has_products(many_rows):
            nodes.append(node)
            continue
        new_names = dict(zip(many_rows.outputs, node.outputs, strict=False))
        for inner in many_rows.nodes:
            rename_values(inner, new_names)
        nodes += many_rows.nodes
        graph.initializers.update(many_rows.initializers)
        graph.encoded_initializers.update(many_rows.encoded_initializers)
        for branch in (branch for inner in many_rows.nodes for branch in inner.branches.values()):
            branch.parent = graph
    graph.nodes = nodes
    graph.index()


def _chooses_few_rows(graph: Graph, node: Node) -> bool:
    few_rows, found = node.branches.get("then_branch"), graph.find_producer(node.inputs[0]) if node.inputs else None
    if few_rows is None or found is None or not is_operator(found[0], "LessOrEqual", 2):
        return False
    many_rows = node.branches["else_branch"]
    distinct = len(set(many_rows.outputs)) == len(node.outputs)  # an output that is renamed must have one name
    computed = all(name in many_rows.producers for name in many_rows.outputs)
    return distinct and computed and any(inner.op_type == PACKED_PRODUCT for inner in few_rows.nodes)


def _has_products(graph: Graph) -> bool:
    return any(node.op_type in PRODUCTS for inner in graph.all_graphs() for node in inner.nodes)
