"""The proof that a rebuilt module computes as its source does, for sizes and data that were not recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.reads import other_values
from tformer_export.capture.by_example.rebuild import RebuiltModule
from tformer_export.capture.by_example.recording import ReadNumber, Recording, record
from tformer_export.capture.by_example.recording_inputs import RecordingInputs
from tformer_export.capture.by_example.size_fit import Sizes
from tformer_export.capture.by_example.unify import DisagreementError
from tformer_export.common.module_state import WriteUndo, is_same, unchanged

FORWARD_FAILURES = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)  # at a size, or for data
HONEST_RUNS = 6  # of each kind of data


class WrongAtSizesError(DisagreementError):
    """A rebuilt module gives other results at these sizes."""

    def __init__(self, reason: str, sizes: Sizes) -> None:
        super().__init__(reason, None)
        self.sizes = sizes


def run(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the tensors of the result of forward; None if it fails. The state of the module is restored."""
    try:
        with torch.no_grad(), unchanged(module), WriteUndo(module, []):
            leaves = pytree.tree_leaves(module(*inputs))
            return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    except FORWARD_FAILURES:
        return None


def agree(module: nn.Module, rebuilt: RebuiltModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether both modules run and give the same outputs."""
    expected, actual = run(module, inputs), run(rebuilt, inputs)
    return expected is not None and actual is not None and is_same(actual, expected)


def check_agreement(
    module: nn.Module, rebuilt: RebuiltModule, draws: RecordingInputs, sizes: Sequence[Sizes], seeds: Sequence[int]
) -> None:
    """Raise DisagreementError unless both modules give the same outputs for all kinds of data at these sizes."""
    for case in sizes:
        for kind in draws.kinds:
            for seed in seeds:
                if not agree(module, rebuilt, [*draws.draw(case, kind, seed).values()]):
                    raise WrongAtSizesError("the recorded operations give other results for other data", case)


def check_asked_ids(
    module: nn.Module, rebuilt: RebuiltModule, draws: RecordingInputs, recordings: Sequence[Recording], sizes: Sizes
) -> None:
    """Raise DisagreementError unless both modules agree on data with the ids for which the module's code may ask.

    Drawn data hardly ever have the id of `if ids[0, -1].item() == 9`. Cost: some runs for each such id.
    """
    for asked in asked_ids(recordings, draws):
        check_agreement(module, rebuilt, replace(draws, asked=asked), [sizes, (1, *sizes[1:])], [0, 1])


def asked_ids(recordings: Sequence[Recording], draws: RecordingInputs) -> list[int]:
    """Return the ids of the vocabulary with which the code that reads data compares it, or may compare it, sorted."""
    ids = {i for recording in recordings for read in recording.numbers for i in read.asked}
    ids |= {i for recording in recordings for i in recording.at_hand}
    return sorted({int(i) for i in ids if 0 <= i < max(draws.vocabulary.values(), default=0)})


def check_reads(
    module: nn.Module,
    draws: RecordingInputs,
    recordings: Sequence[Recording],
    samples: Sequence[Sizes],
    sizes: Sizes,
    answers: Mapping[int, bool],
    on_path: Sequence[Recording],
    shortest: Sequence[Recording],
) -> None:
    """Raise DisagreementError if a number that Python reads may lead to operations that were never compared.

    Honest runs of all kinds of data are recorded at one set of sizes, those of `check_agreement`. Then each number is
    forced to other values. An operation that no honest run had, such as one of another branch, refuses the module. If
    the number was the same in all honest runs, an operation more or less refuses it too: a loop that ends early does a
    part of its operations. A forced run that fails comes from an assertion on data. A number that is a size of the
    inputs in all runs, such as `lengths.max()`, has no other value.

    samples: the sizes of the recordings. sizes: those of the honest runs. answers: those to conditions that the
        recordings were forced to. on_path: recordings of runs that were forced to the program's path, at the sizes
        of honest runs. Their operations are those of the program, which has the results of honest runs. shortest: of
        honest runs of the fewest positions, in which a number such as the rows of an expert may be 0.

    Cost: `HONEST_RUNS` recordings of each kind, and up to twenty for each line that reads a number.
    """
    if any(recording.reads_arrays for recording in recordings):
        raise DisagreementError("forward hands its data to numpy", None)
    if not any(read.number is not None for recording in recordings for read in recording.numbers):
        return
    honest = {
        (kind, seed): record(module, [*draws.draw(sizes, kind, seed).values()])
        for kind in draws.kinds
        for seed in range(HONEST_RUNS)
    }
    operations = Counter[Any]()
    for recording in (*honest.values(), *on_path):
        operations |= recording.descriptions()
    values: dict[str, set[Any]] = {}
    for recording in (*honest.values(), *on_path, *shortest):
        for line, reads in _reads_by_line(recording).items():
            values.setdefault(line, set()).update(read.value for read in reads)
            values[line].update(answers[n] for n in (read.number for read in reads) if n is not None and n in answers)
    for kind in (draws.kinds[0], draws.kinds[-1]):
        inputs = [*draws.draw(sizes, kind, 0).values()]
        for line, reads in _reads_by_line(honest[kind, 0]).items():
            if _are_sizes(line, [*zip(recordings, samples, strict=True), *((r, sizes) for r in honest.values())]):
                continue
            varies = len(values[line]) > 1
            for read in {read.number: read for read in (reads[0], reads[-1])}.values():
                for found in _forced(module, inputs, read):
                    if not (found.keys() <= operations.keys() if varies else found == honest[kind, 0].descriptions()):
                        raise DisagreementError(
                            "a number that Python reads leads to operations that were never compared", line
                        )


def _forced(module: nn.Module, inputs: Sequence[torch.Tensor], read: ReadNumber) -> Iterator[Counter[Any]]:
    """Run forward with other values of a number, and yield the operations of the runs that do not fail."""
    for value in (*other_values(read.value), *sorted(read.asked - {*other_values(read.value), read.value})):
        assert read.number is not None
        try:
            yield record(module, inputs, {read.number: value}).descriptions()
        except FORWARD_FAILURES:
            continue


def _are_sizes(line: str, runs: Sequence[tuple[Recording, Sizes]]) -> bool:
    """Return whether all numbers that a line reads are the same free size of the inputs, in runs of different sizes."""
    read = [({read.value for read in _reads_by_line(run).get(line, ())}, sizes) for run, sizes in runs]
    return any(all(values <= {sizes[group]} for values, sizes in read) for group in range(len(runs[0][1])))


def _reads_by_line(recording: Recording) -> dict[str, list[ReadNumber]]:
    reads: dict[str, list[ReadNumber]] = {}
    for read in recording.numbers:
        if read.number is not None:
            reads.setdefault(read.stack_trace or "", []).append(read)
    return reads
