"""Inputs that would take more memory than any model needs are refused by their size, before memory is taken."""

from __future__ import annotations

import io

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from support.toy_models import Toy, with_manifest, write_encoder

from tformer_runtime import InputError, Model, ModelFileError
from tformer_runtime.base.errors import OutOfMemoryError
from tformer_runtime.engine import kv_cache
from tformer_runtime.format.model_file import read_manifest
from tformer_runtime.preprocess import images, inputs
from tformer_runtime.preprocess.csv_series import read_series
from tformer_runtime.preprocess.images import ImagePreprocessor
from tformer_runtime.preprocess.series import SeriesPreprocessor


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder") / "encoder.onnx")


def test_long_texts_are_refused_or_cut_before_they_are_tokenized(encoder, monkeypatch):
    monkeypatch.setattr(inputs, "MIN_TEXT_CHARACTERS", 600)
    model = Model.load(encoder, "cpu", threads=1)
    with pytest.raises(InputError, match="the input is 601 characters long and at most 600 are read at once"):
        list(model.predict(["a" * 601]))
    (short,), (long,) = (list(model.predict(["ab" * n], truncate=True)) for n in (20, 5000))
    assert short.keys() == long.keys()
    for name in short:
        np.testing.assert_array_equal(short[name], long[name])
    monkeypatch.setattr(inputs, "MIN_TEXT_CHARACTERS", 1)  # then the limit follows the length of the model, 64
    with pytest.raises(InputError, match="the input is 513 characters long and at most 512 are read at once"):
        list(model.predict(["a" * 513]))


def test_outputs_of_another_shape_than_declared_are_a_damaged_file(encoder, tmp_path):
    stage = read_manifest(encoder).encode
    first = replace(stage.outputs[0], shape=(*stage.outputs[0].shape[:-1], 9))
    path = with_manifest(encoder, tmp_path / "x.onnx", encode=replace(stage, outputs=(first, *stage.outputs[1:])))
    with pytest.raises(ModelFileError, match=r"the output 'context\.k' is float32 \(.*, 9\), and in the graph .*, 8\)"):
        Model.load(path, "cpu", threads=1)
    model = Model.load(encoder, "cpu", threads=1)
    declared = replace(model.manifest.encode, outputs=(first, *stage.outputs[1:]))  # as if the graph had free sizes
    model.engine.manifest = replace(model.manifest, encode=declared)
    with pytest.raises(ModelFileError, match=r"its graph returns context\.k of the shape \(1, 2, 3, 8\)"):
        list(model.predict(["abc"]))


def test_caches_larger_than_the_machine_are_refused(tmp_path, monkeypatch):
    model = Model.load(Toy(encoder=False).write(tmp_path / "x.onnx"), "cpu", threads=1)
    monkeypatch.setattr(kv_cache, "_machine_bytes", lambda: 10_000)
    with pytest.raises(
        OutOfMemoryError, match=r"the caches need [0-9,]+ bytes at once, which this machine does not have"
    ):
        model.generate("abc", max_new_tokens=20, num_beams=8)


def png(width, height):
    data = io.BytesIO()
    Image.new("L", (width, height)).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        ((60_000, 1), {"size": {"shortest_edge": 224}, "crop": (224, 224)}, "would be resized to 13440000 × 224"),
        ((1, 2000), {"size": {"shortest_edge": 224}}, "would be resized to 224 × 448000"),
        ((2_000_000, 1), {"size": {"height": 8, "width": 8}}, "an edge has at most 1,048,576 of them"),
        ((5000, 5000), {}, "and the model reads at most 16,777,216"),
    ],
)
def test_images_that_grow_are_refused(size, settings, message):
    with pytest.raises(InputError, match=message):
        ImagePreprocessor(**settings).pixels(png(*size))


@pytest.mark.parametrize("scale", [None, 1 / 255])
def test_pixels_in_chunks_are_those_at_once(scale, monkeypatch):
    settings = ImagePreprocessor({}, scale=scale, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    image = np.random.default_rng(0).integers(0, 256, (31, 17, 3), np.uint8)
    whole = settings.pixels(image)
    monkeypatch.setattr(images, "CHUNK_PIXELS", 40)
    np.testing.assert_array_equal(settings.pixels(image), whole)


def test_tables_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tformer_runtime.preprocess.csv_series.MAX_NUMBERS", 100)
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "1,2\n" * 50)
    assert read_series(str(path), ("a", "b"), 2).shape == (50, 2)
    path.write_text("a,b\n" + "1,2\n" * 51)
    with pytest.raises(InputError, match="has more than 100 numbers: give its last rows"):
        read_series(str(path), ("a", "b"), 2)
    monkeypatch.setattr("tformer_runtime.preprocess.csv_series.MAX_LINE_CHARS", 20)
    path.write_text("a,b\n1,2\n" + "1" * 21)
    with pytest.raises(InputError, match=r"x\.csv, line 3: it is longer than 20 characters"):
        read_series(str(path), ("a", "b"), 2)


@pytest.mark.parametrize(
    "change",
    [
        {"features": 0}, {"targets": (2,)}, {"feedback": (0, 1)}, {"horizon": "4"}, {"normalize": "x"}, {"begin": -1},
        {"begin": ((1.0, 2.0),)}, {"normalize": "fixed", "mean": (1.0,), "scale": (1.0,)}, {"columns": ("a",)},
        {"normalize": "fixed", "mean": (1.0, 2.0), "scale": (1.0, 0.0)}, {"at_once": 1}, {"max_context_length": 0},
    ],
)  # fmt: skip
def test_impossible_settings_of_a_series_are_refused(change):
    manifest = Toy().manifest()
    for numbers, refused in (({}, False), (change, True)):
        entry = SeriesPreprocessor("x", **{"features": 2, **numbers}).manifest_entry
        described = replace(manifest, preprocessing={"x": entry})
        if refused:
            with pytest.raises(ModelFileError, match="the series settings of the file are damaged"):
                SeriesPreprocessor.of(described)
        else:
            assert SeriesPreprocessor.of(described) == SeriesPreprocessor("x", 2)
