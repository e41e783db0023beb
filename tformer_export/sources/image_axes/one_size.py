"""A module that reads the images of all rows on one axis, called with an axis for the images of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tformer_export.sources.image_axes.whole_batch import AllItemsKept

PIXELS, IDS = "pixel_values", "input_ids"  # names in all models and processors of transformers


class ImagesModule(nn.Module):
    """Calls `module(input_ids, pixel_values=…)` with images (batch · images, channels, height, width).

    has_image_axis: whether `module` takes (batch, images, channels, height, width) itself.
    """

    def __init__(self, module: nn.Module, has_image_axis: bool) -> None:
        super().__init__()
        self.module, self.has_image_axis = module, has_image_axis

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor, **others: Any) -> Any:
        """Call the module. A request may have no images.

        pixel_values: (batch, images, channels, height, width). input_ids: (batch, time).
        """
        torch._check(pixel_values.shape[0] == input_ids.shape[0])  # type: ignore[no-untyped-call]
        if pixel_values.shape[1] == 0:
            return self.module(input_ids=input_ids, **others)
        pixels = pixel_values if self.has_image_axis else pixel_values.flatten(0, 1)
        with AllItemsKept():
            return self.module(input_ids=input_ids, pixel_values=pixels, **others)
