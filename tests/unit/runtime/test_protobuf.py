"""What is read and written by hand, against Google's protobuf."""

from __future__ import annotations

import io

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.onnx_wire import BYTES, VARINT, WireError, fields, message, read_head, tag, varint
from tformer_runtime.format.stage_split import cut

# Of TensorProto: a number, a text, bytes, packed numbers of 4 bytes; of AttributeProto: one of 4 bytes by itself.
TENSOR = onnx.TensorProto(data_type=1, name="ü", raw_data=b"\xff" * 300, float_data=[1.5, -2])
ATTRIBUTE = onnx.AttributeProto(name="alpha", f=0.5, type=onnx.AttributeProto.FLOAT, i=-1)


@given(st.integers(0, 2**64 - 1))
def test_a_number(number):
    read = onnx.AttributeProto.FromString(tag(3, VARINT) + varint(number))
    assert read.i % 2**64 == number
    assert varint(number) == read.SerializeToString(deterministic=True)[1:]


@given(st.text(), st.text())
def test_texts(key, value):
    expected = onnx.StringStringEntryProto(key=key, value=value).SerializeToString()
    assert message(1, key.encode()) + message(2, value.encode()) == expected


@pytest.mark.parametrize("proto", [TENSOR, ATTRIBUTE], ids=["tensor", "attribute"])
def test_fields(proto):
    content = proto.SerializeToString()
    found = list(fields(content))
    assert sorted({field.number for field in found}) == [described.number for described, _ in proto.ListFields()]
    assert b"".join(field.whole for field in found) == content
    for field in found:  # a field by itself is a message with nothing else
        ((described, value),) = type(proto).FromString(field.whole).ListFields()
        assert described.number == field.number
        if isinstance(value, (str, bytes)):
            assert field.content == (value.encode() if isinstance(value, str) else value)
        elif isinstance(value, int):
            assert field.content == b""


@pytest.mark.parametrize("proto", [TENSOR, ATTRIBUTE], ids=["tensor", "attribute"])
def test_what_is_cut_short(proto):
    content = proto.SerializeToString()
    ends = {0}
    for field in fields(content):
        ends.add(max(ends) + len(field.whole))
    for end in set(range(len(content))) - ends:
        with pytest.raises(WireError):
            list(fields(content[:end]))


@pytest.mark.parametrize(
    "content",
    [tag(1, 3), tag(1, 6), tag(0, VARINT) + varint(1), b"\xff" * 11, tag(1, BYTES) + varint(1)],
    ids=["a group", "no kind", "no number", "no end", "too long"],
)
def test_what_is_no_field(content):
    with pytest.raises(WireError):
        read_head(io.BytesIO(content), len(content))


def test_a_damaged_graph_has_no_stages():
    with pytest.raises(ModelFileError, match="damaged, export the model again"):
        cut(message(7, b"\x0a\x7f"), "decode")  # a node of 127 bytes, of which there are none
