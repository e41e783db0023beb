"""ImagePreprocessor: pixels equal the output of transformers' image processors bit by bit, and invalid images are
refused.
"""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from support.toy_models import Toy
from transformers.image_processing_backends import PilBackend

from tformer_runtime import InputError, MissingExtraError, ModelFileError, OutOfMemoryError
from tformer_runtime.format.manifest import BATCH_AXIS, Preprocessing, RequestInput
from tformer_runtime.preprocess.images import FILTERS, ImagePreprocessor, is_image
from tformer_runtime.preprocess.inputs import Inputs

SIZES = (
    {},
    {"height": 24, "width": 37},
    {"shortest_edge": 20},
    {"shortest_edge": 33, "longest_edge": 40},
    {"max_height": 30, "max_width": 50},
)
SHAPES = ((40, 61), (61, 40), (33, 33), (7, 90), (25, 24))


def random_image(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("crop", [(), (16, 16), (25, 31), (64, 8)])
def test_every_size_and_crop_matches_transformers(size, crop):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    for index, shape in enumerate(SHAPES):
        resample = FILTERS[index]
        processor = PilBackend(
            do_resize=bool(size), size=size or None, resample=FILTERS.index(resample), do_center_crop=bool(crop),
            crop_size=dict(zip(("height", "width"), crop, strict=True)) if crop else None,
            do_rescale=True, do_normalize=True, image_mean=list(mean), image_std=list(std),
        )  # fmt: skip
        image = random_image(*shape, index)
        expected = processor(images=image, return_tensors="np")["pixel_values"][0]
        actual = ImagePreprocessor(size, resample, crop, mean=mean, std=std).pixels(image)
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, expected)


def test_scale_and_normalization_are_optional():
    image = random_image(9, 8)
    for scale, mean in ((None, ()), (1 / 127.5, ()), (None, (3.0, 4.0, 5.0))):
        processor = PilBackend(
            do_resize=False, do_rescale=scale is not None, rescale_factor=scale, do_normalize=bool(mean),
            image_mean=mean or None, image_std=[2.0] * 3 if mean else None,
        )  # fmt: skip
        expected = processor(images=image, return_tensors="np")["pixel_values"][0]
        actual = ImagePreprocessor(scale=scale, mean=mean, std=(2.0,) * 3 if mean else ()).pixels(image)
        np.testing.assert_array_equal(actual, expected)


def test_arrays_match_images_and_invalid_arrays_are_refused():
    image = random_image(12, 10)
    expected = ImagePreprocessor().pixels(image)
    assert np.array_equal(ImagePreprocessor().pixels(np.array(image)), expected)
    gray = np.array(image.convert("L"))
    assert np.array_equal(
        ImagePreprocessor(channels=1).pixels(gray[..., None]), ImagePreprocessor(channels=1).pixels(gray)
    )
    for invalid in (3, ("a.jpg",)):
        with pytest.raises(InputError, match=rf"a Pillow image or an array of uint8, not {type(invalid).__name__}$"):
            ImagePreprocessor().pixels(invalid)
    for shape in ((3, 12, 10), (12,), (1, 12, 10, 3)):
        with pytest.raises(InputError, match=rf"1, 3 or 4 of them, and this is {re.escape(str(shape))}$"):
            ImagePreprocessor().pixels(np.zeros(shape, np.uint8))


def test_preprocessed_pixels_are_not_images():
    pixels = ImagePreprocessor().pixels(random_image(5, 4))
    assert not any(map(is_image, (pixels, pixels.tolist(), tuple(pixels), [], np.zeros((3, 5, 4), np.int64))))
    assert all(map(is_image, ("a", Path("a"), b"a", random_image(5, 4), np.zeros((5, 4), np.uint8), ("a", "b"), 3)))


def test_generating_model_reads_images(tmp_path):
    manifest, images = Toy().manifest(), ImagePreprocessor({"height": 4, "width": 6}, channels=1)
    encode = replace(manifest.encode, inputs=(RequestInput("pixels", "float32", (BATCH_AXIS, 1, 4, 6), "data"),))
    inputs = Inputs(replace(manifest, encode=encode, preprocessing={"pixels": images.manifest_entry}))
    random_image(9, 8).save(tmp_path / "a.png")
    for image in (str(tmp_path / "a.png"), {"pixels": tmp_path / "a.png"}, images.pixels(tmp_path / "a.png")):
        sources, start, _ = inputs.generation_inputs(image)
        np.testing.assert_array_equal(sources["pixels"], images.pixels(random_image(9, 8)))
        assert tuple(start) == manifest.special_tokens.bos_token_ids
    with pytest.raises(InputError, match=r"none.png cannot be read"):
        inputs.generation_inputs("none.png")
    for value in (np.nan, -np.inf, 1e300):  # 1e300 overflows float32
        pixels = np.zeros((1, 4, 6))
        pixels[0, 3, 2] = value
        with pytest.raises(InputError, match=r"input pixels takes finite numbers of float32, not \S+ at \(0, 3, 2\)"):
            inputs.generation_inputs(pixels)


def test_named_pipes_and_devices_are_no_images(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", "/dev/zero"):
        with pytest.raises(InputError, match="is not a regular file but a pipe or a device"):
            ImagePreprocessor().pixels(path)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("", "'' is not a name of a file: give that of an image"),
        ("a\0.png", r"'a\x00.png' is not a name of a file: give that of an image"),
        (
            ("a.png", "b.png"),
            "the input is two images: give one; only --similarity takes pairs",
        ),
    ],
)
def test_invalid_file_names_are_refused(image, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        ImagePreprocessor().pixels(image)


def test_missing_pillow_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"^reading images needs Pillow: pip install 'tformer\[image\]'$"):
        ImagePreprocessor().pixels("photo.jpg")


def test_pillow_that_fails_on_import_raises_missing_extra_error(monkeypatch, tmp_path):
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").touch()
    (tmp_path / "PIL" / "Image.py").write_text("raise ImportError('libjpeg.so.62: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"cannot be loaded \(libjpeg.so.62: cannot open\): install it again"):
        ImagePreprocessor().pixels("photo.jpg")


def test_image_too_large_for_memory_is_refused(monkeypatch):
    def raise_memory_error(*_, **__):
        raise MemoryError

    monkeypatch.setattr(Image, "open", raise_memory_error)
    with pytest.raises(OutOfMemoryError, match=r"^photo\.jpg is too large for the memory there is: make it smaller$"):
        ImagePreprocessor().pixels("photo.jpg")


@pytest.mark.parametrize(
    "numbers",
    [{"size": {"edge": 3}}, {"size": {"height": 0, "width": 2}}, {"crop": [3]}, {"resample": "sharp"}, {"other": 1},
     {"mean": [0.5]}, {"scale": "1"}, {"mean": ["a"] * 3, "std": [0.5] * 3}, {"mean": [0.5] * 3, "std": [math.nan] * 3},
     {"mean": [0.5] * 3, "std": [0.5, 0.0, 0.5]}, {"channels": 2}],
)  # fmt: skip
def test_damaged_manifest_entry_raises_model_file_error(numbers):
    with pytest.raises(ModelFileError, match="the image settings of the file are damaged"):
        ImagePreprocessor.of(Preprocessing("image", numbers))


def test_manifest_entry_round_trip():
    preprocessor = ImagePreprocessor({"shortest_edge": 40}, "lanczos", (32, 30), None, (0.5,) * 3, (0.25,) * 3)
    assert ImagePreprocessor.of(preprocessor.manifest_entry) == preprocessor
