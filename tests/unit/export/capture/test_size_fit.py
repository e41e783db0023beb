"""Numbers of a recording are written as expressions of the sizes at which they were read."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tformer_export.capture.by_example.size_fit import SizeExpression, fit

SAMPLES = [(2, 5), (3, 7), (3, 8), (2, 1), (2, 9), (2, 33)]  # (batch, time)
FORMULAS: dict[str, Callable[[int, int], int]] = {
    "constant": lambda b, t: 4,
    "rows-of-positions": lambda b, t: b * t,
    "positions-after-stride": lambda b, t: (t - 1) // 2,
    "square-less-one": lambda b, t: t * t - 1,
    "windows": lambda b, t: math.ceil(t / 4),
    "padded-positions": lambda b, t: math.ceil(t / 4) * 4,
    "padding": lambda b, t: -t % 8,
    "whole-windows": lambda b, t: t // 3 * 3,
    "windows-of-rows": lambda b, t: b * math.ceil(t / 4),
    "windows-and-one-before": lambda b, t: 4 * (math.ceil(t / 4) + 1),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_fitted_expression_holds_at_other_sizes(formula: Callable[[int, int], int]) -> None:
    found = fit([formula(*sizes) for sizes in SAMPLES], SAMPLES)
    assert found is not None
    others = [(batch, time) for batch in (1, 4) for time in range(1, 70)]
    assert [found.at(sizes) for sizes in others] == [formula(*sizes) for sizes in others]


def test_simplest_expression_is_chosen() -> None:
    assert fit([10, 14, 16, 2, 18, 66], SAMPLES) == SizeExpression(((2, (1,)),), 0)


def test_numbers_that_follow_from_no_size_have_no_expression() -> None:
    assert fit([3, 1, 4, 1, 5, 9], SAMPLES) is None
