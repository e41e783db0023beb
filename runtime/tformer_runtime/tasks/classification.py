"""Classification: the probability of each label from the logits z, as in transformers' pipeline.

p = softmax(z)            single-label: exactly one label is true
p = 1 / (1 + exp(−z))     multi-label: any number of labels is true; also for a model with a single label
z                         regression
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.validation import check_int
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION
from tformer_runtime.tasks.base import BaseTask
from tformer_runtime.tasks.settings import Flag


class Classification(Struct, frozen=True):
    """The labels of an input.

    label: the most probable one.
    score: its probability; the output of a regression.
    scores: of all labels, in the order of the model.
    top: the `top_k` most probable labels and their scores.
    """

    label: str
    score: float
    scores: Mapping[str, float]
    top: tuple[tuple[str, float], ...]


class Classifier(BaseTask):
    names = ("text-classification",)
    does = "classifies its inputs"
    call = "classify()"
    flags = {"Classes": {"top_k": Flag("--top-k", "N", "Write the N likeliest labels.  [default: 1]", int)}}  # noqa: RUF012

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(values)
        top_k = values.pop("top_k", None)
        super().settings(values)
        return {"top_k": 1 if top_k is None else check_int("top_k", top_k)}

    def result(self, outputs: Sequence[Array], settings: Mapping[str, Any]) -> Classification:
        scores = self._scores(np.asarray(outputs[0], np.float64).reshape(-1)).tolist()
        labels = self.output_meaning.labels or tuple(f"LABEL_{i}" for i in range(len(scores)))
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
        top = tuple((labels[i], scores[i]) for i in ranked[: settings["top_k"]])
        return Classification(*top[0], dict(zip(labels, scores, strict=True)), top)

    def _scores(self, logits: Array) -> Array:
        problem_type = self.output_meaning.problem_type
        if problem_type == REGRESSION:
            return logits
        if problem_type == MULTI_LABEL:
            with np.errstate(over="ignore"):
                sigmoid: Array = 1 / (1 + np.exp(-logits))
            return sigmoid
        softmax: Array = np.exp(logits - logits.max())
        softmax /= softmax.sum()
        return softmax

    def numbers(self, result: Classification) -> Array:
        return np.array(list(result.scores.values()))

    def format_line(self, result: Classification) -> str:
        return "\t".join(f"{label}\t{score:.6g}" for label, score in result.top)

    def format_fields(self, result: Classification) -> dict[str, Any]:
        fields: dict[str, Any] = {"label": result.label, "score": result.score, "scores": dict(result.scores)}
        if len(result.top) > 1:
            fields["top"] = [{"label": label, "score": score} for label, score in result.top]
        return fields
