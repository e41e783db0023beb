"""Trace by example: choose sizes and data, record, unify, and prove the program at sizes that were not recorded."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.draws import DataKind, InputDraws
from tformer_export.capture.by_example.rebuild import RebuiltModule, rebuild
from tformer_export.capture.by_example.recording import Constant, InputRef, Recording, Step, StepResult, record
from tformer_export.capture.by_example.simplify import numbers_of_the_course, simplify
from tformer_export.capture.by_example.size_fit import Sizes
from tformer_export.capture.by_example.unify import DisagreementError, unify
from tformer_export.common.fx_nodes import aten
from tformer_export.common.module_state import WriteUndo, is_same, unchanged

logger = logging.getLogger(__name__)

FIRST_LENGTH, NEXT_LENGTH, LONGER = 5, 4, 2  # lengths 5, 9, 13 …, in other recordings 2 more
FACTORS = 1, 8  # of lengths: a mixture of experts takes all its experts if it has positions enough
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)  # of forward at a size or for data
_COMPARISONS = {aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor}
_COPIES = {aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.contiguous.default}


def trace_by_example(module: nn.Module, draws: InputDraws, min_length: int, max_length: int) -> RebuiltModule | None:
    """Return a module that computes as `module` does, and that torch.export can trace; None if there is none.

    min_length: the positions that an input needs.
    max_length: the greatest length at which the two are compared, and to which tables are made that Python makes.

    Cost: some fifty runs of forward at small sizes, and a few at `max_length`.
    """
    sizes = _base(draws, max(1, min_length))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first = record(module, [*draws.draw(sizes, DataKind(False)).values()])
        except _FAILURES:
            return None
        draws = replace(draws, vocabulary=_vocabulary(first, draws))
        draws = replace(draws, paddings=draws.paddings | _compared_ids(first, draws))
        for kind in draws.kinds:
            for factor in FACTORS:
                try:
                    return _course(module, draws, kind, max(1, min_length) * factor, max_length)
                except (DisagreementError, *_FAILURES) as error:
                    logger.debug("no course of %s: %s", kind, error)
    return None


def _course(module: nn.Module, draws: InputDraws, kind: DataKind, unit: int, max_length: int) -> RebuiltModule:
    """Return the module of the course that data of one kind take, if it is right for all kinds of data."""
    samples = _samples(draws, unit)
    recordings = [record(module, [*draws.draw(sizes, kind).values()]) for sizes in samples]
    program = unify(simplify(recordings), samples)
    longest = _longest(
        draws, max(max(samples[-1]), max_length), max(samples[-1]), lambda sizes: _runs(module, draws, sizes)
    )
    if program.has_tables:
        samples.append(longest)
        recordings.append(record(module, [*draws.draw(longest, kind).values()]))
        program = unify(simplify(recordings), samples)
    names = list(draws.example)
    places = [(names.index(name), axis) for (name, axis), *_ in draws.groups]
    rebuilt = rebuild(program, places, len(names))
    proof = _Proof(module, rebuilt, recordings)
    for sizes in (tuple(s + 1 for s in samples[0]), (1, *(s - 1 for s in samples[0][1:]))):
        for tested in draws.kinds:
            proof.add([*draws.draw(sizes, tested, seed=1).values()])
    proof.finish()
    proven = _longest(
        draws, max(longest), max(samples[0]), lambda sizes: proof.holds([*draws.draw(sizes, kind).values()])
    )
    rebuilt.max_length = max(proven) if proven != longest else None
    return rebuilt


class _Proof:
    """Runs of a module and of the module that is to replace it, on inputs that were not recorded."""

    def __init__(self, module: nn.Module, rebuilt: RebuiltModule, recordings: Sequence[Recording]) -> None:
        self.module, self.rebuilt = module, rebuilt
        self.course = numbers_of_the_course(recordings)
        self.conditions: dict[str, set[bool]] = {}
        for recording in recordings:
            self._note(recording)

    def add(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise DisagreementError unless both modules give the same outputs."""
        self._note(record(self.module, inputs))
        if not self.holds(inputs):
            raise DisagreementError("the recorded operations give other results for other data", None)

    def holds(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether both modules give the same outputs."""
        with torch.no_grad():
            return is_same(list(self.rebuilt(*inputs)), _outputs(self.module, inputs))

    def finish(self) -> None:
        """Raise DisagreementError if a condition on data was the same in all runs, so that the other course was never
        compared."""
        for line, seen in self.conditions.items():
            if len(seen) == 1:
                raise DisagreementError("a condition on data was never changed by the data", line)

    def _note(self, recording: Recording) -> None:
        for number in recording.numbers:
            if number.source not in self.course:
                self.conditions.setdefault(number.stack_trace or "", set()).add(number.value)


def _base(draws: InputDraws, unit: int) -> Sizes:
    unit = max(1, unit)
    return 2, *((FIRST_LENGTH + NEXT_LENGTH * i) * unit for i in range(len(draws.groups) - 1))


def _samples(draws: InputDraws, unit: int) -> list[Sizes]:
    """Return the sizes of the recordings: first ones, then each of them changed alone, then all of them."""
    base = _base(draws, unit)
    changed = [3, *(size + LONGER * unit for size in base[1:])]
    alone = [(*base[:i], changed[i], *base[i + 1 :]) for i in range(len(base))]
    return [base, *alone, (3, *(size + (LONGER + 1) * unit for size in base[1:]))]


def _longest(draws: InputDraws, high: int, low: int, holds: Callable[[Sizes], bool]) -> Sizes:
    """Return the sizes of the greatest length from `low` to `high` for which a monotone condition holds."""
    num_lengths = len(draws.groups) - 1
    if not num_lengths or holds((1, *[high] * num_lengths)):
        return 1, *[high] * num_lengths
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds((1, *[middle] * num_lengths)) else (low, middle)
    return 1, *[low] * num_lengths


def _runs(module: nn.Module, draws: InputDraws, sizes: Sizes) -> bool:
    try:
        _outputs(module, [*draws.draw(sizes, DataKind(False)).values()])
    except _FAILURES:
        return False
    return True


def _outputs(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of the result of forward. The state of the module is restored."""
    with torch.no_grad(), unchanged(module), WriteUndo(module, []):
        leaves = pytree.tree_leaves(module(*inputs))
        return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _vocabulary(recording: Recording, draws: InputDraws) -> dict[str, int]:
    """Return the number of ids of each input that is looked up in a table."""
    names = list(draws.example)
    found: dict[str, int] = {}
    for step, i in _readers(recording, len(names)):
        if step.target is aten.embedding.default:
            found.setdefault(names[i], int(step.args[0].value.shape[0]))
    return found


def _compared_ids(recording: Recording, draws: InputDraws) -> frozenset[int]:
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
