"""Models on images from a folder to their results: against transformers' own image processor and module, on pictures of
every kind, and one's own patch embedding.

Each is exported once. Pictures are made here; what is expected is made by transformers, which opens and converts them.
"""

from __future__ import annotations

import functools
import json
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.command_lines import failed, run
from torch import nn
from transformers.image_utils import load_image

from tformer_export import Quantization, Task, export, image
from tformer_export.calibration.samples import read_samples
from tformer_export.sources import load_source
from tformer_runtime import InputError, Model, UnsupportedCallError
from tformer_runtime.engine.engine import Engine

LABELS = dict(id2label={0: "cat", 1: "dog", 2: "car"}, label2id={"cat": 0, "dog": 1, "car": 2})
SHAPE = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8, initializer_range=0.3
)
SQUARE = {"height": 32, "width": 32}


def plain():
    config = transformers.ViTConfig(**SHAPE, **LABELS, intermediate_size=48)
    return transformers.ViTForImageClassification(config), transformers.ViTImageProcessorPil(size=SQUARE)


def distilled():
    """Two tokens of classes; multi label; resized by another filter to more than is read, and cropped."""
    config = transformers.DeiTConfig(**SHAPE, **LABELS, intermediate_size=48, problem_type="multi_label_classification")
    processor = transformers.DeiTImageProcessorPil(size={"height": 40, "width": 44}, crop_size=SQUARE)
    return transformers.DeiTForImageClassificationWithTeacher(config), processor


def windows():
    """Attention in windows, which the second layer shifts: rolled pixels, and a mask between what was apart."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=2, initializer_range=0.3,
        **LABELS,
    )  # fmt: skip
    processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.8)
    return transformers.SwinForImageClassification(config), processor


def features():
    """No head: a vector for each patch; the shortest edge is resized, and the longest cropped."""
    config = transformers.Dinov2Config(**SHAPE)
    processor = transformers.BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=SQUARE, resample=Image.LANCZOS)
    return transformers.Dinov2Model(config), processor


MODELS = {"plain": plain, "distilled": distilled, "windows": windows, "features": features}


class Patches(nn.Module):
    """One's own: patches by reshaping, without a convolution, packed QKV, a class token and a linear head."""

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
def pictures(tmp_path_factory):
    """Files of every kind that people have, by name."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(5)

    def drawn(height, width, channels=3):
        coarse = Image.fromarray(random.integers(0, 256, (4, 5, 4), np.uint8)).resize((width, height))
        noise = random.integers(-30, 31, (height, width, 4))
        return np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)[..., :channels]

    def save(name, picture, **options):
        picture.save(folder / name, **options)

    save("photo.jpg", Image.fromarray(drawn(70, 101)))
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright
    save("turned.jpg", Image.fromarray(drawn(50, 90)), exif=turned)
    save("gray.png", Image.fromarray(drawn(41, 33, 1)[..., 0]))
    save("alpha.png", Image.fromarray(drawn(64, 64, 4)))
    save("palette.gif", Image.fromarray(drawn(60, 48)).convert("P"))
    save("print.jpg", Image.fromarray(drawn(45, 71)).convert("CMYK"))
    deep = drawn(40, 52, 1)[..., 0].astype(np.uint16) * 257
    save("deep.png", Image.fromarray(deep))
    save("small.png", Image.fromarray(drawn(9, 7)))
    save("bits.png", Image.fromarray(drawn(30, 40)).convert("1"))
    return {path.name: path for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name → the module, its processor, its file and the report of its export from a folder."""

    @functools.cache
    def get(name, **options):
        module, processor = drawn_model(name)
        folder = tmp_path_factory.mktemp(name)
        module.save_pretrained(folder)
        processor.save_pretrained(folder)
        report = export(load_source(folder), folder / "model.onnx", **options)
        return module, processor, folder / "model.onnx", report

    return get


def drawn_model(name):
    torch.manual_seed(3)
    module, processor = MODELS[name]()
    return module.eval(), processor


def theirs(module, processor, paths):
    """transformers' outputs, each picture by itself."""
    with torch.no_grad():
        return [module(**processor(images=load_image(str(p)), return_tensors="pt"))[0][0].double() for p in paths]


@pytest.mark.parametrize("name", ["distilled", "windows"])
def test_classes_of_pictures_of_every_kind(made, pictures, name):
    module, processor, path, report = made(name)
    finish = torch.sigmoid if name == "distilled" else functools.partial(torch.softmax, dim=-1)
    expected = [finish(output).numpy() for output in theirs(module, processor, pictures.values())]
    model = Model.load(path, "cpu", threads=1)
    for batch_size, workers in ((1, 1), (4, 1), (2, 2)):
        found = model.classify(pictures.values(), batch_size=batch_size, workers=workers, top_k=2)
        for result, own in zip(found, expected, strict=True):
            assert list(result.scores) == ["cat", "dog", "car"]
            np.testing.assert_allclose(list(result.scores.values()), own, atol=1e-5)
            assert result.label == ["cat", "dog", "car"][own.argmax()]
    assert np.ptp(expected, axis=0).max() > 0.1  # pictures matter
    assert report.task == "image-classification"
    assert report.parity.raw.images == 6
    assert report.parity.raw.relative < 1e-4
    assert ("from raw inputs", "6 images") in [(label, text.rpartition(", ")[2]) for label, text in report.rows()]


def test_eight_bits_fitted_to_pictures_and_what_they_change(pictures, tmp_path):
    """A model in memory, and lines that name pictures: one in four is measured on."""
    module, processor = drawn_model("plain")
    paths = [*pictures.values()] * 4
    (tmp_path / "lines").write_text("".join(f"{path}\n" for path in paths))
    report = export(
        module, tmp_path / "x.onnx", preprocessor=processor, quantization=Quantization("int8",
        calibration=tmp_path / "lines")
    )  # fmt: skip
    quality = report.degradation.quality
    assert quality.of_classes
    found = Model.load(tmp_path / "x.onnx", "cpu").classify(paths)
    logits = torch.stack(theirs(module, processor, paths))
    found, expected = np.array([list(r.scores.values()) for r in found]), logits.softmax(-1).numpy()
    np.testing.assert_allclose(found, expected, atol=0.1)
    measured = slice(3, None, 4)
    assert quality.positions == len(paths[measured])
    assert quality.agreement == (found.argmax(1) == expected.argmax(1))[measured].mean()
    assert ("quantised", f"{quality.agreement:.2%} of 9 rows keep their class") in report.rows()


def test_one_vector_of_all_patches(made, pictures, tmp_path):
    module, processor, path, report = made("features", task=Task(pooling="mean", normalize=True))
    assert report.task == "image-feature-extraction"
    assert report.parity.raw.relative < 1e-4
    lines = [str(path) for path in pictures.values()]
    states = torch.stack(theirs(module, processor, lines))
    means = nn.functional.normalize(states.mean(1), dim=1)
    vectors = Model.load(path, "cpu").embed(lines)
    np.testing.assert_allclose(vectors, means.numpy(), atol=1e-5)
    assert run(path, *lines, "--output-file", tmp_path / "x.npy").exit_code == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), vectors)
    rows = run(path, *lines, "--similarity").stdout.splitlines()
    np.testing.assert_allclose([list(map(float, row.split("\t"))) for row in rows], means @ means.T, atol=1e-4)
    near = run(path, "\t".join(lines[:2]), "\t".join(lines[2:4]), "--similarity").stdout.splitlines()
    expected = [float(means[0] @ means[1]), float(means[2] @ means[3])]
    assert list(map(float, near)) == pytest.approx(expected, abs=1e-4)
    (first, *_) = run(path, *lines, "--json").stdout.splitlines()
    assert json.loads(first)["vector"] == pytest.approx(vectors[0].tolist())


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    torch.manual_seed(4)
    module, path = Patches().eval(), tmp_path_factory.mktemp("own") / "own.onnx"
    report = export(
        module, path, example={"pixels": torch.randn(2, 1, 24, 32)}, task=Task(labels=["a", "b", "c"]),
        preprocessor={"pixels": image(size={"shortest_edge": 36}, crop=(24, 32), mean=0.4, std=0.3, resample="box")},
    )  # fmt: skip
    return module, path, report


def test_ones_own_patches_of_gray_pixels(own, pictures):
    """The same by hand: Pillow's resizing, slices and PyTorch."""
    module, path, report = own
    assert report.parity.raw.images == 6
    model = Model.load(path, "cpu")
    for name in ("photo.jpg", "gray.png", "alpha.png"):
        gray = Image.open(pictures[name]).convert("L")
        height, width = gray.height, gray.width
        size = (36, int(36 * height / width)) if width <= height else (int(36 * width / height), 36)
        x = torch.from_numpy(np.array(gray.resize(size, Image.BOX))).double()
        top, left = (x.shape[0] - 24) // 2, (x.shape[1] - 32) // 2
        x = ((x / 255 - 0.4) / 0.3)[top : top + 24, left : left + 32].float()
        with torch.no_grad():
            expected = module(x[None, None])[0].softmax(-1)
        made = x[None].numpy()  # what is made already is taken as it is
        for given in (pictures[name], str(pictures[name]), pictures[name].read_bytes(), gray, np.array(gray), made):
            (found,) = model.classify([given])
            np.testing.assert_allclose(list(found.scores.values()), expected, atol=1e-5)


def test_pictures_are_opened_a_batch_at_a_time(own, pictures):
    _, path, _ = own
    taken = []

    def given():
        for _ in range(20):
            taken.append(pictures["small.png"])
            yield taken[-1]

    results = Model.load(path, "cpu").predict(given(), batch_size=4)
    next(results)
    assert len(taken) == 4
    assert len(list(results)) == 19


def test_the_command_line(own, pictures, tmp_path):
    _, path, _ = own
    lines = [str(pictures[name]) for name in ("photo.jpg", "turned.jpg", "gray.png")]
    expected = Model.load(path, "cpu").classify(lines, top_k=2)
    (line,) = run(path, lines[0]).stdout.splitlines()
    assert line == f"{expected[0].label}\t{expected[0].score:.6g}"
    result = run(path, *lines, "--top-k", 2)
    assert result.exit_code == 0
    assert result.stderr == "device: cpu\n"
    for line, own_result in zip(result.stdout.splitlines(), expected, strict=True):
        words = line.split("\t")
        assert words[::2] == [label for label, _ in own_result.top]
        assert list(map(float, words[1::2])) == pytest.approx([score for _, score in own_result.top], abs=1e-5)
    many = run(path, "--input-file", "-", "--json", "--workers", 2, stdin="\n".join(lines * 40)).stdout.splitlines()
    for index, (line, one) in enumerate(zip(map(json.loads, many), expected * 40, strict=True)):
        assert (line["index"], line["label"]) == (index, one.label)
        assert line["scores"] == pytest.approx(one.scores, abs=1e-5)
    info = run(path, "--info").stdout
    assert "task: image-classification" in info
    assert "shortest edge: 36" in info


def test_a_run_goes_on_after_a_picture_that_was_missing(own, pictures, tmp_path):
    _, path, _ = own
    lines = [str(pictures["photo.jpg"]), str(tmp_path / "late.png"), str(pictures["gray.png"])]
    message = failed(run(path, "--output-file", tmp_path / "out", "--batch-size", 1, stdin="\n".join(lines)))
    assert message == f"line 2: {lines[1]} cannot be read: No such file or directory; --resume goes on after input 1"
    Image.open(pictures["turned.jpg"]).convert("L").save(lines[1])
    done = run(path, "--output-file", tmp_path / "out", "--resume", stdin="\n".join(lines))
    assert done.exit_code == 0
    labels = [line.split("\t")[0] for line in (tmp_path / "out").read_text().splitlines()]
    assert labels == [result.label for result in Model.load(path, "cpu").classify(lines)]


def said_to_be(path, width, height):
    """A small PNG whose first chunk tells another size, https://www.w3.org/TR/png/#11IHDR"""
    Image.new("1", (8, 8)).save(path)
    data = path.read_bytes()
    head = data[12:16] + struct.pack(">II", width, height) + data[24:29]
    path.write_bytes(data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:])


@pytest.fixture
def damaged(pictures, tmp_path, monkeypatch):
    """Files that are no pictures, or none that are read, in the working folder."""
    (tmp_path / "torn.jpg").write_bytes(pictures["photo.jpg"].read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("no picture")
    torn = bytearray(pictures["alpha.png"].read_bytes())
    torn[200:260] = bytes(60)
    (tmp_path / "torn.png").write_bytes(torn)
    said_to_be(tmp_path / "huge.png", 10_000, 9_000)
    said_to_be(tmp_path / "bomb.png", 20_000, 10_000)
    Image.new("L", (80_000, 1)).save(tmp_path / "thin.png")
    monkeypatch.chdir(tmp_path)


def test_sentences_of_pictures(own, pictures, damaged):
    _, path, _ = own
    assert failed(run(path, "none.jpg")) == "input 1: none.jpg cannot be read: No such file or directory"
    assert failed(run(path, ".")) == "input 1: . cannot be read: Is a directory"
    first = run(path, pictures["gray.png"], "torn.jpg")
    assert failed(first, before=1).startswith("input 2: torn.jpg is a damaged image: ")
    assert failed(run(path, "torn.png")).startswith("input 1: torn.png is a damaged image: ")
    assert failed(run(path, "text.jpg")) == "input 1: text.jpg is not an image that Pillow can read"
    assert failed(run(path, "huge.png")) == (
        "input 1: huge.png is 10000 × 9000 pixels, and at most 89,478,485 are read: make it smaller first"
    )
    assert failed(run(path, "bomb.png")).startswith("input 1: bomb.png has too many pixels, and at most 89,478,485")
    assert failed(run(path, "thin.png")).startswith("input 1: thin.png is 80000 × 1 pixels and would be resized to")


def test_sentences_of_options(own, pictures, monkeypatch):
    _, path, _ = own
    line = str(pictures["photo.jpg"])
    assert failed(run(path, "--ids", "1 2")) == "input 1: the model reads images, not ids: leave out --ids"
    assert failed(run(path, line, "--truncate", "--num-beams", 2, "--similarity"), 2) == (
        "own.onnx classifies images (image-classification): it takes no --num-beams, --truncate, --similarity"
    )
    assert failed(run(path, line, "--top-k", 0), 2) == "--top-k must be a whole number of at least 1, not 0"
    assert failed(run(path, f"{line}\t{line}")) == (
        "input 1: it is two images, and each is read by itself: give one, for pairs are of --similarity alone"
    )
    assert "holds 2 tabs: a pair is two names of files with one tab" in failed(run(path, "a\tb\tc"))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert failed(run(path, line)) == "reading images needs Pillow: pip install 'tformer[image]'"


def test_sentences_of_calls(own, pictures):
    _, path, _ = own
    model = Model.load(path, "cpu")
    picture = Image.open(pictures["photo.jpg"])
    pixels = np.array(picture)
    for one in (str(pictures["photo.jpg"]), pictures["photo.jpg"], picture, pixels, pixels[..., 0]):
        with pytest.raises(InputError, match="give a list of inputs, of one too"):
            model.classify(one)
    with pytest.raises(UnsupportedCallError, match=r"classifies images: it cannot embed; call classify\(\) or pre"):
        model.embed([picture])
    with pytest.raises(InputError, match=r"input 1: an array of uint8 is an image of .*, and this is \(3, 70, 101\)"):
        model.classify([np.moveaxis(pixels, -1, 0)])
    with pytest.raises(InputError, match=r"input 1: the image has no pixels"):
        model.classify([Image.new("RGB", (0, 5))])
    with pytest.raises(InputError, match=r"input 2: input pixels has the shape \(1, 9, 32\) where \(1, 24, 32\) is ne"):
        model.classify([np.zeros((1, 24, 32)), np.zeros((1, 9, 32))])


def test_calibration_names_the_line_that_cannot_be_read(own, pictures, damaged, tmp_path):
    _, path, _ = own
    engine = Engine(path, "cpu", threads=1)
    names = [str(pictures["photo.jpg"])] * 9
    (tmp_path / "lines").write_text("\n".join([names[0], "torn.jpg", *names]))
    with pytest.raises(InputError, match=r"^line 2 of .*lines: torn.jpg is a damaged image"):
        read_samples(tmp_path / "lines", engine)
    (tmp_path / "lines").write_text("\n".join(names))
    samples = read_samples(tmp_path / "lines", engine)
    assert (len(samples.fitted), len(samples.measured)) == (7, 2)
    assert samples.fitted[0].request["pixels"].shape == (1, 24, 32)
