"""The reader and writer of protobuf fields equal Google's protobuf."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format import onnx_fields
from tformer_runtime.format.onnx_wire import (
    BYTES,
    VARINT,
    WireError,
    bytes_field,
    iter_fields,
    read_field_header,
    tag,
    varint,
)
from tformer_runtime.format.stage_split import extract_stage

MESSAGES = {  # prefix of the constants in onnx_fields → message
    "MODEL": onnx.ModelProto,
    "OPERATOR_SET_ID": onnx.OperatorSetIdProto,
    "STRING_STRING_ENTRY": onnx.StringStringEntryProto,
    "GRAPH": onnx.GraphProto,
    "NODE": onnx.NodeProto,
    "ATTRIBUTE": onnx.AttributeProto,
    "VALUE_INFO": onnx.ValueInfoProto,
    "TYPE_TENSOR": onnx.TypeProto.Tensor,
    "TYPE": onnx.TypeProto,
    "TENSOR_SHAPE": onnx.TensorShapeProto,
    "DIMENSION": onnx.TensorShapeProto.Dimension,
    "TENSOR": onnx.TensorProto,
}
ENUM_VALUES = {
    "ATTRIBUTE_TYPE_FLOAT": onnx.AttributeProto.FLOAT,
    "ATTRIBUTE_TYPE_INT": onnx.AttributeProto.INT,
    "ATTRIBUTE_TYPE_STRING": onnx.AttributeProto.STRING,
    "ATTRIBUTE_TYPE_GRAPH": onnx.AttributeProto.GRAPH,
    "TENSOR_DATA_LOCATION_EXTERNAL": onnx.TensorProto.EXTERNAL,
    "DATA_TYPE_FLOAT": onnx.TensorProto.FLOAT,
    "DATA_TYPE_UINT8": onnx.TensorProto.UINT8,
    "DATA_TYPE_INT8": onnx.TensorProto.INT8,
    "DATA_TYPE_INT32": onnx.TensorProto.INT32,
    "DATA_TYPE_INT64": onnx.TensorProto.INT64,
    "DATA_TYPE_BFLOAT16": onnx.TensorProto.BFLOAT16,
}
# Of TensorProto: a number, a text, bytes, packed numbers of 4 bytes; of AttributeProto: one of 4 bytes by itself.
TENSOR = onnx.TensorProto(data_type=1, name="ü", raw_data=b"\xff" * 300, float_data=[1.5, -2])
ATTRIBUTE = onnx.AttributeProto(name="alpha", f=0.5, type=onnx.AttributeProto.FLOAT, i=-1)


def onnx_number(name):
    """Return the field number that onnx has for a constant of onnx_fields."""
    if name in ENUM_VALUES:
        return ENUM_VALUES[name]
    numbers = {
        f"{prefix}_{field.name.upper()}": field.number
        for prefix, message in MESSAGES.items()
        for field in message.DESCRIPTOR.fields
    }
    return numbers[name]


@pytest.mark.parametrize("name", [name for name in vars(onnx_fields) if name.isupper()])
def test_field_numbers_equal_those_of_onnx(name):
    assert getattr(onnx_fields, name) == onnx_number(name)


@given(st.integers(0, 2**64 - 1))
def test_varints_round_trip_through_protobuf(number):
    read = onnx.AttributeProto.FromString(tag(3, VARINT) + varint(number))
    assert read.i % 2**64 == number
    assert varint(number) == read.SerializeToString(deterministic=True)[1:]


@given(st.text(), st.text())
def test_text_fields_round_trip_through_protobuf(key, value):
    expected = onnx.StringStringEntryProto(key=key, value=value).SerializeToString()
    assert bytes_field(1, key.encode()) + bytes_field(2, value.encode()) == expected


@pytest.mark.parametrize("proto", [TENSOR, ATTRIBUTE], ids=["tensor", "attribute"])
def test_fields_equal_those_of_protobuf(proto):
    content = proto.SerializeToString()
    fields = list(iter_fields(content))
    assert sorted({field.number for field in fields}) == [described.number for described, _ in proto.ListFields()]
    assert b"".join(field.encoded for field in fields) == content
    for field in fields:  # one field alone is a whole message
        ((described, value),) = type(proto).FromString(field.encoded).ListFields()
        assert described.number == field.number
        if isinstance(value, (str, bytes)):
            assert field.content == (value.encode() if isinstance(value, str) else value)
        elif isinstance(value, int):
            assert field.content == b""


@pytest.mark.parametrize("proto", [TENSOR, ATTRIBUTE], ids=["tensor", "attribute"])
def test_truncated_message_is_refused(proto):
    content = proto.SerializeToString()
    ends = {0}
    for field in iter_fields(content):
        ends.add(max(ends) + len(field.encoded))
    for end in set(range(len(content))) - ends:
        with pytest.raises(WireError):
            list(iter_fields(content[:end]))


@pytest.mark.parametrize(
    "content",
    [tag(1, 3), tag(1, 6), tag(0, VARINT) + varint(1), b"\xff" * 11, tag(1, BYTES) + varint(1)],
    ids=["a group", "no kind", "no number", "no end", "too long"],
)
def test_invalid_field_header_is_refused(content):
    with pytest.raises(WireError):
        read_field_header(content, 0, len(content))


def test_damaged_graph_has_no_stages():
    with pytest.raises(ModelFileError, match="damaged, export the model again"):
        extract_stage(bytes_field(7, b"\x0a\x7f"), "decode")  # a node of 127 bytes, and no byte follows
