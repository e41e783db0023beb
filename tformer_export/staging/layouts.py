"""The layout of positions on an axis: merged with other axes, and with constant rows before and after them.

A model may put rows in front of its sequence: a row of zeros, learned registers, the keys of a learned prefix. An axis
of n + time rows then holds n rows that are the same for any tokens. The rows of a window keep them, so an operation
that drops or adds them commutes with restriction like any other. They are computed again in each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch

MAX_TRIED_FRONTS = 8  # of more constant rows, all are in front of the positions or all are after them


@dataclass(frozen=True)
class Layout:
    """An axis of size outer · (front + time + back) · stride.

    front, back: rows before and after those of the positions.
    stride: neighbouring entries that belong to one row.
    """

    front: int = 0
    back: int = 0
    stride: int = 1

    @property
    def is_padded(self) -> bool:
        return self.front + self.back > 0

    def rows(self, time: int) -> int:
        """Return the number of rows for a number of positions."""
        return self.front + time + self.back

    def restrict(self, tensor: torch.Tensor, axis: int, time: int, first: int, count: int) -> torch.Tensor:
        """Keep `count` positions from `first` on, and the rows before and after all positions.

        time: the number of positions of the tensor.
        """
        split = torch.unflatten(tensor, axis, (-1, self.rows(time), self.stride))
        kept = split.narrow(axis + 1, self.front + first, count)
        if self.is_padded:
            front = split.narrow(axis + 1, 0, self.front)
            back = split.narrow(axis + 1, self.front + time, self.back)
            kept = torch.cat([front, kept, back], axis + 1)
        return kept.flatten(axis, axis + 2)


PLAIN = Layout()


def possible_layouts(size: sympy.Expr, time: sympy.Symbol, entries: int, length: int) -> Iterator[Layout]:
    """Yield the layouts that an axis may have, those with small strides and rows in front first.

    entries: the size of the axis at `length` positions.
    """
    extra = _rows_besides(size, time)
    if extra is None or entries % (length + extra):
        return
    count = entries // (length + extra)
    fronts = range(extra, -1, -1) if extra <= MAX_TRIED_FRONTS else (extra, 0)
    for stride in range(1, count + 1):
        if count % stride == 0:
            yield from (Layout(front, extra - front, stride) for front in fronts)


def _rows_besides(size: sympy.Expr, time: sympy.Symbol) -> int | None:
    """Return n of an expression outer · stride · (time + n); None if n is not a number of 0 or more."""
    expanded = sympy.expand(size)
    factor = expanded.coeff(time, 1)
    rest = sympy.simplify(expanded - factor * time)
    if factor == 0 or time in rest.free_symbols:
        return 0  # not linear in time: only the sizes at hand can tell
    extra = sympy.simplify(rest / factor)
    return int(extra) if extra.is_Integer and extra >= 0 else None
