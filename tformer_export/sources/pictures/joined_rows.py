"""What stands for all rows of a tensor while a model is traced (`capture.row_iteration`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Rows:
    """All rows of a tensor, as the only item of its iterator."""

    tensor: torch.Tensor

    def item(self) -> Rows:
        """Stand for the numbers of all rows: `tensor.tolist()` is a list with these rows as its only item."""
        return self
