"""Weights that a file derives: numpy's equal those that onnxruntime computes from the same file, and so do results."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.small_graphs import model_of
from support.stored_records import records_of, with_records

from tformer_export import Quantization, export
from tformer_export.common.onnx_writer import write
from tformer_export.quantize import quantize_weights
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime.backend import session as session_module
from tformer_runtime.backend.session import Session
from tformer_runtime.base import scratch_files
from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.model_file import read_mapped_model
from tformer_runtime.format.onnx_wire import bytes_field
from tformer_runtime.format.stored_forms import ProductSpec, StoredProducts
from tformer_runtime.rewriting import derived_weights
from tformer_runtime.rewriting.derived_weights import with_derived_weights
from tformer_runtime.rewriting.product_rewrite import replace_products

VOCABULARY = 200
NUMBERS = "form.int32.1.a2f0fa99"  # 0 … 15, from which the table of 4 bits is made


@pytest.fixture(autouse=True)
def _small_models_too(monkeypatch):
    monkeypatch.setattr(derived_weights, "MIN_DERIVED_BYTES", 1)


def small_model(inner: int) -> onnx.ModelProto:
    """Return ids → rows of a table → two products and the product with the table."""
    random = np.random.default_rng(inner)
    weights = {
        "table": random.standard_normal((VOCABULARY, inner)),
        "up": random.standard_normal((inner, 72)),
        "down": random.standard_normal((72, inner)),
    }
    weights["columns"] = weights["table"].T  # one matrix, which is stored once
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "up"], ["h"], name="up"),
        helper.make_node("Tanh", ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "down"], ["z"], name="down"),
        helper.make_node("MatMul", ["z", "columns"], ["y"], name="out"),
    ]
    ports = {"ids": (TensorProto.INT64, ["batch", "new"])}, {"y": ["batch", "new", VOCABULARY]}
    return model_of(nodes, *ports, {n: np.ascontiguousarray(w, np.float32) for n, w in weights.items()})


def quantised_file(folder: Path, inner: int, bits: int, goal: str) -> Path:
    model = ir.from_proto(small_model(inner))
    quantize_weights(model, bits, goal, "ids", on_cpu=True)
    write(with_records(model), folder / "model.onnx")
    return folder / "model.onnx"


@contextmanager
def opened(path: Path):
    """Yield the rewritten model, with the values of its references, and the folder of the references."""
    model, folder = read_mapped_model(path)
    with with_derived_weights(model, folder, 2, records_of(model)) as (rewritten, root):
        yield onnx.load_from_string(rewritten), root


def values_of(model: onnx.ModelProto, root: Path) -> dict[str, np.ndarray]:
    onnx.external_data_helper.load_external_data_for_model(model, str(root))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("goal", ["throughput", "latency"])
@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("inner", [48, 100, 299])  # 100 and 299 rows do not fill blocks, and 299 no bytes
def test_weights_equal_those_that_onnxruntime_derives(inner, bits, goal, tmp_path):
    path = quantised_file(tmp_path, inner, bits, goal)
    stored = onnx.load(path)
    with opened(path) as (model, root):
        derived = {t.name for t in model.graph.initializer} - {t.name for t in stored.graph.initializer}
        assert derived, "nothing is derived here, so that nothing is compared"
        values = values_of(model, root)
    kinds = {n.name: n.type.tensor_type.elem_type for n in stored.graph.output}
    for name in sorted(derived - kinds.keys()):
        kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
        stored.graph.output.append(helper.make_tensor_value_info(name, kind, values[name].shape))
    session = onnxruntime.InferenceSession(stored.SerializeToString())
    for name, expected in zip(sorted(derived), session.run(sorted(derived), {"ids": np.array([[3]])}), strict=True):
        assert values[name].dtype == expected.dtype
        np.testing.assert_array_equal(values[name], expected)
    remaining = {n.op_type for n in model.graph.node if n.op_type in ("BitwiseXor", "Gather", "Transpose")}
    assert remaining <= {"Gather"}  # of the embedding


@pytest.mark.parametrize("external", [False, True], ids=["one file", "two files"])
def test_onnxruntime_opens_the_rewritten_model(external, tmp_path):
    path = quantised_file(tmp_path, 300, 4, "throughput")
    ids = {"ids": np.arange(40).reshape(4, 10)}
    (expected,) = onnxruntime.InferenceSession(path).run(None, ids)
    if external:
        proto = onnx.load(path)
        path = tmp_path / "second.onnx"
        onnx.save(proto, path, save_as_external_data=True, location="second.onnx.data", size_threshold=1024)
    options = onnxruntime.SessionOptions()
    with opened(path) as (model, root):
        assert root == Path("/")
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(root))
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (actual,) = session.run(None, ids)  # the scratch file is deleted
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("bits", "goal"),
    [("int8", "latency"), ("int4", "throughput"), pytest.param("int4", "latency", marks=pytest.mark.thorough)],
)
def test_an_exported_file_gives_the_same_bits(bits, goal, tmp_path, monkeypatch):
    torch.manual_seed(5)
    module = Seq2SeqTransformer(
        source_vocabulary=64, target_vocabulary=64, width=64, heads=2, encoder_layers=1, decoder_layers=1,
        feedforward=128, max_length=20, dropout=0.0,
    ).eval()  # fmt: skip
    ids, path = torch.tensor([[3, 4, 5], [6, 7, 8]]), tmp_path / "model.onnx"
    export(
        module, path, {"src": ids, "tgt": ids}, "tgt", quantization=Quantization(bits), optimize_for=goal,
        special_tokens={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )  # fmt: skip
    actual = logits(path)

    @contextmanager
    def unchanged(model, folder, threads, products):
        yield model, folder

    monkeypatch.setattr(session_module, "with_derived_weights", unchanged)
    np.testing.assert_array_equal(actual, logits(path))


def logits(path: Path) -> np.ndarray:
    engine = Engine(Session(path, "cpu", threads=1))
    state = engine.start({"src": [np.array([3, 4, 5, 9]), np.array([6, 7])]}, 2)
    return np.stack([engine.step(state, np.array(tokens)).copy() for tokens in ([[1], [1]], [[7], [30]])])


def test_without_a_place_for_the_scratch_file_onnxruntime_derives(tmp_path, monkeypatch):
    path = quantised_file(tmp_path, 100, 4, "throughput")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    model, folder = read_mapped_model(path)
    with with_derived_weights(model, folder, 2, records_of(model)) as result:
        assert result == (model, folder)


def test_no_scratch_file_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = quantised_file(tmp_path, 100, 4, "throughput")
    in_block = []

    def fail() -> None:
        with opened(path):
            in_block.extend((tmp_path / "temporary").iterdir())
            raise RuntimeError("of the block")

    with pytest.raises(RuntimeError, match="of the block"):
        fail()
    assert len(in_block) == 1
    assert not list((tmp_path / "temporary").iterdir())


def test_files_of_killed_processes_are_deleted_and_used_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{scratch_files.PREFIX}left"
    left.write_bytes(b"weights")
    with scratch_files.scratch_file(8) as (_, used), scratch_files.scratch_file(8) as (_, other):
        assert {used, other} == set(tmp_path.iterdir())


def altered(path: Path, change) -> tuple[bytes, Path]:
    """Return a model that `change` has changed, as it is read, and its folder."""
    model, folder = read_mapped_model(path)
    proto = onnx.load_from_string(model)
    change(proto.graph)
    return proto.SerializeToString(), folder


def _initializer(graph, ending):
    return next(t for t in graph.initializer if t.name.endswith(ending))


def _other_table(graph):
    numbers = _initializer(graph, NUMBERS)
    numbers.CopyFrom(numpy_helper.from_array(np.arange(1, 17, dtype=np.int32), numbers.name))


def _outside(graph):
    _initializer(graph, "up.packed").external_data[0].value = "../secret"


def _attribute_outside(graph):
    tensor = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "etc/passwd"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    graph.node.append(helper.make_node("Constant", [], ["stolen"], value=tensor))
    graph.output.append(helper.make_tensor_value_info("stolen", TensorProto.FLOAT, [4]))


def _too_long(graph):
    entry = next(e for e in _initializer(graph, "up.packed").external_data if e.key == "offset")
    entry.value = str(1 << 40)


def _no_number(graph):
    next(e for e in _initializer(graph, "up.packed").external_data if e.key == "offset").value = "x"


def _divided_by_zero(graph):
    two = _initializer(graph, "form.int32.0.2")
    two.CopyFrom(numpy_helper.from_array(np.int32(0), two.name))


def _multiplied_often(graph):
    """A chain of products that each read their operand many times."""
    name = _initializer(graph, NUMBERS).name
    for i in range(16):
        graph.node.insert(i, helper.make_node("Mul", [name] * 40, [f"chain{i}"]))
        name = f"chain{i}"
    pairs = {n.output[0] for n in graph.node if n.op_type == "Cast" and n.attribute[0].i == TensorProto.INT8}
    next(n for n in graph.node if n.op_type == "Gather" and n.input[0] in pairs).input[0] = name


def _hidden_branch(graph):
    graph.node.append(helper.make_node("SequenceMap", ["x"], ["s"], name="body"))


CHANGES = [
    *(_outside, _attribute_outside, _too_long, _no_number),
    _hidden_branch,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_damaged_or_hostile_model_is_left_to_onnxruntime(change, tmp_path):
    model, folder = altered(quantised_file(tmp_path, 100, 4, "throughput"), change)
    with with_derived_weights(model, folder, 2, records_of(model)) as result:
        assert result == (model, folder)


def test_a_disk_is_not_filled_with_many_forms_of_one_weight(tmp_path):
    path = quantised_file(tmp_path, 100, 4, "throughput")
    stored = records_of(path.read_bytes())
    table = next(i for i, matrix in enumerate(stored.matrices) if matrix.weights.endswith(".int8"))
    name = stored.matrices[table].weights
    products = {f"product{i}": ProductSpec(table, "x", "y", "scale") for i in range(60)}

    def transpose_often(graph):
        for i in range(60):
            graph.node.insert(0, helper.make_node("Transpose", [name], [f"copy{i}"], perm=[1, 0]))
            graph.node.append(helper.make_node("MatMulInteger", ["x", f"copy{i}"], [f"product{i}"]))

    model, folder = altered(path, transpose_often)
    with with_derived_weights(model, folder, 2, StoredProducts(stored.matrices, products)) as result:
        assert result == (model, folder)


@pytest.mark.parametrize(
    "change", [_other_table, _divided_by_zero, _multiplied_often], ids=lambda change: change.__name__
)
def test_other_numbers_in_the_table_are_left_to_onnxruntime(change, tmp_path):
    model, folder = altered(quantised_file(tmp_path, 100, 4, "throughput"), change)
    with with_derived_weights(model, folder, 2, records_of(model)) as (rewritten, _):
        assert any(node.op_type == "Unsqueeze" for node in onnx.load_from_string(rewritten).graph.node)


def test_a_location_that_protobuf_reads_otherwise_is_seen(tmp_path):
    """Protobuf takes the last of several fields, and drops bits of a tag beyond 32: both hide a key from readers."""
    model, folder = read_mapped_model(quantised_file(tmp_path, 100, 4, "throughput"))
    tensor = TensorProto(name="stolen", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key in (b"\x0a\x01l\x0a\x08location", b"\x8a\x80\x80\x80\x10\x08location"):
        entries = [key + b"\x12\x0aetc/passwd", b"\x0a\x06length\x12\x0216"]
        encoded = tensor.SerializeToString() + b"".join(bytes_field(13, entry) for entry in entries)
        output = helper.make_tensor_value_info("stolen", TensorProto.FLOAT, [4]).SerializeToString()
        hostile = model + bytes_field(7, bytes_field(5, encoded) + bytes_field(12, output))
        with with_derived_weights(hostile, folder, 2, records_of(model)) as result:
            assert result == (hostile, folder)


def test_a_file_with_an_operator_of_the_kernels_is_refused(tmp_path):
    """Protobuf drops the bits of a tag beyond 32, so that a reader may see no domain."""
    node = bytes_field(4, b"RowQuantizedMatMul") + b"\xba\x80\x80\x80\x10\x0aai.tformer"
    with pytest.raises(ModelFileError, match=r"ai\.tformer"):
        replace_products(bytes_field(7, bytes_field(1, node)), tmp_path, lambda product, files: None)
