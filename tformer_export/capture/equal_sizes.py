"""Sizes that two ways of counting give, and that are equal at every length.

A convolution of stride 2 without padding gives (n - 3) // 2 + 1 positions, and a slice `mask[:, 2::2]` of its padding
mask (n - 1) // 2. torch.export does not see that both are the same number. It would ask for an n at which they are
equal, and fix the length. Here the equation is decided for all n at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

LONGEST_PERIOD = 256  # lengths at which an equation is tried


@contextmanager
def equal_sizes_known() -> Iterator[None]:
    """Patch the method of torch that decides conditions on sizes without fixing one.

    The patch is process-wide: the caller holds TORCH_PATCH_LOCK.
    """
    shapes: Any = ShapeEnv
    original = shapes._maybe_evaluate_static

    @functools.wraps(original)  # with the functions of its cache
    def evaluate(self: Any, condition: Any, *args: Any, **options: Any) -> Any:
        decided = original(self, condition, *args, **options)
        if decided is None and isinstance(condition, (sympy.Eq, sympy.Ne)):
            condition = self.simplify(condition)
            if isinstance(condition, (sympy.Eq, sympy.Ne)) and len(condition.free_symbols) == 1:
                (size,) = condition.free_symbols
                least = self.var_to_range[size].lower if size in self.var_to_range else None
                if least is not None and least.is_finite and are_equal(condition.lhs, condition.rhs, size, int(least)):
                    return sympy.true if isinstance(condition, sympy.Eq) else sympy.false
        return decided

    shapes._maybe_evaluate_static = evaluate
    try:
        yield
    finally:
        shapes._maybe_evaluate_static = original


def are_equal(one: sympy.Expr, other: sympy.Expr, size: sympy.Symbol, least: int) -> bool:
    """Return whether two expressions of a whole number `size` are proven to be equal from `least` on.

    Both rise by a fixed amount in each period, so it is enough to compare them in one period, and their slopes.
    """
    forms = _slope_and_period(one, size), _slope_and_period(other, size)
    if forms[0] is None or forms[1] is None or forms[0][0] != forms[1][0]:
        return False
    period = math.lcm(forms[0][1], forms[1][1])
    difference = one - other
    return period <= LONGEST_PERIOD and all(difference.subs(size, least + i) == 0 for i in range(period))


def _slope_and_period(expression: sympy.Expr, size: sympy.Symbol) -> tuple[Fraction, int] | None:
    """Return (s, p) so that the value rises by s · p whenever `size` rises by p; None if there are none or unknown."""
    if expression.is_Rational:
        return Fraction(0), 1
    if expression == size:
        return Fraction(1), 1
    parts = [_slope_and_period(part, size) for part in expression.args]
    if not parts or any(part is None for part in parts):
        return None
    slopes = [part[0] for part in parts if part is not None]
    period = math.lcm(*(part[1] for part in parts if part is not None))
    if isinstance(expression, sympy.Add):
        return sum(slopes, Fraction(0)), period
    factors = [part for part in expression.args if part.is_Rational]
    if isinstance(expression, sympy.Mul) and len(factors) >= len(parts) - 1:
        return sum(slopes, Fraction(0)) * math.prod(Fraction(int(f.p), int(f.q)) for f in factors), period
    if isinstance(expression, (FloorDiv, Mod, PythonMod)) and expression.args[1].is_Integer and expression.args[1] > 0:
        divisor = int(expression.args[1])
        period *= (slopes[0] * period / divisor).denominator
        return (slopes[0] / divisor if isinstance(expression, FloorDiv) else Fraction(0)), period
    return None
