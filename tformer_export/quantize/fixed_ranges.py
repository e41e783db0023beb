"""Static scales of activations, learnt from data: which inputs of products get one, and their ranges.

A static scale saves the work on each row before a product and after it (docs/design/kernels.md#with-a-static-scale). A
row's result still does not depend on other rows. The cost is range: the steps have to suit all rows, and numbers beyond
them are clipped.

An operand x becomes q = round(x / scale) + zero in 0 … 255. Its range reaches from a lowest to a highest number and
includes zero. Behind a Relu or a Gelu the lowest number is known. The other ends minimise

    Σₖ |wₖ|² · (x[k] − x̂[k])²

over rows x of the data, where wₖ is the row of the weights that channel k is multiplied with. This is the squared error
of the products' results, if errors are uncorrelated.

Outlier channels, as behind many norms, are smoothed first (SmoothQuant, Xiao et al. 2022,
https://arxiv.org/abs/2211.10438): channels are divided by aₖ^α / bₖ^(1 − α), of the largest activation and weight, and
the weights' rows are multiplied by it. This is free after a norm that only these products read, because its weight and
bias are divided. Elsewhere it costs one Mul, so it is done only where it is needed.

An operand is scaled by row if its products err by more than MAX_ERROR_RATIO times as much as by row, with smoothing or
without (squared error, weights in int8, on rows that nothing was fitted to). The error of each row is relative to the
size of its results, so that loud rows do not hide the errors of quiet rows. The limit was chosen by experiments:
docs/design/quantization.md#static-scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tformer_export.calibration.samples import Sample
from tformer_export.quantize import smoothquant
from tformer_export.quantize.activations_int8 import MAX_NEGATIVE_GELU, StaticScale, is_gelu, is_positive, round_by_row
from tformer_export.quantize.input_statistics import StatisticsReader
from tformer_export.quantize.matrices import Matrix, find_matrices
from tformer_export.quantize.rounding import round_nearest
from tformer_runtime.format.manifest import Manifest

MAX_ERROR_RATIO = 4.0  # see the module's docstring
SMOOTHING_POWERS = (0.5, 0.75)  # the tried α
MAX_SAMPLED_ROWS = 1024  # of each operand; ranges are fitted to one half, and errors are computed on the other
MAX_SAMPLED_BYTES = 1 << 29  # of the sampled rows of all operands
MAX_EVALUATED_ROWS = 256  # rows for which products are computed
HISTOGRAM_BINS = 4096
RANGE_SHARES = np.linspace(1.0, 0.3, 36)  # of the largest number
# A row whose results are smaller than this share of the mean square, or this square, gets no greater weight.
MIN_RELATIVE_LOUDNESS, MIN_LOUDNESS = 0.01, 1e-30
MIN_CHANNEL_SIZE = 0.01  # share of the loudest channel; a channel that was quiet on the data may become loud


def learn_static_scales(
    model: ir.Model, manifest: Manifest, samples: Sequence[Sample], path: Path
) -> dict[str, StaticScale]:
    """Return name of a product → static scale of its activations; other products need a scale for each row.

    Where channels are divided, the model is rewritten in place. It then computes the same results up to the rounding of
    float32.

    path: for a temporary copy of the model. Time: one pass over the samples, and five products of 256 rows with each
        matrix.
    Memory: that of `StatisticsReader`, half a gigabyte of rows at most, and one matrix at a time.
    """
    scales: dict[str, StaticScale] = {}
    for operand, rows in _sample_operands(model, manifest, samples, path):
        choice = _choose(operand, rows, model)
        if choice is None:
            continue
        if choice.factors is not None:
            smoothquant.divide(model, operand.value, operand.matrices, choice.factors)
        scales |= dict.fromkeys(operand.products, choice.scale)
    return scales


@dataclass
class _Operand:
    """An input of products. products: their names. matrices: the matrices with which it is multiplied."""

    value: ir.Value
    products: list[str]
    matrices: list[Matrix]

    def weights(self, model: ir.Model) -> np.ndarray:
        return np.concatenate([matrix.read(model) for matrix in self.matrices], 1)


class _SampledRows:
    """Rows of an operand, drawn at random from all rows, and the extremes of each channel over all rows.

    Each row gets a random key, and the rows with the least keys are kept. So few of many rows have to be copied.
    """

    def __init__(self, width: int, max_rows: int) -> None:
        self.rows, self._keys = np.zeros((0, width), np.float32), np.zeros(0)
        self.lowest, self.highest = np.zeros(width, np.float32), np.zeros(width, np.float32)
        self._max_rows, self._random = max_rows, np.random.default_rng(width)

    def add(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        self.lowest, self.highest = np.minimum(self.lowest, rows.min(0)), np.maximum(self.highest, rows.max(0))
        free = self._max_rows - len(self.rows)
        keys = self._random.random(len(rows))
        if free:
            self.rows = np.concatenate([self.rows, rows[:free]])
            self._keys = np.concatenate([self._keys, keys[:free]])
            rows, keys = rows[free:], keys[free:]
        selected = np.argsort(np.concatenate([self._keys, keys]))[: self._max_rows]
        added = selected[selected >= len(self._keys)] - len(self._keys)
        dropped = np.setdiff1d(np.arange(len(self._keys)), selected)
        self.rows[dropped], self._keys[dropped] = rows[added], keys[added]

    @property
    def is_usable(self) -> bool:
        return len(self.rows) > 1 and bool(np.isfinite(self.lowest).all() and np.isfinite(self.highest).all())


def _sample_operands(
    model: ir.Model, manifest: Manifest, samples: Sequence[Sample], path: Path
) -> Iterator[tuple[_Operand, _SampledRows]]:
    """Yield the inputs of products with rows of them, drawn from the samples.

    Operands that cannot be read, or are not finite, are left out.
    """
    operands: dict[ir.Value, _Operand] = {}
    for matrix in find_matrices(model):
        for value, product in zip(matrix.inputs, matrix.products, strict=True):
            operand = operands.setdefault(value, _Operand(value, [], []))
            operand.products.append(product)
            operand.matrices += [matrix] if matrix not in operand.matrices else []
    copy = model.clone()
    products = {str(node.name): node for graph in (copy.graph, *copy.graph.subgraphs()) for node in graph}
    operand_of = {products[operand.products[0]].inputs[0]: operand for operand in operands.values()}
    statistics = StatisticsReader(copy, manifest, [value for value in operand_of if value is not None], path)
    widths = {name: operand_of[value].matrices[0].shape[0] for value, name in statistics.names.items()}
    max_rows = int(np.clip(MAX_SAMPLED_BYTES / (4 * max(1, sum(widths.values()))), 2, MAX_SAMPLED_ROWS))
    sampled = {name: _SampledRows(width, max_rows) for name, width in widths.items()}
    for values in statistics.read(samples, list(widths)):
        for name, rows in values.items():
            sampled[name].add(rows.reshape(-1, widths[name]))
    for value, name in statistics.names.items():
        rows_of_operand = sampled.pop(name)
        if rows_of_operand.is_usable:
            yield operand_of[value], rows_of_operand


@dataclass(frozen=True)
class _ScaleChoice:
    """A static scale of an operand.

    scale: the scale.
    error: the squared error of the products' results.
    factors: the factors (K,) by which channels are divided; None if they are not.
    """

    scale: StaticScale
    error: float
    factors: np.ndarray | None = None


def _choose(operand: _Operand, sampled: _SampledRows, model: ir.Model) -> _ScaleChoice | None:
    """Return the static scale of an operand; None if it needs a scale for each row."""
    weight = operand.weights(model)
    evaluated = sampled.rows[1::2][:MAX_EVALUATED_ROWS]
    exact = evaluated @ weight
    loudness = np.square(exact).mean(1)
    row_weights = 1 / (loudness + MIN_RELATIVE_LOUDNESS * loudness.mean() + MIN_LOUDNESS)

    def error(rounded: np.ndarray, weight: np.ndarray) -> float:
        q, scale = round_nearest.per_column(weight)
        return float(np.square(rounded @ (q * scale) - exact).mean(1) @ row_weights)

    def try_factors(factors: np.ndarray | None = None) -> _ScaleChoice:
        divisors = np.ones(len(weight), np.float32) if factors is None else factors
        multiplied = weight * divisors[:, None]
        lower_bound = _lower_bound(operand.value) if factors is None else None
        importance = np.square(multiplied).sum(1)
        static_scale = fit_range(
            sampled.rows[::2] / divisors,
            (sampled.lowest / divisors).min(),
            (sampled.highest / divisors).max(),
            importance,
            lower_bound,
        )
        return _ScaleChoice(static_scale, error(static_scale.round(evaluated / divisors), multiplied), factors)

    max_error = MAX_ERROR_RATIO * error(round_by_row(operand.value, evaluated), weight)
    is_free = smoothquant.is_free(model, operand.value, operand.matrices)
    plain = try_factors()
    if plain.error <= max_error and not is_free:
        return plain
    choices = [plain]
    if is_free or smoothquant.is_possible(model, operand.value, operand.matrices):
        choices += [try_factors(factors) for factors in _smoothing_factors(sampled, weight)]
    best = min(choices, key=lambda choice: choice.error)
    return best if best.error <= max_error else None


def _smoothing_factors(sampled: _SampledRows, weight: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the factors (K,) for each power, with a geometric mean of 1."""
    activation_sizes, weight_sizes = (
        np.maximum(size, MIN_CHANNEL_SIZE * size.max() or 1)
        for size in (np.maximum(sampled.highest, -sampled.lowest), _row_sizes(weight))
    )
    for power in SMOOTHING_POWERS:
        factors = activation_sizes**power / weight_sizes ** (1 - power)
        yield (factors / np.exp(np.log(factors).mean())).astype(np.float32)


def _row_sizes(weight: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each row, (K,)."""
    sizes: np.ndarray = np.maximum(weight.max(1), -weight.min(1))
    return sizes


def _lower_bound(value: ir.Value) -> float | None:
    """Return the number below which an operand never is, if that is known."""
    return 0.0 if is_positive(value) else -MAX_NEGATIVE_GELU if is_gelu(value) else None


def fit_range(
    rows: np.ndarray, lowest: float, highest: float, importance: np.ndarray, lower_bound: float | None
) -> StaticScale:
    """Return the scale of least squared error, weighted by the importance of each channel (K,).

    lower_bound: the lower end of the range, if it is known.
    """
    low = lowest if lower_bound is None else lower_bound
    span = (highest - low) or 1.0
    bins = ((rows - low) * (HISTOGRAM_BINS / span)).astype(np.int64).clip(0, HISTOGRAM_BINS - 1)
    counts = np.bincount(bins.ravel(), np.broadcast_to(importance, rows.shape).ravel(), HISTOGRAM_BINS)
    numbers = (low + (np.arange(HISTOGRAM_BINS) + 0.5) * (span / HISTOGRAM_BINS)).astype(np.float32)

    def error(ends: tuple[float, float]) -> float:
        return float(counts @ np.square(StaticScale.between(*ends).round(numbers) - numbers))

    best = low, highest
    for _ in range(2):
        best = min(((best[0], share * highest) for share in RANGE_SHARES), key=error)
        if lower_bound is None:
            best = min(((share * low, best[1]) for share in RANGE_SHARES), key=error)
    return StaticScale.between(*best)
