"""Raw inputs: texts, images, recordings and series, as JSON and for a call of the runtime."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tformer_export.verify.golden.values import Json, decode_array, encode_array, pattern
from tformer_runtime.base.errors import InputError
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.model import Model
from tformer_runtime.preprocess.audio import AudioPreprocessor, audio_of
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.preprocess.series import SeriesPreprocessor
from tformer_runtime.tasks import BaseTask
from tformer_runtime.tasks.speech import Speech

TEXTS = (
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "Don't say “cafe” or 3.14 at once!",
    "Größe, naïve café, señor, Łódź",
    "我能吞下玻璃而不伤身体。 Съешь ещё булок",
    "👋🏽 emoji 😀 and ﬁ ligatures",
    "a",
)
PAIRS = (("Who is very old?", "The good film is very old and the new one is not."), ("a", "Hello world"))
MAX_GENERATION_TEXTS = 3
IMAGE_SIZES = ((23, 37), (64, 48))
SECONDS = (0.5, 1.1)
VOLUME = 0.25  # of the noise that a recording is


def raw_inputs(model: Model, task: BaseTask | None, random: np.random.Generator) -> list[Json]:
    """Return raw inputs that a file reads. task: None for a file that generates from texts."""
    manifest = model.manifest
    if task is None:
        return _generation_texts(model, random)
    if (series := SeriesPreprocessor.of(manifest)) is not None:
        return [_series(model, series, random, i) for i in range(2)]
    if (audio := audio_of(manifest)) is not None:
        return [_recording(audio[1], i) for i in range(len(SECONDS))]
    if _reads_images(manifest):
        return [_image(size, random) for size in IMAGE_SIZES]
    return _task_texts(model, task)


def _reads_images(manifest: Manifest) -> bool:
    names = [spec.name for spec in manifest.encode.inputs if spec.role in ("ids", "data")] if manifest.encode else []
    return len(names) == 1 and names == list(image_inputs(manifest.preprocessing))


def _generation_texts(model: Model, random: np.random.Generator) -> list[Json]:
    """Return texts that the tokenizer of the input can read; made of its own tokens, if the texts here are no help."""
    manifest = model.manifest
    name = _text_input(manifest)
    if name not in manifest.tokenizer_of:
        return []
    tokenizer = Tokenizer.from_str(manifest.tokenizers[manifest.tokenizer_of[name]])
    drawn = [tokenizer.decode(random.integers(0, tokenizer.get_vocab_size(), 5).tolist()) for _ in range(8)]
    drawn += [text.replace(" ", "") for text in drawn]  # for a vocabulary without spaces
    kept: list[Json] = []
    for text in dict.fromkeys((*TEXTS, *drawn)):
        try:
            sources, prompt, _ = model.inputs.generation_inputs(text)
        except InputError:
            continue
        lengths = [len(ids) for ids in sources.values() if ids.ndim]
        room = manifest.max_length - 1  # a prompt needs room for a token
        if max([len(prompt), *lengths]) <= min(room, max(2, manifest.max_length // 2)):
            kept.append({"text": text})
    return kept[:MAX_GENERATION_TEXTS]


def _text_input(manifest: Manifest) -> str:
    """Return the name of the input that takes the text of a caller; "" if there is none."""
    assert manifest.decode is not None
    if manifest.placeholders:
        return ""
    if manifest.takes_prompt or manifest.encode is None:
        return manifest.decode.step.name
    names = [spec.name for spec in manifest.encode.inputs if spec.role in ("ids", "data")]
    return names[0] if len(names) == 1 else ""


def _task_texts(model: Model, task: BaseTask) -> list[Json]:
    """Return texts, pairs and texts with a mask that the task reads."""
    if not model.manifest.tokenizer_of:
        return []
    kept: list[Json] = []
    settings = task.settings(task.comparison_settings)
    for text in (*TEXTS, *PAIRS):
        try:
            sample = task.sample(text)
            if sample is not None:
                task.read_input(sample, model.inputs, task.can_truncate, settings)
                kept.append(encode_raw(sample))
        except InputError:
            continue
    return kept


def _image(size: tuple[int, int], random: np.random.Generator) -> Json:
    from PIL import Image

    height, width = size
    coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), np.uint8)).resize((width, height))
    file = io.BytesIO()
    coarse.save(file, "PNG")
    return {"png": base64.b64encode(file.getvalue()).decode()}


def _recording(audio: AudioPreprocessor, number: int) -> Json:
    count = max(round(SECONDS[number] * audio.sampling_rate), audio.min_samples)
    samples = pattern(number, (count,))
    return {"samples": encode_array(samples, number), "volume": VOLUME, "rate": audio.sampling_rate}


def _series(model: Model, series: SeriesPreprocessor, random: np.random.Generator, number: int) -> Json:
    room = model.calls.forecaster.room(_horizon(model))
    most = min(n for n in (24, room, series.max_context_length) if n is not None)
    rows = max(series.min_context_length, most - number * (5 if series.ragged else 0))
    steps = random.standard_normal((rows, series.features)).cumsum(0)
    scale = np.array(series.scale) if len(series.scale) else np.ones(series.features)
    mean = np.array(series.mean) if len(series.mean) else np.zeros(series.features)
    return {"series": encode_array((steps / 4 * scale + mean).astype(np.float32)), "horizon": _horizon(model)}


def _horizon(model: Model) -> int:
    series, most = model.calls.forecaster.series, model.calls.forecaster.max_steps
    return min(n for n in (series.horizon or 4, most) if n is not None)


def encode_raw(value: Any) -> Json:
    """Return a text, a pair or named texts as JSON."""
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, Mapping):
        return {"fields": dict(value)}
    return {"texts": list(value)}


def decode_raw(raw: Mapping[str, Any]) -> Any:
    """Return a raw input for a call of the runtime."""
    if "text" in raw:
        return raw["text"]
    if "fields" in raw:
        return raw["fields"]
    if "texts" in raw:
        return tuple(raw["texts"])
    if "png" in raw:
        return base64.b64decode(raw["png"])
    if "samples" in raw:
        return decode_array(raw["samples"]) * np.float32(raw["volume"]), raw["rate"]
    return decode_array(raw["series"])


def run_raw(model: Model, task: BaseTask, raws: list[Json]) -> list[Any]:
    """Return the results of raw inputs, computed together."""
    values = [decode_raw(raw) for raw in raws]
    if SeriesPreprocessor.of(model.manifest) is not None:
        return [model.forecast(value, raw["horizon"]) for value, raw in zip(values, raws, strict=True)]
    if isinstance(task, Speech):
        return list(model.transcribe_batch(values))
    return list(model.predict(values, truncate=task.can_truncate, **task.comparison_settings))
