"""The gate from raw inputs to final results.

Texts and pairs go through the runtime's tokenizer, padding, file and task, and images through its preprocessing. The
results are compared with the source's own results for each input alone.

The cases of `parity` prove the computation on ids. This gate proves the steps before and after it, for any task: the
ids of a text and their types, truncation, padding, and the final results from scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from tformer_export.sources import Source
from tformer_export.sources.base import build_mask
from tformer_export.sources.hugging_face.images import draw_images, make_pixel_pipeline
from tformer_export.sources.pooled_module import Pipeline
from tformer_export.sources.reference_pipelines import TOKEN_TASKS, make_token_pipeline
from tformer_export.sources.task_names import CLASSES
from tformer_export.sources.tokenizer.check import SAMPLE_TEXTS
from tformer_export.verify.prompts import check_prompts
from tformer_export.verify.speech import check_audio
from tformer_runtime.base.errors import InputError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import ADAPTER_INPUT, MULTI_LABEL, SINGLE_LABEL
from tformer_runtime.model import Model
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.tasks import BaseTask, FillMask, task_of
from tformer_runtime.tasks.question_answering import FIRST

TEXTS = (*SAMPLE_TEXTS[:9], "a", " ".join(SAMPLE_TEXTS[:8] * 3))
PAIRS = (
    (SAMPLE_TEXTS[0], SAMPLE_TEXTS[1]),
    (SAMPLE_TEXTS[5], "a"),
    ("a", SAMPLE_TEXTS[7]),
    (SAMPLE_TEXTS[3] * 3, SAMPLE_TEXTS[1] * 2),
)


@dataclass(frozen=True)
class RawParity:
    """The result of the comparison.

    error: max |Δ| of results.
    relative: the error over their range.
    texts, pairs, images, recordings: the number of compared inputs, each together with others and alone.
    tokens: the number of compared tokens that were written for recordings.
    """

    error: float
    relative: float
    texts: int = 0
    pairs: int = 0
    images: int = 0
    recordings: int = 0
    tokens: int = 0


def check_raw(source: Source, engine: Engine, tolerance: float) -> RawParity | None:
    """Compare results from raw inputs; return None for a source that reads neither texts, images nor recordings.

    Raises ParityError where a result differs by more than the tolerance times the range of all results. The range is
    that of all results together because a single label has none.
    """
    if (recordings := check_audio(source, engine, tolerance)) is not None:
        return RawParity(recordings.error, recordings.relative, recordings=recordings.count, tokens=recordings.tokens)
    if (prompts := check_prompts(source, engine)) is not None:
        return RawParity(prompts[0], prompts[0], images=prompts[1])
    input_names = source.caller_inputs
    images = draw_images(seed=1) if input_names == list(image_inputs(source.preprocessing)) else []
    if source.step_input is not None or not (images or (len(input_names) == 1 and input_names[0] in source.tokenizers)):
        return None
    model, task = Model(engine), task_of(engine.manifest)
    assert engine.manifest.encode is not None
    max_length = next(spec.max_length for spec in engine.manifest.encode.inputs if spec.name == input_names[0])
    samples = images or _readable(model, task, (*TEXTS, *(PAIRS if source.reads_pairs else ())))
    if not samples:
        return None
    if images:
        answer = source.own_pipeline or make_pixel_pipeline(source, input_names[0])
    else:
        answer = source.own_pipeline or _make_id_pipeline(source, input_names[0], task)
    inputs = samples if source.own_pipeline is not None else [task.model_input(sample) for sample in samples]
    expected = [_final(source, answer(sample, max_length)) for sample in inputs]
    span = max(float(np.ptp(np.concatenate([value.ravel() for value in expected]))), 1e-6)
    worst = 0.0
    for together in (len(samples), 1):
        results = list(
            model.predict(samples, batch_size=together, truncate=task.can_truncate, **task.comparison_settings)
        )
        for sample, result, expected_values in zip(samples, results, expected, strict=True):
            numbers = np.asarray(task.numbers(result), np.float64)
            circumstance = "in a batch" if together > 1 else "alone"
            if numbers.shape != expected_values.shape:
                raise ParityError(
                    f"the file's result for {_shown(sample)}, {circumstance}, has the shape {numbers.shape}, and its "
                    f"source's own {expected_values.shape}; no file was written"
                )
            error = float(np.abs(numbers - expected_values).max(initial=0))
            worst = max(worst, error)
            if not error <= tolerance * span:
                raise ParityError(
                    f"the file's result for {_shown(sample)}, {circumstance}, differs from its source's own by "
                    f"{error:.3g} where the results span {span:.3g} ({tolerance:g} of that is allowed); no file was "
                    "written"
                )
    pairs = 0 if images else sum(not isinstance(sample, str) for sample in samples)
    return RawParity(worst, worst / span, len(samples) - pairs - len(images), pairs, len(images))


def _readable(model: Model, task: BaseTask, samples: Any) -> list[Any]:
    """Return the samples that the task accepts and the tokenizer can read.

    A tokenizer may lack some characters.
    """
    readable = []
    settings = task.settings(task.comparison_settings)
    for sample in map(task.sample, samples):
        try:
            if sample is not None:
                task.read_input(sample, model.inputs, task.can_truncate, settings)
                readable.append(sample)
        except InputError:
            continue
    return readable


def _make_id_pipeline(source: Source, name: str, task: BaseTask) -> Pipeline:
    """Return the reference for a source without its own pipeline: its tokenizer, and the module on one row."""

    def read(sample: Any, max_length: int | None, stride: int | None) -> list[Encoding]:
        tokenizer = Tokenizer.from_str(source.tokenizers[name])
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if max_length is not None:
            options: dict[str, Any] = {} if stride is None else {"stride": stride, "strategy": "only_second"}
            tokenizer.enable_truncation(max_length, **options)
        encoding = tokenizer.encode(*((sample,) if isinstance(sample, str) else sample))
        return [encoding, *(encoding.overflowing if stride is not None else ())]

    def run(encoding: Encoding) -> tuple[torch.Tensor, ...]:
        inputs = {name: torch.tensor([encoding.ids]).to(source.example[name].dtype)}
        inputs |= {other: torch.tensor([encoding.type_ids]) for other in source.token_types}
        masks = {other: build_mask(mask, inputs[mask.of]) for other, mask in source.masks.items()}
        inputs[ADAPTER_INPUT] = torch.zeros(1, dtype=torch.int64)
        with torch.no_grad():
            returned = source.module(*({**inputs, **masks}[n] for n in source.example))
        return tuple(value[0] for value in (returned if source.outputs else (returned,)))

    if source.task in TOKEN_TASKS:
        special = task.mask if isinstance(task, FillMask) else source.output_meaning.settings.get(FIRST)
        return make_token_pipeline(source.task, read, run, special)
    return lambda sample, max_length: run(read(sample, max_length, None)[0])[0]


def _final(source: Source, output: torch.Tensor) -> np.ndarray:
    """Apply the last step of the source's task, in PyTorch."""
    if source.task in CLASSES and output.dim() == 1:
        if source.output_meaning.problem_type == SINGLE_LABEL:
            output = output.double().softmax(-1)
        elif source.output_meaning.problem_type == MULTI_LABEL:
            output = output.double().sigmoid()
    result: np.ndarray = output.double().numpy()
    return result


def _shown(sample: Any) -> str:
    text = f"an image of {sample.mode}, {sample.width} × {sample.height}" if hasattr(sample, "mode") else repr(sample)
    return text if len(text) < 80 else f"{text[:60]}…"
