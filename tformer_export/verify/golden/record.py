"""Make a golden file of a finished model file, with `tformer_runtime` and the operators of onnxruntime alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tformer_export.verify.golden.decided import all_decided, changed_models, decided_tokens
from tformer_export.verify.golden.draws import Draws
from tformer_export.verify.golden.raw import raw_inputs, run_raw
from tformer_export.verify.golden.run import (
    DecodedRow,
    prompt_of,
    run_decode,
    run_generation,
    run_outputs,
    run_stream,
)
from tformer_export.verify.golden.values import SAMPLED, Json, encode_array, sample, sample_logits
from tformer_runtime.backend.session import Session
from tformer_runtime.base.whole_files import replaced_file
from tformer_runtime.decoding.request import Result
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.model import Model
from tformer_runtime.tasks import BaseTask, generates, task_of

FORMAT, VERSION = "tformer-golden", 1
FLOAT_TOLERANCE = 1e-3  # that of the parity gate
HALF_TOLERANCE = 1e-2  # of values that are rounded to half precision
# One activation that is rounded to the other integer of 8 bits changes all later roundings. Then two runtimes differ by
# as much as the file differs from its model in float32.
INTEGER_TOLERANCE = 5e-2
MAX_NEW_TOKENS = 12
GREEDY = {"num_beams": 1, "num_return_sequences": 1}
BEAMS = {"num_beams": 4, "num_return_sequences": 4}
STORED_POSITIONS = 12  # of the logits of a row: the last ones
MAX_FIELDS = 8192  # characters of a result as JSON, beyond which its numbers are stored alone


def open_model(path: Path) -> Model:
    """Open a file as for a golden file: with the operators of onnxruntime, and one thread, so that sums have one order.

    A file for CUDA runs there if there is a GPU.
    """
    return Model(Engine(Session(path, device="auto", threads=1, verify=True, native_kernels=False)))


def make_golden(path: Path, seed: int = 0) -> Json:
    """Return the golden file of a model file. Raises ModelFileError for a file that is damaged.

    Cost: a few hundred steps of the model.
    """
    with open_model(path) as model:
        manifest = model.manifest
        golden: Json = {
            "format": FORMAT,
            "version": VERSION,
            "file": {
                "name": path.name,
                "sha256": _sha256(path),
                "task": manifest.task,
                "target": manifest.target,
                "precision": manifest.precision,
                "quantization": manifest.quantization,
            },
            "seed": seed,
            "tolerance": _tolerance(manifest),
        }
        golden |= _Recorder(model, golden["tolerance"], seed).record()
    return golden


def _tolerance(manifest: Manifest) -> float:
    """Return the tolerance of a file, which follows from its roundings. Products of a file for the web have none."""
    caches = manifest.decode.caches if manifest.decode is not None else ()
    products = manifest.quantization != "none" and manifest.target != "web"
    if products or any(cache.dtype in ("int8", "uint8") for cache in caches):
        return INTEGER_TOLERANCE
    return FLOAT_TOLERANCE if manifest.precision == "fp32" else HALF_TOLERANCE


def _sha256(path: Path) -> str:
    """Return the digest of the file, without weights that stand next to it. Any language has this one."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_golden(golden: Json, path: Path) -> None:
    """Write a golden file whole. Raises OutputError."""
    with replaced_file(path) as file:
        file.write(golden_bytes(golden))


def golden_bytes(golden: Json) -> bytes:
    return (json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


class _Recorder:
    """Draws the requests of a file and records their results."""

    def __init__(self, model: Model, tolerance: float, seed: int) -> None:
        self.model, self.tolerance, self.seed = model, tolerance, seed
        self.draws = Draws(model.engine, seed)
        self.random = np.random.default_rng(seed + 1)

    def record(self) -> Json:
        manifest, model = self.model.manifest, self.model
        task = None if generates(manifest) else task_of(manifest)
        if manifest.decode is None:
            return {"outputs": list(self._outputs()), "results": self._results(task)}
        decode = list(self._decode())
        if task is not None:
            return {"decode": decode, "results": self._results(task)}
        if not (manifest.takes_prompt or manifest.special_tokens.bos_token_ids):
            return {"decode": decode}  # no token to start from
        generation = list(self._generation())
        streams = list(self._streams()) if model.inputs.output_codec is not None else []
        return {"decode": decode, "generation": generation, "streams": streams}

    def _outputs(self) -> Iterator[Json]:
        for case in self.draws.output_cases():
            described = case.to_json()
            rows = run_outputs(self.model.engine, described)
            expected = [{name: sample(value, self.random) for name, value in row.items()} for row in rows]
            yield {**described, "expected": expected}

    def _decode(self) -> Iterator[Json]:
        for case in self.draws.decode_cases():
            described = case.to_json()
            rows = run_decode(self.model.engine, described)
            yield {**described, "expected": [self._row(row) for row in rows]}

    def _row(self, row: DecodedRow) -> Json:
        length, width = row.logits.shape[0], row.logits.shape[-1]
        extras = {name: sample(value, self.random) for name, value in row.extras.items()}
        if self.model.engine.decode.features:
            return {"outputs": encode_array(row.logits), "extras": extras}
        positions = list(range(max(0, length - STORED_POSITIONS), length))
        columns = np.sort(self.random.choice(width, min(width, SAMPLED), replace=False)).tolist()
        return {"logits": sample_logits(row.logits[positions], positions, columns), "extras": extras}

    def _cases(self) -> Iterator[Json]:
        """Yield inputs of generation: drawn ids, then texts."""
        manifest = self.model.manifest
        for length in (6, 3):
            inputs = self.draws.inputs(length)
            if manifest.takes_prompt:
                assert manifest.decode is not None
                prompt = self.draws.tokens(min(length, max(1, manifest.max_length // 2)))
                inputs = {**inputs, manifest.decode.step.name: encode_array(prompt)}
            yield {"inputs": inputs}
        yield from raw_inputs(self.model, None, self.random)

    def _generation(self) -> Iterator[Json]:
        others = changed_models(self.model, self.tolerance, self.seed)
        for case in self._cases():
            for search in (GREEDY, BEAMS):
                described = {**case, "options": {"max_new_tokens": MAX_NEW_TOKENS, **search, "top_logprobs": 2}}
                results = run_generation(self.model, described)
                changed = [run_generation(other, described) for other in others]
                expected: Json = {
                    "sequences": [_sequence(result) for result in results],
                    "decided_tokens": decided_tokens(results, changed),
                    "all_decided": all_decided(results, changed),
                }
                if "text" in case:
                    expected["read"] = prompt_of(self.model, case)
                yield {**described, "expected": expected}

    def _streams(self) -> Iterator[Json]:
        others = changed_models(self.model, self.tolerance, self.seed)
        for case in self._cases():
            if "text" not in case and self.model.manifest.adapters:
                continue
            described = {**case, "options": {"max_new_tokens": 2 * MAX_NEW_TOKENS, "num_beams": 1}}
            pieces = run_stream(self.model, described)
            decided = all(run_stream(other, described) == pieces for other in others)
            yield {**described, "expected": {"pieces": pieces, "decided": decided}}

    def _results(self, task: BaseTask | None) -> list[Json]:
        assert task is not None
        raws = raw_inputs(self.model, task, self.random)
        results = run_raw(self.model, task, raws) if raws else []
        return [
            {"input": raw, "expected": self._result(task, result)} for raw, result in zip(raws, results, strict=True)
        ]

    def _result(self, task: BaseTask, result: Any) -> Json:
        fields = task.format_fields(result)
        small = len(json.dumps(fields, ensure_ascii=False)) <= MAX_FIELDS
        numbers = sample(np.asarray(task.numbers(result), np.float32), self.random)
        return {**({"fields": fields} if small else {}), "numbers": numbers}


def _sequence(result: Result) -> Json:
    """Return a sequence as JSON. margins: how much likelier each token was than the next one, as log-probabilities."""
    likeliest = [sorted((value for _, value in pairs), reverse=True) for pairs in result.top_logprobs]
    return {
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "score": result.score,
        "token_logprobs": encode_array(np.array(result.token_logprobs, np.float32)),
        "margins": [round(pair[0] - pair[1], 6) for pair in likeliest if len(pair) > 1],
    }
