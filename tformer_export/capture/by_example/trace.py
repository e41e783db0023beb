"""Trace by example: choose sizes and data, record, unify, and prove the program at sizes that were not recorded."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from tformer_export.capture.by_example.input_facts import with_facts
from tformer_export.capture.by_example.proof import (
    FORWARD_FAILURES,
    HONEST_RUNS,
    WrongAtSizesError,
    agree,
    check_agreement,
    check_asked_ids,
    check_reads,
    run,
)
from tformer_export.capture.by_example.random_choices import RandomChoices
from tformer_export.capture.by_example.rebuild import RebuiltModule, rebuild
from tformer_export.capture.by_example.recording import Recording, record
from tformer_export.capture.by_example.recording_inputs import DataKind, RecordingInputs
from tformer_export.capture.by_example.roll import roll_loops
from tformer_export.capture.by_example.simplify import forward_values, simplify, without_empty_pieces
from tformer_export.capture.by_example.size_fit import Sizes
from tformer_export.capture.by_example.unify import DisagreementError, GeneralProgram, LoopError, unify
from tformer_export.common.fx_nodes import DENSE_SIZES

logger = logging.getLogger(__name__)

FIRST_LENGTH, NEXT_LENGTH, LONGER = 5, 4, 2  # lengths 5, 9, 13 …, in other recordings 2 more
BY_CHANCE = 2  # times the lengths of the recordings: a program that holds no further has their numbers
MAX_SAMPLES = 9  # with the sizes that are recorded because a program is wrong there
MAX_CONDITIONS = 3  # on data, whose answers are changed in turn
PATH_RUNS = 4  # times HONEST_RUNS: recordings with random choices, each of which has other experts
FEW_ROWS, MANY_ROWS = 2, 64  # of a recording: a mixture of experts takes all its experts if it has rows enough


def trace_by_example(
    module: nn.Module, draws: RecordingInputs, min_length: int, max_length: int
) -> RebuiltModule | None:
    """Return a module that computes as `module` does, and that torch.export can trace; None if there is none.

    min_length: the positions that an input needs.
    max_length: the greatest length at which the two are compared, and to which tables are made that Python makes.

    Raises LoopError if the cause is a loop over positions that cannot be written as one operation.

    Cost: some forty runs of forward at small sizes, a few at `max_length`, and a hundred more at small sizes if forward
    reads numbers out of its data.
    """
    tracer = _Tracer(module, draws, max(1, min_length), max_length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tracer.trace()


class _Tracer:
    def __init__(self, module: nn.Module, draws: RecordingInputs, unit: int, max_length: int) -> None:
        self.module, self.draws, self.unit, self.max_length = module, draws, unit, max_length
        self.forced: Mapping[int, bool] = {}  # number of a condition on data → the answer that forward gets
        self.random_choices = False  # whether operations that choose among few choose at random

    def trace(self) -> RebuiltModule | None:
        try:
            first = self._record(self._sizes(2), DataKind(False), 0)
        except Exception as error:  # the user's code may raise anything on what a record gives it
            logger.debug("forward cannot be recorded: %s", error)
            return None
        if not all(self._run(self._sizes(2), kind) for kind in self.draws.kinds):
            self.draws = replace(self.draws, fills_one_row=True)
        self.draws = with_facts(self.draws, first)
        full = self.draws.kinds[-1]
        # Other data change the path of a module that reads them, and of no other.
        kinds = [(kind, FEW_ROWS) for kind in self.draws.kinds] + [(full, MANY_ROWS)] if first.numbers else []
        paths: list[tuple[DataKind, int, dict[int, bool], bool]] = [
            (kind, rows, {}, False) for kind, rows in kinds or [(full, FEW_ROWS)]
        ]
        paths += [(full, FEW_ROWS, forced, False) for forced in _other_answers(first)]
        if first.numbers or first.selects_rows:  # a router may send nothing to an expert, for the drawn data
            paths.append((full, MANY_ROWS, {}, True))
        reason: LoopError | None = None
        for kind, rows, self.forced, self.random_choices in paths:
            try:
                return self._path_module(kind, rows)
            except (DisagreementError, *FORWARD_FAILURES) as error:
                others = "random choices" if self.random_choices else self.forced
                logger.debug("no path of %s with %d rows and %s: %s", kind, rows, others, error)
                reason = error if isinstance(error, LoopError) else reason
        if reason is not None:
            raise reason
        return None

    def _path_module(self, kind: DataKind, rows: int) -> RebuiltModule:
        """Return the module of the path that data of one kind take, if it is right for all kinds of data.

        Short recordings may agree by chance: for windows of 32 positions, they all have one window. So a size at which
        the program is wrong is recorded too, and the recordings are unified again.
        """
        samples = self._samples(rows)
        limited: RebuiltModule | None = None  # a program that is right up to a length
        failure: Exception | None = None
        while len(samples) < MAX_SAMPLES:
            try:
                rebuilt = self._path_module_at(samples, kind)
                if rebuilt.max_length is None:
                    return rebuilt
                limited, wrong = rebuilt, _longer((1, *[rebuilt.max_length] * (len(samples[0]) - 1)))
                if not self._run(wrong, kind):
                    return rebuilt
            except WrongAtSizesError as error:
                failure, wrong = error, error.sizes
            except (DisagreementError, *FORWARD_FAILURES) as error:
                failure = error
                break
            if not self._add_sample(samples, wrong, rows):
                break
        if limited is None and failure is not None:
            raise failure
        assert limited is not None
        return limited

    def _add_sample(self, samples: list[Sizes], sizes: Sizes, rows: int) -> bool:
        """Add the sizes at which a program is wrong; return False if they are recorded already.

        Tables are those of the last sample, so its lengths are the greatest. A batch of one row may run other
        operations, so its length is recorded with more rows.
        """
        sample = rows if sizes[0] == 1 else sizes[0], *sizes[1:]
        if any(sample[1:] == other[1:] for other in samples):
            return False
        is_longest = all(one >= other for one, other in zip(sample[1:], samples[-1][1:], strict=True))
        samples.insert(len(samples) if is_longest else 0, sample)
        return True

    def _path_module_at(self, sizes: Sequence[Sizes], kind: DataKind) -> RebuiltModule:
        """Return the module of the recordings at these sizes, if it is right elsewhere too, or up to a length.

        Raises WrongAtSizesError with sizes at which it is wrong, and DisagreementError for another reason.
        """
        samples = list(sizes)
        recordings, has_loops = self._recordings(samples, kind)
        program, num_samples = self._program(recordings, samples, has_loops), len(samples)
        longest = self._longest(self.max_length, lambda sizes: self._run(sizes, kind))

        def with_the_longest(prefer_tables: bool) -> GeneralProgram:
            if len(samples) == num_samples:
                samples.append((FEW_ROWS, *longest[1:]))  # one row alone may run other operations
                recordings.append(self._record(samples[-1], kind, 0, has_loops))
            return self._program(recordings, samples, has_loops, prefer_tables)

        if program.has_tables:
            program = with_the_longest(prefer_tables=False)
        try:
            return self._proven(program, recordings, samples, longest, kind)
        except DisagreementError as error:
            if has_loops or not program.has_calls:
                raise
            logger.debug("constants are tables where possible, because %s", error)
            program = with_the_longest(prefer_tables=True)
            return self._proven(program, recordings, samples, longest, kind)

    def _proven(
        self,
        program: GeneralProgram,
        recordings: Sequence[Recording],
        samples: Sequence[Sizes],
        longest: Sizes,
        kind: DataKind,
    ) -> RebuiltModule:
        """Return the module of a program, if it computes as forward does.

        longest: the sizes of the greatest length at which forward runs.
        """
        names = list(self.draws.example)
        places = [(names.index(name), axis) for (name, axis), *_ in self.draws.groups]
        rebuilt = rebuild(program, places, len(names))
        fewer = 2, *(size - 1 for size in self._sizes(2)[1:])
        check_agreement(self.module, rebuilt, self.draws, [self._sizes(3, 1), (1, *fewer[1:])], [1])
        for length in range(1, DENSE_SIZES):
            sizes = 1, *[length * self.unit] * (len(fewer) - 1)
            if self._run(sizes, kind) and not agree(self.module, rebuilt, self._draw(sizes, kind)):
                raise WrongAtSizesError(f"other operations run at a length of {length}", sizes)
        check_asked_ids(self.module, rebuilt, self.draws, recordings, fewer)
        if any(recording.numbers for recording in recordings):
            check_agreement(self.module, rebuilt, self.draws, [fewer], range(HONEST_RUNS))
            on_path = [self._record(fewer, self.draws.kinds[-1], seed) for seed in range(self._path_runs)]
            shortest = [
                record(self.module, self._draw((1, *[self.unit] * (len(fewer) - 1)), kind, i)) for i in range(2)
            ]
            check_reads(self.module, self.draws, recordings, samples, fewer, self.forced, on_path, shortest)
        proven = self._longest(longest[-1], lambda sizes: agree(self.module, rebuilt, self._draw(sizes, kind)))
        if proven != longest:
            if max(proven[1:]) < BY_CHANCE * max(size for sample in samples for size in sample[1:]):
                length = max(proven[1:])
                raise WrongAtSizesError(f"other operations run beyond a length of {length}", _longer(proven))
            rebuilt.max_length = proven[-1]
        elif len(longest) == 2 and longest[-1] < self.max_length:  # forward itself runs no further, and has one length
            rebuilt.max_length = longest[-1]
        return rebuilt

    def _recordings(self, samples: Sequence[Sizes], kind: DataKind) -> tuple[list[Recording], bool]:
        """Return a recording for each sample, and whether longer ones repeat the operations of loops over positions.

        Raises DisagreementError at the first recording that has other operations.
        """
        recordings: list[Recording] = []
        has_loops = False
        for seed, sizes in enumerate(samples):
            recordings.append(self._record(sizes, kind, seed, has_loops))
            if not has_loops and len({len(recording.steps) for recording in simplify(recordings)}) > 1:
                has_loops = True
                recordings = [self._record(s, kind, i, has_loops) for i, s in enumerate(samples[: seed + 1])]
            if has_loops:
                roll_loops(forward_values(recordings), samples[: seed + 1])
        return recordings, has_loops

    def _program(
        self, recordings: Sequence[Recording], samples: Sequence[Sizes], has_loops: bool, prefer_tables: bool = False
    ) -> GeneralProgram:
        if not has_loops:
            simple = simplify(recordings)
            return unify([*map(without_empty_pieces, simple)] if prefer_tables else simple, samples, prefer_tables)
        program = unify(roll_loops(forward_values(recordings), samples), samples)
        shortest = 1, *[self.unit] * (len(self.draws.groups) - 1)
        for step in program.steps:
            if step.body is not None and step.body.count.at(shortest) < 1:
                raise LoopError(
                    "its first position is computed apart, so one position alone has no run", step.stack_trace
                )
        return program

    def _draw(self, sizes: Sizes, kind: DataKind, seed: int = 0) -> list[torch.Tensor]:
        return [*self.draws.draw(sizes, kind, seed).values()]

    def _record(self, sizes: Sizes, kind: DataKind, seed: int, has_loops: bool = False) -> Recording:
        with RandomChoices() if self.random_choices else nullcontext():
            return record(self.module, self._draw(sizes, kind, seed), self.forced, with_first_runs=has_loops)

    @property
    def _path_runs(self) -> int:
        """The number of recordings of a path that forward was forced to."""
        return HONEST_RUNS * PATH_RUNS if self.random_choices else int(bool(self.forced))

    def _run(self, sizes: Sizes, kind: DataKind) -> bool:
        return run(self.module, self._draw(sizes, kind)) is not None

    def _sizes(self, rows: int, longer: int = 0) -> Sizes:
        """Return sizes with another length for each group of axes."""
        lengths = [FIRST_LENGTH + NEXT_LENGTH * i + longer for i in range(len(self.draws.groups) - 1)]
        return rows, *(length * self.unit for length in lengths)

    def _samples(self, rows: int) -> list[Sizes]:
        """Return the sizes of the recordings: first ones, then each of them changed alone, then all of them."""
        base, changed = self._sizes(rows), self._sizes(rows + 1, LONGER)
        alone = [(*base[:i], changed[i], *base[i + 1 :]) for i in range(len(base))]
        return [base, *alone, self._sizes(rows + 1, LONGER + 1)]

    def _longest(self, high: int, holds: Callable[[Sizes], bool]) -> Sizes:
        """Return the sizes of the greatest length up to `high` for which a monotone condition holds."""
        num_lengths, low = len(self.draws.groups) - 1, max(self._sizes(0, LONGER + 1))
        high = max(low, high)
        if not num_lengths or holds((1, *[high] * num_lengths)):
            return 1, *[high] * num_lengths
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds((1, *[middle] * num_lengths)) else (low, middle)
        return 1, *[low] * num_lengths


def _other_answers(recording: Recording) -> Iterator[dict[int, bool]]:
    """Yield other answers to the conditions on data that a recording has asked, if they are few: one, then more.

    `if torch.all(keep): return x` is a shortcut that all drawn data may take. The other path has the operations that
    other data take, and it is right for both if it gives the results of the shortcut as well.
    """
    asked = {read.number: read.value for read in recording.numbers if read.number is not None}
    if len(asked) > MAX_CONDITIONS or not all(isinstance(value, bool) for value in asked.values()):
        return
    for count in range(1, len(asked) + 1):
        for numbers in itertools.combinations(asked, count):
            yield {number: not asked[number] for number in numbers}


def _longer(sizes: Sizes) -> Sizes:
    return sizes[0], *(size + 1 for size in sizes[1:])
