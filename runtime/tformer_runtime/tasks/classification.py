"""Classification: which labels an input has, by the scores that the model gives each, as transformers' pipeline does.

p = softmax(z)            one label holds
p = 1 / (1 + exp(−z))     each label may hold; also where there is a single one
z itself                  regression
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.validation import whole
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION
from tformer_runtime.tasks.base import Task
from tformer_runtime.tasks.settings import Flag


@dataclass(frozen=True)
class Classification:
    """label: the likeliest. score: its probability; of regression, the number. scores: of every label, in the model's
    order. top: the `top_k` likeliest and their scores."""

    label: str
    score: float
    scores: Mapping[str, float]
    top: tuple[tuple[str, float], ...]


class Classifier(Task):
    names = ("text-classification",)
    does = "classifies its inputs"
    call = "classify()"
    flags = {"Classes": {"top_k": Flag("--top-k", "N", "Write the N likeliest labels.", int)}}  # noqa: RUF012

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(given)
        top = given.pop("top_k", None)
        super().settings(given)
        return {"top_k": 1 if top is None else whole("top_k", top)}

    def result(self, outputs: Sequence[Array], settings: Mapping[str, Any]) -> Classification:
        scores = self._scores(np.asarray(outputs[0], np.float64).reshape(-1)).tolist()
        labels = self.outcome.labels or tuple(f"LABEL_{i}" for i in range(len(scores)))
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: settings["top_k"]]
        top = tuple((labels[i], scores[i]) for i in best)
        return Classification(*top[0], dict(zip(labels, scores, strict=True)), top)

    def _scores(self, logits: Array) -> Array:
        problem = self.outcome.problem
        if problem == REGRESSION:
            return logits
        if problem == MULTI_LABEL:
            with np.errstate(over="ignore"):
                held: Array = 1 / (1 + np.exp(-logits))
            return held
        powers: Array = np.exp(logits - logits.max())
        powers /= powers.sum()
        return powers

    def numbers(self, result: Classification) -> Array:
        return np.array(list(result.scores.values()))

    def line(self, result: Classification) -> str:
        return "\t".join(f"{label}\t{score:.6g}" for label, score in result.top)

    def fields(self, result: Classification) -> dict[str, Any]:
        fields: dict[str, Any] = {"label": result.label, "score": result.score, "scores": dict(result.scores)}
        if len(result.top) > 1:
            fields["top"] = [{"label": label, "score": score} for label, score in result.top]
        return fields
