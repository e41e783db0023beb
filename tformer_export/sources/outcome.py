"""The meaning of the outputs of a single-pass source, by the caller's task: pooled vectors, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from tformer_export.sources.base import Source
from tformer_export.sources.forward_errors import run_example
from tformer_export.sources.pooling import with_pooling
from tformer_export.sources.task_names import ANSWERS, CLASSES, CLASSIFIES, CLASSIFIES_IMAGES, LABELS_TOKENS
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.format.manifest import MULTI_LABEL, SINGLE_LABEL, OutputMeaning


def with_task(
    source: Source, labels: Sequence[str] | None, problem_type: str | None, pooling: str | None, normalize: bool
) -> Source:
    """Set the meaning of a source's outputs. The arguments are fields of `Task`.

    Raises OptionError for arguments that do not fit each other or the model.
    """
    of_tokens = source.task == LABELS_TOKENS and problem_type is None
    if (labels is not None or problem_type is not None) and (
        source.step_input is not None or not (source.task in CLASSES or of_tokens)
    ):
        raise OptionError(
            f"labels and problem_type are for the tasks {CLASSIFIES} and {CLASSIFIES_IMAGES}, labels also for "
            f"{LABELS_TOKENS}, but the task of this model is {source.task}: choose another task (--task)"
        )
    if pooling is not None:
        source = with_pooling(source, [pooling], normalize=normalize)
    if source.task in (*CLASSES, LABELS_TOKENS) and source.step_input is None:
        label_names = tuple(source.output_meaning.labels if labels is None else map(str, labels))
        source = replace(
            source,
            output_meaning=_class_meaning(
                source, label_names, problem_type or source.output_meaning.problem_type or SINGLE_LABEL
            ),
        )
    if source.task == ANSWERS and source.step_input is None:
        _check_span_scores(source)
    return source


def _class_meaning(source: Source, labels: tuple[str, ...], problem: str) -> OutputMeaning:
    """Return the meaning of a classifier's output. labels: empty for transformers' default labels.

    Raises OptionError if the number of labels is not the number of scores, SourceError for an output that is not one
    row of scores.
    """
    of_tokens = source.task == LABELS_TOKENS
    shape = tuple(run_example(source)[0].shape)
    if len(shape) != 2 + of_tokens:
        subject, axes = ("each token", "(batch, time, labels)") if of_tokens else ("each row", "(batch, labels)")
        raise SourceError(
            f"a classifier must return scores of its labels for {subject}, {axes}, but this model returns {shape}: let "
            "forward return the scores, or name them with output="
        )
    labels = labels or tuple(f"LABEL_{i}" for i in range(shape[-1]))
    if len(labels) != shape[-1] or len(set(labels)) != len(labels):
        raise OptionError(f"{len(labels)} labels are given for {shape[-1]} scores: give as many, each once")
    if problem == SINGLE_LABEL and shape[-1] == 1 and not of_tokens:
        problem = MULTI_LABEL  # one label alone holds or not
    return structs.replace(source.output_meaning, labels=labels, problem_type=problem)


def _check_span_scores(source: Source) -> None:
    """Raise SourceError unless the outputs are scores of the begin and of the end of an answer."""
    shapes = [tuple(each.shape) for each in run_example(source)]
    if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
        raise SourceError(
            "a model that answers questions must return two scores for each token, that an answer starts there and "
            f"that it ends there, (batch, time) each, but this model returns {', '.join(map(str, shapes))}: name both "
            "outputs (output=[START, END])"
        )
