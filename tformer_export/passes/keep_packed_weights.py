"""Keep matrices that the source stores in 4-bit integers: their products read these integers, not the floats.

MatMulNBits computes with the weights (integer − zero point) · scale in float32, as the source model does, so the parity
gate compares the integers too. A matrix is found by its numbers, because its name is lost on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, is_float_weight, replace_node
from tformer_export.common.packed_weight import PackedWeight
from tformer_export.passes.weight_bits import describe
from tformer_runtime.base.errors import UnsupportedModelError

_CONTRIB = "com.microsoft"
_FLOAT_ACTIVATIONS = 1  # accuracy level: products are computed in float32


def run(model: ir.Model, packed: Mapping[str, PackedWeight]) -> int:
    """Let the products of these matrices read their integers, and return the number of matrices.

    packed: name → matrix. Raises UnsupportedModelError for a matrix that is not the constant operand of a product.
    Cost: a pass over the weights.
    """
    if not packed:
        return 0
    names = {_digest(weight.dequantize()): name for name, weight in packed.items()}
    found: set[str] = set()
    digests: dict[tuple[ir.Value, bool], bytes] = {}
    for node in list(model.graph.all_nodes()):
        operand = _constant_operand(node)
        if operand is None:
            continue
        if operand not in digests:
            value, is_transposed = operand
            assert value.const_value is not None
            numbers = value.const_value.numpy()
            digests[operand] = _digest(numbers.T if is_transposed else numbers)
        name = names.get(digests[operand])
        if name is not None:
            _replace(model, node, name, packed[name])
            found.add(name)
    if missing := sorted({name for name in names.values() if name not in found}):
        raise UnsupportedModelError(
            f"the weight {missing[0]} is in 4-bit integers in the source, and the model changes it before it is "
            f"multiplied ({len(missing)} of {len(names)} weights): export the unquantised model, and quantise it here"
        )
    return len(found)


def _constant_operand(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """Return the constant on the right of a product, and whether it is stored as (N, K); None for other nodes."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain or node.inputs[1] is None:
        return None
    value, is_transposed = node.inputs[1], False
    if node.op_type == "Gemm":
        neutral = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        if any(name in node.attributes and node.attributes[name].value != number for name, number in neutral.items()):
            return None
        flag = node.attributes.get("transB")
        is_transposed = flag is not None and bool(flag.as_int())
    above = value.producer()
    if above is not None and above.op_type == "Transpose" and above.inputs[0] is not None:
        value, is_transposed = above.inputs[0], not is_transposed
    return (value, is_transposed) if is_float_weight(value, 2) else None


def _replace(model: ir.Model, node: ir.Node, name: str, weight: PackedWeight) -> None:
    """Replace a product by one that reads the integers."""
    inner, columns = weight.integers.shape
    integers, scales, zeros = weight.operands()
    operands = [
        describe(constant(model, f"{name}.integers", integers), 4, inner * columns),
        describe(constant(model, f"{name}.scales", scales)),
        constant(model, f"{name}.zeros", zeros),
    ]
    (rows, *_), nodes = node.inputs, []
    label = node.name or f"product of {node.outputs[0].name}"
    if weight.order is not None:
        order = constant(model, f"{name}.order", weight.order)
        nodes.append(ir.node("Gather", [rows, order], {"axis": -1}, name=f"{label}.ordered"))
        rows = nodes[-1].outputs[0]
    nodes.append(
        ir.node(
            "MatMulNBits",
            [rows, *operands],
            {"K": inner, "N": columns, "bits": 4, "block_size": weight.block, "accuracy_level": _FLOAT_ACTIVATIONS},
            domain=_CONTRIB,
            version=1,
            name=f"{label}.packed",
        )
    )
    model.graph.opset_imports.setdefault(_CONTRIB, 1)
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], node.inputs[2]], name=f"{label}.biased"))
    for new in nodes:
        new.outputs[0].name, new.outputs[0].dtype = str(new.name), ir.DataType.FLOAT
    replace_node(node, nodes)


def _digest(matrix: np.ndarray) -> bytes:
    result = hashlib.sha256(repr(matrix.shape).encode())
    result.update(np.ascontiguousarray(matrix, np.float32).data)
    return result.digest()
