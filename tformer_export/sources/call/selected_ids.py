"""Selections of all ids of a row: `y[y != -1]`.

Code for training fills the labels of a batch up with -1, and forward selects the others, row by row. The ids of a file
are never negative, so the selection is the row itself. Its size, which would follow from data, is that of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SAME_IDS = {  # operations whose results have ids of their first operand alone
    torch.Tensor.__getitem__,
    torch.Tensor.__iter__,
    torch.Tensor.unbind,
    torch.unbind,
    torch.Tensor.select,
    torch.Tensor.squeeze,
    torch.Tensor.unsqueeze,
    torch.Tensor.long,
    torch.Tensor.int,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
}
_UNEQUAL = {torch.Tensor.__ne__, torch.Tensor.ne, torch.ne}
_AT_LEAST = {torch.Tensor.__ge__, torch.Tensor.ge, torch.ge}


class AllIdsSelected(TorchFunctionMode):
    """Within a `with` block, a row of ids that is indexed by `row != number`, a negative one, is the row itself.

    inputs: of forward. Those of whole numbers are ids.
    """

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.ids = [value for value in inputs if not value.is_floating_point() and value.dtype != torch.bool]
        self.masks: list[tuple[torch.Tensor, torch.Tensor]] = []  # (a mask that is true everywhere, its row)

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        row = next((known for known in self.ids if args and args[0] is known), None)
        if row is None:
            return function(*args, **(kwargs or {}))
        others = args[1:]
        if function is torch.Tensor.__getitem__ and any(others[0] is m and row is r for m, r in self.masks):
            return row
        result = function(*args, **(kwargs or {}))
        if function in _SAME_IDS:
            parts = [result] if isinstance(result, torch.Tensor) else list(result)
            self.ids += parts
            return iter(parts) if function is torch.Tensor.__iter__ else result
        if others and isinstance(others[0], int):
            number = others[0]
            if (function in _UNEQUAL and number < 0) or (function in _AT_LEAST and number <= 0):
                self.masks.append((result, row))
        return result
