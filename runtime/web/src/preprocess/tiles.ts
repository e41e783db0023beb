/**
 * Images that are cut into a grid of square tiles, which the image as a whole follows, resized to one tile.
 *
 * The formulas are those of transformers, with their roundings. A size is height and width.
 */

import { cropped, resize, type Filter, type Raster } from "./resize.js";

export type Grid = readonly [rows: number, columns: number]; // [0, 0] for an image that is one tile
export type Size = readonly [height: number, width: number];

export const NO_GRID: Grid = [0, 0];
export const MAX_EDGE = 4096; // of an image before it is cut, whatever its longest edge is to be

/** Return the size of an image whose longer edge is scaled to a number. The shorter edge is even. */
export function rescaledSize(longestEdge: number, height: number, width: number): Size {
  let ratio = width / height;
  if (width >= height) {
    width = longestEdge;
    height = Math.trunc(longestEdge / ratio);
    height += height % 2;
  } else {
    height = longestEdge;
    width = Math.trunc(longestEdge * ratio);
    width += width % 2;
  }
  height = Math.max(height, 1);
  width = Math.max(width, 1);
  ratio = width / height;
  if (width >= height && width > MAX_EDGE) {
    [height, width] = [Math.trunc(MAX_EDGE / ratio), MAX_EDGE];
  } else if (height > width && height > MAX_EDGE) {
    [height, width] = [MAX_EDGE, Math.trunc(MAX_EDGE * ratio)];
  }
  return [Math.max(height, 1), Math.max(width, 1)];
}

/** Return the size of an image whose edges are enlarged to multiples of a tile's. */
export function wholeTilesSize(tile: number, height: number, width: number): Size {
  const ratio = width / height;
  if (width >= height) {
    width = Math.ceil(width / tile) * tile;
    height = Math.ceil(Math.trunc(width / ratio) / tile) * tile;
  } else {
    height = Math.ceil(height / tile) * tile;
    width = Math.ceil(Math.trunc(height * ratio) / tile) * tile;
  }
  return [height, width];
}

/** Return the grid of an image whose edges are multiples of a tile's. */
export function gridOf(tile: number, height: number, width: number): Grid {
  return Math.max(height, width) > tile ? [Math.floor(height / tile), Math.floor(width / tile)] : NO_GRID;
}

/** Return the name of a grid in the manifest. */
export function gridName([rows, columns]: Grid): string {
  return `${rows}x${columns}`;
}

/** Cut an image, whose edges are multiples of a tile's, into tiles row by row. The whole image follows them. */
export function cut(image: Raster, tile: number, filter: Filter): Raster[] {
  const [rows, columns] = gridOf(tile, image.height, image.width);
  if (!rows && !columns) return [image];
  const tiles: Raster[] = [];
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) tiles.push(cropped(image, x * tile, y * tile, tile, tile));
  }
  return [...tiles, resize(image, tile, tile, filter)];
}
