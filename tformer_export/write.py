"""A model as one ONNX file, one weight at a time.

Serialising a whole `ModelProto` holds every weight twice more, as messages and as bytes. But protobuf merges a message
that comes in parts (https://protobuf.dev/programming-guides/encoding/#last-one-wins): so each weight is written as a
graph that holds nothing else, and the model without its weights comes last, which also tells a file that was cut short.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

LARGEST = 2 * 10**9  # bytes that one file holds; weights beyond go beside it
SMALL = 1024  # bytes; what is smaller stays in the model

# Tags of onnx.proto: field number and wire type (varint 0, length-delimited 2)
_IR_VERSION, _MODEL_GRAPH, _GRAPH_INITIALIZER = 1 << 3 | 0, 7 << 3 | 2, 5 << 3 | 2


def write(model: ir.Model, path: Path) -> None:
    """Write the model; its weights go into `path`.data if they are beyond 2 GB. Memory: that of the largest weight."""
    held = model.graph.initializers
    large = {n: v for n, v in held.items() if v.const_value is not None and v.const_value.nbytes > SMALL}
    if sum(v.const_value.nbytes for v in large.values() if v.const_value is not None) > LARGEST:
        ir.save(model, path, external_data=data_file(path).name)
        return
    order = list(held.values())
    try:
        for name in large:
            held.pop(name)
        rest = ir.to_proto(model).SerializeToString()
    finally:
        held.clear()
        held.update({str(value.name): value for value in order})
    with path.open("wb") as file:
        file.write(bytes([_IR_VERSION]) + _varint(model.ir_version))
        for name, value in large.items():
            assert value.const_value is not None
            weight = ir.to_proto(value.const_value)
            weight.name = name
            content = weight.SerializeToString()
            head = bytes([_GRAPH_INITIALIZER]) + _varint(len(content))
            file.write(bytes([_MODEL_GRAPH]) + _varint(len(head) + len(content)) + head)
            file.write(content)
        file.write(rest)


def data_file(path: Path) -> Path:
    return path.with_name(path.name + ".data")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
