"""Scales that lose least: what rounding to nearest by the largest weight leaves on the table, searched for.

Few weights of a block are as large as its largest. Clipping those makes the steps of all others smaller, so the scale
with the least squared error is below the largest weight's: at 4 bits by a tenth to a third (Sakr et al. 2022,
https://arxiv.org/abs/2206.06501). Both levels are searched together, for a block's multiplier is a whole number: a step
that a block would like may not be one of its column's. No result is worse than rounding to nearest, by the measure

    Σₖ importance[k] · (w[k, n] − scale[n] · m[k // block, n] · q[k, n])²

`importance` (K,) is the mean square of each input of the product, where it is known: then the sum is the expected error
of the product's result, inputs taken as uncorrelated. Without it every weight counts the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tformer_export.quantize.rounding import pair_sums, round_nearest

T = TypeVar("T")

AT_ONCE = 1 << 17  # numbers of a matrix that are looked at together: what is made of them stays near the processor
CLIPPED = np.linspace(1.0, 0.5, 21).tolist()  # shares of the largest weight that a block's steps may reach
COARSEST = 5  # of what the widest block may be multiplied by: less leaves the others little to choose from
ROUNDS = 3  # of least squares for a column's scale and rounding to it


def per_column(weight: np.ndarray, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """As `round_nearest.per_column`, with the scales of least error. Time: 30 passes over the weights, on all cores."""
    shares = _shares(weight, importance)
    parts = _of_parts(weight, lambda part: _columns(part, shares))
    return np.concatenate([q for q, _ in parts], 1), np.concatenate([s for _, s in parts])


def in_blocks(
    weight: np.ndarray, block: int, importance: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `round_nearest.in_blocks`, with the scales and multipliers of least error. Time: some 30 passes over the
    weights, on all cores."""
    shares = _shares(weight, importance)
    parts = _of_parts(weight, lambda part: _blocks(part, block, shares))
    q, m, scale = zip(*parts, strict=True)
    return np.concatenate(q, 1), np.concatenate(m, 1), np.concatenate(scale)


def error(weight: np.ndarray, rounded: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """(N,): each column's, by the measure above."""
    total: np.ndarray = (_shares(weight, importance) * (weight - rounded) ** 2).sum(0)
    return total


def _shares(weight: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """(K, 1), positive: an input that was never seen may come, and is to be no one's to give away."""
    if importance is None:
        return np.ones((len(weight), 1), np.float32)
    mean = float(importance.mean()) or 1.0
    return (importance / mean + 1e-3).astype(np.float32)[:, None]


def _of_parts(weight: np.ndarray, made: Callable[[np.ndarray], T]) -> list[T]:
    """What is made of columns together, as many as are looked at at once. On threads: numpy lets others run."""
    count = min(max(1, weight.size // AT_ONCE), max(1, weight.shape[1]))
    parts = np.array_split(weight, count, axis=1)
    with ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool:
        return list(pool.map(made, parts))


def _columns(weight: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    best, scale = round_nearest.per_column(weight)
    least = error(weight, best * scale, shares[:, 0])

    def keep(candidate: np.ndarray) -> None:
        q = pair_sums.round_columns(weight / candidate)
        found = (shares * (weight - q * candidate) ** 2).sum(0)
        better = found < least
        np.copyto(least, found, where=better)
        np.copyto(scale, candidate, where=better)
        np.copyto(best, q, where=better)

    widest = scale.copy()
    for share in CLIPPED:
        keep((widest * share).astype(np.float32))
    for _ in range(ROUNDS):
        keep(_fitted(weight, best, scale, shares))
    return best, scale


def _blocks(weight: np.ndarray, block: int, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    edges = np.arange(0, len(weight), block)
    best, multipliers, scale = round_nearest.in_blocks(weight, block)
    rounded = round_nearest.expanded(best, multipliers, block) * scale
    least = (shares * (weight - rounded) ** 2).sum(0)
    wanted = _steps(weight, edges, block, shares)
    widest = wanted.max(0)
    for coarse in range(COARSEST, round_nearest.MOST + 1):
        candidate = np.where(widest > 0, widest / coarse, 1).astype(np.float32)
        nearby = [(np.floor(wanted / candidate) + up).clip(1, round_nearest.MOST).astype(np.uint8) for up in (0, 1)]
        errors = [_block_errors(weight, m, candidate, edges, block, shares) for m in nearby]
        m = np.where(errors[0] <= errors[1], *nearby)
        found = np.minimum(*errors).sum(0)
        better = found < least
        np.copyto(least, found, where=better)
        np.copyto(scale, candidate, where=better)
        np.copyto(multipliers, m, where=better)
        np.copyto(best, _nearest(weight, m, candidate, block), where=better)
    for _ in range(ROUNDS):  # each step of which can only lessen the error
        candidate = _fitted(weight, round_nearest.expanded(best, multipliers, block), scale, shares)
        q = _nearest(weight, multipliers, candidate, block)
        found = (shares * (weight - round_nearest.expanded(q, multipliers, block) * candidate) ** 2).sum(0)
        better = found < least
        np.copyto(least, found, where=better)
        np.copyto(scale, candidate, where=better)
        np.copyto(best, q, where=better)
    return best, multipliers, scale


def _nearest(weight: np.ndarray, m: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """The q of given scales."""
    ratio: np.ndarray = weight / (np.repeat(m, block, 0)[: len(weight)] * scale)
    np.rint(ratio, out=ratio).clip(round_nearest.LOWEST, round_nearest.HIGHEST, out=ratio)
    return ratio.astype(np.int8)


def _steps(weight: np.ndarray, edges: np.ndarray, block: int, shares: np.ndarray) -> np.ndarray:
    """(blocks, N): the step that each block would have if it could have any."""
    largest = np.maximum.reduceat(np.abs(weight), edges) / round_nearest.HIGHEST
    chosen, least = largest.copy(), np.full(largest.shape, np.inf, np.float32)
    one = np.ones(largest.shape, np.uint8)
    for share in CLIPPED:
        steps = largest * share
        errors = _block_errors(weight, one, steps, edges, block, shares)
        better = errors < least
        np.copyto(least, errors, where=better)
        np.copyto(chosen, steps, where=better)
    return chosen


def _block_errors(
    weight: np.ndarray, m: np.ndarray, scale: np.ndarray, edges: np.ndarray, block: int, shares: np.ndarray
) -> np.ndarray:
    """(blocks, N): the error of each block with its multipliers and its column's scale, or its own."""
    steps = m * scale
    steps[steps == 0] = 1
    of_rows = np.repeat(steps, block, 0)[: len(weight)]
    rest = weight / of_rows
    np.rint(rest, out=rest)
    rest.clip(round_nearest.LOWEST, round_nearest.HIGHEST, out=rest)
    rest *= of_rows
    rest -= weight
    rest *= rest
    rest *= shares
    return np.add.reduceat(rest, edges)


def _fitted(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """(N,): the scale of least error for given integers; the old one where that is no positive number."""
    q = q.astype(np.float32)
    across, along = (shares * weight * q).sum(0), (shares * q * q).sum(0)
    return np.where((across > 0) & (along > 0), across / np.where(along > 0, along, 1), scale).astype(np.float32)
