"""The greedy choice on the device: of what a step gives, a few bytes a row come back, and the next is fed from there.

Behind the decode stage the model is given some nodes more: the likeliest token, its log-probability, and where the
token after it will stand. `graphs.Step` has them written over the step's own inputs, so that a step that goes on from
the likeliest tokens finds everything in its place, and one CUDA graph holds all of it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tformer_runtime.manifest import LAST, POSITIONS, START, Decode
from tformer_runtime.protobuf import message as _message
from tformer_runtime.protobuf import tag as _tag
from tformer_runtime.protobuf import varint as _written

if TYPE_CHECKING:
    from tformer_runtime.graphs import Step
    from tformer_runtime.session import Array

NEXT = "next."  # what the outputs are called: as the inputs that they become, behind this
LOGPROB = "next.logprob"

_FLOAT, _INT32, _INT64 = 1, 6, 7  # onnx.TensorProto.DataType
_MODEL_GRAPH = 7


class Chosen:
    """The logits of a step, (rows, vocabulary), on the device, and what is likeliest, on the host.

    tokens: (rows,). logprobs: (rows,). It counts and is indexed as the array of logits, which is read only then, and is
    no longer there after the next step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.tokens: Array = step.told[step.token][:, 0].copy()
        self.logprobs: Array = step.outputs[LOGPROB].numpy()[:, 0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: Array) -> Array:
        return self.copy()[at]

    def copy(self) -> Array:
        logits: Array = self._step.logits.numpy()[:, 0]
        return logits


def choosing(model: bytes, decode: Decode) -> bytes:
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
    return model + _message(_MODEL_GRAPH, b"".join(parts))


# The parts of a GraphProto: node 1, initializer 5, output 12; of NodeProto: input 1, output 2, op_type 4, attribute 5;
# of AttributeProto: name 1, i 3, type 20 (2 for an integer); of TensorProto: dims 1, data_type 2, name 8, raw_data 9.


def _node(op: str, inputs: list[str], output: str, **attributes: int) -> bytes:
    content = b"".join(_message(1, name.encode()) for name in inputs)
    content += _message(2, output.encode()) + _message(4, op.encode())
    for name, value in attributes.items():
        number = _tag(3, 0) + _written(value % 2**64)
        content += _message(5, _message(1, name.encode()) + number + _tag(20, 0) + _written(2))
    return _message(1, content)


def _tensor(name: str, kind: int, shape: tuple[int, ...], raw: bytes) -> bytes:
    dims = b"".join(_tag(1, 0) + _written(size) for size in shape)
    return _message(5, dims + _tag(2, 0) + _written(kind) + _message(8, name.encode()) + _message(9, raw))


def _output(name: str, kind: int) -> bytes:
    tensor = _message(1, _tag(1, 0) + _written(kind))  # TypeProto.tensor_type, of any shape
    return _message(12, _message(1, name.encode()) + _message(2, tensor))
