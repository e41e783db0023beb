"""Replace a Gelu that is spelled out by the standard operator Gelu (Hendrycks and Gimpel 2016).

    ½ · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))   → Gelu with approximate="tanh"
    ½ · x · (1 + erf(x / √2))                          → Gelu

The factors may come in any order, and x³ as a power or as products: what tanh or erf reads, and what the sum with 1 is
multiplied by, is compared as a polynomial of x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from tformer_export.common.ir_edit import only_user, replace_node

_SCALE = math.sqrt(2 / math.pi)
# operator → the polynomial of x that it reads, as degree → coefficient; the value of the attribute `approximate`
_FORMS = {"Tanh": ({1: _SCALE, 3: 0.044715 * _SCALE}, "tanh"), "Erf": ({1: math.sqrt(0.5)}, "none")}
_HALF = {1: 0.5}
_TOLERANCE = 4 * 2.0**-24  # of a coefficient, over its value: each constant in it is rounded to float32
_MAX_DEGREE = 3
_MAX_DEPTH = 6  # operators on a path to x; √(2/π) · (x + 0.044715 · x · x · x) has 5

_Polynomial = dict[int, float]


def run(model: ir.Model) -> int:
    """Replace them in place, and return how many there were. Linear in the number of nodes.

    Nodes that nothing reads any more stay in the graph.
    """
    count = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            count += node.op_type in _FORMS and not node.domain and _replace(node)
    return count


def _replace(root: ir.Node) -> bool:
    """Replace the Gelu that contains this Tanh or Erf; return False if there is none."""
    expected, approximate = _FORMS[root.op_type]
    argument = root.inputs[0]
    if argument is None or argument.dtype not in (None, ir.DataType.FLOAT):
        return False
    for x in dict.fromkeys(_values_before(argument)):
        if _is_equal(_polynomial(argument, x), expected):
            last = _last_product(root, x)
            if last is not None:
                gelu = ir.node("Gelu", [x], {"approximate": approximate}, name=f"{last.name}.gelu")
                replace_node(last, [gelu])
            return last is not None
    return False


def _values_before(value: ir.Value, depth: int = 0) -> Iterator[ir.Value]:
    """Yield a value and those from which it is computed, up to the greatest depth. Constants are none of them."""
    if value.const_value is not None:
        return
    yield value
    node = value.producer()
    if node is not None and depth < _MAX_DEPTH and node.op_type in ("Mul", "Add", "Div", "Pow"):
        for operand in node.inputs:
            if operand is not None:
                yield from _values_before(operand, depth + 1)


def _last_product(root: ir.Node, x: ir.Value) -> ir.Node | None:
    """Return the node whose result is ½ · x · (1 + root); None if there is none.

    No other node may read the sum, or the products before the last.
    """
    total = only_user(root.outputs[0])
    if total is None or total.op_type != "Add" or total.domain:
        return None
    if not any(_number(value, x) == 1 for value in total.inputs):
        return None
    last, factor = total, {0: 1.0}
    while not _is_equal(factor, _HALF):
        value, node = last.outputs[0], only_user(last.outputs[0])
        if node is None or node.op_type not in ("Mul", "Div") or node.domain:
            return None
        if node.op_type == "Div" and node.inputs[0] is not value:
            return None
        other = _polynomial(node.inputs[1 if node.inputs[0] is value else 0], x)
        new = _quotient(factor, other) if node.op_type == "Div" else _product(factor, other)
        if new is None:
            return None
        last, factor = node, new
    return last


def _polynomial(value: ir.Value | None, x: ir.Value, depth: int = 0) -> _Polynomial | None:
    """Return a value as a polynomial of x; None if it is none, or if its degree is too high."""
    if value is x:
        return {1: 1.0}
    number = _number(value, x)
    if number is not None:
        return {0: number}
    node = value.producer() if value is not None else None
    if node is None or node.domain or depth == _MAX_DEPTH or len(node.inputs) != 2:
        return None
    if node.op_type not in ("Mul", "Add", "Div", "Pow"):
        return None
    one, other = (_polynomial(operand, x, depth + 1) for operand in node.inputs)
    if one is None or other is None:
        return None
    if node.op_type == "Add":
        return {degree: one.get(degree, 0.0) + other.get(degree, 0.0) for degree in one | other}
    if node.op_type == "Div":
        return _quotient(one, other)
    if node.op_type == "Mul":
        return _product(one, other)
    return _power(one, other)


def _product(one: _Polynomial, other: _Polynomial | None) -> _Polynomial | None:
    if other is None or max(one) + max(other) > _MAX_DEGREE:
        return None
    result: _Polynomial = {}
    for degree, coefficient in one.items():
        for further, factor in other.items():
            result[degree + further] = result.get(degree + further, 0.0) + coefficient * factor
    return result


def _quotient(one: _Polynomial, other: _Polynomial | None) -> _Polynomial | None:
    """Return a polynomial that is divided by a number."""
    if other is None or max(other) > 0 or other[0] == 0:
        return None
    return {degree: coefficient / other[0] for degree, coefficient in one.items()}


def _power(one: _Polynomial, other: _Polynomial) -> _Polynomial | None:
    """Return a polynomial to a power of 1 to 3."""
    if max(other) > 0 or other[0] not in (1, 2, 3):
        return None
    result: _Polynomial | None = one
    for _ in range(int(other[0]) - 1):
        result = None if result is None else _product(result, one)
    return result


def _is_equal(one: _Polynomial | None, other: _Polynomial) -> bool:
    """Return whether the coefficients are equal, but for the rounding of constants to float32."""
    return (
        one is not None
        and one.keys() == other.keys()
        and all(math.isclose(one[degree], other[degree], rel_tol=_TOLERANCE) for degree in one)
    )


def _number(value: ir.Value | None, x: ir.Value) -> float | None:
    """Return the number of a constant; None for other values, and for one that would give a result more axes than x."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    axes = len(value.const_value.shape)
    if axes and (x.shape is None or axes > len(x.shape)):
        return None
    return float(value.const_value.numpy().item())
