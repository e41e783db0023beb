"""Graphs that choose the next token on the device, so that a few bytes a row come back in the place of all logits.

`with_choice` adds nodes behind the decode stage: the likeliest token, its log-probability, and where the token after it
will stand. `cuda_graphs.CapturedStep` has them written over the step's own inputs, so that a step that goes on from the
likeliest tokens finds everything in its place, and one CUDA graph holds all of it.

For sampling, `top_logits_model` is a small model of its own. It finds the likeliest tokens of each row and what all
tokens weigh, from which the host draws what it would from the whole row, or finds that it needs that
(`sampling.warp_top_logits`). It is run for steps that draw alone, so that greedy ones do not pay for it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.format.manifest import LAST, POSITIONS, START, Decode
from tformer_runtime.format.onnx_wire import VARINT, message, tag, varint

NEXT = "next."  # what the outputs are called: as the inputs that they become, behind this
LOGPROB = "next.logprob"
TOP_TOKENS = 256  # of a row: 3 KB, and more than most ask for
LOGITS, TEMPERATURES, VALUES, TOKENS, WEIGHT = "logits", "temperatures", "values", "tokens", "weight"

_FLOAT, _INT32, _INT64 = 1, 6, 7  # onnx.TensorProto.DataType
_MODEL_IR, _MODEL_GRAPH, _MODEL_OPSET = 1, 7, 8
_GRAPH_NAME = 2
_OPSET_VERSION = 2
_IR, _OPSET = 10, 21


class TopLogits(NamedTuple):
    """The likeliest tokens of a row: no other has a greater logit than any of them.

    tokens, logits: (count,), in the order of the vocabulary. total: Σ exp((logit - greatest) / temperature) of the
    whole row, to within `sampling.SLACK` of itself. whole: whether there are no other tokens.
    """

    tokens: Ints
    logits: F32
    total: float
    whole: bool


def with_choice(model: bytes, decode: Decode) -> bytes:
    """The model with the nodes that choose. Protobuf merges a message that comes in parts."""
    logits, token = decode.logits.name, NEXT + decode.step.name
    kind = _INT32 if decode.step.dtype == "int32" else _INT64
    parts = [
        _tensor("next/axis", _INT64, (1,), struct.pack("<q", -1)),
        _tensor("next/first", _INT64, (), struct.pack("<q", 0)),
        _tensor("next/one", _INT64, (), struct.pack("<q", 1)),
        _node("ArgMax", [logits], "next/best", axis=-1, keepdims=0),
        _node("Cast", ["next/best"], token, to=kind),
        _node("ReduceMax", [logits, "next/axis"], "next/top", keepdims=0),
        _node("ReduceLogSumExp", [logits, "next/axis"], "next/total", keepdims=0),
        _node("Sub", ["next/top", "next/total"], LOGPROB),
        # One more, but not before the logits are there: until then nodes read what this is written over.
        _node("Sub", ["next/best", "next/best"], "next/zeros"),
        _node("Add", ["next/zeros", "next/one"], "next/ones"),
        _node("Gather", ["next/ones", "next/first"], "next/ones.row", axis=1),
        _output(token, kind),
        _output(LOGPROB, _FLOAT),
    ]
    if POSITIONS in decode.controls:
        parts += [_node("Add", [POSITIONS, "next/ones"], NEXT + POSITIONS), _output(NEXT + POSITIONS, _INT64)]
    if START in decode.controls:
        parts += [_node("Add", [START, "next/ones.row"], NEXT + START), _output(NEXT + START, _INT64)]
    if LAST in decode.controls:
        parts += [
            _node("Cast", ["next/ones.row"], "next/ones.last", to=_INT32),
            _node("Add", [LAST, "next/ones.last"], NEXT + LAST),
            _output(NEXT + LAST, _INT32),
        ]
    return model + message(_MODEL_GRAPH, b"".join(parts))


def top_logits_model(vocabulary: int) -> bytes:
    """The model that `TopLogitsFinder` runs: (rows, 1, vocabulary) logits and (rows, 1, 1) temperatures → their
    TOP_TOKENS greatest, which tokens these are, and Σ exp((logit - greatest) / temperature)."""
    graph = [
        message(_GRAPH_NAME, b"top logits"),
        _tensor("axis", _INT64, (1,), struct.pack("<q", -1)),
        _tensor("count", _INT64, (1,), struct.pack("<q", min(TOP_TOKENS, vocabulary))),
        _node("TopK", [LOGITS, "count"], VALUES, TOKENS, axis=-1),
        _node("ReduceMax", [LOGITS, "axis"], "greatest"),
        _node("Sub", [LOGITS, "greatest"], "less"),
        _node("Div", ["less", TEMPERATURES], "scores"),
        _node("Exp", ["scores"], "weights"),
        _node("ReduceSum", ["weights", "axis"], WEIGHT),
        _input(LOGITS, _FLOAT),
        _input(TEMPERATURES, _FLOAT),
        _output(VALUES, _FLOAT),
        _output(TOKENS, _INT64),
        _output(WEIGHT, _FLOAT),
    ]
    versions = _number(_MODEL_IR, _IR) + message(_MODEL_OPSET, _number(_OPSET_VERSION, _OPSET))
    return versions + message(_MODEL_GRAPH, b"".join(graph))


# The parts of a GraphProto: node 1, initializer 5, input 11, output 12; of NodeProto: input 1, output 2, op_type 4,
# attribute 5; of AttributeProto: name 1, i 3, type 20 (2 for an integer); of TensorProto: dims 1, data_type 2, name 8,
# raw_data 9.


def _node(op: str, inputs: list[str], *outputs: str, **attributes: int) -> bytes:
    content = b"".join(message(1, name.encode()) for name in inputs)
    content += b"".join(message(2, name.encode()) for name in outputs) + message(4, op.encode())
    for name, value in attributes.items():
        content += message(5, message(1, name.encode()) + _number(3, value % 2**64) + _number(20, 2))
    return message(1, content)


def _tensor(name: str, kind: int, shape: tuple[int, ...], raw: bytes) -> bytes:
    dims = b"".join(_number(1, size) for size in shape)
    return message(5, dims + _number(2, kind) + message(8, name.encode()) + message(9, raw))


def _input(name: str, kind: int) -> bytes:
    return message(11, _value(name, kind))


def _output(name: str, kind: int) -> bytes:
    return message(12, _value(name, kind))


def _value(name: str, kind: int) -> bytes:
    tensor = message(1, _number(1, kind))  # TypeProto.tensor_type, of any shape
    return message(1, name.encode()) + message(2, tensor)


def _number(field: int, value: int) -> bytes:
    return tag(field, VARINT) + varint(value)
