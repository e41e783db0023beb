"""What stands for all rows of a tensor while a model is traced (`capture.row_iteration`)."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class Rows:
    """All rows of a tensor, as the only item of its iterator.

    is_taken: whether all rows were joined again, or read together, which is the only right use.
    is_misused: whether Python asked for a single row, such as for its value.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.is_taken, self.is_misused = tensor, False, False

    @property
    def tensor(self) -> torch.Tensor:
        self.is_taken = True
        return self._tensor

    def item(self) -> Rows:
        """Stand for the numbers of all rows: `tensor.tolist()` is a list with these rows as its only item."""
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.is_misused = True
        raise TypeError("these are all rows of a tensor, and code asks for one of them")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = _refuse
