"""The small files that targets change or run, made once in a process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper
from support.small_graphs import model_of
from support.text_models import byte_pairs
from support.toy_models import Toy, with_manifest, write_encoder
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tformer_runtime import Model
from tformer_runtime.format import manifest as m
from tformer_runtime.preprocess.series import TASK as FORECASTING
from tformer_runtime.preprocess.series import SeriesPreprocessor


@functools.cache
def folder() -> Path:
    """Return the folder of this process, which goes with the supervisor's."""
    return Path(tempfile.mkdtemp(prefix="fuzz-child-"))


@functools.cache
def translator() -> Path:
    """Return a model from letters to letters."""
    return Toy(seed=27).write(folder() / "translator.onnx")


@functools.cache
def writer() -> Path:
    """Return a model that continues letters."""
    return Toy(encoder=False, seed=3).write(folder() / "writer.onnx")


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and a few pairs of them."""
    tokenizer = Tokenizer(BPE(**byte_pairs("<pad>", "<s>", "</s>")))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def byte_writer() -> Path:
    """Return a model that continues bytes, and can so spell any text."""
    tokenizer = byte_tokenizer()
    plain = Toy(encoder=False, vocabulary=tokenizer.get_vocab_size(), seed=5).write(folder() / "letters.onnx")
    return with_manifest(plain, folder() / "byte-writer.onnx", tokenizers=(tokenizer.to_str(),))


@functools.cache
def embedder() -> Path:
    """Return a single-pass model of letters."""
    return write_encoder(folder() / "embedder.onnx")


@functools.cache
def forecaster() -> Path:
    """Return a forecaster of two columns, which repeats the mean of the history's last three rows four times."""
    history = SeriesPreprocessor(
        "history", 2, columns=("low", "high"), targets=(0, 1), feedback=(0, 1), horizon=4, at_once=True,
        normalize="instance", min_context_length=3, max_context_length=40, ragged=False,
    )  # fmt: skip
    nodes = [
        helper.make_node("Slice", ["history", "begin", "end", "axis"], ["tail"]),
        helper.make_node("ReduceMean", ["tail", "axis"], ["mean"], keepdims=1),
        helper.make_node("Expand", ["mean", "shape"], ["forecast"]),
    ]
    weights = {"begin": [-3], "end": [2**31], "axis": [1], "shape": [1, 4, 1]}
    spec = m.RequestInput("history", "float32", (m.BATCH_AXIS, "time", 2), "data")
    manifest = m.Manifest(
        task=FORECASTING,
        max_length=40,
        encode=m.EncodeStage((spec,), (m.TensorSpec("forecast", "float32", (m.BATCH_AXIS, 4, 2)),)),
        decode=None,
        special_tokens=m.SpecialTokens((), (), 0),
        preprocessing={"history": history.manifest_entry},
        precision="fp32",
        producer={"tformer": "0"},
        parity={"max_abs_error": 0.0},
    )
    model = model_of(
        nodes,
        {"history": (TensorProto.FLOAT, [m.BATCH_AXIS, "time", 2])},
        {"forecast": (TensorProto.FLOAT, [m.BATCH_AXIS, 4, 2])},
        {name: np.array(value, np.int64) for name, value in weights.items()},
    )
    helper.set_model_props(model, {m.MANIFEST_KEY: manifest.to_json()})
    path = folder() / "forecaster.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@functools.cache
def loaded(path: Path) -> Model:
    return Model.load(path, "cpu", threads=1)
