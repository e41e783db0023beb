"""Other sizes for the example of a model's inputs: distinct ones, so that no two axes look equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
    model needs. Axes of request inputs that have equal sizes in the example get equal sizes.
    """
    sizes: dict[tuple[str, int], int] = {}
    for number, group in enumerate(size_groups(example, axes, step_input)):
        length = FIRST_LENGTH + 2 * (number - 1) + DRAWN_LENGTH_FACTOR * min_length
        sizes.update(dict.fromkeys(group, length if number else batch_size))
    return resized(example, sizes)


def resized(example: Mapping[str, torch.Tensor], sizes: Mapping[tuple[str, int], int]) -> dict[str, torch.Tensor]:
    """Repeat or cut the example. sizes: an input and an axis → its new size."""
    values = dict(example)
    for (name, axis), size in sizes.items():
        value = values[name]
        values[name] = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return {name: value.contiguous() for name, value in values.items()}


def size_groups(
    example: Mapping[str, torch.Tensor], axes: Mapping[str, tuple[int, ...]], step_input: str | None
) -> list[list[tuple[str, int]]]:
    """Return the free axes, as pairs of an input and an axis, that have one size: the batch first, then each length.

    Axes of request inputs that have equal sizes in the example have one size.
    """
    groups: dict[Any, list[tuple[str, int]]] = {"batch": []}
    for name, value in example.items():
        for axis in axes[name]:
            key = (value.shape[axis], name == step_input) if axis else "batch"
            groups.setdefault(key, []).append((name, axis))
    return list(groups.values())
