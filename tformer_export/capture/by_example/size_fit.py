"""Numbers as expressions of the free sizes, inferred from their values at several sizes.

A number of a recording, such as the 24 of `view(24, 8)`, follows from the sizes of the inputs or is a constant. Its
values at several sizes tell which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

EXPONENTS = 1.0, 0.5, -1.0, -0.5  # of powers of sizes
ROUNDING = 1e-9  # of such a power, over its value
MAX_DIVISOR = 64  # of a quotient of sizes

Sizes = tuple[int, ...]  # one value for each free size
Monomial = tuple[int, ...]  # the numbers of the free sizes that are multiplied


@dataclass(frozen=True)
class SizeExpression:
    """(Σ factor · monomial + offset) // divisor."""

    terms: tuple[tuple[int, Monomial], ...]
    offset: int
    divisor: int = 1

    def at(self, sizes: Sequence[int]) -> int:
        return (sum(factor * _value(m, sizes) for factor, m in self.terms) + self.offset) // self.divisor


@dataclass(frozen=True)
class SizePower:
    """base ** exponent, such as the square root of a size."""

    base: SizeExpression
    exponent: float


def fit_power(values: Sequence[float], samples: Sequence[Sizes]) -> SizePower | None:
    """Return a power of an expression with these values, a root or quotient, or None."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    for exponent in EXPONENTS:
        bases = [value ** (1 / exponent) for value in values]
        whole = [round(base) for base in bases]
        if all(math.isclose(base, number, rel_tol=ROUNDING) for base, number in zip(bases, whole, strict=True)):
            found = fit(whole, samples)
            if found is not None:
                return SizePower(found, exponent)
    return None


def fit(values: Sequence[int], samples: Sequence[Sizes]) -> SizeExpression | None:
    """Return the simplest expression with these values at these sizes, or None.

    The order of preference: a constant, one monomial of degree one or two with a factor and an offset, its quotient by
    a small divisor, two monomials. Cost: the square of the number of monomials.
    """
    if len(set(values)) == 1:
        return SizeExpression((), values[0])
    numbers = range(len(samples[0]))
    monomials: list[Monomial] = [
        *itertools.combinations_with_replacement(numbers, 1),
        *itertools.combinations_with_replacement(numbers, 2),
    ]
    for monomial in monomials:
        found = _fit_terms(values, samples, (monomial,))
        if found is not None:
            return found
    for monomial in monomials:
        found = _fit_quotient(values, samples, monomial)
        if found is not None:
            return found
    for pair in itertools.combinations(monomials, 2):
        found = _fit_terms(values, samples, pair)
        if found is not None:
            return found
    return None


def _value(monomial: Monomial, sizes: Sequence[int]) -> int:
    value = 1
    for number in monomial:
        value *= sizes[number]
    return value


def _fit_terms(
    values: Sequence[int], samples: Sequence[Sizes], monomials: tuple[Monomial, ...]
) -> SizeExpression | None:
    """Fit Σ factor · monomial + offset with whole factors, none of them 0. It has to hold at one more sample than its
    unknown numbers."""
    unknown = len(monomials) + 1
    if len(samples) <= unknown:
        return None
    rows = [[Fraction(_value(m, sizes)) for m in monomials] + [Fraction(1)] for sizes in samples]
    solution = _solve(rows, [Fraction(v) for v in values])
    if solution is None or any(x.denominator != 1 for x in solution) or not all(solution[:-1]):
        return None
    terms = tuple((int(x), m) for x, m in zip(solution, monomials, strict=False))
    found = SizeExpression(terms, int(solution[-1]))
    return found if [found.at(sizes) for sizes in samples] == list(values) else None


def _fit_quotient(values: Sequence[int], samples: Sequence[Sizes], monomial: Monomial) -> SizeExpression | None:
    """Fit (monomial + offset) // divisor."""
    for divisor in range(2, MAX_DIVISOR + 1):
        low = max(v * divisor - _value(monomial, s) for v, s in zip(values, samples, strict=True))
        high = min((v + 1) * divisor - 1 - _value(monomial, s) for v, s in zip(values, samples, strict=True))
        if low <= high:
            offset = next((o for o in (0, divisor - 1) if low <= o <= high), low)
            return SizeExpression(((1, monomial),), offset, divisor)
    return None


def _solve(rows: list[list[Fraction]], values: list[Fraction]) -> list[Fraction] | None:
    """Solve linear equations by Gauss's elimination; None if the solution is not unique. Equations that are left over
    are not checked."""
    width, matrix = len(rows[0]), [[*row, value] for row, value in zip(rows, values, strict=True)]
    for column in range(width):
        pivot = next((i for i in range(column, len(matrix)) if matrix[i][column]), None)
        if pivot is None:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        matrix[column] = [x / matrix[column][column] for x in matrix[column]]
        for i, row in enumerate(matrix):
            if i != column and row[column]:
                matrix[i] = [x - row[column] * y for x, y in zip(row, matrix[column], strict=True)]
    return [matrix[i][-1] for i in range(width)]
