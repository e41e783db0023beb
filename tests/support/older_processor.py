"""Integer products as x86 processors without VNNI compute them, in standard operators, for any processor to run.

VPMADDUBSW multiplies uint8 by int8 and adds each two neighbours up in 16 bits, saturated. onnxruntime's kernels pair
rows 2i and 2i + 1 of the weights; `test_pair_sums.py` compares with them, where a processor has no better ones.
"""

from __future__ import annotations

import onnx
from onnx import GraphProto, ModelProto, NodeProto, inliner, parser

DOMAIN = "older.processor"
PRODUCTS = ("MatMulInteger", "MatMulIntegerToFloat")

# y (…, N) int32 = (a − zero) b of uint8 a (…, K) and int8 b (K, N), of which an odd K gets a row of zeros
_PRODUCT = """
<domain: "older.processor", opset_import: ["" : {version}]>
Product (a, b, zero) => (y) {{
    none = Constant <value = int64[1] {{0}}> ()
    one = Constant <value = int64[1] {{1}}> ()
    two = Constant <value = int64[1] {{2}}> ()
    last = Constant <value = int64[1] {{-1}}> ()
    rows = Constant <value = int64[1] {{-2}}> ()
    end = Constant <value = int64[1] {{9223372036854775807}}> ()
    lowest = Constant <value = int32 {{{lowest}}}> ()
    highest = Constant <value = int32 {{{highest}}}> ()
    narrow_a = Cast <to = 6> (a)
    narrow_b = Cast <to = 6> (b)
    inner = Shape <start = 0, end = 1> (b)
    odd = Mod (inner, two)
    more = Concat <axis = 0> (none, odd)
    whole_a = Pad (narrow_a, more, , last)
    whole_b = Pad (narrow_b, more, , none)
    a_first = Slice (whole_a, none, end, last, two)
    b_first = Slice (whole_b, none, end, none, two)
    a_second = Slice (whole_a, one, end, last, two)
    b_second = Slice (whole_b, one, end, none, two)
    a_column = Unsqueeze (a_first, last)
    first = Mul (a_column, b_first)
    next_column = Unsqueeze (a_second, last)
    second = Mul (next_column, b_second)
    pairs = Add (first, second)
    held = Clip (pairs, lowest, highest)
    total = ReduceSum <keepdims = 0> (held, rows)
    columns = ReduceSum <keepdims = 0> (whole_b, none)
    origin = Cast <to = 6> (zero)
    moved = Mul (origin, columns)
    y = Sub (total, moved)
}}
"""
_TO_FLOAT = """
<domain: "older.processor", opset_import: ["" : {version}, "older.processor" : 1]>
ProductToFloat{name} (a, b, a_scale, b_scale, zero{bias}) => (y) {{
    product = older.processor.Product (a, b, zero)
    number = Cast <to = 1> (product)
    by_row = Mul (number, a_scale)
    by_column = Mul (by_row, b_scale)
    y = {last}
}}
"""


def spelt_out(model: ModelProto, saturating: bool) -> ModelProto:
    """A copy of a model whose integer products are made of operators, pair by pair.

    saturating: pairs are in 16 bits, else in 32. Everything else is the same, so that results are, bit for bit, unless
    a pair saturates.
    """
    bits = 15 if saturating else 31
    version = next(opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx"))
    texts = [
        _PRODUCT.format(version=version, lowest=-(2**bits), highest=2**bits - 1),
        _TO_FLOAT.format(version=version, name="", bias="", last="Identity (by_column)"),
        _TO_FLOAT.format(version=version, name="Biased", bias=", bias", last="Add (by_column, bias)"),
    ]
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.functions.extend(parser.parse_function(text) for text in texts)
    copy.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    _exchange(copy.graph)
    return inliner.inline_local_functions(copy)  # the runtime refuses functions of a graph


def integer_products(graph: GraphProto) -> list[NodeProto]:
    """Yield the nodes of a graph and of its branches."""
    own = [node for node in graph.node if node.op_type in PRODUCTS]
    branches = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return own + [node for branch in branches for node in integer_products(branch)]


def _exchange(graph: GraphProto) -> None:
    for node in integer_products(graph):
        inputs = [*node.input]
        if node.op_type == "MatMulInteger":
            assert len(inputs) == 3
            node.op_type = "Product"
        else:
            assert not any(inputs[5:6])  # weights around zero
            biased = len(inputs) > 6 and inputs[6]
            node.op_type = "ProductToFloatBiased" if biased else "ProductToFloat"
            del node.input[:]
            node.input.extend([*inputs[:5], *(inputs[6:7] if biased else ())])
        node.domain = DOMAIN
