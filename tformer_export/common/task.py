"""`Task`: the purpose of a model, as the caller of `export` or of `save_checkpoint` states it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tformer_export.common.option_table import check_choices, option
from tformer_export.common.option_values import POOLINGS
from tformer_runtime.base.errors import OptionError
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION, SINGLE_LABEL

PROBLEM_TYPES = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)


@dataclass(frozen=True)
class Task:
    """The purpose of a model and the meaning of its outputs."""

    name: str | None = option(
        None,
        "Set the task of the model, by its name in transformers, such as text-classification. A Hugging Face folder is "
        "loaded with the class for this task.  [default: that of SOURCE]",
        flag="--task",
    )
    labels: Sequence[str] | None = option(
        None, "Name the labels of a classifier, in the order of its scores.", "list", flag="--labels", metavar="A,B,…"
    )
    problem_type: str | None = option(
        None,
        "Set the meaning of the scores of a classifier. single_label: exactly one label applies (softmax). "
        "multi_label: any number apply (sigmoid). regression: the scores are the result.",
        flag="--problem-type",
        choices=PROBLEM_TYPES,
    )
    pooling: str | None = option(
        None,
        "Reduce the vectors of all positions to one vector for each input.",
        flag="--pooling",
        choices=POOLINGS,
    )
    normalize: bool = option(False, "Scale pooled vectors to length 1.", "switch", flag="--normalize")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.normalize and self.pooling is None:
            raise OptionError("normalize is for pooled vectors: choose a pooling too")
