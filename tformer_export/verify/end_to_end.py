"""The gate from raw input to final result: texts and pairs through the runtime's tokenizer, padding, file and task, or
pictures through what it makes of them, against the source's own way to its results, of each input alone.

The cases of `verify` prove what the file computes of ids. What comes before and after, which ids a text has, their
types, where it is cut, which rows are padded, what is made of scores, is proven here, for any task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from tformer_export.sources import Source
from tformer_export.sources.base import build_mask
from tformer_export.sources.hf_images import draw_pictures, through_pixels
from tformer_export.sources.pooled_module import Answer
from tformer_export.sources.reference_pipelines import BY_TOKEN, answer_by_token
from tformer_export.sources.task_names import CLASSES
from tformer_export.sources.tokenizer.check import SAMPLE
from tformer_export.verify.speech import check_sounds
from tformer_runtime.base.errors import InputError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import MULTI_LABEL, SINGLE_LABEL
from tformer_runtime.model import Model
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.tasks import Filling, Task, task_of
from tformer_runtime.tasks.question_answering import FIRST

TEXTS = (*SAMPLE[:9], "a", " ".join(SAMPLE[:8] * 3))
PAIRS = ((SAMPLE[0], SAMPLE[1]), (SAMPLE[5], "a"), ("a", SAMPLE[7]), (SAMPLE[3] * 3, SAMPLE[1] * 2))


@dataclass(frozen=True)
class RawParity:
    """error: max |Δ| of results, relative: of their range. texts, pairs, images, sounds: how many were compared,
    together and alone; tokens: that were written of sounds."""

    error: float
    relative: float
    texts: int = 0
    pairs: int = 0
    images: int = 0
    sounds: int = 0
    tokens: int = 0


def check_raw(source: Source, engine: Engine, tolerance: float) -> RawParity | None:
    """None for a source that reads neither texts, images nor sounds. ParityError where a result differs by more than
    the tolerance, times what the results span: together they do, of one label each by itself is."""
    if (sounds := check_sounds(source, engine, tolerance)) is not None:
        return RawParity(sounds.error, sounds.relative, sounds=sounds.count, tokens=sounds.tokens)
    reads = source.given
    pictures = draw_pictures(seed=1) if reads == list(image_inputs(source.preparation)) else []
    if source.step is not None or not (pictures or (len(reads) == 1 and reads[0] in source.tokenizers)):
        return None
    model, task = Model(engine), task_of(engine.manifest)
    assert engine.manifest.encode is not None
    most = next(spec.max_length for spec in engine.manifest.encode.inputs if spec.name == reads[0])
    samples = pictures or _readable(model, task, (*TEXTS, *(PAIRS if source.pairs else ())))
    if not samples:
        return None
    if pictures:
        answer = source.answer or through_pixels(source, reads[0])
    else:
        answer = source.answer or _through_ids(source, reads[0], task)
    given = samples if source.answer is not None else [task.value(sample) for sample in samples]
    expected = [_final(source, answer(sample, most)) for sample in given]
    span = max(float(np.ptp(np.concatenate([value.ravel() for value in expected]))), 1e-6)
    worst = 0.0
    for together in (len(samples), 1):
        found = list(model.predict(samples, batch_size=together, truncate=task.cuts, **task.proven))
        for sample, result, own in zip(samples, found, expected, strict=True):
            numbers = np.asarray(task.numbers(result), np.float64)
            error = float(np.abs(numbers - own).max(initial=0)) if numbers.shape == own.shape else np.inf
            worst = max(worst, error)
            if not error <= tolerance * span:
                how = "beside others" if together > 1 else "alone"
                raise ParityError(
                    f"the file's result for {_shown(sample)}, {how}, differs from its source's own by {error:.3g} "
                    f"where the results span {span:.3g} ({tolerance:g} of that is allowed); no file was written"
                )
    pairs = 0 if pictures else sum(not isinstance(sample, str) for sample in samples)
    return RawParity(worst, worst / span, len(samples) - pairs - len(pictures), pairs, len(pictures))


def _readable(model: Model, task: Task, samples: Any) -> list[Any]:
    """Those that the task is done on and the model's tokenizer can read: one of letters alone may refuse the rest."""
    found = []
    settings = task.settings(task.proven)
    for sample in map(task.sample, samples):
        try:
            if sample is not None:
                task.reading(sample, model.inputs, task.cuts, settings)
                found.append(sample)
        except InputError:
            continue
    return found


def _through_ids(source: Source, name: str, task: Task) -> Answer:
    """The way of a source that has no tokenizer of its own kind: the given one, and the module on one row."""

    def read(sample: Any, most: int | None, stride: int | None) -> list[Encoding]:
        tokenizer = Tokenizer.from_str(source.tokenizers[name])
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if most is not None:
            cut: dict[str, Any] = {} if stride is None else {"stride": stride, "strategy": "only_second"}
            tokenizer.enable_truncation(most, **cut)
        found = tokenizer.encode(*((sample,) if isinstance(sample, str) else sample))
        return [found, *(found.overflowing if stride is not None else ())]

    def run(found: Encoding) -> tuple[torch.Tensor, ...]:
        given = {name: torch.tensor([found.ids]).to(source.example[name].dtype)}
        given |= {other: torch.tensor([found.type_ids]) for other in source.types}
        masks = {other: build_mask(mask, given[mask.of]) for other, mask in source.masks.items()}
        with torch.no_grad():
            returned = source.module(*({**given, **masks}[n] for n in source.example))
        return tuple(value[0] for value in (returned if source.outputs else (returned,)))

    if source.task in BY_TOKEN:
        special = task.mask if isinstance(task, Filling) else source.outcome.settings.get(FIRST)
        return answer_by_token(source.task, read, run, special)
    return lambda sample, most: run(read(sample, most, None)[0])[0]


def _final(source: Source, output: torch.Tensor) -> np.ndarray:
    """The final step of the source's task, in PyTorch."""
    if source.task in CLASSES and output.dim() == 1:
        if source.outcome.problem == SINGLE_LABEL:
            output = output.double().softmax(-1)
        elif source.outcome.problem == MULTI_LABEL:
            output = output.double().sigmoid()
    found: np.ndarray = output.double().numpy()
    return found


def _shown(sample: Any) -> str:
    text = f"an image of {sample.mode}, {sample.width} × {sample.height}" if hasattr(sample, "mode") else repr(sample)
    return text if len(text) < 80 else f"{text[:60]}…"
