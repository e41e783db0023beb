"""Writing: onnx reads the model that was written; its weights can be mapped, and are read back from the file."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tformer_export.common import onnx_writer as writing
from tformer_export.common.onnx_writer import ALIGNMENT, MAX_INLINE_BYTES, data_file, write
from tformer_runtime.format.model_file import read_mapped_model, read_metadata

SIZES = (3, 256, 257, 1000, 5000)  # elements; float32, so the first is small and stays in the model


def model(doc_string=""):
    random = np.random.default_rng(0)
    weights = {f"w{size}": random.standard_normal(size).astype(np.float32) for size in SIZES}
    weights["ids"] = np.arange(700)
    nodes = [helper.make_node("Cast", ["ids"], ["numbers"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("ReduceSum", [name], [f"s_{name}"], keepdims=1) for name in weights if name != "ids"]
    nodes += [helper.make_node("Sum", ["x", *[f"s_w{size}" for size in SIZES]], ["y"])]
    nodes += [helper.make_node("ReduceSum", ["numbers"], ["z"], keepdims=1)]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y", "z")]
    held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", ports[:1], ports[1:], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10, doc_string=doc_string)
    helper.set_model_props(made, {"key": "value"})
    return made


def weights_of(proto):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def run(source, folder=None):
    options = onnxruntime.SessionOptions()
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(source, options).run(None, {"x": np.ones(1, np.float32)})


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("doc_string", ["", "about it"])
def test_onnx_reads_the_model_that_was_written(doc_string, beside, tmp_path, monkeypatch):
    if beside:
        monkeypatch.setattr(writing, "MAX_FILE_BYTES", 2000)
    proto, path = model(doc_string), tmp_path / "model.onnx"
    write(ir.from_proto(proto), path)
    onnx.checker.check_model(path)
    read = onnx.load(path)
    assert read.doc_string == doc_string
    assert read_metadata(path) == {"key": "value"}
    assert data_file(path).exists() == beside
    found, expected = weights_of(read), weights_of(proto)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    for one, other in zip(run(path), run(proto.SerializeToString()), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("beside", [False, True])
def test_the_weights_are_read_back_from_the_file(beside, tmp_path, monkeypatch):
    if beside:
        monkeypatch.setattr(writing, "MAX_FILE_BYTES", 2000)
    proto, first, second = model(), tmp_path / "first.onnx", tmp_path / "second.onnx"
    written = ir.from_proto(proto)
    write(written, first)
    for value in written.graph.initializers.values():
        assert isinstance(value.const_value, ir.LazyTensor) == (value.const_value.nbytes > MAX_INLINE_BYTES)
        np.testing.assert_array_equal(value.const_value.numpy(), weights_of(proto)[value.name])
    write(written, second)
    for name, array in weights_of(onnx.load(second)).items():
        np.testing.assert_array_equal(array, weights_of(proto)[name])


def test_numbers_begin_where_vectors_do_and_are_mapped(tmp_path):
    proto, path = model(), tmp_path / "model.onnx"
    write(ir.from_proto(proto), path)
    content, (header, folder) = path.read_bytes(), read_mapped_model(path)
    assert folder == tmp_path
    assert len(header) < 0.1 * len(content)
    references = {t.name: t for t in onnx.load_from_string(header).graph.initializer}
    for name, array in weights_of(proto).items():
        place = {entry.key: entry.value for entry in references[name].external_data}
        assert bool(place) == (array.nbytes > MAX_INLINE_BYTES)
        if place:
            assert place["location"] == "model.onnx"
            assert int(place["offset"]) % ALIGNMENT == 0
            np.testing.assert_array_equal(np.frombuffer(content, array.dtype, array.size, int(place["offset"])), array)
    for one, other in zip(run(header, folder), run(proto.SerializeToString()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_file_whose_weights_lie_anywhere_is_copied(tmp_path):
    """As other tools write it: nothing is aligned, so nothing is referred to by chance alone."""
    proto, path = model(), tmp_path / "model.onnx"
    onnx.save(proto, path)
    header, folder = read_mapped_model(path)
    for tensor in onnx.load_from_string(header).graph.initializer:
        for entry in tensor.external_data:
            assert entry.key != "offset" or int(entry.value) % ALIGNMENT == 0
    for one, other in zip(run(header, folder), run(proto.SerializeToString()), strict=True):
        np.testing.assert_array_equal(one, other)
