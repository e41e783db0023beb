"""Trace by example: choose sizes and data, record, unify, and prove the program at sizes that were not recorded."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.draws import DataKind, InputDraws
from tformer_export.capture.by_example.reads import other_values
from tformer_export.capture.by_example.rebuild import RebuiltModule, rebuild
from tformer_export.capture.by_example.recording import (
    Constant,
    InputRef,
    ReadNumber,
    Recording,
    Step,
    StepResult,
    record,
)
from tformer_export.capture.by_example.simplify import simplify
from tformer_export.capture.by_example.size_fit import Sizes
from tformer_export.capture.by_example.unify import DisagreementError, unify
from tformer_export.common.fx_nodes import aten
from tformer_export.common.module_state import WriteUndo, is_same, unchanged

logger = logging.getLogger(__name__)

FIRST_LENGTH, NEXT_LENGTH, LONGER = 5, 4, 2  # lengths 5, 9, 13 …, in other recordings 2 more
HONEST_RUNS = 8  # of each kind of data, in the proof on numbers that Python reads
NUM_ROWS = 2, 32, 256  # of a recording: a mixture of experts takes all its experts if it has rows enough
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)  # of forward at a size or for data
_COMPARISONS = {aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor}
_COPIES = {aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.contiguous.default}


def trace_by_example(module: nn.Module, draws: InputDraws, min_length: int, max_length: int) -> RebuiltModule | None:
    """Return a module that computes as `module` does, and that torch.export can trace; None if there is none.

    min_length: the positions that an input needs.
    max_length: the greatest length at which the two are compared, and to which tables are made that Python makes.

    Cost: some fifty runs of forward at small sizes, and a few at `max_length`.
    """
    unit = max(1, min_length)
    sizes = _base(draws, 2, unit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first = record(module, [*draws.draw(sizes, DataKind(False)).values()])
        except _FAILURES:
            return None
        draws = replace(draws, vocabulary=_vocabulary(first, draws))
        draws = replace(draws, paddings=draws.paddings | _compared_ids(first, draws))
        for kind in draws.kinds:
            for rows in NUM_ROWS:
                try:
                    return _course(module, draws, kind, rows, unit, max_length)
                except (DisagreementError, *_FAILURES) as error:
                    logger.debug("no course of %s: %s", kind, error)
    return None


def _course(
    module: nn.Module, draws: InputDraws, kind: DataKind, rows: int, unit: int, max_length: int
) -> RebuiltModule:
    """Return the module of the course that data of one kind take, if it is right for all kinds of data."""
    samples = _samples(draws, rows, unit)
    recordings = [record(module, [*draws.draw(sizes, kind, seed).values()]) for seed, sizes in enumerate(samples)]
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
    for sizes in (tuple(s + 1 for s in samples[0]), (1, *(s - 1 for s in samples[0][1:]))):
        for tested in draws.kinds:
            _check_agreement(module, rebuilt, [*draws.draw(sizes, tested, seed=1).values()])
    _prove_reads(module, rebuilt, draws, recordings, (2, *(s - 1 for s in samples[0][1:])))
    proven = _longest(
        draws, max(longest), max(samples[0]), lambda sizes: _agree(module, rebuilt, [*draws.draw(sizes, kind).values()])
    )
    rebuilt.max_length = max(proven) if proven != longest else None
    return rebuilt


def _prove_reads(
    module: nn.Module, rebuilt: RebuiltModule, draws: InputDraws, recordings: Sequence[Recording], sizes: Sizes
) -> None:
    """Raise DisagreementError if a number that Python reads may lead forward a way that was not compared."""
    if any(recording.reads_arrays for recording in recordings):
        raise DisagreementError("forward hands its data to numpy", None)
    proof = _ReadProof(module)
    if not any(map(proof.reads, recordings)):
        return
    for kind in draws.kinds:
        for seed in range(HONEST_RUNS):
            inputs = [*draws.draw(sizes, kind, seed).values()]
            _check_agreement(module, rebuilt, inputs)
            proof.add(inputs)
    for kind in (draws.kinds[0], draws.kinds[-1]):
        proof.force([*draws.draw(sizes, kind).values()])


def _check_agreement(module: nn.Module, rebuilt: RebuiltModule, inputs: Sequence[torch.Tensor]) -> None:
    if not _agree(module, rebuilt, inputs):
        raise DisagreementError("the recorded operations give other results for other data", None)


def _agree(module: nn.Module, rebuilt: RebuiltModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether both modules give the same outputs."""
    with torch.no_grad():
        return is_same(list(rebuilt(*inputs)), _outputs(module, inputs))


class _ReadProof:
    """Shows that no other value of a number that Python reads leads to operations that were never compared.

    Honest runs of all kinds of data are recorded at one set of sizes. Then each number is forced to other values. An
    operation that no honest run had, such as one of another branch, refuses the program. So does another operation at
    all, if the number was the same in all honest runs. A forced run that fails comes from an assertion on data.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.operations: set[tuple[Any, ...]] = set()
        self.values: dict[str, set[Any]] = {}

    def add(self, inputs: Sequence[torch.Tensor]) -> None:
        """Note the operations and the numbers of an honest run."""
        recording = record(self.module, inputs)
        self.operations |= recording.descriptions()
        for line, reads in self.reads(recording).items():
            self.values.setdefault(line, set()).update(read.value for read in reads)

    def force(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise DisagreementError if another value leads to other operations.

        Cost: up to five runs for the first and for the last read of each line.
        """
        honest = record(self.module, inputs)
        for line, reads in self.reads(honest).items():
            known = self.operations if len(self.values[line]) > 1 else honest.descriptions()
            for read in {read.number: read for read in (reads[0], reads[-1])}.values():
                for value in other_values(read.value):
                    try:
                        forced = record(self.module, inputs, {read.number or 0: value})
                    except _FAILURES:
                        continue
                    if not forced.descriptions() <= known:
                        raise DisagreementError("a number that Python reads leads to operations never compared", line)

    def reads(self, recording: Recording) -> dict[str, list[ReadNumber]]:
        """Return line → its reads of numbers."""
        reads: dict[str, list[ReadNumber]] = {}
        for read in recording.numbers:
            if read.number is not None:
                reads.setdefault(read.stack_trace or "", []).append(read)
        return reads


def _base(draws: InputDraws, rows: int, unit: int) -> Sizes:
    return rows, *((FIRST_LENGTH + NEXT_LENGTH * i) * unit for i in range(len(draws.groups) - 1))


def _samples(draws: InputDraws, rows: int, unit: int) -> list[Sizes]:
    """Return the sizes of the recordings: first ones, then each of them changed alone, then all of them."""
    base = _base(draws, rows, unit)
    changed = [rows + 1, *(size + LONGER * unit for size in base[1:])]
    alone = [(*base[:i], changed[i], *base[i + 1 :]) for i in range(len(base))]
    return [base, *alone, (rows + 1, *(size + (LONGER + 1) * unit for size in base[1:]))]


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
