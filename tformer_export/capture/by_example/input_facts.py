"""Facts on the inputs that one recording shows: the number of their ids, and the ids that may be padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tformer_export.capture.by_example.recording import Constant, InputRef, Recording, Step, StepResult
from tformer_export.capture.by_example.recording_inputs import RecordingInputs
from tformer_export.common.fx_nodes import aten

_COMPARISONS = {aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor}
_COPIES = {aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.contiguous.default}


def with_facts(draws: RecordingInputs, recording: Recording) -> RecordingInputs:
    """Return draws of ids of the whole vocabulary. Ids with which the module compares its ids may be padding."""
    draws = replace(draws, vocabulary=_vocabulary(recording, draws))
    return replace(draws, paddings=draws.paddings | _compared_ids(recording, draws))


def _vocabulary(recording: Recording, draws: RecordingInputs) -> dict[str, int]:
    """Return the number of ids of each input that is looked up in tables: that of the smallest.

    An input of numbers, such as dates, may have columns for several tables. It keeps the numbers of the example.
    """
    names = list(draws.example)
    found: dict[str, int] = {}
    for step, i in _readers(recording, len(names)):
        if step.target is aten.embedding.default and not draws.example[names[i]].is_floating_point():
            rows = int(step.args[0].value.shape[0])
            found[names[i]] = min(rows, found.get(names[i], rows))
    return found


def _compared_ids(recording: Recording, draws: RecordingInputs) -> frozenset[int]:
    """Return the ids with which the module compares its ids."""
    names = list(draws.example)
    compared = set()
    for step, i in _readers(recording, len(names)):
        if names[i] in draws.vocabulary and step.target in _COMPARISONS:
            other = next((o for o in step.operands[1:] if isinstance(o, (int, Constant))), None)
            value = other.value if isinstance(other, Constant) else other
            if isinstance(value, int) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                compared.add(int(value))
    return frozenset(i for i in compared if 0 <= i < max(draws.vocabulary.values(), default=0))


def _readers(recording: Recording, num_inputs: int) -> Iterator[tuple[Step, int]]:
    """Find the operations that read an input as it is, each with the number of the input."""
    moved: dict[object, int] = {InputRef(i): i for i in range(num_inputs)}
    for number, step in enumerate(recording.steps):
        operands = [o for o in step.operands if isinstance(o, (InputRef, StepResult)) and o in moved]
        if len(operands) == 1:
            yield step, moved[operands[0]]
            if step.is_view or step.target in _COPIES:
                moved[StepResult(number)] = moved[operands[0]]
