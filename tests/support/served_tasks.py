"""Small files of the tasks that do not generate, for tests of the server. They are made with onnx.helper."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile
from fuzz.models import forecaster
from onnx import helper as h
from PIL import Image

from support.small_graphs import model_of
from support.toy_tasks import EMBEDDING, MAX_INPUT_TOKENS, TEXT_TASKS, TYPES, WORDS, words, write
from tformer_runtime.format import manifest as m
from tformer_runtime.preprocess.audio import AudioPreprocessor
from tformer_runtime.preprocess.images import ImagePreprocessor

RATE, STRIDE, KERNEL = 16000, 320, 400
LETTERS = ("<blank>", "|", *"ETAONI")


def write_tasks(folder: Path) -> dict[str, Path]:
    """Write a file of each task. Return name → file."""
    files = {name: write(folder / f"{name}.onnx", **how) for name, how in TEXT_TASKS.items()}
    return {
        **files,
        "relevance": _write_relevance(folder / "relevance.onnx"),
        "images": _write_images(folder / "images.onnx"),
        "audio": _write_audio(folder / "audio.onnx"),
        "series": forecaster(),
    }


def _save(path: Path, model, inputs, outputs, **manifest) -> Path:
    derived = manifest.pop("derived_lengths", {})
    ragged = manifest.pop("ragged", True)
    encode = m.EncodeStage(inputs, outputs, ragged=ragged, derived_lengths=derived)
    full = m.Manifest(max_length=0, encode=encode, decode=None, **manifest)
    h.set_model_props(model, {m.MANIFEST_KEY: full.to_json()})
    path.write_bytes(model.SerializeToString())
    return path


def _write_relevance(path: Path) -> Path:
    """Write a cross-encoder: its number of a pair is the mean of E[ids] + T[types]."""
    time = "ids_length"
    inputs = (
        m.RequestInput("ids", "int64", (m.BATCH_AXIS, time), "ids", max_length=MAX_INPUT_TOKENS, vocabulary=len(WORDS)),
        m.RequestInput("mask", "int64", (m.BATCH_AXIS, time), "mask", of="ids"),
        m.RequestInput("types", "int64", (m.BATCH_AXIS, time), "types", of="ids"),
    )
    nodes = [
        h.make_node("Gather", ["E", "ids"], ["e"]),
        h.make_node("Gather", ["T", "types"], ["t"]),
        h.make_node("Add", ["e", "t"], ["x"]),
        h.make_node("ReduceMean", ["x", "last"], ["each"], keepdims=0),
        h.make_node("Cast", ["mask"], ["keep"], to=1),
        h.make_node("Mul", ["each", "keep"], ["kept"]),
        h.make_node("ReduceSum", ["kept", "axis"], ["sum"], keepdims=1),
        h.make_node("ReduceSum", ["keep", "axis"], ["count"], keepdims=1),
        h.make_node("Div", ["sum", "count"], ["score"]),
    ]
    weights = {"E": EMBEDDING, "T": TYPES, "last": np.array([2]), "axis": np.array([1])}
    shape = [m.BATCH_AXIS, time]
    model = model_of(
        nodes, dict.fromkeys(("ids", "mask", "types"), (7, shape)), {"score": (1, [m.BATCH_AXIS, 1])}, weights
    )
    meaning = m.OutputMeaning(("relevant",), m.REGRESSION)
    return _save(
        path, model, inputs, (m.TensorSpec("score", "float32", (m.BATCH_AXIS, 1)),), task="text-classification",
        output_meaning=meaning, tokenizers=(words().to_str(),), tokenizer_of={"ids": 0},
    )  # fmt: skip


def _write_images(path: Path) -> Path:
    """Write a classifier of images: its scores are the means of red, green and blue."""
    size = {"height": 4, "width": 4}
    shape = (m.BATCH_AXIS, 3, 4, 4)
    inputs = (m.RequestInput("pixels", "float32", shape, "data"),)
    nodes = [h.make_node("ReduceMean", ["pixels", "axes"], ["scores"], keepdims=0)]
    model = model_of(
        nodes, {"pixels": (1, list(shape))}, {"scores": (1, [m.BATCH_AXIS, 3])}, {"axes": np.array([2, 3])}
    )
    return _save(
        path, model, inputs, (m.TensorSpec("scores", "float32", (m.BATCH_AXIS, 3)),), task="image-classification",
        output_meaning=m.OutputMeaning(("red", "green", "blue"), m.SINGLE_LABEL),
        preprocessing={"pixels": ImagePreprocessor(size=size).manifest_entry},
    )  # fmt: skip


def _write_audio(path: Path) -> Path:
    """Write a recognizer: a convolution with random weights gives the scores of the letters at each frame."""
    kernel = np.random.default_rng(8).standard_normal((len(LETTERS), 1, KERNEL)).astype(np.float32)
    inputs = (m.RequestInput("samples", "float32", (m.BATCH_AXIS, "time"), "data"),)
    nodes = [
        h.make_node("Unsqueeze", ["samples", "one"], ["x"]),
        h.make_node("Conv", ["x", "kernel"], ["y"], strides=[STRIDE]),
        h.make_node("Transpose", ["y"], ["scores"], perm=[0, 2, 1]),
    ]
    model = model_of(
        nodes, {"samples": (1, [m.BATCH_AXIS, "time"])}, {"scores": (1, [m.BATCH_AXIS, "frames", len(LETTERS)])},
        {"one": np.array([1]), "kernel": kernel},
    )  # fmt: skip
    audio = AudioPreprocessor(sampling_rate=RATE, normalize=True, min_samples=KERNEL)
    return _save(
        path,
        model,
        inputs,
        (m.TensorSpec("scores", "float32", (m.BATCH_AXIS, "frames", len(LETTERS))),),
        task="automatic-speech-recognition",
        output_meaning=m.OutputMeaning(LETTERS, settings={"blank": 0, "delimiter": "|"}),
        preprocessing={"samples": audio.manifest_entry},
        derived_lengths={"frames": m.DerivedLength("time", KERNEL, STRIDE)},
        ragged=False,
    )


def audio_file(seconds: float, seed: int = 0, form: str = "WAV", rate: int = RATE) -> bytes:
    """Return a file of noise."""
    samples = 0.1 * np.random.default_rng(seed).standard_normal(round(seconds * rate)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form)
    return file.getvalue()


def png(red: int, green: int, blue: int) -> bytes:
    """Return a PNG of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (red, green, blue)).save(file, "PNG")
    return file.getvalue()
