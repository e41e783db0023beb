"""Descriptions of images at export, and image processors of transformers: accepted ones match the processor."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

from tformer_export import Task, export, image
from tformer_export.sources.base import Source
from tformer_export.sources.hugging_face.images import load_processor, with_preprocessing, with_processor
from tformer_runtime import MissingExtraError, OptionError, SourceError
from tformer_runtime.preprocess.images import image_inputs


class Mean(nn.Module):
    """The mean of each channel, for images of any size. `other` is an optional second input."""

    def forward(self, pixels, other=None):
        return pixels.mean((2, 3)) if other is None else pixels.mean((2, 3)) + other


def make_source(*shape, **others):
    return Source(
        Mean(), {"pixels": torch.randn(2, *shape), **others}, step_input=None, name="mean", task="feature-extraction"
    )


def prepare_image(prepare, *shape, classes=False):
    """Return the preprocessing in the file, and the task."""
    prepared = with_preprocessing(make_source(*shape), prepare, classes)
    return image_inputs(prepared.preprocessing)["pixels"], prepared.task


def test_image_sizes_are_accepted_in_all_forms():
    for size in (16, (16, 16), {"height": 16, "width": 16}):
        preprocessing, task = prepare_image(image(size), 3, 16, 16)
        assert (dict(preprocessing.size), preprocessing.crop, preprocessing.scale) == (
            {"height": 16, "width": 16},
            (),
            1 / 255,
        )
        assert task == "image-feature-extraction"
    preprocessing, task = prepare_image(
        image({"shortest_edge": 20}, crop=(16, 12), mean=0.5, std=0.25), 3, 16, 12, classes=True
    )
    assert (preprocessing.crop, preprocessing.mean, preprocessing.std) == ((16, 12), (0.5,) * 3, (0.25,) * 3)
    assert task == "image-classification"
    gray, _ = prepare_image({"pixels": image(16, mean=[0.1], std=[2], scale=None, resample="box")}, 1, 16, 16)
    assert (gray.channels, gray.mean, gray.std, gray.scale, gray.resample) == (1, (0.1,), (2.0,), None, "box")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": ["a"], "std": [0.5]}, r"one number for all channels, or one for each, not \['a'\], \[0.5\]"),
        ({"size": (1, 2, 3)}, r"a size is one number, or a height and a width, not \(1, 2, 3\)"),
        ({"size": {"edge": 3}}, "a size has the names height, width; shortest_edge; .*, not edge"),
        ({"size": 0}, "sizes are whole numbers of 1 or more, two of them for a crop: height and width"),
        ({"crop": 2.5}, "sizes are whole numbers of 1 or more"),
        ({"resample": "sharp"}, "resample is one of nearest, lanczos, bilinear, .*, not 'sharp'"),
        ({"mean": 0.5}, "mean and std have a number for each of 1 channels, no std of them 0"),
        ({"mean": [0.5] * 3, "std": [0.5, 0, 0.5]}, "mean and std have a number for each of 3 channels, no std"),
        ({"mean": [0.5], "std": [0.5] * 3}, "mean and std have a number for each of 3 channels"),
        ({"mean": [0.5] * 2, "std": [0.5] * 2}, "images have 3 channels or 1, not 2"),
        ({"scale": float("inf")}, "scale, mean and std are finite numbers"),
    ],
)  # fmt: skip
def test_invalid_descriptions_raise_option_error(options, message):
    with pytest.raises(OptionError, match=message):
        image(**options)


@pytest.mark.parametrize(
    ("shape", "prepare", "message"),
    [
        ((3, 8, 8), image(9), "images are made 9 × 9, height by width, and pixels is 8 × 8: give the size"),
        ((3, 8, 8), image(), "images must all get one size, which the file has: give a height and a width, or"),
        ((3, 8, 8), image({"shortest_edge": 8}), "images must all get one size"),
        ((4, 8, 8), image(8), r"an image is an input of floats \(batch, channels, height, width\), 3 or 1 of them, and "
         r"pixels is torch.float32 \(2, 4, 8, 8\)"),
        ((3, 8), image(8), r"and pixels is torch.float32 \(2, 3, 8\)"),
        ((3, 8, 8), {"image": image(8)}, "there is no input 'image' to prepare: pixels"),
        ((3, 8, 8), {"size": 8}, "there is no input 'size' to prepare: pixels"),
        ((3, 8, 8), 8, r"pixels is prepared by image\(…\) or an image processor, not int"),
    ],
)  # fmt: skip
def test_descriptions_that_do_not_match_the_model_raise_option_error(shape, prepare, message):
    with pytest.raises(OptionError, match=message):
        prepare_image(prepare, *shape)


def test_image_input_must_be_named_among_several(tmp_path):
    two_inputs = make_source(3, 8, 8, other=torch.zeros(2, 1))
    with pytest.raises(
        OptionError, match=r"say which input is an image, preprocessor={name: …}: there are pixels, other"
    ):
        with_preprocessing(two_inputs, image(8), False)
    assert list(with_preprocessing(two_inputs, {"pixels": image(8)}, False).preprocessing) == ["pixels"]
    example = {"pixels": torch.randn(2, 3, 8, 8)}
    with pytest.raises(OptionError, match="images are made 9 × 9"):
        export(
            Mean(),
            tmp_path / "x.onnx",
            example=example,
            preprocessor=image(9),
            task=Task(labels=["red", "green", "blue"]),
        )
    assert not (tmp_path / "x.onnx").exists()


def test_image_processor_is_carried_over():
    processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 24}, crop_pct=0.75)
    cropped = with_processor(make_source(3, 24, 24), processor)
    preprocessing = image_inputs(cropped.preprocessing)["pixels"]
    assert (dict(preprocessing.size), preprocessing.crop) == ({"shortest_edge": 32}, (24, 24))
    any_size = with_processor(make_source(3, 9, 9), processor)  # the model takes any size, so the processor decides it
    assert any_size.example["pixels"].shape == (2, 3, 24, 24)
    processor = transformers.ViTImageProcessorPil(size={"height": 7, "width": 9}, image_mean=[0.4], image_std=[0.2])
    gray = with_processor(make_source(1, 7, 9), processor)
    sample = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30), np.uint8))
    expected = processor(images=sample, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(image_inputs(gray.preprocessing)["pixels"].pixels(sample), expected)
    assert gray.own_pipeline(sample, None).item() == pytest.approx(expected.mean(), abs=1e-6)


class Flipped(transformers.ViTImageProcessorPil):
    def _preprocess(self, images, **options):
        return super()._preprocess([pixels[::-1] for pixels in images], **options)


def test_unsupported_image_processor_is_refused():
    with pytest.raises(SourceError, match="the image processor Flipped does something else than resize, crop"):
        with_processor(make_source(3, 8, 8), Flipped(size={"height": 8, "width": 8}))
    three_channels = transformers.ViTImageProcessorPil(size={"height": 8, "width": 8})
    with pytest.raises(SourceError, match="ViTImageProcessorPil makes no pixels of an image of 1 channels: mean must"):
        with_processor(make_source(1, 8, 8), three_channels)
    three_channels.size = {"longest_edge": 8}
    with pytest.raises(SourceError, match="ViTImageProcessorPil"):
        with_processor(make_source(3, 8, 8), three_channels)


def test_missing_pillow_raises_missing_extra_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    for call in (
        lambda: prepare_image(image(8), 3, 8, 8),
        lambda: with_processor(make_source(3, 8, 8), None),
        lambda: load_processor(tmp_path),
    ):
        with pytest.raises(MissingExtraError, match=r"images needs Pillow: pip install 'tformer\[image\]'"):
            call()


def test_missing_processor_is_none_and_damaged_one_is_refused(tmp_path):
    assert load_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(SourceError, match=rf"^{tmp_path}'s image processor cannot be loaded: "):
        load_processor(tmp_path)
