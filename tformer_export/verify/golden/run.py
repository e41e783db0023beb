"""Run one request of a golden file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tformer_export.verify.golden.manifest_draws import adapter_name
from tformer_export.verify.golden.values import Json, decode_array
from tformer_export.verify.teacher_forcing import by_name, padded
from tformer_runtime.base.errors import InputError
from tformer_runtime.decoding.request import Result
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import ADAPTER_INPUT
from tformer_runtime.model import Model
from tformer_runtime.tasks.base import TaskInput
from tformer_runtime.tasks.single_pass import run_single_pass


@dataclass(frozen=True)
class DecodedRow:
    """A row of a decode case: the logits after each of its tokens, (length, vocabulary), and its extra outputs."""

    logits: np.ndarray
    extras: dict[str, np.ndarray]


def arrays_of(inputs: Mapping[str, Json]) -> dict[str, np.ndarray]:
    return {name: decode_array(value) for name, value in inputs.items()}


def run_decode(engine: Engine, case: Mapping[str, Any]) -> list[DecodedRow]:
    """Feed the tokens of the rows of a case: the prompts together, then as many new tokens as each step has."""
    requests = [arrays_of(row["inputs"]) for row in case["rows"]]
    tokens = [decode_array(row["tokens"]) for row in case["rows"]]
    counts = np.array(case["prompts"])
    for row, count in zip(tokens, counts, strict=True):
        if min([count, *case["steps"]]) < 1 or len(row) != count + sum(case["steps"]):
            raise InputError(f"a row of {len(row)} tokens does not have the prompt and the steps of its case")
    names = [extra.name for extra in engine.manifest.extras]
    state = engine.start(by_name(requests), len(tokens), extras=names)
    prompts = padded([row[:count] for row, count in zip(tokens, counts, strict=True)])
    parts: list[list[np.ndarray]] = [[] for _ in tokens]
    extras: list[dict[str, list[np.ndarray]]] = [{} for _ in tokens]

    def keep(logits: np.ndarray, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            parts[row].append(logits[row, :length].copy())
            for name, values in state.extras.items():
                extras[row].setdefault(name, []).append(values[row, :length].copy())

    keep(engine.step(state, prompts, counts, logit_positions="all"), counts.tolist())
    fed = counts.copy()
    for step in case["steps"]:
        new = np.stack([row[start : start + step] for row, start in zip(tokens, fed, strict=True)])
        keep(engine.step(state, new, logit_positions="all"), [step] * len(tokens))
        fed += step
    encoded = [{name: np.asarray(values[row]) for name, values in state.encoded.items()} for row in range(len(tokens))]
    state.release()
    return [
        DecodedRow(np.concatenate(part), {name: np.concatenate(values) for name, values in more.items()} | request)
        for part, more, request in zip(parts, extras, encoded, strict=True)
    ]


def run_outputs(engine: Engine, case: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    """Return the outputs of a single-pass model for the rows of a case, by name."""
    assert engine.manifest.encode is not None
    names = [spec.name for spec in engine.manifest.encode.outputs]
    readings = [partial(TaskInput, [arrays_of(row["inputs"])]) for row in case["rows"]]
    outputs = run_single_pass(engine, readings, len(readings))
    return [dict(zip(names, map(np.asarray, values[0]), strict=True)) for _, values in outputs]


def generation_input(case: Mapping[str, Any]) -> Any:
    """Return the input of `Model.generate`."""
    if "text" in case:
        return case["text"]
    return {name: array for name, array in arrays_of(case["inputs"]).items() if name != ADAPTER_INPUT}


def run_generation(model: Model, case: Mapping[str, Any]) -> list[Result]:
    """Return the results of a generation case: the best first."""
    adapter = {} if "text" in case else {"adapter": adapter_name(model.manifest, case["inputs"])}
    result = model.generate(generation_input(case), **{**adapter, **case["options"]})
    return [result, *result.alternatives]


def run_stream(model: Model, case: Mapping[str, Any]) -> list[str]:
    """Return the pieces of text of a stream."""
    return list(model.stream(generation_input(case), **case["options"]))


def prompt_of(model: Model, case: Mapping[str, Any]) -> Json:
    """Return the ids that the runtime reads for a text: of request inputs, and the prompt."""
    sources, prompt, _ = model.inputs.generation_inputs(case["text"])
    return {"inputs": {name: ids.tolist() for name, ids in sources.items()}, "prompt": prompt.tolist()}
