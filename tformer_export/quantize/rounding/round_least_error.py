"""Integers and scales with the least squared error of the weights.

Few weights of a block are as large as its largest. Clipping those makes the steps of all others smaller, so the best
scale is below the scale of the largest weight (Sakr et al. 2022, https://arxiv.org/abs/2206.06501). Both levels of 4
bits are searched together, because a block's multiplier is a whole number: the best step of a block may not be a step
of its column. No result is worse than rounding to nearest, by the measure

    Σₖ importance[k] · (w[k, n] − scale[n] · m[k // block, n] · q[k, n])²

`importance` (K,) is the mean square of each input of the product, where it is known. The sum is then the expected error
of the product's result, if inputs are uncorrelated. Without it every weight counts the same. More:
docs/design/quantization.md#scales-of-least-error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tformer_export.quantize.rounding import pair_sums, round_nearest

T = TypeVar("T")

PARALLEL_PART_VALUES = 1 << 17  # weights of a part, so that intermediate results stay in the processor's cache
CLIP_SHARES = np.linspace(1.0, 0.5, 21).tolist()  # tried magnitudes of the largest step, relative to the largest weight
MIN_LARGEST_MULTIPLIER = 5  # of the block with the widest range; a smaller one leaves other blocks few choices
FIT_ROUNDS = 3  # rounds of fitting a column's scale by least squares and rounding to it


def per_column(weight: np.ndarray, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Round as `round_nearest.per_column` does, with the scales of least error.

    Time: 30 passes over the weights, on all cores.
    """
    shares = _shares(weight, importance)
    parts = _map_parts(weight, lambda part: _search_columns(part, shares))
    return np.concatenate([q for q, _ in parts], 1), np.concatenate([s for _, s in parts])


def in_blocks(
    weight: np.ndarray, block: int, importance: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round as `round_nearest.in_blocks` does, with the scales and multipliers of least error.

    Time: some 30 passes over the weights, on all cores.
    """
    shares = _shares(weight, importance)
    parts = _map_parts(weight, lambda part: _search_blocks(part, block, shares))
    q, m, scale = zip(*parts, strict=True)
    return np.concatenate(q, 1), np.concatenate(m, 1), np.concatenate(scale)


def error(weight: np.ndarray, rounded: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Return the error of each column (N,), by the measure of the module's docstring."""
    total: np.ndarray = (_shares(weight, importance) * (weight - rounded) ** 2).sum(0)
    return total


def _shares(weight: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Return the weight of each row's error, (K, 1).

    All are positive, because an input that was zero on the data may occur.
    """
    if importance is None:
        return np.ones((len(weight), 1), np.float32)
    mean = float(importance.mean()) or 1.0
    return (importance / mean + 1e-3).astype(np.float32)[:, None]


def _map_parts(weight: np.ndarray, compute: Callable[[np.ndarray], T]) -> list[T]:
    """Apply a function to parts of the columns, on all cores, and return its results in order."""
    count = min(max(1, weight.size // PARALLEL_PART_VALUES), max(1, weight.shape[1]))
    parts = np.array_split(weight, count, axis=1)
    with ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool:
        return list(pool.map(compute, parts))


def _search_columns(weight: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers and scales of least error for 8 bits."""
    best, scale = round_nearest.per_column(weight)
    least_error = error(weight, best * scale, shares[:, 0])

    def keep_better(candidate: np.ndarray) -> None:
        q = pair_sums.round_columns(weight / candidate)
        candidate_error = (shares * (weight - q * candidate) ** 2).sum(0)
        better = candidate_error < least_error
        np.copyto(least_error, candidate_error, where=better)
        np.copyto(scale, candidate, where=better)
        np.copyto(best, q, where=better)

    widest = scale.copy()
    for share in CLIP_SHARES:
        keep_better((widest * share).astype(np.float32))
    for _ in range(FIT_ROUNDS):
        keep_better(_fit_scale(weight, best, scale, shares))
    return best, scale


def _search_blocks(weight: np.ndarray, block: int, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the integers, multipliers and scales of least error for 4 bits."""
    edges = np.arange(0, len(weight), block)
    best, multipliers, scale = round_nearest.in_blocks(weight, block)
    rounded = round_nearest.expand(best, multipliers, block) * scale
    least_error = (shares * (weight - rounded) ** 2).sum(0)
    ideal_steps = _best_steps(weight, edges, block, shares)
    widest = ideal_steps.max(0)
    for coarse in range(MIN_LARGEST_MULTIPLIER, round_nearest.MAX_BLOCK_MULTIPLIER + 1):
        candidate = np.where(widest > 0, widest / coarse, 1).astype(np.float32)
        nearby = [
            (np.floor(ideal_steps / candidate) + up).clip(1, round_nearest.MAX_BLOCK_MULTIPLIER).astype(np.uint8)
            for up in (0, 1)
        ]
        errors = [_block_errors(weight, m, candidate, edges, block, shares) for m in nearby]
        m = np.where(errors[0] <= errors[1], *nearby)
        candidate_error = np.minimum(*errors).sum(0)
        better = candidate_error < least_error
        np.copyto(least_error, candidate_error, where=better)
        np.copyto(scale, candidate, where=better)
        np.copyto(multipliers, m, where=better)
        np.copyto(best, _round_to_scale(weight, m, candidate, block), where=better)
    for _ in range(FIT_ROUNDS):  # each round can only reduce the error
        candidate = _fit_scale(weight, round_nearest.expand(best, multipliers, block), scale, shares)
        q = _round_to_scale(weight, multipliers, candidate, block)
        candidate_error = (shares * (weight - round_nearest.expand(q, multipliers, block) * candidate) ** 2).sum(0)
        better = candidate_error < least_error
        np.copyto(least_error, candidate_error, where=better)
        np.copyto(scale, candidate, where=better)
        np.copyto(best, q, where=better)
    return best, multipliers, scale


def _round_to_scale(weight: np.ndarray, m: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """Return the q of given multipliers and scales."""
    ratio: np.ndarray = weight / (np.repeat(m, block, 0)[: len(weight)] * scale)
    np.rint(ratio, out=ratio).clip(round_nearest.MIN_INT4, round_nearest.MAX_INT4, out=ratio)
    return ratio.astype(np.int8)


def _best_steps(weight: np.ndarray, edges: np.ndarray, block: int, shares: np.ndarray) -> np.ndarray:
    """Return the best step of each block if it were free, (blocks, N)."""
    largest = np.maximum.reduceat(np.abs(weight), edges) / round_nearest.MAX_INT4
    chosen, least_error = largest.copy(), np.full(largest.shape, np.inf, np.float32)
    one = np.ones(largest.shape, np.uint8)
    for share in CLIP_SHARES:
        steps = largest * share
        errors = _block_errors(weight, one, steps, edges, block, shares)
        better = errors < least_error
        np.copyto(least_error, errors, where=better)
        np.copyto(chosen, steps, where=better)
    return chosen


def _block_errors(
    weight: np.ndarray, m: np.ndarray, scale: np.ndarray, edges: np.ndarray, block: int, shares: np.ndarray
) -> np.ndarray:
    """Return the error of each block, (blocks, N). scale: of each column, or of each block."""
    steps = m * scale
    steps[steps == 0] = 1
    of_rows = np.repeat(steps, block, 0)[: len(weight)]
    rest = weight / of_rows
    np.rint(rest, out=rest)
    rest.clip(round_nearest.MIN_INT4, round_nearest.MAX_INT4, out=rest)
    rest *= of_rows
    rest -= weight
    rest *= rest
    rest *= shares
    return np.add.reduceat(rest, edges)


def _fit_scale(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the scales of least error for these integers, (N,); the old scale where that is not a positive number."""
    q = q.astype(np.float32)
    across, along = (shares * weight * q).sum(0), (shares * q * q).sum(0)
    return np.where((across > 0) & (along > 0), across / np.where(along > 0, along, 1), scale).astype(np.float32)
