"""The comparison of prompts with images: the runtime's ids and pixels against those of the source's own processor."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tformer_export.sources import Source
from tformer_export.sources.hugging_face.images import ROUNDING_ERROR, draw_images
from tformer_export.sources.tokenizer.check import SAMPLE_TEXTS
from tformer_runtime.base.errors import InputError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.preprocess.inputs import Inputs

IMAGES = ((0,), (1, 2), (), (3, 4, 5))  # numbers of the images of each compared prompt


def check_prompts(source: Source, engine: Engine) -> tuple[float, int] | None:
    """Compare the ids, which must be equal, and the pixels. Return the greatest error of a pixel and the images.

    Return None for a source without images in its prompt, or without a processor. Raises ParityError.
    """
    if source.prompt_pipeline is None or not source.placeholders:
        return None
    inputs, ((name, placeholder),) = Inputs(engine.manifest), source.placeholders.items()
    preprocessor = image_inputs(source.preprocessing).get(name)
    converts = preprocessor is not None and preprocessor.on_white  # as the source's own processor does
    drawn = [image if converts else image.convert("RGB") for image in draw_images(seed=1)]
    step = source.step_input or ""
    worst, count = 0.0, 0
    for numbers in IMAGES:
        images = [drawn[i] for i in numbers]
        if len(images) * placeholder.positions >= engine.manifest.max_length:
            continue
        between = _readable_texts(inputs, step)
        text = "".join(f"{placeholder.marker}{between[i % len(between)]}" for i in numbers) or between[0]
        expected = source.prompt_pipeline(text, images)
        prompt: dict[str, Any] = {step: text, name: images}
        sources, ids, starts = inputs.generation_inputs(prompt)
        if ids[starts:].tolist() != expected[step].tolist():
            raise ParityError(
                f"a prompt with {len(images)} images becomes other ids than those of the source's own processor; "
                "no file was written"
            )
        if images:
            error = float(np.abs(sources[name].astype(np.float64) - expected[name]).max())
            allowed = ROUNDING_ERROR * max(1.0, float(np.abs(expected[name]).max()))
            if not error <= allowed:
                raise ParityError(
                    f"the pixels of an image differ from those of the source's own processor by {error:.3g}; no file "
                    "was written"
                )
            worst, count = max(worst, error), count + len(images)
    return worst, count


def _readable_texts(inputs: Inputs, step: str) -> list[str]:
    """Return sample texts that the tokenizer can read, which may lack some characters."""
    readable = []
    for text in (*SAMPLE_TEXTS, "a"):
        with contextlib.suppress(InputError):
            inputs.ids(step, text, add_special_tokens=True)
            readable.append(text)
    return readable or [""]
