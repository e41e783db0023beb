"""Exported image models match transformers' image processor and module, on images of every file format and mode.

A custom model with its own patch embedding is compared with Pillow and PyTorch. Each model is exported once.
"""

from __future__ import annotations

import asyncio
import functools
import json
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageOps
from support.command_lines import failed, run
from torch import nn
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from tformer_export import Quantization, Task, export, image
from tformer_export.calibration.samples import read_samples
from tformer_export.sources import load_source
from tformer_export.sources.hugging_face.images import read_image_steps
from tformer_runtime import AsyncModel, InputError, Model, UnsupportedCallError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.preprocess import images

LABELS = dict(id2label={0: "cat", 1: "dog", 2: "car"}, label2id={"cat": 0, "dog": 1, "car": 2})
SHAPE = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8, initializer_range=0.3
)
SQUARE = {"height": 32, "width": 32}


def plain():
    config = transformers.ViTConfig(**SHAPE, **LABELS, intermediate_size=48)
    return transformers.ViTForImageClassification(config), transformers.ViTImageProcessorPil(size=SQUARE)


def distilled():
    """DeiT: two class tokens, multi-label, resized with another filter and cropped."""
    config = transformers.DeiTConfig(**SHAPE, **LABELS, intermediate_size=48, problem_type="multi_label_classification")
    processor = transformers.DeiTImageProcessorPil(size={"height": 40, "width": 44}, crop_size=SQUARE)
    return transformers.DeiTForImageClassificationWithTeacher(config), processor


def windows():
    """Swin: attention in windows. The second layer shifts them by rolling pixels, with a mask."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=2, initializer_range=0.3,
        **LABELS,
    )  # fmt: skip
    processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.8)
    return transformers.SwinForImageClassification(config), processor


def features():
    """DINOv2 without a head: a vector for each patch. The shortest edge is resized and the longest is cropped."""
    config = transformers.Dinov2Config(**SHAPE)
    processor = transformers.BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=SQUARE, resample=Image.LANCZOS)
    return transformers.Dinov2Model(config), processor


MODELS = {"plain": plain, "distilled": distilled, "windows": windows, "features": features}


class Patches(nn.Module):
    """A custom model: patches by reshaping, packed QKV, a class token and a linear head."""

    def __init__(self, classes=3, channels=1, patch=8, width=32, heads=4):
        super().__init__()
        self.patch, self.heads = patch, heads
        self.embed = nn.Linear(channels * patch * patch, width)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 13, width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pixels):
        b, c, h, w = pixels.shape
        p = self.patch
        x = pixels.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)
        x = torch.cat([self.first.expand(b, -1, -1), self.embed(x)], 1) + self.place
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x[:, 0])


@pytest.fixture(scope="module")
def image_files(tmp_path_factory):
    """Return name → path of images of many formats and modes."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(5)

    def random_pixels(height, width, channels=3):
        coarse = Image.fromarray(random.integers(0, 256, (4, 5, 4), np.uint8)).resize((width, height))
        noise = random.integers(-30, 31, (height, width, 4))
        return np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)[..., :channels]

    def save(name, sample, **options):
        sample.save(folder / name, **options)

    save("photo.jpg", Image.fromarray(random_pixels(70, 101)))
    orientation = Image.Exif()
    orientation[0x0112] = 6  # orientation: rotated by 90 degrees
    save("turned.jpg", Image.fromarray(random_pixels(50, 90)), exif=orientation)
    save("gray.png", Image.fromarray(random_pixels(41, 33, 1)[..., 0]))
    save("alpha.png", Image.fromarray(random_pixels(64, 64, 4)))
    save("palette.gif", Image.fromarray(random_pixels(60, 48)).convert("P"))
    save("print.jpg", Image.fromarray(random_pixels(45, 71)).convert("CMYK"))
    deep_pixels = random_pixels(40, 52, 1)[..., 0].astype(np.uint16) * 257
    save("deep.png", Image.fromarray(deep_pixels))
    save("small.png", Image.fromarray(random_pixels(9, 7)))
    save("bits.png", Image.fromarray(random_pixels(30, 40)).convert("1"))
    return {path.name: path for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function: name → module, processor, file and report of an export from a folder."""

    @functools.cache
    def get(name, **options):
        module, processor = seeded_model(name)
        folder = tmp_path_factory.mktemp(name)
        module.save_pretrained(folder)
        processor.save_pretrained(folder)
        report = export(load_source(folder), folder / "model.onnx", **options)
        return module, processor, folder / "model.onnx", report

    return get


def seeded_model(name):
    torch.manual_seed(3)
    module, processor = MODELS[name]()
    return module.eval(), processor


def transformers_outputs(module, processor, paths):
    """Return transformers' output for each image. Its pipelines convert it for a processor that does not."""
    read = (lambda path: ImageOps.exif_transpose(Image.open(path))) if processor.do_convert_rgb else load_image
    with torch.no_grad():
        return [module(**processor(images=read(str(p)), return_tensors="pt"))[0][0].double() for p in paths]


@pytest.mark.parametrize("name", ["distilled", "windows"])
def test_classes_match_transformers_for_each_batch_size(exported, image_files, name):
    module, processor, path, report = exported(name)
    activation = torch.sigmoid if name == "distilled" else functools.partial(torch.softmax, dim=-1)
    expected = [activation(output).numpy() for output in transformers_outputs(module, processor, image_files.values())]
    model = Model.load(path, "cpu", threads=1)
    for batch_size, workers in ((1, 1), (4, 1), (2, 2)):
        actual = model.classify(image_files.values(), batch_size=batch_size, workers=workers, top_k=2)
        for result, probabilities in zip(actual, expected, strict=True):
            assert list(result.scores) == ["cat", "dog", "car"]
            np.testing.assert_allclose(list(result.scores.values()), probabilities, atol=1e-5)
            assert result.label == ["cat", "dog", "car"][probabilities.argmax()]

    async def ask():
        async with AsyncModel(model, max_batch_size=4) as aio:
            return await asyncio.gather(*(aio.classify(path, top_k=2) for path in image_files.values()))

    for result, alone in zip(asyncio.run(ask()), actual, strict=True):
        np.testing.assert_allclose(list(result.scores.values()), list(alone.scores.values()), atol=1e-6)
        assert [label for label, _ in result.top] == [label for label, _ in alone.top]
    assert np.ptp(expected, axis=0).max() > 0.1  # the results depend on the image
    assert report.task == "image-classification"
    assert report.parity.raw.images == 6
    assert report.parity.raw.relative < 1e-4
    assert ("from raw inputs", "6 images") in [(label, text.rpartition(", ")[2]) for label, text in report.rows()]


def test_int8_classes_are_near_and_the_report_has_the_agreement(image_files, tmp_path):
    """A model in memory is fitted to calibration images. The loss is measured on every fourth image."""
    module, processor = seeded_model("plain")
    paths = [*image_files.values()] * 4
    (tmp_path / "lines").write_text("".join(f"{path}\n" for path in paths))
    report = export(
        module, tmp_path / "x.onnx", preprocessor=processor, quantization=Quantization("int8",
        calibration=tmp_path / "lines")
    )  # fmt: skip
    quality = report.degradation.quality
    assert quality.of_classes
    actual = Model.load(tmp_path / "x.onnx", "cpu").classify(paths)
    logits = torch.stack(transformers_outputs(module, processor, paths))
    actual, expected = np.array([list(r.scores.values()) for r in actual]), logits.softmax(-1).numpy()
    np.testing.assert_allclose(actual, expected, atol=0.1)
    measured = slice(3, None, 4)
    assert quality.positions == len(paths[measured])
    assert quality.agreement == (actual.argmax(1) == expected.argmax(1))[measured].mean()
    assert ("quantised", f"{quality.agreement:.2%} of 9 rows keep their class") in report.rows()


def test_pooled_vectors_match_transformers(exported, image_files, tmp_path):
    module, processor, path, report = exported("features", task=Task(pooling="mean", normalize=True))
    assert report.task == "image-feature-extraction"
    assert report.parity.raw.relative < 1e-4
    lines = [str(path) for path in image_files.values()]
    states = torch.stack(transformers_outputs(module, processor, lines))
    means = nn.functional.normalize(states.mean(1), dim=1)
    vectors = Model.load(path, "cpu").embed(lines)
    np.testing.assert_allclose(vectors, means.numpy(), atol=1e-5)
    assert run(path, *lines, "--output-file", tmp_path / "x.npy").exit_code == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), vectors)
    lines_of_similarity = run(path, *lines, "--similarity").stdout.splitlines()
    np.testing.assert_allclose(
        [list(map(float, row.split("\t"))) for row in lines_of_similarity], means @ means.T, atol=1e-4
    )
    pair_lines = run(path, "\t".join(lines[:2]), "\t".join(lines[2:4]), "--similarity").stdout.splitlines()
    expected = [float(means[0] @ means[1]), float(means[2] @ means[3])]
    assert list(map(float, pair_lines)) == pytest.approx(expected, abs=1e-4)
    (first, *_) = run(path, *lines, "--json").stdout.splitlines()
    assert json.loads(first)["vector"] == pytest.approx(vectors[0].tolist())


def image_modes():
    """Return an image in each mode of Pillow that converts to RGB, some of them transparent in part."""
    random = np.random.default_rng(2)
    colours = Image.fromarray(random.integers(0, 256, (37, 50, 3), np.uint8))
    alpha = Image.fromarray(random.integers(0, 256, (37, 50), np.uint8))
    modes = {mode: colours.convert(mode) for mode in ("RGB", "P", "L", "CMYK", "1", "I", "F", "YCbCr", "HSV")}
    modes["I;16"] = Image.fromarray(random.integers(0, 65536, (37, 50), np.uint16))
    for mode in ("RGB", "L"):
        modes[f"{mode}A"] = modes[mode].copy()
        modes[f"{mode}A"].putalpha(alpha)
        modes[f"{mode}, one colour"] = modes[mode].copy()
        modes[f"{mode}, one colour"].info["transparency"] = modes[mode].getpixel((25, 18))
    modes["RGBa"] = modes["RGBA"].convert("RGBa")
    for name, transparency in (("one colour", modes["P"].getpixel((25, 18))), ("all colours", random.bytes(256))):
        modes[f"P, {name}"] = modes["P"].copy()
        modes[f"P, {name}"].info["transparency"] = transparency
    modes["PA"] = modes["P, one colour"].convert("PA")
    return modes


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("converts", [True, None])
def test_pixels_of_each_mode_are_those_of_the_processor(converts):
    """A processor that does not convert images gets them in RGB from transformers' pipelines."""
    processor = transformers.ViTImageProcessorPil(size={"height": 24, "width": 30}, do_convert_rgb=converts)
    steps = read_image_steps(processor, 3)
    dropped = 0
    for mode, sample in image_modes().items():
        given = sample if converts else sample.convert("RGB")
        expected = processor(images=given, return_tensors="np")["pixel_values"][0]
        assert np.array_equal(steps.pixels(sample), expected), mode
        opaque = Image.fromarray(np.asarray(sample.convert("RGB")))  # which has no transparent colour
        dropped += not np.array_equal(processor(images=opaque)["pixel_values"][0], expected)
    assert dropped == (7 if converts else 0)  # images that have transparent parts


def test_large_transparent_images_are_laid_on_white_some_rows_at_a_time(monkeypatch):
    sample = image_modes()["RGBA"]
    expected = convert_to_rgb(sample, return_numpy=True)
    monkeypatch.setattr(images, "CHUNK_PIXELS", 130)
    pixels = images.ImagePreprocessor(scale=None, on_white=True).pixels(sample)
    assert np.array_equal(pixels, np.moveaxis(expected, -1, 0))


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    """Return the custom model, its file and its report."""
    torch.manual_seed(4)
    module, path = Patches().eval(), tmp_path_factory.mktemp("own") / "own.onnx"
    report = export(
        module, path, example={"pixels": torch.randn(2, 1, 24, 32)}, task=Task(labels=["a", "b", "c"]),
        preprocessor={"pixels": image(size={"shortest_edge": 36}, crop=(24, 32), mean=0.4, std=0.3, resample="box")},
    )  # fmt: skip
    return module, path, report


def test_custom_model_matches_pillow_and_pytorch_for_each_input_type(custom, image_files):
    """The reference is Pillow's resizing, slices and PyTorch."""
    module, path, report = custom
    assert report.parity.raw.images == 6
    model = Model.load(path, "cpu")
    for name in ("photo.jpg", "gray.png", "alpha.png"):
        gray = Image.open(image_files[name]).convert("L")
        height, width = gray.height, gray.width
        size = (36, int(36 * height / width)) if width <= height else (int(36 * width / height), 36)
        x = torch.from_numpy(np.array(gray.resize(size, Image.BOX))).double()
        top, left = (x.shape[0] - 24) // 2, (x.shape[1] - 32) // 2
        x = ((x / 255 - 0.4) / 0.3)[top : top + 24, left : left + 32].float()
        with torch.no_grad():
            expected = module(x[None, None])[0].softmax(-1)
        pixels = x[None].numpy()  # normalised pixels are not processed again
        for sample in (
            image_files[name],
            str(image_files[name]),
            image_files[name].read_bytes(),
            gray,
            np.array(gray),
            pixels,
        ):
            (actual,) = model.classify([sample])
            np.testing.assert_allclose(list(actual.scores.values()), expected, atol=1e-5)


class Convolved(nn.Module):
    """Patches by a convolution, which runs for images of other heights and widths, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 2)

    def forward(self, pixels):
        return self.head(self.embed(pixels).flatten(2).relu().mean(2))


@pytest.mark.parametrize("by_name", [True, False])
def test_module_for_any_size_gets_images_of_one_size(by_name, image_files, tmp_path):
    torch.manual_seed(6)
    module, path = Convolved().eval(), tmp_path / "own.onnx"
    prepare = image(size=(24, 32), mean=[0.5] * 3, std=[0.5] * 3)
    example, task = {"pixels": torch.randn(2, 3, 24, 32)}, Task("image-classification", labels=["a", "b"])
    export(module, path, example, preprocessor={"pixels": prepare} if by_name else prepare, task=task)
    model = Model.load(path, "cpu")
    pixels = np.random.default_rng(0).standard_normal((3, 24, 32)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(pixels)[None])[0].softmax(-1)
    (actual, _) = model.classify([pixels, image_files["photo.jpg"]])
    np.testing.assert_allclose(list(actual.scores.values()), expected, atol=1e-5)


def test_module_for_one_image_gets_images_of_one_size(image_files, tmp_path):
    class OneImage(Convolved):
        def forward(self, pixels):
            return super().forward(pixels[None])[0]

    torch.manual_seed(6)
    module, path = OneImage().eval(), tmp_path / "own.onnx"
    prepare = {"pixels": image(size=(24, 32), mean=[0.5] * 3, std=[0.5] * 3)}
    task, example = Task("image-classification", labels=["a", "b"]), {"pixels": torch.randn(3, 24, 32)}
    export(module, path, example, preprocessor=prepare, axes={"pixels": (None,)}, task=task)
    pixels = np.random.default_rng(0).standard_normal((2, 3, 24, 32)).astype(np.float32)
    for result, sample in zip(Model.load(path, "cpu").classify([*pixels]), pixels, strict=True):
        with torch.no_grad():
            expected = module(torch.from_numpy(sample)).softmax(-1)
        np.testing.assert_allclose(list(result.scores.values()), expected, atol=1e-5)


def test_images_are_read_one_batch_at_a_time(custom, image_files):
    _, path, _ = custom
    requested = []

    def inputs():
        for _ in range(20):
            requested.append(image_files["small.png"])
            yield requested[-1]

    results = Model.load(path, "cpu").predict(inputs(), batch_size=4)
    next(results)
    assert len(requested) == 4
    assert len(list(results)) == 19


def test_command_line_writes_the_classes_of_classify(custom, image_files, tmp_path):
    _, path, _ = custom
    lines = [str(image_files[name]) for name in ("photo.jpg", "turned.jpg", "gray.png")]
    expected = Model.load(path, "cpu").classify(lines, top_k=2)
    (line,) = run(path, lines[0]).stdout.splitlines()
    assert line == f"{expected[0].label}\t{expected[0].score:.6g}"
    result = run(path, *lines, "--top-k", 2)
    assert result.exit_code == 0
    assert result.stderr == "device: cpu\n"
    for line, result_of_python in zip(result.stdout.splitlines(), expected, strict=True):
        words = line.split("\t")
        assert words[::2] == [label for label, _ in result_of_python.top]
        assert list(map(float, words[1::2])) == pytest.approx([score for _, score in result_of_python.top], abs=1e-5)
    json_lines = run(
        path, "--input-file", "-", "--json", "--workers", 2, stdin="\n".join(lines * 40)
    ).stdout.splitlines()
    for index, (line, result_of_python) in enumerate(zip(map(json.loads, json_lines), expected * 40, strict=True)):
        assert (line["index"], line["label"]) == (index, result_of_python.label)
        assert line["scores"] == pytest.approx(result_of_python.scores, abs=1e-5)
    info = run(path, "--info").stdout
    assert "task: image-classification" in info
    assert "shortest edge: 36" in info


def test_run_is_resumed_after_a_missing_image(custom, image_files, tmp_path):
    _, path, _ = custom
    lines = [str(image_files["photo.jpg"]), str(tmp_path / "late.png"), str(image_files["gray.png"])]
    message = failed(run(path, "--output-file", tmp_path / "out", "--batch-size", 1, stdin="\n".join(lines)))
    assert message == f"line 2: {lines[1]} cannot be read: No such file or directory; --resume goes on after input 1"
    Image.open(image_files["turned.jpg"]).convert("L").save(lines[1])
    result_of_resume = run(path, "--output-file", tmp_path / "out", "--resume", stdin="\n".join(lines))
    assert result_of_resume.exit_code == 0
    labels = [line.split("\t")[0] for line in (tmp_path / "out").read_text().splitlines()]
    assert labels == [result.label for result in Model.load(path, "cpu").classify(lines)]


def write_png_with_size(path, width, height):
    """Write a small PNG with another size in its header, https://www.w3.org/TR/png/#11IHDR"""
    Image.new("1", (8, 8)).save(path)
    data = path.read_bytes()
    header = data[12:16] + struct.pack(">II", width, height) + data[24:29]
    path.write_bytes(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])


@pytest.fixture
def damaged(image_files, tmp_path, monkeypatch):
    """Enter a folder with damaged files, files of other types and images of invalid sizes."""
    (tmp_path / "torn.jpg").write_bytes(image_files["photo.jpg"].read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("no image")
    damaged_bytes = bytearray(image_files["alpha.png"].read_bytes())
    damaged_bytes[200:260] = bytes(60)
    (tmp_path / "torn.png").write_bytes(damaged_bytes)
    write_png_with_size(tmp_path / "huge.png", 10_000, 9_000)
    write_png_with_size(tmp_path / "bomb.png", 20_000, 10_000)
    Image.new("L", (80_000, 1)).save(tmp_path / "thin.png")
    monkeypatch.chdir(tmp_path)


def test_invalid_images_are_refused(custom, image_files, damaged):
    _, path, _ = custom
    assert failed(run(path, "none.jpg")) == "input 1: none.jpg cannot be read: No such file or directory"
    assert failed(run(path, ".")) == "input 1: . cannot be read: Is a directory"
    first = run(path, image_files["gray.png"], "torn.jpg")
    assert failed(first, before=1).startswith("input 2: torn.jpg is a damaged image: ")
    assert failed(run(path, "torn.png")).startswith("input 1: torn.png is a damaged image: ")
    assert failed(run(path, "text.jpg")) == "input 1: text.jpg is not an image that Pillow can read"
    assert failed(run(path, "huge.png")) == (
        "input 1: huge.png is 10000 × 9000 pixels, and at most 61,000,000 are read: make it smaller first"
    )
    assert failed(run(path, "bomb.png")).startswith("input 1: bomb.png has too many pixels, and at most 61,000,000")
    assert failed(run(path, "thin.png")).startswith("input 1: thin.png is 80000 × 1 pixels and would be resized to")


def test_invalid_options_and_missing_pillow_are_refused(custom, image_files, monkeypatch):
    _, path, _ = custom
    line = str(image_files["photo.jpg"])
    assert failed(run(path, "--ids", "1 2")) == "input 1: the model reads images, not ids: leave out --ids"
    assert failed(run(path, line, "--truncate", "--num-beams", 2, "--similarity")) == (
        "own.onnx classifies images (image-classification): it takes no --num-beams, --truncate, --similarity"
    )
    assert failed(run(path, line, "--top-k", 0)) == "--top-k must be a whole number of at least 1, not 0"
    assert failed(run(path, f"{line}\t{line}")) == (
        "input 1: the input is two images: give one; only --similarity takes pairs"
    )
    assert "holds 2 tabs: a pair is two names of files with one tab" in failed(run(path, "a\tb\tc"))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert failed(run(path, line)) == "reading images needs Pillow: pip install 'tformer[image]'"


def test_invalid_calls_raise_errors(custom, image_files):
    _, path, _ = custom
    model = Model.load(path, "cpu")
    sample = Image.open(image_files["photo.jpg"])
    pixels = np.array(sample)
    for single_input in (str(image_files["photo.jpg"]), image_files["photo.jpg"], sample, pixels, pixels[..., 0]):
        with pytest.raises(InputError, match="give a list of inputs"):
            model.classify(single_input)
    with pytest.raises(UnsupportedCallError, match=r"classifies images: it cannot embed; call classify\(\) or pre"):
        model.embed([sample])
    with pytest.raises(InputError, match=r"input 1: an array of uint8 is an image of .*, and this is \(3, 70, 101\)"):
        model.classify([np.moveaxis(pixels, -1, 0)])
    with pytest.raises(InputError, match=r"input 1: the image has no pixels"):
        model.classify([Image.new("RGB", (0, 5))])
    with pytest.raises(InputError, match=r"input 2: input pixels has the shape \(1, 9, 32\) where \(1, 24, 32\) is ne"):
        model.classify([np.zeros((1, 24, 32)), np.zeros((1, 9, 32))])


def test_calibration_error_names_the_line_of_a_damaged_image(custom, image_files, damaged, tmp_path):
    _, path, _ = custom
    engine = Engine(path, "cpu", threads=1)
    names = [str(image_files["photo.jpg"])] * 9
    (tmp_path / "lines").write_text("\n".join([names[0], "torn.jpg", *names]))
    with pytest.raises(InputError, match=r"^line 2 of .*lines: torn.jpg is a damaged image"):
        read_samples(tmp_path / "lines", engine)
    (tmp_path / "lines").write_text("\n".join(names))
    samples = read_samples(tmp_path / "lines", engine)
    assert (len(samples.fitted), len(samples.measured)) == (7, 2)
    assert samples.fitted[0].request["pixels"].shape == (1, 24, 32)
