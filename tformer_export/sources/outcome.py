"""What the results of a source that is run once stand for, as whoever exports it says: pooled vectors, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tformer_export.sources.base import Source
from tformer_export.sources.pooled_module import CHOICES
from tformer_export.sources.pooling import pooled
from tformer_export.sources.task_names import ANSWERS, CLASSES, CLASSIFIES, CLASSIFIES_IMAGES, LABELS_TOKENS
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION, SINGLE_LABEL, Outcome


def for_its_task(
    source: Source, labels: Sequence[str] | None, problem: str | None, pool: str | None, normalize: bool
) -> Source:
    """The source with what its results stand for. OptionError for what does not go together."""
    of_tokens = source.task == LABELS_TOKENS and problem is None
    if (labels is not None or problem is not None) and (
        source.step is not None or not (source.task in CLASSES or of_tokens)
    ):
        raise OptionError(
            f"labels and a problem are of task {CLASSIFIES} (--task {CLASSIFIES}) or {CLASSIFIES_IMAGES}, labels also "
            f"of {LABELS_TOKENS}, and this model's is {source.task}"
        )
    if problem not in (None, SINGLE_LABEL, MULTI_LABEL, REGRESSION):
        raise OptionError(f"problem is one of {SINGLE_LABEL}, {MULTI_LABEL}, {REGRESSION}, not {problem!r}")
    if normalize and pool is None:
        raise OptionError("normalize is of pooled vectors: choose a pool too")
    if pool is not None:
        if pool not in CHOICES:
            raise OptionError(f"pool is one of {', '.join(CHOICES)}, not {pool!r}")
        source = pooled(source, [pool], normalize=normalize)
    if source.task in (*CLASSES, LABELS_TOKENS) and source.step is None:
        given = tuple(source.outcome.labels if labels is None else map(str, labels))
        source = replace(source, outcome=_classes(source, given, problem or source.outcome.problem or SINGLE_LABEL))
    if source.task == ANSWERS and source.step is None:
        _check_places(source)
    return source


def _classes(source: Source, labels: tuple[str, ...], problem: str) -> Outcome:
    """What a classifier's output stands for; labels: none for those that transformers would make up. OptionError if
    there are more or fewer than the output has numbers, SourceError for an output that is not one row of scores."""
    of_tokens = source.task == LABELS_TOKENS
    shape = _shapes(source)[0]
    if len(shape) != 2 + of_tokens:
        what, axes = ("each token", "(batch, time, labels)") if of_tokens else ("each row", "(batch, labels)")
        raise SourceError(
            f"a classifier gives scores of its labels for {what}, {axes}, and this model gives {shape}: let forward "
            "return those, or name them with output="
        )
    labels = labels or tuple(f"LABEL_{i}" for i in range(shape[-1]))
    if len(labels) != shape[-1] or len(set(labels)) != len(labels):
        raise OptionError(f"{len(labels)} labels are given for {shape[-1]} scores: give as many, each once")
    if problem == SINGLE_LABEL and shape[-1] == 1 and not of_tokens:
        problem = MULTI_LABEL  # one label alone holds or not
    return replace(source.outcome, labels=labels, problem=problem)


def _check_places(source: Source) -> None:
    """SourceError unless the outputs are scores of where an answer begins, and where it ends."""
    shapes = _shapes(source)
    if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
        raise SourceError(
            "to answer questions a model gives, for each token, scores that an answer begins and that it ends there, "
            f"(batch, time) each, and this model gives {', '.join(map(str, shapes))}: name both outputs "
            "(output=[START, END])"
        )


def _shapes(source: Source) -> list[tuple[int, ...]]:
    with source.ready(), torch.no_grad():
        found = source.module(*source.example.values())
    return [tuple(each.shape) for each in (found if isinstance(found, tuple) else (found,))]
