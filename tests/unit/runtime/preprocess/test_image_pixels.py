"""From pictures to pixels: bit for bit what transformers' image processors make of them, and what is refused."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.toy_models import Toy
from transformers.image_processing_backends import PilBackend

from tformer_runtime import InputError, MissingExtraError, ModelFileError, OutOfMemoryError
from tformer_runtime.format.manifest import BATCH_AXIS, Preprocessing, RequestInput
from tformer_runtime.preprocess.images import FILTERS, ImagePreprocessor, is_picture
from tformer_runtime.preprocess.inputs import Inputs

SIZES = (
    {},
    {"height": 24, "width": 37},
    {"shortest_edge": 20},
    {"shortest_edge": 33, "longest_edge": 40},
    {"max_height": 30, "max_width": 50},
)
SHAPES = ((40, 61), (61, 40), (33, 33), (7, 90), (25, 24))


def drawn(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("crop", [(), (16, 16), (25, 31), (64, 8)])
def test_every_size_and_crop_is_transformers(size, crop):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    for number, shape in enumerate(SHAPES):
        resample = FILTERS[number]
        processor = PilBackend(
            do_resize=bool(size), size=size or None, resample=FILTERS.index(resample), do_center_crop=bool(crop),
            crop_size=dict(zip(("height", "width"), crop, strict=True)) if crop else None,
            do_rescale=True, do_normalize=True, image_mean=list(mean), image_std=list(std),
        )  # fmt: skip
        picture = drawn(*shape, number)
        expected = processor(images=picture, return_tensors="np")["pixel_values"][0]
        found = ImagePreprocessor(size, resample, crop, mean=mean, std=std).pixels(picture)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_scale_and_normalisation_are_each_left_out():
    picture = drawn(9, 8)
    for scale, mean in ((None, ()), (1 / 127.5, ()), (None, (3.0, 4.0, 5.0))):
        processor = PilBackend(
            do_resize=False, do_rescale=scale is not None, rescale_factor=scale, do_normalize=bool(mean),
            image_mean=mean or None, image_std=[2.0] * 3 if mean else None,
        )  # fmt: skip
        expected = processor(images=picture, return_tensors="np")["pixel_values"][0]
        found = ImagePreprocessor(scale=scale, mean=mean, std=(2.0,) * 3 if mean else ()).pixels(picture)
        np.testing.assert_array_equal(found, expected)


def test_arrays():
    picture = drawn(12, 10)
    expected = ImagePreprocessor().pixels(picture)
    assert np.array_equal(ImagePreprocessor().pixels(np.array(picture)), expected)
    gray = np.array(picture.convert("L"))
    assert np.array_equal(
        ImagePreprocessor(channels=1).pixels(gray[..., None]), ImagePreprocessor(channels=1).pixels(gray)
    )
    for wrong in (3, ("a.jpg",)):
        with pytest.raises(InputError, match=rf"a Pillow image or an array of uint8, not {type(wrong).__name__}$"):
            ImagePreprocessor().pixels(wrong)
    for shape in ((3, 12, 10), (12,), (1, 12, 10, 3)):
        with pytest.raises(InputError, match=rf"1, 3 or 4 of them, and this is {re.escape(str(shape))}$"):
            ImagePreprocessor().pixels(np.zeros(shape, np.uint8))


def test_what_is_made_already_is_no_picture():
    made = ImagePreprocessor().pixels(drawn(5, 4))
    assert not any(map(is_picture, (made, made.tolist(), tuple(made), [], np.zeros((3, 5, 4), np.int64))))
    assert all(map(is_picture, ("a", Path("a"), b"a", drawn(5, 4), np.zeros((5, 4), np.uint8), ("a", "b"), 3)))


def test_a_model_that_generates_reads_pictures_too(tmp_path):
    manifest, images = Toy().manifest(), ImagePreprocessor({"height": 4, "width": 6}, channels=1)
    encode = replace(manifest.encode, inputs=(RequestInput("pixels", "float32", (BATCH_AXIS, 1, 4, 6), "data"),))
    inputs = Inputs(replace(manifest, encode=encode, preprocessing={"pixels": images.manifest_entry}))
    drawn(9, 8).save(tmp_path / "a.png")
    for given in (str(tmp_path / "a.png"), {"pixels": tmp_path / "a.png"}, images.pixels(tmp_path / "a.png")):
        sources, start, _ = inputs.generation_inputs(given)
        np.testing.assert_array_equal(sources["pixels"], images.pixels(drawn(9, 8)))
        assert tuple(start) == manifest.special_tokens.bos_token_ids
    with pytest.raises(InputError, match=r"none.png cannot be read"):
        inputs.generation_inputs("none.png")
    for number in (np.nan, -np.inf, 1e300):  # the last is none of float32
        pixels = np.zeros((1, 4, 6))
        pixels[0, 3, 2] = number
        with pytest.raises(InputError, match=r"input pixels takes finite numbers of float32, not \S+ at \(0, 3, 2\)"):
            inputs.generation_inputs(pixels)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "'' is no name of a file: give that of an image"),
        ("a\0.png", r"'a\x00.png' is no name of a file: give that of an image"),
        (
            ("a.png", "b.png"),
            "it is two images, and each is read by itself: give one, for pairs are of --similarity alone",
        ),
    ],
)
def test_names_that_are_none(given, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        ImagePreprocessor().pixels(given)


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"^reading images needs Pillow: pip install 'tformer\[image\]'$"):
        ImagePreprocessor().pixels("photo.jpg")


def test_a_pillow_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").touch()
    (tmp_path / "PIL" / "Image.py").write_text("raise ImportError('libjpeg.so.62: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"cannot be loaded \(libjpeg.so.62: cannot open\): install it anew"):
        ImagePreprocessor().pixels("photo.jpg")


def test_a_picture_for_which_there_is_no_memory(monkeypatch):
    def nothing_left(*_, **__):
        raise MemoryError

    monkeypatch.setattr("tformer_runtime.preprocess.images._open", nothing_left)
    with pytest.raises(OutOfMemoryError, match=r"^photo\.jpg is too large for the memory there is: make it smaller$"):
        ImagePreprocessor().pixels("photo.jpg")


@pytest.mark.parametrize(
    "numbers",
    [{"size": {"edge": 3}}, {"size": {"height": 0, "width": 2}}, {"crop": [3]}, {"resample": "sharp"}, {"other": 1},
     {"mean": [0.5]}, {"scale": "1"}, {"mean": ["a"] * 3, "std": [0.5] * 3}, {"mean": [0.5] * 3, "std": [math.nan] * 3},
     {"mean": [0.5] * 3, "std": [0.5, 0.0, 0.5]}, {"channels": 2}],
)  # fmt: skip
def test_damaged_numbers(numbers):
    with pytest.raises(ModelFileError, match="what the file says of its images is damaged"):
        ImagePreprocessor.of(Preprocessing("image", numbers))


def test_numbers_go_through_the_file():
    made = ImagePreprocessor({"shortest_edge": 40}, "lanczos", (32, 30), None, (0.5,) * 3, (0.25,) * 3)
    assert ImagePreprocessor.of(made.manifest_entry) == made
