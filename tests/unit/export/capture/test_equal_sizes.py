"""Expressions of sizes are equal for all sizes if and only if every size shows it."""

from __future__ import annotations

import itertools

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from tformer_export.capture.equal_sizes import are_equal

N = sympy.Symbol("n", integer=True)
WAYS = [
    N,
    FloorDiv(N - 1, 2),
    FloorDiv(N - 3, 2) + 1,
    FloorDiv(N, 2),
    FloorDiv(FloorDiv(N - 1, 2) - 1, 2),
    FloorDiv(N - 3, 4),
    FloorDiv(FloorDiv(N - 3, 2) - 2, 2) + 1,
    N - Mod(N, 2),
    2 * FloorDiv(N, 2),
    FloorDiv(N + Mod(2 * N, 3), 3),
    FloorDiv(N + 2, 3),
    FloorDiv(2 * N, 3),
]


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations_with_replacement(WAYS, 2)])
def test_equal_if_they_are_at_every_size(one: sympy.Expr, other: sympy.Expr) -> None:
    everywhere = all((one - other).subs(N, n) == 0 for n in range(7, 200))
    assert are_equal(one, other, N, 7) == everywhere


def test_difference_below_the_least_size_does_not_count() -> None:
    assert not are_equal(N, sympy.Max(N, 3), N, 7)  # other functions are not decided
    assert not are_equal(FloorDiv(N, 1000), sympy.Integer(0), N, 2)
