"""Targets: images, recordings and series."""

from __future__ import annotations

import functools
import io
import json
import math
import wave
from random import Random
from typing import Any

import numpy as np

from fuzz import models
from fuzz.files import write
from fuzz.mutations import mutate_bytes, mutate_json, mutate_text
from fuzz.target import Target, WrongOutcomeError
from tformer_runtime.preprocess.audio import LOG_MEL, AudioPreprocessor
from tformer_runtime.preprocess.csv_series import read_series
from tformer_runtime.preprocess.images import ImagePreprocessor

IMAGE_FORMATS = (
    "PNG",
    "JPEG",
    "GIF",
    "TIFF",
    "WEBP",
    "BMP",
    "PPM",
    "ICO",
    "TGA",
    "PCX",
    "SGI",
    "JPEG2000",
    "DDS",
    "IM",
)
PREPROCESSORS = (
    ImagePreprocessor({"height": 8, "width": 8}, mean=(0.5,) * 3, std=(0.5,) * 3),
    ImagePreprocessor({"shortest_edge": 8}, crop=(8, 8), resample="bicubic"),
    ImagePreprocessor({"longest_edge": 16}, tile=8, splits=True, resample="lanczos"),
    ImagePreprocessor({"shortest_edge": 8, "longest_edge": 20}, channels=1, resample="nearest"),
    ImagePreprocessor({"max_height": 16, "max_width": 16}, resample="box"),
)
AUDIO_PREPROCESSORS = (
    AudioPreprocessor(16000, normalize=True, min_samples=10),
    AudioPreprocessor(16000, LOG_MEL, num_mel_bins=4, n_fft=40, hop_length=20, max_frequency=8000.0, n_samples=1600),
)


@functools.cache
def seed_images() -> list[bytes]:
    from PIL import Image

    values = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    images = []
    for kind in IMAGE_FORMATS:
        for image in (Image.fromarray(values), Image.fromarray(values).convert("P")):
            data = io.BytesIO()
            try:
                image.save(data, kind)
            except (OSError, KeyError, ValueError):  # the format has no such mode, or this Pillow has no such format
                continue
            images.append(data.getvalue())
    frames, data = [Image.fromarray(values), Image.fromarray(values[::-1])], io.BytesIO()
    frames[0].save(data, "PNG", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    turned = io.BytesIO()
    frames[0].save(turned, "JPEG", exif=exif)
    return [*images, data.getvalue(), turned.getvalue()]


def run_image(data: bytes) -> None:
    failure = None
    for preprocessor in PREPROCESSORS:
        try:
            pixels, _ = preprocessor.tiles(data)
        except Exception as error:
            failure = failure or error
            continue
        if preprocessor.shape is not None and pixels.shape[-2:] != preprocessor.shape:
            raise WrongOutcomeError(f"pixels of {pixels.shape}, not {preprocessor.shape}")
    if failure is not None:
        raise failure


@functools.cache
def seed_audio() -> list[bytes]:
    import soundfile

    samples = 0.3 * np.sin(np.arange(900) / 5)
    recordings = []
    for kind, subtype in (
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
        ("W64", "PCM_16"),
        ("CAF", "PCM_16"),
        ("MP3", "MPEG_LAYER_III"),
        ("WAV", "IMA_ADPCM"),
        ("WAV", "MS_ADPCM"),
    ):
        data = io.BytesIO()
        soundfile.write(data, samples, 22050, subtype, format=kind)
        recordings.append(data.getvalue())
    stereo = io.BytesIO()
    with wave.open(stereo, "wb") as file:
        file.setnchannels(2), file.setsampwidth(2), file.setframerate(16000)
        file.writeframes(np.zeros(600, "<i2").tobytes())
    return [*recordings, stereo.getvalue()]


def run_audio(data: bytes) -> None:
    failure = None
    for preprocessor in AUDIO_PREPROCESSORS:
        try:
            features = preprocessor.from_samples(data)
        except Exception as error:
            failure = failure or error
            continue
        if not np.isfinite(features).all():
            raise WrongOutcomeError("features that are not numbers")
    if failure is not None:
        raise failure


def seed_series() -> list[bytes]:
    rows = [[1.0, 2.0], [2.0, 2.5], [3.5, 1.0], [0.25, 1e3]]
    csv = "low,high\n" + "".join(f"{a},{b}\n" for a, b in rows)
    array = io.BytesIO()
    np.save(array, np.array(rows))
    texts = [
        csv,
        csv.replace(",", "\t"),
        csv.replace("low,high", '"low", "high",note'),
        "high,low\r\n1,2\r\n3,4\r\n5,6\r\n",
    ]
    documents: list[Any] = [{"values": rows}, {"values": rows, "horizon": 3, "truncate": True}]
    return [*(text.encode() for text in texts), array.getvalue(), *(json.dumps(each).encode() for each in documents)]


def mutate_series(data: bytes, rng: Random) -> bytes:
    if data.startswith(b"{"):
        return mutate_json(data, rng, keys=("values", "horizon", "truncate"))
    if rng.random() < 0.5 and not data.startswith(b"\x93NUMPY"):
        words = (
            "1e999",
            "-1e999",
            "nan",
            "inf",
            "9" * 400,
            '"',
            ",",
            "\n",
            "\t",
            "\r",
            "1_0",
            "٣",
            "0x10",
            "1e-400",
            "\0",
        )
        return mutate_text(data.decode("utf-8", "replace"), rng, words).encode("utf-8", "surrogatepass")
    return mutate_bytes(data, rng)


def run_series(data: bytes) -> None:
    """Forecast from a history in a file (.csv, .tsv, .npy), or in a list of a program."""
    model, names = models.loaded(models.forecaster()), ("low", "high")
    options: dict[str, Any] = {}
    if data.startswith(b"{"):
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return
        history = document.get("values")
        options = {name: document[name] for name in ("horizon", "truncate") if name in document}
    elif data.startswith(b"\x93NUMPY"):
        history = read_series(str(write("case.npy", data)), names, 2)
    else:
        ending = "tsv" if b"\t" in data[:40] else "csv"
        history = read_series(str(write(f"case.{ending}", data)), names, 2)
    forecast = model.forecast(history, **options)
    if forecast.shape[1:] != (2,) or any(math.isnan(number) for number in forecast.ravel()):
        raise WrongOutcomeError(f"the forecast {forecast}")


IMAGE_WORDS = (
    b"IHDR",
    b"IDAT",
    b"PLTE",
    b"tRNS",
    b"acTL",
    b"fcTL",
    b"zTXt",
    b"iCCP",
    b"eXIf",
    b"\xff\xd8",
    b"\xff\xc0",
    b"\xff\xda",
    b"II*\0",
    b"MM\0*",
)
AUDIO_WORDS = (
    b"RIFF",
    b"WAVE",
    b"fmt ",
    b"data",
    b"LIST",
    b"fact",
    b"fLaC",
    b"OggS",
    b"FORM",
    b"COMM",
    b"SSND",
    b"\xff\xfb",
)

SIGNALS = [
    Target("image", seed_images, lambda data, rng: mutate_bytes(data, rng, IMAGE_WORDS), run_image),
    Target("audio", seed_audio, lambda data, rng: mutate_bytes(data, rng, AUDIO_WORDS), run_audio),
    Target("series", seed_series, mutate_series, run_series),
]
