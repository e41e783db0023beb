"""The differences of results, each in units of the change that is allowed for its number.

A logit's unit is the spread of those that can be chosen at its position, as softmax sees them, in nats. An id that the
model hides with −1e9 does not make the unit longer, and no position has that of another. Other numbers are measured by
their spread. Rounding sets a lower bound: float32 has 24 bits, and results are sums of many products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

CHOSEN = 20.0  # nats below the best logit, that is a probability of 2e-9: such an id is drawn once in 500 million
SEEN = 104.0  # nats below the best logit: exp(−104) is 0 in float32
SEEN_BY_BOTH = 90.0  # nats: less than SEEN, for a logit at its edge moves by rounding
HIDDEN = (
    -9e3
)  # numbers below it stand for −∞ if all others are small: masks write −1e4, −65504, −1e9 or the least number
BLOCK = 1 << 18  # logits that are compared at once: the temporary arrays take some 20 MB
ROUNDING = 1.5e-2  # of the greatest magnitude: the thousandth of it is 250 times the rounding of one float32


def logit_units(expected: np.ndarray) -> np.ndarray:
    """Return the unit of each logit (…, vocabulary); infinite where softmax gives 0.

    With the best logit m and the spread s of the logits from m − CHOSEN on, a logit x has the unit max(s, m − x): an
    unlikely id may move by a share of its distance from the best. Cost: some passes over the logits.
    """
    logits = np.where(np.isfinite(expected), expected, -np.inf).astype(np.float64)
    best = logits.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        distance = best - logits
    seen = distance <= SEEN
    spread = np.max(distance, axis=-1, where=distance <= CHOSEN, initial=0.0, keepdims=True)
    rounding = ROUNDING * np.max(np.abs(logits), axis=-1, where=seen, initial=0.0, keepdims=True)
    units = np.maximum(np.maximum(spread, np.where(seen, distance, 0.0)), rounding)
    return np.where(seen, np.where(units > 0, units, 1.0), np.inf)  # 1 for logits that are all 0


def number_units(expected: np.ndarray, rows: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Return the unit of each number of a result that is not a row of logits; infinite where a mask hides it.

    It is the greatest range that a number of the result has over `rows`, results for other inputs: a part that no input
    changes does not count. Rows of several lengths are compared by the numbers of their last axis.
    """
    results = [np.where(is_hidden(row), np.nan, row.astype(np.float64)) for row in (expected, *rows)]
    if len({row.shape for row in results}) > 1 or len(results) == 1:
        results = [row.reshape(-1, row.shape[-1]) if row.ndim > 1 else row.reshape(1, -1) for row in results]
        widths = {row.shape[-1] for row in results}
        together = np.concatenate(results if len(widths) == 1 else [row.reshape(-1, 1) for row in results])
    else:
        together = np.stack(results)
    shown = ~np.isnan(together)
    ranges = np.max(together, 0, where=shown, initial=-np.inf) - np.min(together, 0, where=shown, initial=np.inf)
    magnitude = np.max(np.abs(together), where=shown, initial=0.0)
    unit = max(float(np.max(ranges, where=np.isfinite(ranges), initial=0.0)), ROUNDING * float(magnitude)) or 1.0
    return np.where(is_hidden(expected), np.inf, unit)


def is_hidden(values: np.ndarray) -> np.ndarray:
    """Return where numbers stand for −∞: below HIDDEN, and of another magnitude than the greatest number."""
    finite = values[np.isfinite(values)]
    most = float(finite.max()) if finite.size else 0.0
    return np.asarray(~np.isfinite(values) | ((values <= HIDDEN) & (values <= -100 * max(1.0, abs(most)))))


def logit_differences(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the differences of logits (…, vocabulary), over their units, as float32.

    Infinite where a logit that no softmax sees is seen in the other result, and where a number stands in the place of
    NaN or infinity. Memory: that of the result, and of some copies of BLOCK logits.
    """
    vocabulary = expected.shape[-1]
    differences = np.empty(expected.shape, dtype=np.float32)
    flat = [array.reshape(-1, vocabulary) for array in (actual, expected, differences)]
    positions = max(1, BLOCK // vocabulary)
    for begin in range(0, len(flat[0]), positions):
        one, other, result = (array[begin : begin + positions] for array in flat)
        best = np.max(other, axis=-1, where=np.isfinite(other), initial=-np.inf, keepdims=True)
        result[...] = _differences(one, other, logit_units(other), best - SEEN_BY_BOTH)
    return differences


def number_differences(actual: np.ndarray, expected: np.ndarray, rows: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Return the differences of numbers, over their unit, as `logit_differences`."""
    return _differences(actual, expected, number_units(expected, rows), HIDDEN / 2)


def _differences(actual: np.ndarray, expected: np.ndarray, units: np.ndarray, hidden_below: Any) -> np.ndarray:
    shown = np.isfinite(units)
    wrong = (np.isnan(actual) != np.isnan(expected)) | ((actual == np.inf) != (expected == np.inf))
    wrong |= np.where(shown, ~np.isfinite(actual), np.isfinite(actual) & (actual > hidden_below))
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.abs(actual.astype(np.float64) - expected) / units
    return np.where(wrong, np.inf, np.where(shown, differences, 0.0))
