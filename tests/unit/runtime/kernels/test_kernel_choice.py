"""TFORMER_KERNELS: its values, and the reason why a file runs without native kernels."""

from __future__ import annotations

import json

import onnxruntime
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from support.toy_models import Toy

from tformer_runtime import Model, OptionError
from tformer_runtime.backend import native_kernels
from tformer_runtime.backend.native_kernels import BITS_OF_PATH, VARIABLE, NativeKernels, reason_without_kernels
from tformer_runtime.cli.main import main
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import VERSION_WITHOUT_PRODUCTS, Manifest

MANIFEST = Manifest("text-generation", 8, None, None)
UNKNOWN = ["bogus", "1", "none", "off", "avx512vnni,avx2", "0,products", "avx2,bogus", "AVX2", " "]


@pytest.fixture
def file(tmp_path):
    return Toy().write(tmp_path / "toy.onnx")


@pytest.mark.parametrize("value", UNKNOWN)
def test_unknown_value_is_refused_with_the_values(value, file, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    for call in (
        lambda: Model.load(file, device="cpu"),
        lambda: native_kernels.kernels_for(replace(MANIFEST, target="cuda")),
        native_kernels.find_native_ranking,
    ):
        with pytest.raises(OptionError) as caught:
            call()
        assert repr(value) in str(caught.value)
        assert all(name in str(caught.value) for name in (VARIABLE, *BITS_OF_PATH, "products", "apart"))
    for arguments in ([str(file), "abc"], [str(file), "--info"]):
        done = CliRunner().invoke(main, arguments)
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
        assert VARIABLE in done.stderr


@pytest.mark.parametrize("value", ["", "0", "avx2", "products", "avx2,apart", "scalar,products,apart"])
def test_known_values_are_taken(value, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    assert native_kernels.wanted_kernels() == value


def library_of(monkeypatch, library):
    """Let the library be this value of `_load_library`, and forget kernels that were found before."""
    monkeypatch.setattr(native_kernels, "_load_library", lambda: library)
    load = native_kernels.load_kernels
    monkeypatch.setattr(native_kernels, "load_kernels", getattr(load, "__wrapped__", load))


def test_reason_says_what_is_missing(file, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    library_of(monkeypatch, "tformer-kernels is not installed (pip install 'tformer[fast]')")
    model = Model.load(file, device="cpu")
    assert model.info()["kernels"] is None
    assert model.info()["no_kernels"] == "tformer-kernels is not installed (pip install 'tformer[fast]')"
    lines = CliRunner().invoke(main, [str(file), "--info"]).output.splitlines()
    assert "kernels: none, onnxruntime's operators: tformer-kernels is not installed" in "\n".join(lines)
    facts = json.loads(CliRunner().invoke(main, [str(file), "--info", "--json"]).output)
    assert (facts["kernels"], facts["no_kernels"]) == (None, model.info()["no_kernels"])
    assert Engine(file, "cpu", native_kernels=False).session.reason_without_kernels == "opened without them"
    monkeypatch.setenv(VARIABLE, "0")
    assert reason_without_kernels(MANIFEST) == "switched off by TFORMER_KERNELS=0"
    assert reason_without_kernels(MANIFEST, "cuda") == "a file for CUDA has CUDA's operators"


class Library:
    """A library that onnxruntime has taken."""

    def __init__(self, registered=True):
        self.tformer_kernels_registered = lambda: registered


def test_reason_says_what_is_wrong_with_a_library_or_processor(monkeypatch):
    class Options:
        def register_custom_ops_library(self, file):
            pass

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(native_kernels, "_supported_paths", lambda library: {"avx2": 3, "scalar": 6})
    monkeypatch.delenv(VARIABLE, raising=False)
    library_of(monkeypatch, (Library(registered=False), "library.so"))
    assert "another interface than library.so" in reason_without_kernels(MANIFEST)
    library_of(monkeypatch, (Library(), "library.so"))
    assert reason_without_kernels(MANIFEST) == (
        "not measured to be faster on this processor (avx2); TFORMER_KERNELS=avx2 switches them on"
    )
    monkeypatch.setenv(VARIABLE, "avx512vnni")
    assert reason_without_kernels(MANIFEST).startswith("this processor lacks avx512vnni, which TFORMER_KERNELS names")


def test_reason_says_which_bits_were_not_measured(monkeypatch):
    kernels = NativeKernels.__new__(NativeKernels)
    kernels.bits, kernels.path = (4,), "avxvnni"
    monkeypatch.setattr(native_kernels, "_find_kernels", lambda *_: kernels)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert reason_without_kernels(replace(MANIFEST, quantization="int8")) == (
        "not measured to be faster for weights of 8 bits on this processor (avxvnni)"
    )
    assert reason_without_kernels(replace(MANIFEST, quantization="int4")) == "the file has no product that they compute"


def test_reason_names_a_file_without_records(monkeypatch):
    kernels = NativeKernels.__new__(NativeKernels)
    kernels.bits, kernels.path = (8,), "avx2"
    monkeypatch.setattr(native_kernels, "_find_kernels", lambda *_: kernels)
    monkeypatch.setattr(native_kernels, "find_native_kernels", lambda *_: kernels)
    monkeypatch.delenv(VARIABLE, raising=False)
    old = replace(MANIFEST, quantization="int8", version=VERSION_WITHOUT_PRODUCTS)
    assert native_kernels.kernels_for(old) is None
    assert reason_without_kernels(old) == (
        "an earlier tformer wrote the file, without records of its products: export the model again"
    )
