"""Compare the results of a model file with a golden file, as a runtime in another language does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_export.verify.golden.decided import all_decided, changed_models, decided_tokens
from tformer_export.verify.golden.raw import run_raw
from tformer_export.verify.golden.record import FORMAT, VERSION, file_facts, open_model, requests_of, tolerance_of
from tformer_export.verify.golden.run import prompt_of, run_decode, run_generation, run_outputs, run_stream
from tformer_export.verify.golden.values import (
    Json,
    array_difference,
    decode_array,
    logits_difference,
    number_difference,
)
from tformer_runtime.base.errors import InputError
from tformer_runtime.base.special_files import endless_reason
from tformer_runtime.decoding.request import Result
from tformer_runtime.model import Model
from tformer_runtime.tasks import task_of


def read_golden(path: Path) -> Json:
    """Read a golden file. Raises InputError for a file that is none, or that another version has written."""
    if reason := endless_reason(path):
        raise InputError(reason)
    try:
        golden = json.loads(path.read_text(encoding="utf-8"))
        if golden["format"] != FORMAT:
            raise KeyError
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a golden file of a model: write one with tformer-golden MODEL.onnx") from error
    if golden.get("version") != VERSION:
        raise InputError(
            f"{path} is of version {golden.get('version')} of golden files and this tformer reads version {VERSION}: "
            "write it again with tformer-golden MODEL.onnx"
        )
    return golden  # type: ignore[no-any-return]


def differences(golden: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield how the results of a file differ from a golden file, a sentence each.

    The digest is not compared: a file may be compared with the golden file of another form of its model.
    Raises InputError for a golden file that is damaged, or whose requests the model cannot read.
    """
    with open_model(path) as model:
        try:
            yield from _Replay(model, golden).differences()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise _damaged(f"{type(error).__name__}: {error}") from error


SCORE_ROUNDING = 2.0**-20  # of a score for each of its tokens: sums of float32 in another order


def _damaged(reason: str) -> InputError:
    return InputError(f"the golden file is damaged, or belongs to a model of another kind ({reason})")


class _Replay:
    def __init__(self, model: Model, golden: Mapping[str, Any]) -> None:
        self.model, self.golden = model, golden
        self.tolerance = tolerance_of(golden["file"])
        self._check_facts()
        self._check_cases()
        # Tokens that are decided in this model are compared too, so that a golden file cannot ask for fewer.
        self.others = changed_models(model, self.tolerance, golden["seed"]) if golden.get("generation") else []

    def _check_facts(self) -> None:
        """Raise InputError for another tolerance than that of the file that the golden file is of."""
        if self.golden["tolerance"] != self.tolerance:
            raise _damaged(f"its tolerance is {self.golden['tolerance']}, and that of its model {self.tolerance}")
        stated, facts = self.golden["file"], file_facts(self.model.engine.session.path, self.model.manifest)
        if stated["sha256"] == facts["sha256"]:
            wrong = [name for name, fact in facts.items() if name != "name" and stated[name] != fact]
            if wrong:
                raise _damaged(f"its {wrong[0]} is {stated[wrong[0]]!r}, and that of its model {facts[wrong[0]]!r}")

    def _check_cases(self) -> None:
        """Raise InputError if the golden file has fewer cases than one that is written now."""
        for kind, requests in requests_of(self.model, self.golden["seed"]).items():
            stated = self.golden.get(kind, [])
            missing = Counter(map(_form, requests)) - Counter(map(_form, stated))
            if missing:
                raise _damaged(f"it lacks {missing.total()} of the {len(requests)} cases of {kind}")

    def differences(self) -> Iterator[str]:
        for kind, compare in (
            ("outputs", self._outputs),
            ("decode", self._decode),
            ("generation", self._generation),
            ("streams", self._streams),
        ):
            for number, case in enumerate(self.golden.get(kind, ())):
                name = f" ({case['name']})" if "name" in case else ""
                yield from (f"{kind} {number}{name}: {difference}" for difference in compare(case))
        yield from self._results(self.golden.get("results", ()))

    def _outputs(self, case: Mapping[str, Any]) -> Iterator[str]:
        rows = run_outputs(self.model.engine, case)
        for row, (actual, expected) in enumerate(zip(rows, case["expected"], strict=True)):
            if difference := _names_difference(expected, actual):
                yield f"row {row}: {difference}"
                continue
            for name, values in expected.items():
                if difference := array_difference(values, actual[name], self.tolerance):
                    yield f"row {row}: {name}: {difference}"

    def _decode(self, case: Mapping[str, Any]) -> Iterator[str]:
        rows = run_decode(self.model.engine, case)
        for row, (actual, expected) in enumerate(zip(rows, case["expected"], strict=True)):
            if "outputs" in expected:
                difference = array_difference(expected["outputs"], actual.logits, self.tolerance)
            else:
                difference = logits_difference(expected["logits"], actual.logits, self.tolerance)
            difference = difference or _names_difference(expected["extras"], actual.extras)
            if difference:
                yield f"row {row}: {difference}"
                continue
            for name, values in expected["extras"].items():
                if difference := array_difference(values, actual.extras[name], self.tolerance):
                    yield f"row {row}: {name}: {difference}"

    def _generation(self, case: Mapping[str, Any]) -> Iterator[str]:
        expected = case["expected"]
        if "text" in case and prompt_of(self.model, case) != expected["read"]:
            yield "the text is read as other ids"
            return
        results = run_generation(self.model, case)
        sequences = expected["sequences"]
        if len(results) != len(sequences):
            yield f"there are {len(results)} sequences, not {len(sequences)}"
            return
        changed = [run_generation(other, case) for other in self.others]
        if expected["all_decided"] or all_decided(results, changed):
            for place, (result, sequence) in enumerate(zip(results, sequences, strict=True)):
                if difference := self._sequence_difference(result, sequence):
                    yield f"sequence {place}: {difference}"
            return
        counts = map(max, expected["decided_tokens"], decided_tokens(results, changed))
        for place, (result, sequence, count) in enumerate(zip(results, sequences, counts, strict=True)):
            if list(result.token_ids[:count]) != sequence["token_ids"][:count]:
                begin = sequence["token_ids"][:count]
                yield f"sequence {place}: the ids begin {list(result.token_ids[:count])}, not {begin}"

    def _sequence_difference(self, result: Result, sequence: Mapping[str, Any]) -> str | None:
        for name, actual in (
            ("token_ids", list(result.token_ids)),
            ("text", result.text),
            ("finish_reason", result.finish_reason),
        ):
            if actual != sequence[name]:
                return f"{name} is {actual!r}, not {sequence[name]!r}"
        logprobs = decode_array(sequence["token_logprobs"])
        allowed = self.logprob_tolerance
        if difference := number_difference(logprobs, np.array(result.token_logprobs, np.float32), allowed):
            return f"token_logprobs: {difference}"
        # A score is the sum over a power of the length, which is the same for the same ids.
        sums = [float(np.sum(values, dtype=np.float64)) for values in (logprobs, result.token_logprobs)]
        score = result.score * sums[0] / sums[1] if sums[1] else result.score
        if not abs(sequence["score"] - score) <= SCORE_ROUNDING * len(logprobs) * max(1.0, abs(score)):
            return f"score is {score:.6g} by its token_logprobs, not {sequence['score']:.6g}"
        return None

    @property
    def logprob_tolerance(self) -> float:
        """The allowed difference of a log-probability: twice that of a logit, of the widest range in the file."""
        spans = [
            float((decode_array(row["logits"]["maximum"]) - decode_array(row["logits"]["minimum"])).max())
            for case in self.golden["decode"]
            for row in case["expected"]
        ]
        return 2 * self.tolerance * max(spans)

    def _streams(self, case: Mapping[str, Any]) -> Iterator[str]:
        pieces, expected = run_stream(self.model, case), case["expected"]
        if pieces == expected["pieces"]:
            return
        if expected["decided"] or all(run_stream(other, case) == pieces for other in self.others):
            yield f"the pieces are {pieces}, not {expected['pieces']}"

    def _results(self, cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        if not cases:
            return
        task = task_of(self.model.manifest)
        results = run_raw(self.model, task, [dict(case["input"]) for case in cases])
        for number, (case, result) in enumerate(zip(cases, results, strict=True)):
            expected = case["expected"]
            if difference := array_difference(expected["numbers"], task.numbers(result), self.tolerance):
                yield f"results {number}: {difference}"
            elif "fields" in expected and (
                place := _first_difference(
                    json.loads(json.dumps(task.format_fields(result))), expected["fields"], self.tolerance
                )
            ):
                yield f"results {number}: {place}"


def _form(request: Mapping[str, Any]) -> str:
    """Return the form of a request, without the numbers that the seed draws."""
    inputs = request.get("input", request)
    drawn = {name: len(inputs[name]) if name == "rows" else None for name in sorted(inputs) if name != "expected"}
    return json.dumps([drawn, request.get("name"), request.get("options")], sort_keys=True)


def _names_difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str | None:
    """Return how the names of the outputs differ; None if they do not."""
    names = [", ".join(sorted(outputs)) or "none" for outputs in (actual, expected)]
    return f"the outputs are {names[0]}, not {names[1]}" if names[0] != names[1] else None


def _first_difference(actual: Any, expected: Any, tolerance: float, place: str = "") -> str | None:
    """Return the first place at which two JSON values differ by more than rounding; None if there is none."""
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        pairs = [(actual[name], value, f"{place}.{name}") for name, value in expected.items()]
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = [(one, two, f"{place}[{i}]") for i, (one, two) in enumerate(zip(actual, expected, strict=True))]
    elif isinstance(expected, float) and isinstance(actual, (int, float)):
        allowed = tolerance * max(1.0, abs(expected))
        return None if abs(actual - expected) <= allowed else f"{place} is {actual}, not {expected}"
    else:
        return None if actual == expected else f"{place} is {actual!r}, not {expected!r}"
    return next((found for one, two, at in pairs if (found := _first_difference(one, two, tolerance, at))), None)
