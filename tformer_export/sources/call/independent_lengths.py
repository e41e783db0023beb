"""Lengths of the request inputs: which of them forward needs equal, and which it needs no longer than others.

A trace gives one symbol to two axes of one size if forward cuts, fills or compares them, and the file would then be
right for equal lengths alone. So forward is run with other lengths of each input, and the example gets different ones
wherever forward takes them. Lengths that stay equal are those that forward needs equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tformer_export.common.example_sizes import Axis, resized, size_groups
from tformer_export.common.module_state import Attempt, attempt
from tformer_export.sources.base import Source

Unit = tuple[Axis, ...]  # axes that have one length by their roles: of an input, its masks and its token types
MIN_LENGTH = 3  # an axis of one position may be repeated, so that other lengths of it prove nothing
MAX_SWAPPED = 8  # times the shortest length up to which the longest is swapped with it: a run costs its square


def separate_lengths(source: Source) -> Source:
    """Return the source with an example of which two lengths are equal only if forward needs that, and their order.

    Cost: none for a single request input. Else some runs of forward for each one.
    """
    axes = {name: source.axes.get(name, (0, 1)[: value.dim()]) for name, value in source.example.items()}
    _, *groups = size_groups(source.example, axes, source.step_input)
    taken = {value.shape[axis] for name, value in source.example.items() for axis in axes[name][1:]}
    units: list[Unit] = []
    for group in groups:
        first, *others = _separable(source, _units(source, group)) or [()]
        for unit in others:
            size = _size(source, unit)
            for other in _other_sizes(size, taken):
                longer = resized(source.example, dict.fromkeys(unit, other))
                if attempt(source.module, longer).runs:
                    source = replace(source, example=longer)
                    taken.add(other)
                    break
        units += [first, *others] if first else []
    return replace(source, length_order=tuple(_order(source, units)))


def _size(source: Source, unit: Unit) -> int:
    return source.example[unit[0][0]].shape[unit[0][1]]


def _units(source: Source, group: Sequence[Axis]) -> list[Unit]:
    """Return the axes of a group, those together that have one length by the roles of their inputs."""
    units: dict[Axis, list[Axis]] = {}
    for name, axis in group:
        owner = source.masks[name].of if name in source.masks else source.token_types.get(name, name)
        if owner != source.step_input and name not in source.placeholders:
            units.setdefault((owner, axis), []).append((name, axis))
    return [tuple(unit) for unit in units.values()]


def _separable(source: Source, units: Sequence[Unit]) -> list[Unit]:
    """Return the units joined to those whose lengths forward needs equal, so that each may have another length.

    If two units have to be equal, each fails alone, and no sooner than there is an operation that relates them. So both
    together run, or fail later. Cost: some four runs for each unit, in most models.
    """
    if len(units) < 2:
        return list(units)
    size = max(MIN_LENGTH, _size(source, units[0]))

    def run(changed: Collection[Axis], other: int) -> Attempt:
        sizes = {axis: other if axis in changed else size for unit in units for axis in unit}
        return attempt(source.module, resized(source.example, sizes))

    every = [*itertools.chain(*units)]
    others = [other for other in (size + 1, size - 1, 2 * size) if run(every, other).runs][:2]
    if not others or not run((), size).runs:
        return []
    bound: dict[Unit, Attempt] = {}  # those that have to be as long as another, and how far forward gets
    for unit in units:
        attempts = [run(unit, other) for other in others]
        if not any(tried.runs for tried in attempts):
            bound[unit] = attempts[0]
    joined = [unit for unit in units if unit not in bound]

    def join(unit: Unit, failed: Attempt) -> tuple[list[Unit], Attempt]:
        """Return the units that have to be as long as one, and how far forward gets with all of them."""
        for partner in sorted(bound, key=lambda partner: bound[partner] != failed):
            tried = run((*unit, *partner), others[0])
            if tried.runs or tried.operations > failed.operations:
                return [partner], tried
        alike = [partner for partner in bound if bound[partner] == failed]  # an operation may relate more than two
        return alike, run((*unit, *itertools.chain(*alike)), others[0]) if alike else failed

    while bound:
        unit = min(bound, key=lambda unit: bound[unit].operations)
        partners, tried = join(unit, bound.pop(unit))
        unit = (*unit, *itertools.chain(*partners))
        for partner in partners:
            del bound[partner]
        if tried.runs or not partners:
            joined.insert(0, unit)
        else:
            bound[unit] = tried
    return joined


def _order(source: Source, units: Sequence[Unit]) -> Iterator[tuple[Axis, Axis]]:
    """Yield the pairs of axes of which forward needs the first no longer than the second.

    Cost: one run if the units may have each other's lengths. Else up to three for each pair, with lengths of the
    shorter one.
    """
    ordered = sorted(units, key=lambda unit: _size(source, unit))
    sizes = [_size(source, unit) for unit in ordered]

    def runs(sizes: Mapping[Unit, int]) -> bool:
        by_axis = {axis: size for unit, size in sizes.items() for axis in unit}
        return attempt(source.module, resized(source.example, by_axis)).runs

    if len(units) < 2 or (sizes[-1] <= MAX_SWAPPED * sizes[0] and runs(dict(zip(ordered, sizes[::-1], strict=True)))):
        return
    for one, other in itertools.combinations(ordered, 2):
        size = max(MIN_LENGTH, _size(source, one))
        is_bound = not runs({one: size + 1, other: size})
        if is_bound and runs({one: size, other: size}) and runs({one: size + 1, other: size + 1}):
            yield from itertools.product(one, other)


def _other_sizes(size: int, taken: Collection[int]) -> Iterator[int]:
    """Yield some lengths that differ from one length and from those that are taken, near ones first."""
    near = (*range(size + 1, size + 5), 2 * size, size - 1, size - 2, size // 2)
    sizes = itertools.chain(near, itertools.count(size + 5))
    return itertools.islice((n for n in sizes if n > 1 and n not in taken and n != size), len(near))
