"""Loops in recordings: operations that are repeated once more for each further position.

Recordings at two sizes have the same operations up to the end of a loop, where the longer one repeats the body of the
loop. A body of p operations explains the difference if the longer recording repeats its last p operations as often as
it has further positions, and both go on with the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tformer_export.capture.by_example.recording import Recording, Step
from tformer_export.capture.by_example.size_fit import Sizes
from tformer_export.capture.by_example.unify import DisagreementError

MAX_BODY = 2000  # operations
MAX_PATHS = 200  # ways to explain a difference

Growth = Mapping[int, tuple[int, int]]  # end of a loop in the first recording → operations of its body, further runs


@dataclass(frozen=True)
class Loop:
    """A loop in a recording: `count` runs of a body of `period` operations that end before the operation `end`.

    slack: the number of operations before the first run that are repeated too, so that runs may begin earlier.
    """

    end: int
    period: int
    count: int
    slack: int


def find_loops(recordings: Sequence[Recording], sizes: Sequence[Sizes]) -> list[list[Loop]]:
    """Return the loops of each recording, in their order.

    Raises DisagreementError if further positions run other operations than those of a loop. The first recording has to
    have two runs of it or more.
    """
    first, *others = ([_key(step) for step in recording.steps] for recording in recordings)
    growths = [_growth(first, other, _further(sizes[0], more)) for other, more in zip(others, sizes[1:], strict=True)]
    periods: dict[int, int] = {}
    for growth in growths:
        for end, (period, _) in growth.items():
            if periods.setdefault(end, period) != period:
                raise DisagreementError("other operations run at other sizes", recordings[0].steps[end - 1].stack_trace)
    ends = sorted(periods)
    loops = []
    for end in ends:
        period = periods[end]
        begin = end - period
        while begin > 0 and first[begin - 1] == first[begin - 1 + period]:
            begin -= 1
        if end - begin < 2 * period:
            raise DisagreementError("other operations run at other sizes", recordings[0].steps[end - 1].stack_trace)
        loops.append(Loop(end, period, (end - begin) // period, (end - begin) % period))
    found = [loops]
    for growth in growths:
        moved, extra = [], 0
        for loop in loops:
            runs = growth.get(loop.end, (0, 0))[1]
            extra += runs * loop.period
            moved.append(Loop(loop.end + extra, loop.period, loop.count + runs, loop.slack))
        found.append(moved)
    return found


def _key(step: Step) -> tuple[object, str | None]:
    return step.target, step.stack_trace


def _further(sizes: Sizes, other: Sizes) -> list[int]:
    """Return by how many runs a loop over an axis may be longer."""
    return sorted({b - a for a, b in zip(sizes[1:], other[1:], strict=True)} - {0})


def _growth(one: Sequence[object], other: Sequence[object], further: Sequence[int]) -> Growth:
    paths = 0

    def search(at: int, other_at: int) -> dict[int, tuple[int, int]] | None:
        nonlocal paths
        paths += 1
        if paths > MAX_PATHS:
            return None
        while at < len(one) and other_at < len(other) and one[at] == other[other_at]:
            at, other_at = at + 1, other_at + 1
        if at == len(one) and other_at == len(other):
            return {}
        for period, runs in _explanations(one, at, other, other_at, further):
            rest = search(at, other_at + period * runs)
            if rest is not None:
                return {at: (period, runs), **rest}
        return None

    found = search(0, 0)
    if found is None:
        raise DisagreementError("other operations run at other sizes", None)
    return found


def _explanations(
    one: Sequence[object], at: int, other: Sequence[object], other_at: int, further: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield bodies, as their number of operations, with the number of further runs that the longer recording has."""
    for runs in further:
        for period in range(1, min(MAX_BODY, other_at, (len(other) - other_at) // runs) + 1):
            after = other_at + period * runs
            ends_alike = at == len(one) if after == len(other) else at < len(one) and other[after] == one[at]
            if ends_alike and all(other[i] == other[i - period] for i in range(other_at, after)):
                yield period, runs
