"""The output projection outside of the decode stage, for all ids or for gathered columns.

The file then consists of standard operators:

    hidden, …  = If(stage) { decode } else { encode }
    gathered   = Transpose(Gather(rows of the projection, gather))
    logits     = If(columns) { hidden × weight } else { hidden × the whole projection }

`gather`, `columns` and `weight` are inputs, and the columns that one call gathers are the weight of later calls. The
projection is outside of the stages because onnxruntime packs a weight that is read in a branch of one `If`, but not of
an `If` within another (`quantize/few_rows_branch.py`). A bias or scale of the product is small, and each step picks its
columns.

Columns are gathered once for a request and not in each step, and only up to an eighth of the vocabulary, where this is
faster (`tformer_runtime/engine/shortlist.py`, docs/design/kernels.md#columns-of-the-projection).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.common.onnx_writer import copy_product, describe_rows
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format.manifest import COLUMN_IDS, COLUMN_WEIGHT, GATHER_IDS, GATHERED_COLUMNS, ShortlistSpec

PRODUCTS = ("MatMul", "FusedMatMul", "MatMulInteger", "Gemm")
# Operators that may follow the product: they compute each id's logit from that id's value alone.
ELEMENTWISE = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Cast",
    "Tanh",
    "Identity",
    "Clip",
    "Where",
    "Neg",
    "Min",
    "Max",
    "Relu",
    "Sigmoid",
}
HIDDEN = "shortlist.hidden"


@dataclass
class _OutputProjection:
    """The output projection of a graph.

    product: the product with a constant matrix as wide as the vocabulary.
    followers: the nodes from the product to the logits, in their order.
    """

    product: ir.Node
    followers: list[ir.Node]
    vocabulary: int

    @property
    def nodes(self) -> list[ir.Node]:
        return [self.product, *self.followers]


def separate_projection(model: ir.Model) -> None:
    """Move the output projection of a staged model out of its decode stage, in place.

    Raises UnsupportedModelError if the model has no projection that can be moved.
    """
    graph = model.graph
    choice = next(node for node in graph if node.op_type == "If")
    decode, encode = (choice.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    projection = _find_projection(decode)
    constants = _constants_read(decode, projection)
    hidden = _hidden_output(decode, projection)
    logits, result, inner = decode.outputs[0], graph.outputs[0], _inner(projection.product)
    moved = [node for node in decode if node in projection.nodes or node in constants]
    decode.outputs[0] = hidden
    _return_no_hidden(encode, inner)
    decode.remove(moved)
    projection.product.replace_input_with(0, choice.outputs[0])
    graph.extend(moved)
    graph.outputs[0] = logits
    logits.shape, logits.type = result.shape, result.type
    choice.outputs[0].name, choice.outputs[0].shape = HIDDEN, ir.Shape([None, None, inner])
    choice.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    logits.name = "logits" if result.name == HIDDEN else result.name


def _constants_read(decode: ir.Graph, projection: _OutputProjection) -> list[ir.Node]:
    """Return the constants of the decode stage that the projection reads.

    Raises UnsupportedModelError if it reads other values than these and the hidden state, or if other nodes read it.
    """
    inside = {value for node in projection.nodes for value in node.outputs}
    read = {value for node in projection.nodes for value in node.inputs if value is not None}
    outside = read - inside - {projection.product.inputs[0]}
    constants = [node for value in outside if (node := value.producer()) is not None and node.graph is decode]
    other_readers = [use.node for value in inside for use in value.uses() if use.node not in projection.nodes]
    if other_readers or any(node.op_type != "Constant" for node in constants):
        raise _refused("reads more than the last hidden state, or is read by more than the logits")
    return constants


def _hidden_output(decode: ir.Graph, projection: _OutputProjection) -> ir.Value:
    """Return the last hidden state as a value that may be an output. One that is an output already is copied."""
    hidden = projection.product.inputs[0]
    assert hidden is not None
    if not hidden.is_graph_output():
        return hidden
    same = ir.node("Identity", [hidden], name=HIDDEN)
    decode.append(same)
    same.outputs[0].type = hidden.type
    projection.product.replace_input_with(0, same.outputs[0])
    return same.outputs[0]


def _return_no_hidden(encode: ir.Graph, inner: int) -> None:
    """Let the encode stage return a hidden state without rows in the place of logits without rows."""
    maker = encode.outputs[0].producer()
    assert maker is not None
    empty = ir.tensor(np.zeros((0, 0, inner), np.float32))
    constant = ir.node("Constant", [], {"value": empty}, name=f"no {HIDDEN}")
    encode.append(constant)
    constant.outputs[0].name = f"{encode.name}/no/{HIDDEN}"
    encode.outputs[0] = constant.outputs[0]
    encode.remove(maker, safe=True)


def add_gathered_columns(model: ir.Model) -> ShortlistSpec:
    """Compute the separated projection, quantised or not, for gathered columns if there are any.

    Changes the model in place and returns the shortlist's entry of the manifest.
    """
    graph = model.graph
    projection = _find_projection(graph)
    rows, weight = _rows(model, projection.product)
    dtype, inner = rows.dtype, _sizes(rows)[1]
    assert dtype is not None
    gather, columns, gathered_weight = _add_inputs(graph, dtype, inner)
    gathered = _add_gathered_weight(graph, rows, gather, dtype, inner)
    has_columns = _add_test_of_columns(graph, columns)
    branches = {
        "then_branch": _copy_projection(graph, projection, "shortlist/", gathered_weight, columns),
        "else_branch": _copy_projection(graph, projection, "all/", weight, None),
    }
    choice = ir.node("If", [has_columns], branches, name="shortlist")
    graph.append(choice)
    result, logits = graph.outputs[0], choice.outputs[0]
    logits.dtype, logits.shape = ir.DataType.FLOAT, ir.Shape([*list(result.shape or [None, None, None])[:-1], None])
    graph.outputs[0] = logits
    graph.outputs.append(gathered)
    graph.remove(list(reversed(projection.nodes)), safe=True)
    logits.name, result.name = result.name, "logits.before"
    return ShortlistSpec(dtype.numpy().name, inner)


def _add_inputs(graph: ir.Graph, dtype: ir.DataType, inner: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Add and return the ids of columns to gather, the ids of gathered columns, and the gathered columns."""
    gather, columns = _input(GATHER_IDS, ir.DataType.INT64, 1), _input(COLUMN_IDS, ir.DataType.INT64, 1)
    gathered_weight = _input(COLUMN_WEIGHT, dtype, 2)
    gathered_weight.shape = ir.Shape([inner, None])
    graph.inputs.extend([gather, columns, gathered_weight])
    return gather, columns, gathered_weight


def _add_gathered_weight(graph: ir.Graph, rows: ir.Value, gather: ir.Value, dtype: ir.DataType, inner: int) -> ir.Value:
    """Add the gathering of rows of the weight, and return them as columns (inner, number of ids)."""
    picked = ir.node("Gather", [rows, gather], {"axis": 0}, name="shortlist.rows")
    transposed = ir.node("Transpose", [picked.outputs[0]], {"perm": [1, 0]}, name=GATHERED_COLUMNS)
    picked.outputs[0].name, gathered = "shortlist.rows", transposed.outputs[0]
    gathered.name, gathered.dtype, gathered.shape = GATHERED_COLUMNS, dtype, ir.Shape([inner, None])
    graph.extend([picked, transposed])
    return gathered


def _add_test_of_columns(graph: ir.Graph, columns: ir.Value) -> ir.Value:
    """Add and return whether there are any gathered columns."""
    size = ir.node("Size", [columns], name="shortlist.size")
    some = ir.node("Cast", [size.outputs[0]], {"to": ir.DataType.BOOL}, name="shortlist.some")
    size.outputs[0].name, some.outputs[0].name = "shortlist.size", "shortlist.some"
    graph.extend([size, some])
    return some.outputs[0]


def _find_projection(graph: ir.Graph) -> _OutputProjection:
    """Find the last product with a constant matrix before the logits, and the nodes after it.

    Raises UnsupportedModelError if there is none, or if another node mixes the logits of ids.
    """
    logits = graph.outputs[0]
    todo, seen = [logits], {logits}
    product = None
    while todo:
        node = todo.pop(0).producer()
        if node is None or node.graph is not graph:
            continue
        if node.op_type in PRODUCTS and _is_constant(node.inputs[1]):
            product = node
            break
        if node.op_type not in ELEMENTWISE:
            raise _refused(
                f"is followed by {node.op_type}, which does more than change each id's logit by itself"
                if node.op_type in ("LogSoftmax", "Softmax")
                else f"is no product with a constant matrix: {node.op_type} makes them"
            )
        for value in node.inputs:
            if value is not None and value not in seen:
                seen.add(value)
                todo.append(value)
    if product is None:
        raise _refused("is no product with a constant matrix")
    below = {product.outputs[0]}
    followers = []
    for node in graph:
        if any(value in below for value in node.inputs):
            below |= set(node.outputs)
            followers.append(node)
    followers = [node for node in followers if _leads_to(node, logits)]
    for node in followers:
        if node.op_type not in ELEMENTWISE:
            raise _refused(f"is followed by {node.op_type}, which does more than change each id's logit by itself")
    return _OutputProjection(product, followers, _width(product))


def _leads_to(node: ir.Node, to: ir.Value) -> bool:
    """Return whether a value depends on a node."""
    return any(value is to or any(_leads_to(use.node, to) for use in value.uses()) for value in node.outputs)


def _copy_projection(
    graph: ir.Graph, projection: _OutputProjection, prefix: str, weight: ir.Value, columns: ir.Value | None
) -> ir.Graph:
    """Copy the projection to a branch.

    weight: the weight of the product in the branch, (inner, columns).
    columns: the ids of its columns; None for all ids.
    """
    nodes: list[ir.Node] = []
    copies: dict[ir.Value, ir.Value] = {}
    for node in projection.nodes:
        inputs: list[ir.Value | None] = []
        for at, value in enumerate(node.inputs):
            if node is projection.product and at == 1:
                inputs.append(weight)
            elif value is None or value in copies:
                inputs.append(copies[value] if value is not None else None)
            elif columns is not None and _is_wide(value, projection.vocabulary):
                picked = ir.node("Gather", [value, columns], {"axis": -1}, name=f"{prefix}{value.name}")
                picked.outputs[0].name = f"{prefix}{value.name}"
                nodes.append(picked)
                inputs.append(picked.outputs[0])
            else:
                inputs.append(value)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        kind, domain = node.op_type, node.domain
        if node is projection.product and columns is not None:
            kind, domain = ("MatMul", "") if kind == "FusedMatMul" else (kind, domain)
            attributes = {} if kind == "MatMul" else {n: 0 if n == "transB" else v for n, v in attributes.items()}
        copy = ir.node(kind, inputs, attributes, domain=domain, name=f"{prefix}{node.name}")
        if columns is None:
            copy_product(node, copy)
        for before, after in zip(node.outputs, copy.outputs, strict=True):
            after.name, after.type = f"{prefix}{before.name}", before.type
            copies[before] = after
        nodes.append(copy)
    out = copies[graph.outputs[0]]
    out.dtype = ir.DataType.FLOAT
    return ir.Graph([], [out], nodes=nodes, opset_imports=graph.opset_imports, name=prefix.rstrip("/"))


def _rows(model: ir.Model, product: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the weight as (vocabulary, inner), and as the product reads it. The model stores it once."""
    weight = product.inputs[1]
    assert weight is not None
    if _is_transposed(product):
        return weight, weight
    above = weight.producer()
    if above is not None and above.op_type == "Transpose":
        rows = above.inputs[0]
        assert rows is not None
        rows.shape = ir.Shape(_sizes(weight)[::-1])
        if rows.dtype is None and weight.dtype is not None:
            rows.dtype = weight.dtype
        return rows, weight
    constant = weight.const_value
    assert constant is not None
    array = np.ascontiguousarray(constant.numpy().T)
    rows = ir.Value(name=f"{weight.name}.by_id", const_value=ir.tensor(array, name=f"{weight.name}.by_id"))
    rows.shape, rows.dtype = ir.Shape(array.shape), constant.dtype
    model.graph.initializers[str(rows.name)] = rows
    turn = ir.node("Transpose", [rows], {"perm": [1, 0]}, name=f"{rows.name}.turned")
    turn.outputs[0].name, turn.outputs[0].dtype = f"{rows.name}.turned", constant.dtype
    model.graph.insert_before(model.graph[0], turn)
    for use in list(weight.uses()):
        describe_rows(use.node, str(rows.name))
    weight.replace_all_uses_with(turn.outputs[0])
    del model.graph.initializers[str(weight.name)]
    return rows, turn.outputs[0]


def _is_transposed(product: ir.Node) -> bool:
    flag = product.attributes.get("transB")
    return flag is not None and bool(flag.as_int())


def _is_constant(value: ir.Value | None) -> bool:
    """Return whether a value is a weight, or computed from weights alone."""
    if value is None:
        return False
    if value.const_value is not None:
        return True
    node = value.producer()
    return node is not None and bool(node.inputs) and all(_is_constant(v) for v in node.inputs if v is not None)


def _is_wide(value: ir.Value, vocabulary: int) -> bool:
    """Return whether a constant has one number for each id."""
    constant = value.const_value
    return constant is not None and len(constant.shape) > 0 and constant.shape[-1] == vocabulary and vocabulary > 1


def _width(product: ir.Node) -> int:
    return _sizes(product.inputs[1])[0 if _is_transposed(product) else 1]


def _inner(product: ir.Node) -> int:
    return _sizes(product.inputs[1])[1 if _is_transposed(product) else 0]


def _sizes(weight: ir.Value | None) -> list[int]:
    """Return the sizes of a constant matrix, or of the transpose of one."""
    assert weight is not None
    constant = weight.const_value
    if constant is not None:
        return [size for size in constant.shape if isinstance(size, int)]
    if weight.shape is not None and all(isinstance(size, int) for size in weight.shape):
        return [size for size in weight.shape if isinstance(size, int)]
    node = weight.producer()
    assert node is not None
    return _sizes(node.inputs[0])[::-1]


def _input(name: str, dtype: ir.DataType, rank: int) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape([None] * rank), type=ir.TensorType(dtype))


def _refused(problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model's output projection {problem}, so no shortlist of ids can be made for it: export it without one"
    )
