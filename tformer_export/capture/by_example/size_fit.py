"""Numbers as expressions of the free sizes, inferred from their values at several sizes.

A number of a recording, such as the 24 of `view(24, 8)`, follows from the sizes of the inputs or is a constant. Its
values at several sizes tell which.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

EXPONENTS = 1.0, 0.5, -1.0, -0.5  # of powers of sizes
ROUNDING = 1e-9  # of such a power, over its value
MAX_DIVISOR = 64  # of a quotient of sizes

Sizes = tuple[int, ...]  # one value for each free size


@dataclass(frozen=True)
class WholeParts:
    """(size + offset) // divisor, such as the number of windows that hold a free size."""

    number: int
    offset: int
    divisor: int

    def at(self, sizes: Sizes) -> int:
        return (sizes[self.number] + self.offset) // self.divisor


Monomial = tuple[int | WholeParts, ...]  # factors: numbers of free sizes, and whole parts of them


@dataclass(frozen=True)
class SizeExpression:
    """(Σ factor · monomial + offset) // divisor."""

    terms: tuple[tuple[int, Monomial], ...]
    offset: int
    divisor: int = 1

    def at(self, sizes: Sizes) -> int:
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
    a small divisor, two monomials, a size in whole parts, such as the positions of padded windows.

    Cost: the square of the number of monomials; for whole parts the square of `MAX_DIVISOR` for each free size.
    """
    return _fit(tuple(values), tuple(samples))


@functools.lru_cache(4096)  # layers have the same numbers
def _fit(values: tuple[int, ...], samples: tuple[Sizes, ...]) -> SizeExpression | None:
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
    return _fit_whole_parts(values, samples)


def _value(monomial: Monomial, sizes: Sizes) -> int:
    value = 1
    for part in monomial:
        value *= part.at(sizes) if isinstance(part, WholeParts) else sizes[part]
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


def _fit_whole_parts(values: Sequence[int], samples: Sequence[Sizes]) -> SizeExpression | None:
    """Fit parts · factor + size · factor + offset, all of it perhaps times another free size.

    Few samples allow many of them. So those without an offset come first, and then those without the size.
    """
    numbers = range(len(samples[0]))
    for offset, with_size, number in itertools.product((False, True), (False, True), numbers):
        for other in (None, *(n for n in numbers if n != number)):
            times = [1 if other is None else sizes[other] for sizes in samples]
            if any(value % factor for value, factor in zip(values, times, strict=True)):
                continue
            left = [value // factor for value, factor in zip(values, times, strict=True)]
            found = _fit_parts_of(number, left, samples, with_size, offset)
            if found is not None:
                return found if other is None else _times(found, other)
    return None


def _fit_parts_of(
    number: int, values: Sequence[int], samples: Sequence[Sizes], with_size: bool, offset: bool
) -> SizeExpression | None:
    """Fit parts · factor + size · factor + offset. The factors are those of least squares, if they are whole."""
    if len(samples) <= 2 + with_size:
        return None
    candidates = _whole_parts(number)
    parts = np.array([[candidate.at(sizes) for sizes in samples] for candidate in candidates])
    size, value = np.array([sizes[number] for sizes in samples]), np.array(values)
    p, s, v = parts - parts[:, :1], size - size[0], value - value[0]
    pp, ps, pv, ss, sv = (p * p).sum(1), (p * s).sum(1), (p * v).sum(1), (s * s).sum(), (s * v).sum()
    determinant = pp * ss - ps * ps if with_size else pp
    solvable = np.maximum(determinant, 1)
    factor = (pv * ss - sv * ps if with_size else pv) // solvable
    size_factor = (sv * pp - pv * ps) // solvable if with_size else np.zeros_like(factor)
    constant = value[0] - factor * parts[:, 0] - size_factor * size[0]
    is_right = (p * factor[:, None] + s * size_factor[:, None] == v).all(1) & (determinant > 0) & (factor != 0)
    is_right &= (size_factor != 0) == with_size
    for i in np.flatnonzero(is_right if offset else is_right & (constant == 0))[:1]:
        terms: list[tuple[int, Monomial]] = [(int(factor[i]), (candidates[i],))]
        if with_size:
            terms.append((int(size_factor[i]), (number,)))
        return SizeExpression(tuple(terms), int(constant[i]))
    return None


@functools.cache
def _whole_parts(number: int) -> list[WholeParts]:
    """Return the whole parts of a size, those that are rounded up or down first."""
    divisors = range(2, MAX_DIVISOR + 1)
    rounded = [WholeParts(number, offset, divisor) for divisor in divisors for offset in (divisor - 1, 0)]
    return rounded + [WholeParts(number, offset, divisor) for divisor in divisors for offset in range(1, divisor - 1)]


def _times(expression: SizeExpression, number: int) -> SizeExpression:
    terms = tuple((factor, (number, *monomial)) for factor, monomial in expression.terms)
    return SizeExpression((*terms, (expression.offset, (number,))) if expression.offset else terms, 0)


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
