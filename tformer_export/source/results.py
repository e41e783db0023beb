"""What the results of a source that is run once stand for, as whoever exports it says: pooled vectors, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tformer_export.source.base import Source
from tformer_export.source.pooled import CHOICES, pooled
from tformer_export.source.purpose import CLASSES, CLASSIFIES, CLASSIFIES_IMAGES
from tformer_runtime.errors import OptionError, SourceError
from tformer_runtime.manifest import MULTI_LABEL, REGRESSION, SINGLE_LABEL, Outcome


def for_its_task(
    source: Source, labels: Sequence[str] | None, problem: str | None, pool: str | None, normalize: bool
) -> Source:
    """The source with what its results stand for. OptionError for what does not go together."""
    if (labels is not None or problem is not None) and (source.step is not None or source.task not in CLASSES):
        raise OptionError(
            f"labels and a problem are of task {CLASSIFIES} (--task {CLASSIFIES}) or {CLASSIFIES_IMAGES}, and this "
            f"model's is {source.task}"
        )
    if problem not in (None, SINGLE_LABEL, MULTI_LABEL, REGRESSION):
        raise OptionError(f"problem is one of {SINGLE_LABEL}, {MULTI_LABEL}, {REGRESSION}, not {problem!r}")
    if normalize and pool is None:
        raise OptionError("normalize is of pooled vectors: choose a pool too")
    if pool is not None:
        if pool not in CHOICES:
            raise OptionError(f"pool is one of {', '.join(CHOICES)}, not {pool!r}")
        source = pooled(source, [pool], normalize=normalize)
    if source.task in CLASSES and source.step is None:
        given = tuple(source.outcome.labels if labels is None else map(str, labels))
        source = replace(source, outcome=_classes(source, given, problem or source.outcome.problem or SINGLE_LABEL))
    return source


def _classes(source: Source, labels: tuple[str, ...], problem: str) -> Outcome:
    """What a classifier's output stands for; labels: none for those that transformers would make up. OptionError if
    there are more or fewer than the output has numbers, SourceError for an output that is not one row of scores."""
    with source.ready(), torch.no_grad():
        shape = tuple(source.module(*source.example.values()).shape)
    if len(shape) != 2:
        raise SourceError(
            f"a classifier gives scores of its labels for each row, (batch, labels), and this model gives {shape}: let "
            "forward return those, or name them with output="
        )
    labels = labels or tuple(f"LABEL_{i}" for i in range(shape[1]))
    if len(labels) != shape[1] or len(set(labels)) != len(labels):
        raise OptionError(f"{len(labels)} labels are given for {shape[1]} scores: give as many, each once")
    if problem == SINGLE_LABEL and shape[1] == 1:
        problem = MULTI_LABEL  # one label alone holds or not
    return Outcome(labels, problem)
