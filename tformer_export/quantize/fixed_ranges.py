"""Activations with fixed scales, learnt from data: which of the operands of products, and in which steps.

A fixed scale saves what is done to each row before a product and after it (`rewrite.py` has the times), and a row's
result is still its own. What it gives up is range: steps have to do for all rows, and what is beyond them is clipped.

An operand x becomes q = round(x / scale) + zero in 0 … 255, so that steps reach from some least number to some largest,
zero among them. Behind a Relu or a Gelu the least is known. The others are those of least

    Σₖ |wₖ|² · (x[k] − x̂[k])²

over rows x that were drawn from the data, wₖ being the row of the weights that channel k is multiplied with: the
squared error of the products' results, errors taken as uncorrelated.

Where a few channels are much louder than the others, as behind many a norm, channels are divided by factors first, and
the weights' rows multiplied (SmoothQuant, Xiao et al. 2022, https://arxiv.org/abs/2211.10438): aₖ^α / bₖ^(1 − α), of
the largest activation and weight. Where products alone read a norm's result that costs nothing, its gain and bias being
divided; elsewhere it is one Mul, so that it is done where it is needed alone.

An operand whose products err by more than BEARABLE times as much (squared, weights in int8, on rows that nothing was
fitted to) as they do row by row, with factors or without, is rounded row by row. Each row's error counts by what its
results are large, so that loud rows do not hide what steps that are made for them do to quiet ones. all-MiniLM-L6-v2
(24 operands; weights by GPTQ; row by row a cosine of 0.99757 with the unquantised vectors, on 120 sentences):

========  =====  =======  ======  =======  ===================================
BEARABLE  fixed  divided  by row  cosine   least cosine
========  =====  =======  ======  =======  ===================================
any       24     0        0       0.993    0.988 (weights rounded to nearest)
4         23     11       1       0.99749  0.9928
3         18     8        6       0.99818  0.9968
========  =====  =======  ======  =======  ===================================

With factors it can be better than row by row, for rows with a loud channel have large steps of their own. What rounding
moves the mean of results by, added to the bias, changed next to nothing, and is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tformer_export.calibration.samples import Sample
from tformer_export.quantize import smoothquant
from tformer_export.quantize.activations_int8 import GELU, Fixed, is_gelu, is_positive, row_by_row
from tformer_export.quantize.input_statistics import Reading
from tformer_export.quantize.matrices import Matrix, find_matrices
from tformer_export.quantize.rounding import round_nearest
from tformer_runtime.format.manifest import Manifest

BEARABLE = 4.0  # see above
POWERS = (0.5, 0.75)  # α
KEPT = 1024  # rows of each operand; half are fitted to
AT_ONCE = 1 << 29  # bytes of them all
JUDGED = 256  # rows that products are computed on
BINS = 4096
SHARES = np.linspace(1.0, 0.3, 36)  # of the largest number
QUIET, TINY = 0.01, 1e-30  # of the mean square of products' results, below which a row counts no more
QUIETEST = 0.01  # of the loudest channel: a channel that was hardly heard may yet be loud


def fix_scales(model: ir.Model, manifest: Manifest, samples: Sequence[Sample], path: Path) -> dict[str, Fixed]:
    """Name of a product → the steps of what it reads; those that are not named are to be rounded row by row.

    The model is rewritten where channels are divided, and computes the same but for the rounding of float32.
    path: for a copy of the model. Time: one pass over the samples, and five products of 256 rows with each matrix.
    Memory: that of `Reading`, half a gigabyte of rows at most, and a matrix at a time.
    """
    found: dict[str, Fixed] = {}
    for operand, seen in _seen(model, manifest, samples, path):
        chosen = _choose(operand, seen, model)
        if chosen is None:
            continue
        if chosen.factors is not None:
            smoothquant.divide(model, operand.value, operand.matrices, chosen.factors)
        found |= dict.fromkeys(operand.products, chosen.fixed)
    return found


@dataclass
class _Operand:
    """What products read. products: their names. matrices: what they multiply it with."""

    value: ir.Value
    products: list[str]
    matrices: list[Matrix]

    def weights(self, model: ir.Model) -> np.ndarray:
        return np.concatenate([matrix.read(model) for matrix in self.matrices], 1)


class _Seen:
    """Rows of an operand, drawn at random from all, and the extremes of each channel over all. Each row is given a
    random key, and those with the least are kept: of many rows, few need to be looked at."""

    def __init__(self, width: int, room: int) -> None:
        self.rows, self._keys = np.zeros((0, width), np.float32), np.zeros(0)
        self.least, self.most = np.zeros(width, np.float32), np.zeros(width, np.float32)
        self._room, self._random = room, np.random.default_rng(width)

    def add(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        self.least, self.most = np.minimum(self.least, rows.min(0)), np.maximum(self.most, rows.max(0))
        free = self._room - len(self.rows)
        keys = self._random.random(len(rows))
        if free:
            self.rows = np.concatenate([self.rows, rows[:free]])
            self._keys = np.concatenate([self._keys, keys[:free]])
            rows, keys = rows[free:], keys[free:]
        kept = np.argsort(np.concatenate([self._keys, keys]))[: self._room]
        come = kept[kept >= len(self._keys)] - len(self._keys)
        gone = np.setdiff1d(np.arange(len(self._keys)), kept)
        self.rows[gone], self._keys[gone] = rows[come], keys[come]

    @property
    def is_sound(self) -> bool:
        return len(self.rows) > 1 and bool(np.isfinite(self.least).all() and np.isfinite(self.most).all())


def _seen(
    model: ir.Model, manifest: Manifest, samples: Sequence[Sample], path: Path
) -> Iterator[tuple[_Operand, _Seen]]:
    operands: dict[ir.Value, _Operand] = {}
    for matrix in find_matrices(model):
        for value, product in zip(matrix.inputs, matrix.products, strict=True):
            own = operands.setdefault(value, _Operand(value, [], []))
            own.products.append(product)
            own.matrices += [matrix] if matrix not in own.matrices else []
    copy = model.clone()
    products = {str(node.name): node for graph in (copy.graph, *copy.graph.subgraphs()) for node in graph}
    copied = {products[own.products[0]].inputs[0]: own for own in operands.values()}
    reading = Reading(copy, manifest, [value for value in copied if value is not None], path)
    widths = {name: copied[value].matrices[0].shape[0] for value, name in reading.names.items()}
    room = int(np.clip(AT_ONCE / (4 * max(1, sum(widths.values()))), 2, KEPT))
    seen = {name: _Seen(width, room) for name, width in widths.items()}
    for values in reading.on(samples, list(widths)):
        for name, rows in values.items():
            seen[name].add(rows.reshape(-1, widths[name]))
    for value, name in reading.names.items():
        one = seen.pop(name)
        if one.is_sound:
            yield copied[value], one


@dataclass(frozen=True)
class _Choice:
    """error: squared, of the products' results. factors: (K,), that channels are divided by."""

    fixed: Fixed
    error: float
    factors: np.ndarray | None = None


def _choose(operand: _Operand, seen: _Seen, model: ir.Model) -> _Choice | None:
    weight = operand.weights(model)
    judged = seen.rows[1::2][:JUDGED]
    exact = judged @ weight
    loudness = np.square(exact).mean(1)
    count = 1 / (loudness + QUIET * loudness.mean() + TINY)

    def error(rounded: np.ndarray, weight: np.ndarray) -> float:
        q, scale = round_nearest.per_column(weight)
        return float(np.square(rounded @ (q * scale) - exact).mean(1) @ count)

    def in_steps(factors: np.ndarray | None = None) -> _Choice:
        by = np.ones(len(weight), np.float32) if factors is None else factors
        own = weight * by[:, None]
        bottom = _bottom(operand.value) if factors is None else None
        importance = np.square(own).sum(1)
        fixed = _steps(seen.rows[::2] / by, (seen.least / by).min(), (seen.most / by).max(), importance, bottom)
        return _Choice(fixed, error(fixed.rounded(judged / by), own), factors)

    most = BEARABLE * error(row_by_row(operand.value, judged), weight)
    free = smoothquant.is_free(model, operand.value, operand.matrices)
    plain = in_steps()
    if plain.error <= most and not free:
        return plain
    choices = [plain]
    if free or smoothquant.is_possible(model, operand.value, operand.matrices):
        choices += [in_steps(factors) for factors in _factors(seen, weight)]
    best = min(choices, key=lambda choice: choice.error)
    return best if best.error <= most else None


def _factors(seen: _Seen, weight: np.ndarray) -> Iterator[np.ndarray]:
    """(K,) for each power, their geometric mean 1."""
    loud, heavy = (
        np.maximum(size, QUIETEST * size.max() or 1) for size in (np.maximum(seen.most, -seen.least), _sizes(weight))
    )
    for power in POWERS:
        factors = loud**power / heavy ** (1 - power)
        yield (factors / np.exp(np.log(factors).mean())).astype(np.float32)


def _sizes(weight: np.ndarray) -> np.ndarray:
    """(K,): the largest of each row."""
    sizes: np.ndarray = np.maximum(weight.max(1), -weight.min(1))
    return sizes


def _bottom(value: ir.Value) -> float | None:
    """Below which an operand never is, if that is known."""
    return 0.0 if is_positive(value) else -GELU if is_gelu(value) else None


def _steps(rows: np.ndarray, least: float, most: float, importance: np.ndarray, bottom: float | None) -> Fixed:
    """Of least squared error, each channel's times its importance; from the bottom, if that is known."""
    low = least if bottom is None else bottom
    span = (most - low) or 1.0
    places = ((rows - low) * (BINS / span)).astype(np.int64).clip(0, BINS - 1)
    counts = np.bincount(places.ravel(), np.broadcast_to(importance, rows.shape).ravel(), BINS)
    numbers = (low + (np.arange(BINS) + 0.5) * (span / BINS)).astype(np.float32)

    def lost(ends: tuple[float, float]) -> float:
        return float(counts @ np.square(Fixed.between(*ends).rounded(numbers) - numbers))

    best = low, most
    for _ in range(2):
        best = min(((best[0], share * most) for share in SHARES), key=lost)
        if bottom is None:
            best = min(((share * low, best[1]) for share in SHARES), key=lost)
    return Fixed.between(*best)
