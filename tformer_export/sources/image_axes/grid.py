"""A model that reads images as patches of a grid, and places them on it, called with images of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tformer_export.sources.image_axes.whole_batch import AllItemsKept


@dataclass(frozen=True)
class PatchGrid:
    """How an image of one size becomes patches.

    patch: the edge of a patch. merge: patches that become one position, along each edge. frames: times that the image
    is repeated in each patch. rows, columns: of patches. window: the edge of the windows of attention in positions, of
    which the image has whole ones; 0 for none.
    """

    patch: int
    merge: int
    frames: int
    rows: int
    columns: int
    window: int = 0

    @property
    def height(self) -> int:
        """The height of an image in pixels."""
        return self.rows * self.patch

    @property
    def width(self) -> int:
        """The width of an image in pixels."""
        return self.columns * self.patch

    @property
    def positions(self) -> int:
        """The positions of an image in the prompt."""
        return self.rows * self.columns // self.merge**2

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return (images, patches, channels · frames · patch²) of pixels (images, channels, height, width)."""
        blocks: Any = pixels
        blocks = blocks.unflatten(3, (self.columns // self.merge, self.merge, self.patch))
        blocks = blocks.unflatten(2, (self.rows // self.merge, self.merge, self.patch))
        blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)  # images, blocks, patches of a block, channels, patch
        blocks = blocks.flatten(1, 4).unsqueeze(3)
        patches: torch.Tensor = blocks.expand(-1, -1, -1, self.frames, -1, -1).flatten(2)
        return patches

    def pixels(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the pixels of patches: the inverse of `patches`, from the first of the frames."""
        blocks = self.rows // self.merge, self.columns // self.merge, self.merge, self.merge
        parts: Any = patches
        parts = parts.unflatten(2, (-1, self.frames, self.patch, self.patch))[:, :, :, 0].unflatten(1, blocks)
        pixels: torch.Tensor = parts.permute(0, 5, 1, 3, 6, 2, 4, 7).flatten(5, 7).flatten(2, 4)
        return pixels

    def places(self) -> torch.Tensor:
        """Return the row and the column of each patch of an image, (patches, 2), in the order of `patches`."""
        row, column = torch.meshgrid(torch.arange(self.rows), torch.arange(self.columns), indexing="ij")
        blocks = (self.rows // self.merge, self.merge, self.columns // self.merge, self.merge)
        return torch.stack([place.reshape(blocks).transpose(1, 2).flatten() for place in (row, column)], -1)

    def window_index(self) -> torch.Tensor:
        """Return the positions of an image in the order of its windows, (positions,)."""
        rows, columns = self.rows // self.merge, self.columns // self.merge
        blocks = (rows // self.window, self.window, columns // self.window, self.window)
        return torch.arange(rows * columns).reshape(blocks).transpose(1, 2).flatten()

    def position_ids(self, is_placeholder: torch.Tensor) -> torch.Tensor:
        """Return the positions in time, height and width, (3, batch, time). is_placeholder: (batch, time).

        The positions of an image begin where the text before it ends. The text behind it goes on at the greatest.
        """
        time = is_placeholder.shape[1]
        causal = torch.ones(time, time, dtype=torch.bool).tril()
        count = (is_placeholder.unsqueeze(1) & causal).sum(-1)
        rows, columns = self.rows // self.merge, self.columns // self.merge
        before = torch.where(is_placeholder, count - 1, count)  # placeholders before each position
        image = before.div(self.positions, rounding_mode="floor")
        within = before - image * self.positions
        start = torch.arange(time) - before + image * max(rows, columns)
        row, column = within.div(columns, rounding_mode="floor"), within % columns
        places = (torch.zeros_like(row), row, column)
        return torch.stack([torch.where(is_placeholder, start + place, start) for place in places])


class GridImagesModule(nn.Module):
    """Calls `module` with the embeddings of ids and images, and their positions.

    grid: of each image. token_id: of a placeholder.
    """

    def __init__(self, module: nn.Module, grid: PatchGrid, token_id: int) -> None:
        super().__init__()
        self.module, self.grid, self.token_id = module, grid, token_id

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor, **others: Any) -> Any:
        """Call the module. A request may have no images.

        pixel_values: (batch, images, channels, height, width). input_ids: (batch, time).
        """
        module: Any = self.module
        torch._check(pixel_values.shape[0] == input_ids.shape[0])  # type: ignore[no-untyped-call]
        is_placeholder = input_ids == self.token_id
        embeddings = module.get_input_embeddings()(input_ids)
        if pixel_values.shape[1] > 0:
            with AllItemsKept():
                rows = self._features(self.grid.patches(pixel_values.flatten(0, 1)))
            embeddings = embeddings.masked_scatter(is_placeholder.unsqueeze(-1), rows)
        positions = self.grid.position_ids(is_placeholder)
        return module(inputs_embeds=embeddings, position_ids=positions, **others)

    def _features(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the rows of all images, (images · positions, d). patches: (images, patches, numbers)."""
        module: Any = self.module
        count, each = patches.shape[:2]
        windows: dict[str, torch.Tensor] = {}
        if self.grid.window:
            index, size = self.grid.window_index(), self.grid.window**2 * self.grid.merge**2
            windows["window_index"] = (torch.arange(count).unsqueeze(1) * self.grid.positions + index).flatten()
            windows["cu_window_seqlens"] = torch.arange(count * (each // size) + 1, dtype=torch.int32) * size
        features = module.get_image_features(
            pixel_values=patches.flatten(0, 1),
            image_grid_thw=torch.tensor([[1, self.grid.rows, self.grid.columns]]).expand(count, -1),
            position_ids=self.grid.places().expand(count, -1, -1).flatten(0, 1),
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32) * each,
            **windows,
        ).pooler_output
        return torch.cat(list(features)) if isinstance(features, (list, tuple)) else features
