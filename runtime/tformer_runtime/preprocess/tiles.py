"""Images that are cut into a grid of square tiles, which the image as a whole follows, resized to one tile.

The formulas are those of transformers, with their roundings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Grid = tuple[int, int]  # rows and columns; (0, 0) for an image that is one tile
NO_GRID: Grid = (0, 0)
MAX_EDGE = 4096  # of an image before it is cut, whatever its longest edge is to be


def rescaled_size(longest_edge: int, height: int, width: int) -> tuple[int, int]:
    """Return the size of an image whose longer edge is scaled to a number. The shorter edge is even."""
    ratio = width / height
    if width >= height:
        width, height = longest_edge, int(longest_edge / ratio)
        height += height % 2
    else:
        width, height = int(longest_edge * ratio), longest_edge
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        height, width = int(MAX_EDGE / ratio), MAX_EDGE
    elif height > width and height > MAX_EDGE:
        height, width = MAX_EDGE, int(MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles_size(tile: int, height: int, width: int) -> tuple[int, int]:
    """Return the size of an image whose edges are enlarged to multiples of a tile's."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


def grid_of(tile: int, height: int, width: int) -> Grid:
    """Return the grid of an image whose edges are multiples of a tile's."""
    return (height // tile, width // tile) if max(height, width) > tile else NO_GRID


def grid_name(grid: Grid) -> str:
    """Return the name of a grid in the manifest."""
    return f"{grid[0]}x{grid[1]}"


def reachable_grids(size: Mapping[str, int], tile: int) -> dict[Grid, tuple[int, int]]:
    """Return the grids of all images whose longer edge is scaled, each with the size of an image that has it."""
    edge = size["longest_edge"]
    grids: dict[Grid, tuple[int, int]] = {}
    for short in range(1, edge + 1):
        for height, width in ((short, edge), (edge, short)):
            scaled = rescaled_size(edge, height, width)
            grids.setdefault(grid_of(tile, *whole_tiles_size(tile, *scaled)), (height, width))
    return grids


def cut(image: Image, tile: int, resample: int) -> list[Image]:
    """Cut an image, whose edges are multiples of a tile's, into tiles row by row. The whole image follows them."""
    if grid_of(tile, image.height, image.width) == NO_GRID:
        return [image]
    corners = [(x, y) for y in range(0, image.height, tile) for x in range(0, image.width, tile)]
    return [*(image.crop((x, y, x + tile, y + tile)) for x, y in corners), image.resize((tile, tile), resample)]
