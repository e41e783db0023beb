"""Opening a file: each wrong file or device raises one sentence, and the session has the options of the manifest."""

from __future__ import annotations

import json
import os
import sys

import onnx
import onnxruntime
import pytest
from onnx import helper
from support.toy_models import Toy, with_manifest

from tformer_runtime import DeviceError, MissingExtraError, ModelFileError
from tformer_runtime.backend.session import Session
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import MANIFEST_KEY, MANIFEST_VERSION, Manifest, SessionSettings
from tformer_runtime.format.model_file import read_manifest, read_metadata


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Toy().write(tmp_path_factory.mktemp("session") / "toy.onnx")


def test_manifest_is_read_without_the_graph(path):
    assert read_manifest(path) == Toy().manifest()
    assert read_metadata(path) == {MANIFEST_KEY: Toy().manifest().to_json()}


def test_metadata_before_the_graph_are_found(path, tmp_path):
    model = onnx.load(path)
    meta, graph = onnx.ModelProto(metadata_props=model.metadata_props), onnx.ModelProto()
    graph.CopyFrom(model)
    del graph.metadata_props[:]
    turned = tmp_path / "turned.onnx"
    turned.write_bytes(meta.SerializeToString() + graph.SerializeToString())
    assert read_manifest(turned) == Toy().manifest()


@pytest.mark.parametrize("share", [0.001, 0.3, 0.8, 0.999])
def test_truncated_file_is_refused(path, tmp_path, share):
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ModelFileError, match=r"cut\.onnx is not a whole ONNX file"):
        Session(cut, "cpu")


@pytest.mark.parametrize("content", [b"", b"hello\n" * 50, b"PK\x03\x04" * 9, bytes(1000), b"\xff" * 99])
def test_file_of_another_kind_is_refused(tmp_path, content):
    other = tmp_path / "other.onnx"
    other.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"other\.onnx is not a whole ONNX file"):
        Session(other, "cpu")


def test_session_has_the_options_of_the_manifest(path, tmp_path, monkeypatch):
    """The options that onnxruntime gets. The caller's number of threads overrides the manifest."""
    asked = {}
    real = onnxruntime.InferenceSession

    def opened(model, options, *rest, **more):
        asked.update(more, threads=options.intra_op_num_threads)
        try:
            asked["spinning"] = options.get_session_config_entry("session.intra_op.allow_spinning")
        except RuntimeError:  # it has not been set
            asked["spinning"] = "1"
        return real(model, options, *rest, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    settings = SessionSettings(threads=3, spinning=False, disabled_optimizers=("GeluFusion",))
    tuned = with_manifest(path, tmp_path / "tuned.onnx", session=settings)
    for file, threads, wanted in (
        (path, None, (0, "1", ("SkipLayerNormFusion", "BiasGeluFusion"))),
        (tuned, None, (3, "0", ("GeluFusion",))),
        (tuned, 2, (2, "0", ("GeluFusion",))),
    ):
        Session(file, "cpu", threads)
        assert (asked["threads"], asked["spinning"], asked["disabled_optimizers"]) == wanted
    assert read_manifest(tuned).session == settings


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(ModelFileError, match="does not exist"):
        Session(tmp_path / "none.onnx", "cpu")
    with pytest.raises(ModelFileError, match="is a folder"):
        Session(tmp_path, "cpu")


def test_onnx_file_without_a_manifest_is_refused(path, tmp_path):
    model = onnx.load(path)
    helper.set_model_props(model, {"other": "1"})
    onnx.save(model, tmp_path / "plain.onnx")
    with pytest.raises(ModelFileError, match="no tformer manifest: export the model with tformer-export"):
        Session(tmp_path / "plain.onnx", "cpu")


def test_newer_or_damaged_manifest_is_refused(path, tmp_path):
    newer = with_manifest(path, tmp_path / "newer.onnx", version=99)
    with pytest.raises(ModelFileError, match=r"newer\.onnx: .*version 99 .*upgrade tformer"):
        Session(newer, "cpu")
    model = onnx.load(path)
    helper.set_model_props(model, {MANIFEST_KEY: json.dumps({"version": MANIFEST_VERSION, "task": 3})})
    onnx.save(model, tmp_path / "damaged.onnx")
    with pytest.raises(ModelFileError, match="damaged"):
        Session(tmp_path / "damaged.onnx", "cpu")


def test_missing_external_data_is_refused(path, tmp_path):
    moved = tmp_path / "big.onnx"
    onnx.save(onnx.load(path), moved, save_as_external_data=True, location="big.onnx.data", size_threshold=0)
    assert Engine(moved, device="cpu").manifest.task == "translate"
    (tmp_path / "big.onnx.data").unlink()
    with pytest.raises(ModelFileError, match=r"with its weights, big\.onnx\.data"):
        Session(moved, "cpu")


def test_truncated_external_data_is_refused(path, tmp_path):
    moved = tmp_path / "big.onnx"
    onnx.save(onnx.load(path), moved, save_as_external_data=True, location="big.onnx.data", size_threshold=0)
    os.truncate(tmp_path / "big.onnx.data", 100)
    with pytest.raises(ModelFileError, match=r"is missing or not whole"):
        Session(moved, "cpu")


def test_link_to_a_file_finds_its_external_data(path, tmp_path):
    """Model caches store files elsewhere under another name."""
    link = tmp_path / "model.onnx"
    link.symlink_to(path)
    assert Engine(link, device="cpu").manifest == Toy().manifest()


def test_graph_that_onnxruntime_refuses_is_one_sentence(path, tmp_path):
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ModelFileError, match="onnxruntime cannot run") as caught:
        Session(tmp_path / "odd.onnx", "cpu")
    assert "\n" not in str(caught.value)


def test_unknown_or_missing_device_is_refused(path, monkeypatch):
    with pytest.raises(DeviceError, match="no device 'tpu': choose one of auto, cpu, cuda"):
        Session(path, "tpu")
    assert Session(path, "auto").device == "cpu"
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match=r"holds no CUDA provider: pip install 'tformer\[cuda\]"):
        Session(path, "cuda")


@pytest.mark.skipif(
    os.path.exists("/proc/driver/nvidia") or sys.platform != "linux", reason="there is an NVIDIA driver"
)
def test_cuda_without_a_driver_is_refused(path):
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime holds no CUDA provider")
    with pytest.raises(DeviceError, match="cuda is not available: there is no NVIDIA driver"):
        Session(path, "cuda")


def test_auto_device_falls_back_to_the_cpu(path, tmp_path, monkeypatch):
    other = with_manifest(path, tmp_path / "cuda.onnx", target="cuda", devices=("cuda", "cpu"))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert Session(other, "auto").device == "cpu"


def test_cuda_provider_that_fails_to_start_is_one_sentence(path, tmp_path, monkeypatch):
    other, opened = (
        with_manifest(path, tmp_path / "cuda.onnx", target="cuda", devices=("cuda", "cpu")),
        onnxruntime.InferenceSession,
    )

    def refuse(file, options, providers, **others):
        if providers[0][0] == "CUDAExecutionProvider":  # with its settings
            raise RuntimeError("CUDA failure 35: the driver is too old\nmore")
        return opened(file, options, providers, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    monkeypatch.setattr("tformer_runtime.backend.session.find_missing_cuda", lambda: None)
    with pytest.raises(DeviceError, match=r"is not available: CUDA failure 35: the driver is too old$"):
        Session(other, "cuda")
    assert Session(other, "auto").device == "cpu"
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda f, o, _, **k: opened(f, o, ["CPUExecutionProvider"], **k)
    )
    with pytest.raises(DeviceError, match="did not start"):
        Session(other, "cuda")


def test_missing_onnxruntime_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tformer\[[cg]pu\]'"):
        Session(path, "cpu")


def test_number_of_threads_is_checked(path):
    assert Session(path, "cpu", threads=1).threads == 1


def test_manifest_survives_a_json_round_trip():
    for toy in (Toy(), Toy(encoder=False), Toy(attention="scatter-pair", defaults={"num_beams": 4})):
        assert Manifest.from_json(toy.manifest().to_json()) == toy.manifest()
