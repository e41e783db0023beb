"""Replace matrix products with constant weights by integer ones, and embedding tables by their int8 form.

Two operators keep a row's result its own, as DynamicQuantizeMatMul, with one scale for all rows, does not:

- **blocks**: MatMulNBits with 8 bits, blocks of up to 128 and accuracy level 4 (activations to int8 by row and block).
  The fastest for one row.
- **rows**: each row of the activations scaled by its own maximum and rounded to uint8 around 128, then MatMulInteger
  with int8 columns. Standard operators; the faster one for many rows.

So decode takes blocks and encode takes rows; --target portable takes rows for both. A table that is also the output
projection's weight is held once, in blocks, and looked up there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.quantize import weights
from tformer_runtime import manifest

SMALLEST = 1024  # numbers; smaller products gain nothing


def quantize(model: ir.Model, target: str) -> int:
    """Rewrite in place; returns how many products and tables now hold integers. One pass over the weights."""
    rewriter = _Rewriter(model, target)
    count = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        blocks = target != "portable" and _decodes(model, graph)
        for node in list(graph):
            count += rewriter.product(graph, node, blocks)
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            count += rewriter.table(graph, node)
    _drop_unused(model)
    if any(n.domain == "com.microsoft" for n in model.graph.all_nodes()):
        model.graph.opset_imports.setdefault("com.microsoft", 1)
        for graph in model.graph.subgraphs():
            graph.opset_imports.setdefault("com.microsoft", 1)
    return count


def _decodes(model: ir.Model, graph: ir.Graph) -> bool:
    """Whether a graph is the decode stage: the branch of that name, or all of a model that has no encode stage."""
    staged = any(v.name == manifest.STAGE for v in model.graph.inputs)
    return graph.name == "decode" if staged else any(v.name == manifest.SELECT for v in model.graph.inputs)


@dataclass
class _Blocks:
    """A matrix in MatMulNBits' form: K inner, N outer."""

    packed: ir.Value
    scales: ir.Value
    block: int
    inner: int
    outer: int


class _Rewriter:
    def __init__(self, model: ir.Model, target: str) -> None:
        self.model, self.target = model, target
        self.held: dict[tuple[str, str], object] = {}
        self.rows: dict[tuple[int, ir.Value], tuple[ir.Value, ir.Value]] = {}  # activations quantised already
        self.by_transpose: dict[bytes, _Blocks] = {}

    # -- products -------------------------------------------------------------------------------------------------

    def product(self, graph: ir.Graph, node: ir.Node, blocks: bool) -> int:
        weight = _weight_of(node)
        if weight is None or weight.size < SMALLEST or node.inputs[0] is None:
            return 0
        if blocks:
            self._by_blocks(graph, node, weight)
        else:
            self._by_rows(graph, node, weight)
        return 1

    def _by_blocks(self, graph: ir.Graph, node: ir.Node, weight: np.ndarray) -> None:
        held = self._blocks(node.inputs[1], weight)
        bias, last = _bias_of(node)
        made = ir.node(
            "MatMulNBits",
            [node.inputs[0], held.packed, held.scales, None, None, *([bias] if bias is not None else [])],
            {"K": held.inner, "N": held.outer, "bits": 8, "block_size": held.block, "accuracy_level": 4},
            domain="com.microsoft",
            name=f"{node.name}.blocks",
        )
        _replace(graph, node, last, [made])

    def _by_rows(self, graph: ir.Graph, node: ir.Node, weight: np.ndarray) -> None:
        quantised, scale = self._columns(node.inputs[1], weight)
        rows, row_scale = self._quantised_rows(graph, node)
        name = node.name or "product"
        zero = self.constant("zero point", np.uint8(weights.ZERO))
        product = ir.node("MatMulInteger", [rows, quantised, zero], name=f"{name}.integer")
        number = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{name}.float")
        by_row = ir.node("Mul", [number.outputs[0], row_scale], name=f"{name}.by_row")
        made = [product, number, by_row, ir.node("Mul", [by_row.outputs[0], scale], name=f"{name}.by_column")]
        bias, last = _bias_of(node)
        if bias is not None:
            made.append(ir.node("Add", [made[-1].outputs[0], bias], name=f"{name}.biased"))
        _replace(graph, node, last, made)

    def _quantised_rows(self, graph: ir.Graph, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        """uint8 rows and their float scales (…, 1) of a product's operand, made once for all who read it."""
        value = node.inputs[0]
        assert value is not None
        key = id(graph), value
        if key not in self.rows:
            name = f"{value.name}.rows"
            axis = self.constant("last axis", np.array([-1], np.int64))
            size = ir.node("Abs", [value], name=f"{name}.size")
            most = ir.node("ReduceMax", [size.outputs[0], axis], {"keepdims": 1}, name=f"{name}.most")
            least = self.constant("least size", np.float32(1e-12))
            bounded = ir.node("Max", [most.outputs[0], least], name=f"{name}.bounded")
            scale = ir.node(
                "Mul", [bounded.outputs[0], self.constant("step", np.float32(1 / weights.LEVELS))], name=f"{name}.scale"
            )
            zero = self.constant("zero point", np.uint8(weights.ZERO))
            made = [size, most, bounded, scale]
            made += _to_uint8(value, scale.outputs[0], self.constant("centre", np.float32(weights.ZERO)), name)
            del zero
            _name_outputs(made)
            graph.insert_before(node, made)
            self.rows[key] = made[-1].outputs[0], scale.outputs[0]
        return self.rows[key]

    # -- tables ---------------------------------------------------------------------------------------------------

    def table(self, graph: ir.Graph, node: ir.Node) -> int:
        """An embedding: rows of a matrix gathered by ids."""
        if node.op_type != "Gather" or node.domain or node.inputs[0] is None or node.inputs[0].const_value is None:
            return 0
        held, axis = node.inputs[0].const_value, node.attributes.get("axis")
        if held.dtype != ir.DataType.FLOAT or len(held.shape) != 2 or held.size < SMALLEST:
            return 0
        if (axis is not None and axis.as_int() != 0) or not _is_embedding(node):
            return 0
        matrix, ids, name = held.numpy(), node.inputs[1], node.name
        shared = self.by_transpose.get(_fingerprint(matrix))
        if shared is not None and shared.inner == shared.block * shared.scales.shape[1]:  # type: ignore[index]
            packed = ir.node("Gather", [shared.packed, ids], {"axis": 0}, name=f"{name}.packed")
            number = ir.node("Cast", [packed.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{name}.float")
            centre = self.constant("centre", np.float32(weights.ZERO))
            centred = ir.node("Sub", [number.outputs[0], centre], name=f"{name}.centred")
            scales = self.constant(f"{shared.scales.name}.last", shared.scales.const_value.numpy()[..., None])  # type: ignore[union-attr]
            scale = ir.node("Gather", [scales, ids], {"axis": 0}, name=f"{name}.scale")
            blocks = ir.node("Mul", [centred.outputs[0], scale.outputs[0]], name=f"{name}.scaled")
            shape = self.constant(f"rows of {shared.inner}", np.array([0, 0, shared.inner], np.int64))
            flat = ir.node("Reshape", [blocks.outputs[0], shape], name=f"{name}.flat")
            made = [packed, number, centred, scale, blocks, flat]
        else:
            quantised, scale_values = weights.per_column(matrix.T)
            rows = self.constant(f"{node.inputs[0].name}.int8", np.ascontiguousarray(quantised.T))
            scales = self.constant(f"{node.inputs[0].name}.scales", scale_values[:, None])
            packed = ir.node("Gather", [rows, ids], {"axis": 0}, name=f"{name}.rows")
            number = ir.node("Cast", [packed.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{name}.float")
            scale = ir.node("Gather", [scales, ids], {"axis": 0}, name=f"{name}.scale")
            made = [packed, number, scale]
            made.append(ir.node("Mul", [number.outputs[0], scale.outputs[0]], name=f"{name}.scaled"))
        _replace(graph, node, node, made)
        return 1

    # -- constants ------------------------------------------------------------------------------------------------

    def _blocks(self, value: ir.Value | None, weight: np.ndarray) -> _Blocks:
        assert value is not None and value.name is not None
        key = value.name, "blocks"
        if key not in self.held:
            block = weights.block_size(weight.shape[0])
            packed, scales = weights.blocked(weight, block)
            made = _Blocks(
                self.constant(f"{value.name}.blocks", packed),
                self.constant(f"{value.name}.scales", scales),
                block,
                *weight.shape,
            )
            self.held[key] = made
            self.by_transpose[_fingerprint(weight.T)] = made
        return self.held[key]  # type: ignore[return-value]

    def _columns(self, value: ir.Value | None, weight: np.ndarray) -> tuple[ir.Value, ir.Value]:
        assert value is not None and value.name is not None
        key = value.name, "columns"
        if key not in self.held:
            quantised, scale = weights.per_column(weight)
            self.held[key] = (
                self.constant(f"{value.name}.int8", quantised),
                self.constant(f"{value.name}.columns", scale),
            )
        return self.held[key]  # type: ignore[return-value]

    def constant(self, name: str, array: np.ndarray | np.generic) -> ir.Value:
        if name not in self.model.graph.initializers:
            array = np.asarray(array)
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
            self.model.graph.initializers[name] = value
        return self.model.graph.initializers[name]


def _to_uint8(value: ir.Value, scale: ir.Value, centre: ir.Value, name: str) -> list[ir.Node]:
    """round(value / scale) + 128 as uint8; |value| ≤ 127 · scale, so nothing is clipped."""
    ratio = ir.node("Div", [value, scale], name=f"{name}.ratio")
    whole = ir.node("Round", [ratio.outputs[0]], name=f"{name}.whole")
    moved = ir.node("Add", [whole.outputs[0], centre], name=f"{name}.moved")
    return [ratio, whole, moved, ir.node("Cast", [moved.outputs[0]], {"to": ir.DataType.UINT8}, name=f"{name}.uint8")]


def _weight_of(node: ir.Node) -> np.ndarray | None:
    """(K, N) of a product with a constant float matrix on its right."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or node.inputs[1] is None:
        return None
    held = node.inputs[1].const_value
    if held is None or held.dtype != ir.DataType.FLOAT or len(held.shape) != 2:
        return None
    if node.op_type == "MatMul":
        return held.numpy()
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    if any(name in node.attributes and node.attributes[name].value != value for name, value in plain.items()):
        return None
    transposed = node.attributes.get("transB")
    return held.numpy().T if transposed is not None and transposed.as_int() else held.numpy()


def _bias_of(node: ir.Node) -> tuple[ir.Value | None, ir.Node]:
    """The bias that is added to a product, and the node that adds it (the product itself if it does, or none does)."""
    if node.op_type == "Gemm":
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return bias, node
    users = list(node.outputs[0].uses())
    if len(users) == 1 and users[0].node.op_type == "Add" and not node.outputs[0].is_graph_output():
        adder = users[0].node
        other = adder.inputs[1 - users[0].idx]
        if other is not None and other.const_value is not None and len(other.const_value.shape) == 1:
            return other, adder
    return None, node


def _is_embedding(node: ir.Node) -> bool:
    """Whether ids are looked up, rather than positions: a table over positions is small and stays exact."""
    ids = node.inputs[1]
    while ids is not None and ids.producer() is not None and ids.producer().op_type in ("Reshape", "Unsqueeze", "Cast"):  # type: ignore[union-attr]
        ids = ids.producer().inputs[0]  # type: ignore[union-attr]
    return ids is not None and ids.is_graph_input() and not (ids.name or "").startswith("decode.")


def _fingerprint(matrix: np.ndarray) -> bytes:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(matrix).tobytes()).digest()


def _replace(graph: ir.Graph, node: ir.Node, last: ir.Node, made: list[ir.Node]) -> None:
    """Put `made` in the place of node … last, whose result becomes the last one's."""
    result = last.outputs[0]
    _name_outputs(made)
    graph.insert_before(node, made)
    new = made[-1].outputs[0]
    result.replace_all_uses_with(new, replace_graph_outputs=True)
    new.dtype = ir.DataType.FLOAT
    name = result.name
    if last is not node:
        graph.remove(last, safe=True)
    graph.remove(node, safe=True)
    new.name = name


def _name_outputs(nodes: list[ir.Node]) -> None:
    for node in nodes:
        for value in node.outputs:
            if value.name is None:
                value.name = f"{node.name}.out"


def _drop_unused(model: ir.Model) -> None:
    from tformer_export.passes import unused

    unused.run(model)
