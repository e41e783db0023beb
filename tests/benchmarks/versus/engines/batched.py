"""Texts of mixed lengths in batches of similar lengths, for engines that have no such call of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from versus.shapes import PAD

ROWS = 32  # of a batch: tformer's default


def in_batches(
    inputs: Sequence[Sequence[int]], run: Callable[[list[Sequence[int]]], Sequence[list[int]]], rows: int = ROWS
) -> list[list[int]]:
    """Return the results in the order of the inputs. Batches have inputs of similar lengths, the longest first."""
    order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i]))
    results: list[list[int]] = [[] for _ in inputs]
    for begin in range(0, len(order), rows):
        chosen = order[begin : begin + rows]
        for i, result in zip(chosen, run([inputs[i] for i in chosen]), strict=True):
            results[i] = list(result)
    return results


def right_padded(inputs: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Return the ids, with padding after the shorter ones, and their attention mask, as int64 arrays."""
    ids, mask = left_padded([given[::-1] for given in inputs])
    return ids[:, ::-1].copy(), mask[:, ::-1].copy()


def left_padded(inputs: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Return the ids, with padding before the shorter ones, and their attention mask, as int64 arrays."""
    import numpy as np

    length = max(map(len, inputs))
    ids, mask = np.full((len(inputs), length), PAD, np.int64), np.zeros((len(inputs), length), np.int64)
    for row, given in enumerate(inputs):
        ids[row, length - len(given) :], mask[row, length - len(given) :] = given, 1
    return ids, mask
