"""The ONNX writer: onnx reads the written model, and its weights are aligned, mapped and read back from the file."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tformer_export.common import onnx_writer as writing
from tformer_export.common.onnx_writer import MAX_INLINE_BYTES, data_file, write
from tformer_runtime.format.model_file import WEIGHT_ALIGNMENT_BYTES, read_mapped_model, read_metadata

WEIGHT_SIZES = (3, 256, 257, 1000, 5000)  # float32 elements; the first weight is small and stays inline


def make_model(doc_string=""):
    random = np.random.default_rng(0)
    weights = {f"w{size}": random.standard_normal(size).astype(np.float32) for size in WEIGHT_SIZES}
    weights["ids"] = np.arange(700)
    nodes = [helper.make_node("Cast", ["ids"], ["numbers"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("ReduceSum", [name], [f"s_{name}"], keepdims=1) for name in weights if name != "ids"]
    nodes += [helper.make_node("Sum", ["x", *[f"s_w{size}" for size in WEIGHT_SIZES]], ["y"])]
    nodes += [helper.make_node("ReduceSum", ["numbers"], ["z"], keepdims=1)]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y", "z")]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", ports[:1], ports[1:], initializers)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10, doc_string=doc_string)
    helper.set_model_props(proto, {"key": "value"})
    return proto


def weights_of(proto):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def run(source, folder=None):
    options = onnxruntime.SessionOptions()
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(source, options).run(None, {"x": np.ones(1, np.float32)})


@pytest.mark.parametrize("external_data", [False, True])
@pytest.mark.parametrize("doc_string", ["", "a description"])
def test_onnx_reads_the_written_model(doc_string, external_data, tmp_path, monkeypatch):
    if external_data:
        monkeypatch.setattr(writing, "MAX_FILE_BYTES", 2000)
    proto, path = make_model(doc_string), tmp_path / "model.onnx"
    write(ir.from_proto(proto), path)
    onnx.checker.check_model(path)
    read_model = onnx.load(path)
    assert read_model.doc_string == doc_string
    assert read_metadata(path).items() >= {"key": "value"}.items()
    assert data_file(path).exists() == external_data
    actual, expected = weights_of(read_model), weights_of(proto)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)
    for actual_output, expected_output in zip(run(path), run(proto.SerializeToString()), strict=True):
        np.testing.assert_array_equal(actual_output, expected_output)


@pytest.mark.parametrize("external_data", [False, True])
def test_weights_are_read_back_from_the_file(external_data, tmp_path, monkeypatch):
    if external_data:
        monkeypatch.setattr(writing, "MAX_FILE_BYTES", 2000)
    proto, first, second = make_model(), tmp_path / "first.onnx", tmp_path / "second.onnx"
    written = ir.from_proto(proto)
    write(written, first)
    for value in written.graph.initializers.values():
        assert isinstance(value.const_value, ir.LazyTensor) == (value.const_value.nbytes > MAX_INLINE_BYTES)
        np.testing.assert_array_equal(value.const_value.numpy(), weights_of(proto)[value.name])
    write(written, second)
    for name, array in weights_of(onnx.load(second)).items():
        np.testing.assert_array_equal(array, weights_of(proto)[name])


def test_weights_are_aligned_and_mapped(tmp_path):
    proto, path = make_model(), tmp_path / "model.onnx"
    write(ir.from_proto(proto), path)
    content, (header, folder) = path.read_bytes(), read_mapped_model(path)
    assert folder == tmp_path
    assert len(header) < 0.1 * len(content)
    references = {t.name: t for t in onnx.load_from_string(header).graph.initializer}
    for name, array in weights_of(proto).items():
        location = {entry.key: entry.value for entry in references[name].external_data}
        assert bool(location) == (array.nbytes > MAX_INLINE_BYTES)
        if location:
            assert location["location"] == "model.onnx"
            assert int(location["offset"]) % WEIGHT_ALIGNMENT_BYTES == 0
            np.testing.assert_array_equal(
                np.frombuffer(content, array.dtype, array.size, int(location["offset"])), array
            )
    for actual_output, expected_output in zip(run(header, folder), run(proto.SerializeToString()), strict=True):
        np.testing.assert_array_equal(actual_output, expected_output)


def test_file_with_unaligned_weights_is_copied(tmp_path):
    """Other tools do not align weights. A reference to the file is allowed only where a weight is aligned by chance."""
    proto, path = make_model(), tmp_path / "model.onnx"
    onnx.save(proto, path)
    header, folder = read_mapped_model(path)
    for tensor in onnx.load_from_string(header).graph.initializer:
        for entry in tensor.external_data:
            assert entry.key != "offset" or int(entry.value) % WEIGHT_ALIGNMENT_BYTES == 0
    for actual_output, expected_output in zip(run(header, folder), run(proto.SerializeToString()), strict=True):
        np.testing.assert_array_equal(actual_output, expected_output)
