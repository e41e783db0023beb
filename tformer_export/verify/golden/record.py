"""Make a golden file of a finished model file, with `tformer_runtime` and the operators of onnxruntime alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tformer_export.verify.golden.decided import all_decided, changed_models, decided_tokens
from tformer_export.verify.golden.manifest_draws import ManifestDraws
from tformer_export.verify.golden.raw import raw_inputs, run_raw
from tformer_export.verify.golden.run import (
    DecodedRow,
    prompt_of,
    run_decode,
    run_generation,
    run_outputs,
    run_stream,
)
from tformer_export.verify.golden.values import SAMPLED, Json, encode_array, sample, sample_logits, stored_positions
from tformer_runtime.backend.session import Session
from tformer_runtime.base.whole_files import replaced_file
from tformer_runtime.decoding.request import Result
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.model import Model
from tformer_runtime.tasks import BaseTask, generates, task_of

FORMAT, VERSION = "tformer-golden", 2
FLOAT_TOLERANCE = 1e-3  # that of the parity gate
HALF_TOLERANCE = 1e-2  # of values that are rounded to half precision
# One activation that is rounded to the other integer of 8 bits changes all later roundings. Then two runtimes differ by
# as much as the file differs from its model in float32.
INTEGER_TOLERANCE = 5e-2
MAX_NEW_TOKENS = 12
GREEDY = {"num_beams": 1, "num_return_sequences": 1}
BEAMS = {"num_beams": 4, "num_return_sequences": 4}
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
        facts = file_facts(path, model.manifest)
        tolerance = tolerance_of(facts)
        return {
            "format": FORMAT,
            "version": VERSION,
            "file": facts,
            "seed": seed,
            "tolerance": tolerance,
            **_Recorder(model, tolerance, seed).record(),
        }


def file_facts(path: Path, manifest: Manifest) -> Json:
    """Return what a golden file says of its model file."""
    caches = manifest.decode.caches if manifest.decode is not None else ()
    return {
        "name": path.name,
        "sha256": _sha256(path),
        "task": manifest.task,
        "target": manifest.target,
        "precision": manifest.precision,
        "quantization": manifest.quantization,
        "caches": sorted({cache.dtype for cache in caches}),
    }


def tolerance_of(facts: Mapping[str, Any]) -> float:
    """Return the tolerance of a file, which follows from its roundings. Products of a file for the web have none."""
    products = facts["quantization"] != "none" and facts["target"] != "web"
    if products or not {"int8", "uint8"}.isdisjoint(facts["caches"]):
        return INTEGER_TOLERANCE
    return FLOAT_TOLERANCE if facts["precision"] == "fp32" else HALF_TOLERANCE


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


def requests_of(model: Model, seed: int) -> dict[str, list[Json]]:
    """Return all requests of a golden file, by their kind, as they follow from the manifest and the seed."""
    manifest, draws = model.manifest, ManifestDraws(model.engine, seed)
    random = np.random.default_rng(seed + 2)
    requests: dict[str, list[Json]] = {}
    if manifest.decode is None:
        requests["outputs"] = [case.to_json() for case in draws.output_cases()]
    else:
        requests["decode"] = [case.to_json() for case in draws.decode_cases()]
    if not generates(manifest):
        requests["results"] = [{"input": raw} for raw in raw_inputs(model, task_of(manifest), random)]
    elif manifest.takes_prompt or manifest.special_tokens.bos_token_ids:  # a token to start from
        cases = [*draws.generation_cases(), *raw_inputs(model, None, random)]
        requests["generation"] = [
            {**case, "options": {"max_new_tokens": MAX_NEW_TOKENS, **search, "top_logprobs": 2}}
            for case in cases
            for search in (GREEDY, BEAMS)
        ]
        requests["streams"] = [
            {**case, "options": {"max_new_tokens": 2 * MAX_NEW_TOKENS, "num_beams": 1}}
            for case in cases
            if model.inputs.output_codec is not None and ("text" in case or not manifest.adapters)
        ]
    return requests


class _Recorder:
    """Records the results of the requests of a file."""

    def __init__(self, model: Model, tolerance: float, seed: int) -> None:
        self.model, self.requests = model, requests_of(model, seed)
        self.random = np.random.default_rng(seed + 1)
        self.others = changed_models(model, tolerance, seed) if "generation" in self.requests else []

    def record(self) -> Json:
        record: dict[str, Callable[[list[Json]], Iterator[Any]]] = {
            "outputs": self._outputs,
            "decode": self._decode,
            "generation": self._generation,
            "streams": self._streams,
            "results": self._results,
        }
        return {
            kind: [
                {**request, "expected": expected}
                for request, expected in zip(requests, record[kind](requests), strict=True)
            ]
            for kind, requests in self.requests.items()
        }

    def _outputs(self, requests: list[Json]) -> Iterator[list[Json]]:
        for request in requests:
            rows = run_outputs(self.model.engine, request)
            yield [{name: sample(value, self.random) for name, value in row.items()} for row in rows]

    def _decode(self, requests: list[Json]) -> Iterator[list[Json]]:
        for request in requests:
            yield [self._row(row) for row in run_decode(self.model.engine, request)]

    def _row(self, row: DecodedRow) -> Json:
        length, width = row.logits.shape[0], row.logits.shape[-1]
        extras = {name: sample(value, self.random) for name, value in row.extras.items()}
        if self.model.engine.decode.features:
            return {"outputs": encode_array(row.logits), "extras": extras}
        positions = stored_positions(length)
        columns = np.sort(self.random.choice(width, min(width, SAMPLED), replace=False)).tolist()
        return {"logits": sample_logits(row.logits[positions], positions, columns), "extras": extras}

    def _generation(self, requests: list[Json]) -> Iterator[Json]:
        for request in requests:
            results = run_generation(self.model, request)
            changed = [run_generation(other, request) for other in self.others]
            expected: Json = {
                "sequences": [_sequence(result) for result in results],
                "decided_tokens": decided_tokens(results, changed),
                "all_decided": all_decided(results, changed),
            }
            if "text" in request:
                expected["read"] = prompt_of(self.model, request)
            yield expected

    def _streams(self, requests: list[Json]) -> Iterator[Json]:
        for request in requests:
            pieces = run_stream(self.model, request)
            yield {"pieces": pieces, "decided": all(run_stream(other, request) == pieces for other in self.others)}

    def _results(self, requests: list[Json]) -> Iterator[Json]:
        task = task_of(self.model.manifest)
        results = run_raw(self.model, task, [request["input"] for request in requests]) if requests else []
        return (self._result(task, result) for result in results)

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
