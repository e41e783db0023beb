"""What is said of images at export: which descriptions and processors are taken, and what is said of the others."""

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
from tformer_export.sources.hf_images import load_processor, with_preprocessing, with_processor
from tformer_runtime import MissingExtraError, OptionError, SourceError
from tformer_runtime.preprocess.images import image_inputs


class Mean(nn.Module):
    """Of each channel; of any size. `other` is read too, if it is given."""

    def forward(self, pixels, other=None):
        return pixels.mean((2, 3)) if other is None else pixels.mean((2, 3)) + other


def source(*shape, **others):
    return Source(
        Mean(), {"pixels": torch.randn(2, *shape), **others}, step_input=None, name="mean", task="feature-extraction"
    )


def made(prepare, *shape, classes=False):
    """What is put into the file, and the task."""
    found = with_preprocessing(source(*shape), prepare, classes)
    return image_inputs(found.preprocessing)["pixels"], found.task


def test_sizes_are_said_in_any_way():
    for size in (16, (16, 16), {"height": 16, "width": 16}):
        found, task = made(image(size), 3, 16, 16)
        assert (dict(found.size), found.crop, found.scale) == ({"height": 16, "width": 16}, (), 1 / 255)
        assert task == "image-feature-extraction"
    found, task = made(image({"shortest_edge": 20}, crop=(16, 12), mean=0.5, std=0.25), 3, 16, 12, classes=True)
    assert (found.crop, found.mean, found.std) == ((16, 12), (0.5,) * 3, (0.25,) * 3)
    assert task == "image-classification"
    gray, _ = made({"pixels": image(16, mean=[0.1], std=[2], scale=None, resample="box")}, 1, 16, 16)
    assert (gray.channels, gray.mean, gray.std, gray.scale, gray.resample) == (1, (0.1,), (2.0,), None, "box")


@pytest.mark.parametrize(
    ("given", "message"),
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
def test_descriptions_that_cannot_be(given, message):
    with pytest.raises(OptionError, match=message):
        image(**given)


@pytest.mark.parametrize(
    ("shape", "prepare", "message"),
    [
        ((3, 8, 8), image(9), "images are made 9 × 9, height by width, and pixels is 8 × 8: give the size"),
        ((3, 8, 8), image(), "pictures must all get one size, which the file has: give a height and a width, or"),
        ((3, 8, 8), image({"shortest_edge": 8}), "pictures must all get one size"),
        ((4, 8, 8), image(8), r"an image is an input of floats \(batch, channels, height, width\), 3 or 1 of them, and "
         r"pixels is torch.float32 \(2, 4, 8, 8\)"),
        ((3, 8), image(8), r"and pixels is torch.float32 \(2, 3, 8\)"),
        ((3, 8, 8), {"image": image(8)}, "there is no input 'image' to prepare: pixels"),
        ((3, 8, 8), {"size": 8}, "there is no input 'size' to prepare: pixels"),
        ((3, 8, 8), 8, r"pixels is prepared by image\(…\) or an image processor, not int"),
    ],
)  # fmt: skip
def test_descriptions_that_do_not_fit(shape, prepare, message):
    with pytest.raises(OptionError, match=message):
        made(prepare, *shape)


def test_which_input_is_said_where_there_are_several(tmp_path):
    two = source(3, 8, 8, other=torch.zeros(2, 1))
    with pytest.raises(
        OptionError, match=r"say which input is a picture, preprocessor={name: …}: there are pixels, other"
    ):
        with_preprocessing(two, image(8), False)
    assert list(with_preprocessing(two, {"pixels": image(8)}, False).preprocessing) == ["pixels"]
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


def test_processors_by_what_they_do():
    processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 24}, crop_pct=0.75)
    small = with_processor(source(3, 24, 24), processor)
    found = image_inputs(small.preprocessing)["pixels"]
    assert (dict(found.size), found.crop) == ({"shortest_edge": 32}, (24, 24))
    other = with_processor(source(3, 9, 9), processor)  # the model takes any size, and gets that of its pictures
    assert other.example["pixels"].shape == (2, 3, 24, 24)
    processor = transformers.ViTImageProcessorPil(size={"height": 7, "width": 9}, image_mean=[0.4], image_std=[0.2])
    gray = with_processor(source(1, 7, 9), processor)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30), np.uint8))
    expected = processor(images=picture, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(image_inputs(gray.preprocessing)["pixels"].pixels(picture), expected)
    assert gray.own_pipeline(picture, None).item() == pytest.approx(expected.mean(), abs=1e-6)


class Flipped(transformers.ViTImageProcessorPil):
    def _preprocess(self, images, **options):
        return super()._preprocess([pixels[::-1] for pixels in images], **options)


def test_processors_that_do_something_else():
    with pytest.raises(SourceError, match="the image processor Flipped does something else than resize, crop"):
        with_processor(source(3, 8, 8), Flipped(size={"height": 8, "width": 8}))
    three = transformers.ViTImageProcessorPil(size={"height": 8, "width": 8})
    with pytest.raises(SourceError, match="ViTImageProcessorPil makes no pixels of an image of 1 channels: mean must"):
        with_processor(source(1, 8, 8), three)
    three.size = {"longest_edge": 8}
    with pytest.raises(SourceError, match="ViTImageProcessorPil"):
        with_processor(source(3, 8, 8), three)


def test_without_pillow(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    for call in (
        lambda: made(image(8), 3, 8, 8),
        lambda: with_processor(source(3, 8, 8), None),
        lambda: load_processor(tmp_path),
    ):
        with pytest.raises(MissingExtraError, match=r"which needs Pillow: pip install 'tformer\[image\]'"):
            call()


def test_folders_without_a_processor_or_with_a_damaged_one(tmp_path):
    assert load_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(SourceError, match=rf"^{tmp_path}'s image processor cannot be loaded: "):
        load_processor(tmp_path)
