"""Choosing on the device: of what a step gives, a few bytes a row come back.

Behind the decode stage the model is given some nodes more: the likeliest token, its log-probability, and where the
token after it will stand. `graphs.Step` has them written over the step's own inputs, so that a step that goes on from
the likeliest tokens finds everything in its place, and one CUDA graph holds all of it.

For sampling another small model finds the head of each row: its HEAD likeliest tokens and what all weigh, from which
the host draws what it would from the whole row, or finds that it needs that (`sampling.warped_head`). It is run for
steps that draw alone, so that greedy ones do not pay for it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.manifest import LAST, POSITIONS, START, Decode
from tformer_runtime.protobuf import VARINT, message, tag, varint
from tformer_runtime.sampling import HEAD, Floats, Head

if TYPE_CHECKING:
    from tformer_runtime.graphs import Step
    from tformer_runtime.session import Array, Session

NEXT = "next."  # what the outputs are called: as the inputs that they become, behind this
LOGPROB = "next.logprob"
_LOGITS, _TEMPERATURES, _VALUES, _TOKENS, _WEIGHT = "logits", "temperatures", "values", "tokens", "weight"

_FLOAT, _INT32, _INT64 = 1, 6, 7  # onnx.TensorProto.DataType
_MODEL_IR, _MODEL_GRAPH, _MODEL_OPSET = 1, 7, 8
_GRAPH_NAME = 2
_OPSET_VERSION = 2
_IR, _OPSET = 10, 21


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

    def heads(self, temperatures: Floats) -> list[Head]:
        """The head of each row. temperatures: (rows,), what the logits are divided by where weights are summed."""
        return self._step.heads(temperatures)


class Heads:
    """Finds the heads of rows of logits that stay where they are, bound for good. Not to be run by two threads at once.

    Cost: three passes over the logits on the device, and HEAD tokens and logits a row that come back.
    """

    def __init__(self, session: Session, logits: Any) -> None:
        """logits: (rows, 1, vocabulary), on the session's device."""
        rows, _, vocabulary = logits.shape()
        self._session, self._whole, count = session, vocabulary <= HEAD, min(HEAD, vocabulary)
        self._asked = np.ones((rows, 1, 1), np.float32)
        self._temperatures = session.tensor(self._asked)
        kinds = {_VALUES: (count, np.float32), _TOKENS: (count, np.int64), _WEIGHT: (1, np.float32)}
        self._given = {name: session.tensor(np.zeros((rows, 1, size), kind)) for name, (size, kind) in kinds.items()}
        self._binding = session.binding("head")
        self._binding.bind_ortvalue_input(_LOGITS, logits)
        self._binding.bind_ortvalue_input(_TEMPERATURES, self._temperatures)
        for name, value in self._given.items():
            self._binding.bind_ortvalue_output(name, value)

    def __call__(self, temperatures: Floats) -> list[Head]:
        """temperatures: (rows,), above 0."""
        if not np.array_equal(self._asked[:, 0, 0], temperatures):
            self._asked[:, 0, 0] = temperatures
            self._session.write(self._temperatures, self._asked)
        self._session.run(self._binding, "head")
        values, tokens, weight = (self._given[name].numpy()[:, 0] for name in (_VALUES, _TOKENS, _WEIGHT))
        order = tokens.argsort(-1)
        values, tokens = (np.take_along_axis(array, order, -1) for array in (values, tokens))
        return [
            Head(own, logits, total, self._whole)
            for own, logits, total in zip(tokens, values, weight[:, 0].tolist(), strict=True)
        ]


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
    return model + message(_MODEL_GRAPH, b"".join(parts))


def heads(vocabulary: int) -> bytes:
    """The model that `Heads` runs: (rows, 1, vocabulary) logits and (rows, 1, 1) temperatures → their HEAD greatest,
    which tokens these are, and Σ exp((logit - greatest) / temperature)."""
    graph = [
        message(_GRAPH_NAME, b"heads"),
        _tensor("axis", _INT64, (1,), struct.pack("<q", -1)),
        _tensor("count", _INT64, (1,), struct.pack("<q", min(HEAD, vocabulary))),
        _node("TopK", [_LOGITS, "count"], _VALUES, _TOKENS, axis=-1),
        _node("ReduceMax", [_LOGITS, "axis"], "greatest"),
        _node("Sub", [_LOGITS, "greatest"], "less"),
        _node("Div", ["less", _TEMPERATURES], "scores"),
        _node("Exp", ["scores"], "weights"),
        _node("ReduceSum", ["weights", "axis"], _WEIGHT),
        _input(_LOGITS, _FLOAT),
        _input(_TEMPERATURES, _FLOAT),
        _output(_VALUES, _FLOAT),
        _output(_TOKENS, _INT64),
        _output(_WEIGHT, _FLOAT),
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
