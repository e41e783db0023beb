"""Lengths of the request inputs that are equal in the example and need not be equal.

A trace gives one symbol to two axes of one size if forward cuts, fills or compares them, and the file would then be
right for equal lengths alone. So forward is run with other lengths of each input, and the example gets different ones
wherever forward takes them. Lengths that stay equal are those that forward needs equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from tformer_export.common.example_sizes import resized, size_groups
from tformer_export.common.module_state import restored
from tformer_export.sources.base import Source

Axis = tuple[str, int]
Unit = tuple[Axis, ...]  # axes that have one length by their roles: of an input, its masks and its token types
MAX_TRIED_GROUPS = 64  # of inputs whose lengths may have to be equal
MIN_LENGTH = 3  # an axis of one position may be repeated, so that other lengths of it prove nothing


def separate_lengths(source: Source) -> Source:
    """Return the source with an example of which two lengths are equal only if forward needs them equal.

    Cost: none if each request input has another length. Else some runs of forward for each of the equal ones.
    """
    axes = {name: source.axes.get(name, (0, 1)[: value.dim()]) for name, value in source.example.items()}
    _, *groups = size_groups(source.example, axes, source.step_input)
    taken = {value.shape[axis] for name, value in source.example.items() for axis in axes[name][1:]}
    for group in groups:
        units = _units(source, group)
        if len(units) < 2:
            continue
        for unit in _separable(source, units)[1:]:
            size = source.example[unit[0][0]].shape[unit[0][1]]
            for other in _other_sizes(size, taken):
                longer = resized(source.example, dict.fromkeys(unit, other))
                if _runs(source, longer):
                    source = replace(source, example=longer)
                    taken.add(other)
                    break
    return source


def _units(source: Source, group: Sequence[Axis]) -> list[Unit]:
    """Return the axes of a group, those together that have one length by the roles of their inputs."""
    units: dict[Axis, list[Axis]] = {}
    for name, axis in group:
        owner = source.masks[name].of if name in source.masks else source.token_types.get(name, name)
        if owner != source.step_input and name not in source.placeholders:
            units.setdefault((owner, axis), []).append((name, axis))
    return [tuple(unit) for unit in units.values()]


def _separable(source: Source, units: Sequence[Unit]) -> list[Unit]:
    """Return the units joined to those whose lengths forward needs equal, so that each may have another length."""
    size = max(MIN_LENGTH, source.example[units[0][0][0]].shape[units[0][0][1]])
    if not _runs(source, resized(source.example, dict.fromkeys(itertools.chain(*units), size))):
        return []

    def is_free(changed: Sequence[Unit]) -> bool:
        """Return whether forward takes another length of these units than of the others."""
        return any(
            _runs(source, resized(source.example, sizes))
            for other in (size + 1, 2 * size, size - 1)
            for sizes in [{axis: other if unit in changed else size for unit in units for axis in unit}]
        )

    free = [unit for unit in units if is_free([unit])]
    bound = [unit for unit in units if unit not in free]
    joined: list[Unit] = []
    while bound:
        first, *others = bound
        tried = itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(1, len(others)))
        partners = next((some for some in itertools.islice(tried, MAX_TRIED_GROUPS) if is_free([first, *some])), others)
        joined.append(tuple(itertools.chain(first, *partners)))
        bound = [unit for unit in others if unit not in partners]
    return [*joined, *free]


def _other_sizes(size: int, taken: Collection[int]) -> Iterator[int]:
    """Yield some lengths that differ from one length and from those that are taken, near ones first."""
    near = (*range(size + 1, size + 5), 2 * size, size - 1, size - 2, size // 2)
    sizes = itertools.chain(near, itertools.count(size + 5))
    return itertools.islice((n for n in sizes if n > 1 and n not in taken and n != size), len(near))


def _runs(source: Source, inputs: Mapping[str, torch.Tensor]) -> bool:
    with restored(source.module), suppress(Exception):  # the user's code may raise anything
        source.module(*(value.clone() for value in inputs.values()))
        return True
    return False
