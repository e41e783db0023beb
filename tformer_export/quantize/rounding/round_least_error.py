"""Integers and scales with the least squared error of the weights.

Few weights of a block are as large as its largest. Clipping those makes the steps of all others smaller, so the best
scale is below the scale of the largest weight (Sakr et al. 2022, https://arxiv.org/abs/2206.06501). Both levels of 4
bits are searched together, because a block's multiplier and zero point are whole numbers: the best steps of a block may
not be steps of its column. No result is worse than rounding to nearest, by the measure

    Σₖ importance[k] · (w[k, n] − ŵ[k, n])²

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
from tformer_runtime.format.weight_forms import decode

T = TypeVar("T")

PARALLEL_PART_VALUES = 1 << 17  # weights of a part, so that intermediate results stay in the processor's cache
CLIP_SHARES = np.linspace(1.0, 0.5, 21).tolist()  # tried magnitudes of the largest step, relative to the largest weight
SCALE_SHARES = (1.0, 0.9, 0.8, 0.7)  # tried scales of 4 bits, relative to the least that reaches a column's weights
STEPS_BELOW = (0, 1, 2)  # tried multipliers of a block, below the least that reaches all its weights
FIT_ROUNDS = 3  # rounds of fitting a column's scale by least squares and rounding to it


def per_column(
    weight: np.ndarray, importance: np.ndarray | None = None, bits: int = 8
) -> tuple[np.ndarray, np.ndarray]:
    """Round as `round_nearest.per_column` does, with the scales of least error.

    Time: 30 passes over the weights, on all cores.
    """
    shares = _shares(weight, importance)
    parts = _map_parts(weight, lambda part: _search_columns(part, shares, bits))
    return np.concatenate([q for q, _ in parts], 1), np.concatenate([s for _, s in parts])


def in_blocks(
    weight: np.ndarray, blocks: round_nearest.Blocks, importance: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round as `round_nearest.in_blocks` does, with the scales, multipliers and zero points of least error.

    Time: some 30 passes over the weights, on all cores.
    """
    shares = _shares(weight, importance)
    parts = _map_parts(weight, lambda part: _search_blocks(part, blocks, shares))
    q, codes, scale = zip(*parts, strict=True)
    return np.concatenate(q, 1), np.concatenate(codes, 1), np.concatenate(scale)


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


def _search_columns(weight: np.ndarray, shares: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers and scales of least error for 8 or 6 bits."""
    best, scale = round_nearest.per_column(weight, bits)
    least_error = error(weight, best * scale, shares[:, 0])

    def keep_better(candidate: np.ndarray) -> None:
        q = pair_sums.round_columns(weight / candidate, round_nearest.MAX_OF_BITS[bits])
        candidate_error = (shares * (weight - q * candidate) ** 2).sum(0)
        _keep_better(least_error, candidate_error, (scale, candidate), (best, q))

    widest = scale.copy()
    for share in CLIP_SHARES:
        keep_better((widest * share).astype(np.float32))
    for _ in range(FIT_ROUNDS):
        keep_better(_fit_scale(weight, best, scale, shares))
    return best, scale


def _keep_better(
    least_error: np.ndarray, candidate_error: np.ndarray, *kept_and_candidates: tuple[np.ndarray, np.ndarray]
) -> None:
    """Replace the kept values by the candidates, and their errors, where the candidates err less."""
    better = candidate_error < least_error
    for kept, candidate in ((least_error, candidate_error), *kept_and_candidates):
        np.copyto(kept, candidate, where=better)


def _search_blocks(
    weight: np.ndarray, blocks: round_nearest.Blocks, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the integers, codes and scales of least error for 4 bits."""
    block = blocks.rows
    q, codes, scale = round_nearest.in_blocks(weight, blocks)
    least_error = (shares * (weight - round_nearest.expand(q, codes, block) * scale) ** 2).sum(0)
    low, high = round_nearest.extremes(weight, block)
    widest, unit = round_nearest.scale_in_reach(low, high), 2 if blocks.has_whole_zeros else 1
    for share in SCALE_SHARES:
        candidate = (widest * share).astype(np.float32)
        whole = np.ceil((high - low) / (round_nearest.MAX_INT4 * candidate))
        best_errors, best_codes = np.full(low.shape, np.inf, np.float32), np.zeros(low.shape, np.uint8)
        ratio = weight / candidate
        for fewer in STEPS_BELOW:
            m = (whole - fewer).clip(1, round_nearest.MAX_BLOCK_MULTIPLIER)
            for rounding in (np.floor, np.ceil):
                z = round_nearest.zeros_of_middle(low + high, m * candidate, unit, rounding)
                tried = round_nearest.encode(m, z)
                _keep_better(best_errors, _block_errors(ratio, tried, block, shares), (best_codes, tried))
        _keep_better(least_error, best_errors.sum(0) * candidate**2, (scale, candidate), (codes, best_codes))
    q = round_nearest.round_to_codes(weight, codes, scale, block)
    for _ in range(FIT_ROUNDS):  # each round can only reduce the error
        candidate = _fit_scale(weight, round_nearest.expand(q, codes, block), scale, shares)
        again = round_nearest.round_to_codes(weight, codes, candidate, block)
        candidate_error = (shares * (weight - round_nearest.expand(again, codes, block) * candidate) ** 2).sum(0)
        _keep_better(least_error, candidate_error, (scale, candidate), (q, again))
    return q, codes, scale


def _block_errors(ratio: np.ndarray, codes: np.ndarray, block: int, shares: np.ndarray) -> np.ndarray:
    """Return the error of each block (blocks, N), of weights and steps in units of the column's scale."""
    steps = decode(codes)
    m, shift, low, high = (
        round_nearest.of_rows(values.astype(np.float32), block, len(ratio))
        for values in (*steps, *round_nearest.limits(*steps))
    )
    rest = ratio + shift
    q = rest / m
    np.rint(q, out=q)
    np.clip(q, low, high, out=q)
    q *= m
    rest -= q
    rest *= rest
    rest *= shares
    return np.add.reduceat(rest, np.arange(0, len(ratio), block))


def _fit_scale(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the scales of least error for these integers, (N,); the old scale where that is not a positive number."""
    q = q.astype(np.float32)
    across, along = (shares * weight * q).sum(0), (shares * q * q).sum(0)
    return np.where((across > 0) & (along > 0), across / np.where(along > 0, along, 1), scale).astype(np.float32)
