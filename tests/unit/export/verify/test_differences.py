"""The unit of a difference is the spread of the logits that can be chosen. A hidden id does not change it."""

from __future__ import annotations

import numpy as np
import pytest

from tformer_export.verify.differences import logit_differences, number_differences

LOGITS = np.array([[1.0, 2.0, 3.0, 0.0]])


def moved(difference: float, place: int) -> np.ndarray:
    return difference * np.eye(5)[place]


@pytest.mark.parametrize("hidden", [-1e9, np.finfo(np.float32).min, -np.inf])
def test_hidden_id_does_not_change_the_unit(hidden: float) -> None:
    with_hidden = np.append(LOGITS, [[hidden]], 1)
    differences = logit_differences(with_hidden + moved(0.3, 0), with_hidden)
    assert differences.max() == pytest.approx(0.3 / np.ptp(LOGITS))


def test_unlikely_id_has_its_distance_as_its_unit() -> None:
    with_unlikely = np.append(LOGITS, [[-77.0]], 1)
    assert logit_differences(with_unlikely + moved(0.8, 4), with_unlikely).max() == pytest.approx(0.8 / 80)
    assert logit_differences(with_unlikely + moved(0.3, 0), with_unlikely).max() == pytest.approx(0.3 / 3)


def test_position_has_no_unit_of_another() -> None:
    rows = np.concatenate([LOGITS, 1000 * LOGITS])
    assert logit_differences(rows + np.array([[0.3], [0.0]]), rows).max() == pytest.approx(0.3 / 3)


@pytest.mark.parametrize("actual", [np.nan, np.inf, -np.inf, -50.0])
def test_number_of_another_kind_is_infinitely_far(actual: float) -> None:
    expected = np.append(LOGITS, [[-1e9 if actual == -50.0 else 1.5]], 1)
    other = np.append(LOGITS, [[actual]], 1)
    assert logit_differences(other, expected).max() == np.inf
    assert logit_differences(np.append(LOGITS, [[-2e9]], 1), np.append(LOGITS, [[-1e9]], 1)).max() == 0


def test_number_is_measured_by_its_range_over_inputs() -> None:
    bias = np.array([0.0, 100.0])
    rows = [bias + np.array([0.0, 0.1]), bias + np.array([0.2, 0.0]), bias]
    # 100 · 1.5e-2 is the rounding of numbers of this size, and more than their range, 0.2
    assert number_differences(rows[0] + 0.3, rows[0], rows).max() == pytest.approx(0.3 / 1.5, rel=1e-2)
    centred = [row - bias for row in rows]
    assert number_differences(centred[0] + 0.1, centred[0], centred).max() == pytest.approx(0.1 / 0.2)


def test_equal_logits_have_a_unit() -> None:
    assert logit_differences(np.full((1, 3), 0.01), np.zeros((1, 3))).max() == pytest.approx(0.01)
