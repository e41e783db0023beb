"""Other sizes for the example of a model's inputs: distinct ones, so that no two axes look equal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")
Axis = tuple[str, int]  # of an input
BATCH_SIZE, FIRST_LENGTH = 3, 5  # chosen distinct and above 1
OTHER_BATCH_SIZE = 13  # for a module with an axis of 3, which a condition of torch may compare with the batch
DRAWN_LENGTH_FACTOR = 7  # times the positions that a model needs, so that axes computed from an input are long


def distinct_sizes(
    example: Mapping[str, torch.Tensor],
    axes: Mapping[str, tuple[int, ...]],
    step_input: str | None,
    min_length: int = 0,
    batch_size: int = BATCH_SIZE,
) -> dict[str, torch.Tensor]:
    """Repeat or cut the example to sizes that differ between its axes: the batch, and 5, 7, 9 … for each other length.

    The lengths are greater by DRAWN_LENGTH_FACTOR · min_length, where min_length is the number of positions that the
    model needs. Axes of request inputs that have equal sizes in the example get equal sizes, and a longer one stays the
    longer one.
    """
    batch, *lengths = size_groups(example, axes, step_input)
    sizes = dict.fromkeys(batch, batch_size)
    for number, group in enumerate(sorted(lengths, key=lambda group: example[group[0][0]].shape[group[0][1]])):
        sizes |= dict.fromkeys(group, FIRST_LENGTH + 2 * number + DRAWN_LENGTH_FACTOR * min_length)
    return resized(example, sizes)


def in_order(sizes: Mapping[Key, int], order: Iterable[tuple[Key, Key]]) -> dict[Key, int]:
    """Return the sizes, lowered until the first of no pair exceeds the second."""
    lowered = dict(sizes)
    pairs = [pair for pair in order if pair[0] in lowered and pair[1] in lowered]
    while exceeding := [pair for pair in pairs if lowered[pair[0]] > lowered[pair[1]]]:
        for one, other in exceeding:
            lowered[one] = min(lowered[one], lowered[other])
    return lowered


def least_size(runs: Callable[[int], bool], known: int) -> int:
    """Return the least size at which a model runs. known: a size at which it does. Cost: a run for each halving."""
    return 1 + bisect_left(range(1, known), True, key=runs)


def resized(example: Mapping[str, torch.Tensor], sizes: Mapping[Axis, int]) -> dict[str, torch.Tensor]:
    """Repeat or cut the example. sizes: an input and an axis → its new size."""
    values = dict(example)
    for (name, axis), size in sizes.items():
        value = values[name]
        values[name] = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return {name: value.contiguous() for name, value in values.items()}


def size_groups(
    example: Mapping[str, torch.Tensor], axes: Mapping[str, tuple[int, ...]], step_input: str | None
) -> list[list[Axis]]:
    """Return the free axes, as pairs of an input and an axis, that have one size: the batch first, then each length.

    Axes of request inputs that have equal sizes in the example have one size.
    """
    groups: dict[Any, list[Axis]] = {"batch": []}
    for name, value in example.items():
        for axis in axes[name]:
            key = (value.shape[axis], name == step_input) if axis else "batch"
            groups.setdefault(key, []).append((name, axis))
    return list(groups.values())
