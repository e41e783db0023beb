"""Graphs that choose the next token on the device: the host then reads a few bytes a row instead of all logits.

`add_greedy_choice` adds nodes to the decode stage: the likeliest token, its log-probability, and the position inputs of
the next step. `cuda_graphs.CapturedStep` binds these outputs to the step's own input buffers. So a step that continues
from the likeliest tokens finds its inputs in place, and one CUDA graph holds all of it.

For sampling, `top_logits_model` is a separate model. It finds the likeliest tokens of each row and the weight of all
tokens. From these the host draws the same token as from the whole row, or detects that it needs the whole row
(`decoding.sampling.warp_top_logits`). It runs only for steps that sample, so that greedy steps do not pay for it.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.format.manifest import LAST_POSITION, POSITIONS, START_SLOT, DecodeStage
from tformer_runtime.format.onnx_fields import (
    ATTRIBUTE_I,
    ATTRIBUTE_NAME,
    ATTRIBUTE_TYPE,
    ATTRIBUTE_TYPE_INT,
    DATA_TYPE_FLOAT,
    DATA_TYPE_INT32,
    DATA_TYPE_INT64,
    GRAPH_INITIALIZER,
    GRAPH_INPUT,
    GRAPH_NAME,
    GRAPH_NODE,
    GRAPH_OUTPUT,
    MODEL_GRAPH,
    MODEL_IR_VERSION,
    MODEL_OPSET_IMPORT,
    NODE_ATTRIBUTE,
    NODE_INPUT,
    NODE_OP_TYPE,
    NODE_OUTPUT,
    OPERATOR_SET_ID_VERSION,
    TENSOR_DATA_TYPE,
    TENSOR_DIMS,
    TENSOR_NAME,
    TENSOR_RAW_DATA,
    TYPE_TENSOR_ELEM_TYPE,
    TYPE_TENSOR_TYPE,
    VALUE_INFO_NAME,
    VALUE_INFO_TYPE,
)
from tformer_runtime.format.onnx_wire import bytes_field, varint_field

NEXT_PREFIX = "next."  # an output that becomes an input of the next step has the input's name with this prefix
NEXT_LOGPROB = "next.logprob"
TOP_LOGITS_COUNT = 256  # of a row: 3 KB, and more than most sampling options need
LOGITS_INPUT = "logits"  # inputs and outputs of `top_logits_model`
TEMPERATURES_INPUT = "temperatures"
TOP_VALUES = "values"
TOP_TOKENS = "tokens"
TOTAL_WEIGHT = "weight"

MIN_PART, MAX_PART = 64, 2048  # sizes of parts of a row of logits: CUDA's TopK sorts up to 2048 numbers in one block

_IR_VERSION, _OPSET_VERSION = 10, 21


class TopLogits(NamedTuple):
    """The likeliest tokens of a row: no other token has a greater logit.

    tokens, logits: (count,), in the order of the vocabulary.
    total: Σ exp((logit - greatest) / temperature) of the whole row, with the relative error that
        `decoding.sampling.warp_top_logits` allows for.
    complete: whether the vocabulary has no other tokens.
    """

    tokens: Ints
    logits: F32
    total: float
    complete: bool


def add_greedy_choice(model: bytes, decode: DecodeStage) -> bytes:
    """Return the model with nodes that choose the likeliest token. Protobuf merges the parts of a message."""
    logits, token = decode.logits.name, NEXT_PREFIX + decode.step.name
    token_type = DATA_TYPE_INT32 if decode.step.dtype == "int32" else DATA_TYPE_INT64
    parts = [
        _tensor("next/axis", DATA_TYPE_INT64, (1,), struct.pack("<q", -1)),
        _tensor("next/first", DATA_TYPE_INT64, (), struct.pack("<q", 0)),
        _tensor("next/one", DATA_TYPE_INT64, (), struct.pack("<q", 1)),
        *_find_likeliest(logits, int(decode.logits.shape[-1])),
        _node("Squeeze", ["next/best.index", "next/axis"], "next/best"),
        _node("Cast", ["next/best"], token, to=token_type),
        _node("Softmax", [logits], "next/probabilities", axis=-1),
        _node("GatherElements", ["next/probabilities", "next/best.index"], "next/probability", axis=-1),
        _node("Squeeze", ["next/probability", "next/axis"], "next/probability.row"),
        _node("Log", ["next/probability.row"], NEXT_LOGPROB),
        # 1, computed from the logits: before they exist, other nodes read the buffers that these outputs overwrite.
        _node("Sub", ["next/best", "next/best"], "next/zeros"),
        _node("Add", ["next/zeros", "next/one"], "next/ones"),
        _node("Gather", ["next/ones", "next/first"], "next/ones.row", axis=1),
        _output(token, token_type),
        _output(NEXT_LOGPROB, DATA_TYPE_FLOAT),
    ]
    if POSITIONS in decode.controls:
        parts += [
            _node("Add", [POSITIONS, "next/ones"], NEXT_PREFIX + POSITIONS),
            _output(NEXT_PREFIX + POSITIONS, DATA_TYPE_INT64),
        ]
    if START_SLOT in decode.controls:
        parts += [
            _node("Add", [START_SLOT, "next/ones.row"], NEXT_PREFIX + START_SLOT),
            _output(NEXT_PREFIX + START_SLOT, DATA_TYPE_INT64),
        ]
    if LAST_POSITION in decode.controls:
        parts += [
            _node("Cast", ["next/ones.row"], "next/ones.last", to=DATA_TYPE_INT32),
            _node("Add", [LAST_POSITION, "next/ones.last"], NEXT_PREFIX + LAST_POSITION),
            _output(NEXT_PREFIX + LAST_POSITION, DATA_TYPE_INT32),
        ]
    return model + bytes_field(MODEL_GRAPH, b"".join(parts))


def _find_likeliest(logits: str, vocabulary: int) -> list[bytes]:
    """Return nodes that find the index of the greatest logit of each row, the first of several: next/best.index.

    On CUDA, reductions of few long rows (ArgMax, ReduceMax, ReduceLogSumExp) take milliseconds, and TopK of a long row
    takes one multiprocessor. TopK of many short rows is fast, so that a long row is first cut into parts.
    """
    nodes = [_tensor("next/k", DATA_TYPE_INT64, (1,), struct.pack("<q", 1))]
    if vocabulary <= MAX_PART:
        return [*nodes, _node("TopK", [logits, "next/k"], "next/best.value", "next/best.index", axis=-1)]
    size = _part_size(vocabulary)
    padding = -vocabulary % size
    if padding:
        pads = struct.pack("<6q", 0, 0, 0, 0, 0, padding)
        nodes += [
            _tensor("next/pads", DATA_TYPE_INT64, (6,), pads),
            _tensor("next/least", DATA_TYPE_FLOAT, (), struct.pack("<f", -math.inf)),
            _node("Pad", [logits, "next/pads", "next/least"], "next/padded"),
        ]
    parts_shape = struct.pack("<4q", 0, 0, (vocabulary + padding) // size, size)
    return [
        *nodes,
        _tensor("next/parts.shape", DATA_TYPE_INT64, (4,), parts_shape),
        _tensor("next/size", DATA_TYPE_INT64, (), struct.pack("<q", size)),
        _node("Reshape", ["next/padded" if padding else logits, "next/parts.shape"], "next/parts"),
        _node("TopK", ["next/parts", "next/k"], "next/part.values", "next/part.indices", axis=-1),
        _node("Squeeze", ["next/part.values", "next/axis"], "next/part.value"),
        _node("Squeeze", ["next/part.indices", "next/axis"], "next/part.index"),
        _node("TopK", ["next/part.value", "next/k"], "next/best.value", "next/best.part", axis=-1),
        _node("GatherElements", ["next/part.index", "next/best.part"], "next/best.offset", axis=-1),
        _node("Mul", ["next/best.part", "next/size"], "next/best.begin"),
        _node("Add", ["next/best.begin", "next/best.offset"], "next/best.index"),
    ]


def _part_size(vocabulary: int) -> int:
    """Return the size of the parts of a row: the greatest that divides it and is not small, else a round number."""
    sizes = (size for size in range(MAX_PART, MIN_PART - 1, -1) if vocabulary % size == 0)
    return next(sizes, MAX_PART // 2)


def top_logits_model(vocabulary: int) -> bytes:
    """Return the model that `TopLogitsFinder` runs.

    It maps (rows, 1, vocabulary) logits and (rows, 1, 1) temperatures to the TOP_LOGITS_COUNT greatest logits, their
    tokens, and Σ exp((logit - greatest) / temperature).
    """
    graph = [
        bytes_field(GRAPH_NAME, b"top logits"),
        _tensor("first", DATA_TYPE_INT64, (1,), struct.pack("<q", 0)),
        _tensor("count", DATA_TYPE_INT64, (1,), struct.pack("<q", min(TOP_LOGITS_COUNT, vocabulary))),
        _node("TopK", [LOGITS_INPUT, "count"], TOP_VALUES, TOP_TOKENS, axis=-1),
        # The probability of the greatest logit is 1 / Σ exp((logit - greatest) / temperature).
        _node("Gather", [TOP_VALUES, "first"], "greatest", axis=2),
        _node("Gather", [TOP_TOKENS, "first"], "likeliest", axis=2),
        _node("Sub", [LOGITS_INPUT, "greatest"], "less"),
        _node("Div", ["less", TEMPERATURES_INPUT], "scores"),
        _node("Softmax", ["scores"], "probabilities", axis=-1),
        _node("GatherElements", ["probabilities", "likeliest"], "probability", axis=-1),
        _node("Reciprocal", ["probability"], TOTAL_WEIGHT),
        _input(LOGITS_INPUT, DATA_TYPE_FLOAT),
        _input(TEMPERATURES_INPUT, DATA_TYPE_FLOAT),
        _output(TOP_VALUES, DATA_TYPE_FLOAT),
        _output(TOP_TOKENS, DATA_TYPE_INT64),
        _output(TOTAL_WEIGHT, DATA_TYPE_FLOAT),
    ]
    opset = varint_field(OPERATOR_SET_ID_VERSION, _OPSET_VERSION)
    versions = varint_field(MODEL_IR_VERSION, _IR_VERSION) + bytes_field(MODEL_OPSET_IMPORT, opset)
    return versions + bytes_field(MODEL_GRAPH, b"".join(graph))


def _node(op_type: str, inputs: list[str], *outputs: str, **attributes: int) -> bytes:
    """Return a field of a GraphProto: a node with integer attributes."""
    content = b"".join(bytes_field(NODE_INPUT, name.encode()) for name in inputs)
    content += b"".join(bytes_field(NODE_OUTPUT, name.encode()) for name in outputs)
    content += bytes_field(NODE_OP_TYPE, op_type.encode())
    for name, value in attributes.items():
        attribute = bytes_field(ATTRIBUTE_NAME, name.encode()) + varint_field(ATTRIBUTE_I, value % 2**64)
        attribute += varint_field(ATTRIBUTE_TYPE, ATTRIBUTE_TYPE_INT)
        content += bytes_field(NODE_ATTRIBUTE, attribute)
    return bytes_field(GRAPH_NODE, content)


def _tensor(name: str, data_type: int, shape: tuple[int, ...], raw: bytes) -> bytes:
    """Return a field of a GraphProto: an initializer."""
    content = b"".join(varint_field(TENSOR_DIMS, size) for size in shape) + varint_field(TENSOR_DATA_TYPE, data_type)
    content += bytes_field(TENSOR_NAME, name.encode()) + bytes_field(TENSOR_RAW_DATA, raw)
    return bytes_field(GRAPH_INITIALIZER, content)


def _input(name: str, data_type: int) -> bytes:
    """Return a field of a GraphProto: an input of any shape."""
    return bytes_field(GRAPH_INPUT, _value_info(name, data_type))


def _output(name: str, data_type: int) -> bytes:
    """Return a field of a GraphProto: an output of any shape."""
    return bytes_field(GRAPH_OUTPUT, _value_info(name, data_type))


def _value_info(name: str, data_type: int) -> bytes:
    tensor_type = bytes_field(TYPE_TENSOR_TYPE, varint_field(TYPE_TENSOR_ELEM_TYPE, data_type))
    return bytes_field(VALUE_INFO_NAME, name.encode()) + bytes_field(VALUE_INFO_TYPE, tensor_type)
