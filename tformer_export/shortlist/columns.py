"""The output projection apart from the decode stage, for all ids or for columns that were gathered.

The file is then, of standard operators,

    hidden, …  = If(stage) { decode } else { encode }
    gathered   = Transpose(Gather(rows of the projection, gather))
    logits     = If(columns) { hidden × weight } else { hidden × the whole projection }

where `gather`, `columns` and `weight` are inputs, and what was gathered in one call is the weight of later ones. It is
outside of the stages for onnxruntime's sake, which packs a weight that is read in the branch of one `If`, but not of
one within another (`quantize/few_rows_branch.py`). What is added to the product, or scales it, is small, and is picked
by column in the step itself.

Measured, in µs on one thread of a busy machine, of d = 512 and 32,000 ids; gathered columns are packed again at each
call by onnxruntime, which is in these figures:

===================  ========  ====  ====  =====  =====
columns              all       1000  2000  4000   8000
===================  ========  ====  ====  =====  =====
1 row, int8          730       48    158   414    1209
32 rows, int8        2550      102   97    675    1871
1 row, float32       14600     99    215   425    1963
32 rows, float32     32000     568   1148  11900  24000
gathering, int8                128   556   2240   12800
===================  ========  ====  ====  =====  =====

So they are gathered once and not in each step, and up to an eighth of all (`tformer_runtime/engine/shortlist.py`):
whole steps of the model (6+6 layers, int8) took 0.82 of the time with 4,000 columns for one row, and 1.07 with 8,000,
for 32 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format.manifest import COLUMNS, GATHER, GATHERED, WEIGHT, Shortlist

PRODUCTS = ("MatMul", "FusedMatMul", "MatMulInteger", "Gemm")
# What may stand between the product and the logits: each id's logit is made of that id's alone.
BY_ID = {
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
class _Projection:
    """product: of a constant matrix as wide as the vocabulary. behind: the nodes from there to the logits, in order."""

    product: ir.Node
    behind: list[ir.Node]
    vocabulary: int

    @property
    def nodes(self) -> list[ir.Node]:
        return [self.product, *self.behind]


def set_apart(model: ir.Model) -> None:
    """Move the output projection of a staged model out of its decode stage. UnsupportedModelError if there is none
    that can be."""
    graph = model.graph
    choice = next(node for node in graph if node.op_type == "If")
    decode, encode = (choice.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    found = _find(decode)
    hidden = found.product.inputs[0]
    assert hidden is not None
    inside = {value for node in found.nodes for value in node.outputs}
    read = {value for node in found.nodes for value in node.inputs if value is not None} - inside - {hidden}
    constants = [node for value in read if (node := value.producer()) is not None and node.graph is decode]
    other = [use.node for value in inside for use in value.uses() if use.node not in found.nodes]
    if other or any(node.op_type != "Constant" for node in constants):
        raise _refused("reads more than the last hidden state, or is read by more than the logits")
    logits, result = decode.outputs[0], graph.outputs[0]
    if hidden.is_graph_output():
        same = ir.node("Identity", [hidden], name=HIDDEN)
        decode.append(same)
        hidden, same.outputs[0].type = same.outputs[0], hidden.type
        found.product.replace_input_with(0, hidden)
    decode.outputs[0] = hidden
    moved = [node for node in decode if node in found.nodes or node in constants]
    encoded, inner = encode.outputs[0], _inner(found.product)
    maker = encoded.producer()
    assert maker is not None
    held = ir.tensor(np.zeros((0, 0, inner), np.float32))
    nodes = [ir.node("Constant", [], {"value": held}, name=f"no {HIDDEN}")]
    encode.append(nodes[0])
    nodes[0].outputs[0].name = f"{encode.name}/no/{HIDDEN}"
    encode.outputs[0] = nodes[0].outputs[0]
    encode.remove(maker, safe=True)
    decode.remove(moved)
    made = choice.outputs[0]
    found.product.replace_input_with(0, made)
    graph.extend(moved)
    graph.outputs[0] = logits
    logits.shape, logits.type = result.shape, result.type
    made.name, made.shape, made.type = HIDDEN, ir.Shape([None, None, inner]), ir.TensorType(ir.DataType.FLOAT)
    logits.name = "logits" if result.name == HIDDEN else result.name


def choose_columns(model: ir.Model) -> Shortlist:
    """Let the projection that was set apart, quantised or not, be of gathered columns where there are some."""
    graph = model.graph
    found = _find(graph)
    rows, weight = _rows(model, found.product)
    dtype, inner = rows.dtype, _sizes(rows)[1]
    assert dtype is not None
    gather, columns = _input(GATHER, ir.DataType.INT64, 1), _input(COLUMNS, ir.DataType.INT64, 1)
    own = _input(WEIGHT, dtype, 2)
    own.shape = ir.Shape([inner, None])
    graph.inputs.extend([gather, columns, own])
    picked = ir.node("Gather", [rows, gather], {"axis": 0}, name="shortlist.rows")
    turned = ir.node("Transpose", [picked.outputs[0]], {"perm": [1, 0]}, name=GATHERED)
    picked.outputs[0].name, gathered = "shortlist.rows", turned.outputs[0]
    gathered.name, gathered.dtype, gathered.shape = GATHERED, dtype, ir.Shape([inner, None])
    size = ir.node("Size", [columns], name="shortlist.size")
    some = ir.node("Cast", [size.outputs[0]], {"to": ir.DataType.BOOL}, name="shortlist.some")
    size.outputs[0].name, some.outputs[0].name = "shortlist.size", "shortlist.some"
    result = graph.outputs[0]
    branches = {
        "then_branch": _copy(graph, found, "shortlist/", own, columns),
        "else_branch": _copy(graph, found, "all/", weight, None),
    }
    choice = ir.node("If", [some.outputs[0]], branches, name="shortlist")
    logits = choice.outputs[0]
    logits.dtype, logits.shape = ir.DataType.FLOAT, ir.Shape([*list(result.shape or [None, None, None])[:-1], None])
    graph.extend([picked, turned, size, some, choice])
    graph.outputs[0] = logits
    graph.outputs.append(gathered)
    graph.remove(list(reversed(found.nodes)), safe=True)
    logits.name, result.name = result.name, "logits.before"
    return Shortlist(dtype.numpy().name, inner)


def _find(graph: ir.Graph) -> _Projection:
    """The last product of a constant matrix before the logits, and what is behind it."""
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
        if node.op_type not in BY_ID:
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
    behind = []
    for node in graph:
        if any(value in below for value in node.inputs):
            below |= set(node.outputs)
            behind.append(node)
    behind = [node for node in behind if _leads(node, logits)]
    for node in behind:
        if node.op_type not in BY_ID:
            raise _refused(f"is followed by {node.op_type}, which does more than change each id's logit by itself")
    return _Projection(product, behind, _width(product))


def _leads(node: ir.Node, to: ir.Value) -> bool:
    """Whether a value is made of a node's."""
    return any(value is to or any(_leads(use.node, to) for use in value.uses()) for value in node.outputs)


def _copy(graph: ir.Graph, found: _Projection, prefix: str, weight: ir.Value, columns: ir.Value | None) -> ir.Graph:
    """The projection as a branch that reads another weight, as (inner, columns); of some columns alone, if so."""
    nodes: list[ir.Node] = []
    made: dict[ir.Value, ir.Value] = {}
    for node in found.nodes:
        inputs: list[ir.Value | None] = []
        for at, value in enumerate(node.inputs):
            if node is found.product and at == 1:
                inputs.append(weight)
            elif value is None or value in made:
                inputs.append(made[value] if value is not None else None)
            elif columns is not None and _is_wide(value, found.vocabulary):
                picked = ir.node("Gather", [value, columns], {"axis": -1}, name=f"{prefix}{value.name}")
                picked.outputs[0].name = f"{prefix}{value.name}"
                nodes.append(picked)
                inputs.append(picked.outputs[0])
            else:
                inputs.append(value)
        attributes = {name: held.value for name, held in node.attributes.items()}
        kind, domain = node.op_type, node.domain
        if node is found.product and columns is not None:
            kind, domain = ("MatMul", "") if kind == "FusedMatMul" else (kind, domain)
            attributes = {} if kind == "MatMul" else {n: 0 if n == "transB" else v for n, v in attributes.items()}
        copy = ir.node(kind, inputs, attributes, domain=domain, name=f"{prefix}{node.name}")
        for before, after in zip(node.outputs, copy.outputs, strict=True):
            after.name, after.type = f"{prefix}{before.name}", before.type
            made[before] = after
        nodes.append(copy)
    out = made[graph.outputs[0]]
    out.dtype = ir.DataType.FLOAT
    return ir.Graph([], [out], nodes=nodes, opset_imports=graph.opset_imports, name=prefix.rstrip("/"))


def _rows(model: ir.Model, product: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The projection's weight as (vocabulary, inner), and as the product reads it; one held weight for both."""
    weight = product.inputs[1]
    assert weight is not None
    if _turns(product):
        return weight, weight
    above = weight.producer()
    if above is not None and above.op_type == "Transpose":
        rows = above.inputs[0]
        assert rows is not None
        rows.shape = ir.Shape(_sizes(weight)[::-1])
        if rows.dtype is None and weight.dtype is not None:
            rows.dtype = weight.dtype
        return rows, weight
    held = weight.const_value
    assert held is not None
    array = np.ascontiguousarray(held.numpy().T)
    rows = ir.Value(name=f"{weight.name}.by_id", const_value=ir.tensor(array, name=f"{weight.name}.by_id"))
    rows.shape, rows.dtype = ir.Shape(array.shape), held.dtype
    model.graph.initializers[str(rows.name)] = rows
    turn = ir.node("Transpose", [rows], {"perm": [1, 0]}, name=f"{rows.name}.turned")
    turn.outputs[0].name, turn.outputs[0].dtype = f"{rows.name}.turned", held.dtype
    model.graph.insert_before(model.graph[0], turn)
    weight.replace_all_uses_with(turn.outputs[0])
    del model.graph.initializers[str(weight.name)]
    return rows, turn.outputs[0]


def _turns(product: ir.Node) -> bool:
    flag = product.attributes.get("transB")
    return flag is not None and bool(flag.as_int())


def _is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a weight, or made of weights alone."""
    if value is None:
        return False
    if value.const_value is not None:
        return True
    node = value.producer()
    return node is not None and bool(node.inputs) and all(_is_constant(v) for v in node.inputs if v is not None)


def _is_wide(value: ir.Value, vocabulary: int) -> bool:
    """Whether a constant has a number for each id."""
    held = value.const_value
    return held is not None and len(held.shape) > 0 and held.shape[-1] == vocabulary and vocabulary > 1


def _width(product: ir.Node) -> int:
    return _sizes(product.inputs[1])[0 if _turns(product) else 1]


def _inner(product: ir.Node) -> int:
    return _sizes(product.inputs[1])[1 if _turns(product) else 0]


def _sizes(weight: ir.Value | None) -> list[int]:
    """Of a matrix that is constant, or the transpose of one."""
    assert weight is not None
    held = weight.const_value
    if held is not None:
        return [size for size in held.shape if isinstance(size, int)]
    if weight.shape is not None and all(isinstance(size, int) for size in weight.shape):
        return [size for size in weight.shape if isinstance(size, int)]
    node = weight.producer()
    assert node is not None
    return _sizes(node.inputs[0])[::-1]


def _input(name: str, dtype: ir.DataType, rank: int) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape([None] * rank), type=ir.TensorType(dtype))


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model's output projection {what}, so no shortlist of ids can be made for it: export it without one"
    )
