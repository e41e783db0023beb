/**
 * From a decoded image to pixels, as transformers' image processors compute them.
 *
 * resize (filters of Pillow) → center crop or tiles → x · scale → (x - mean) / std. Each step is optional. The image is
 * first converted to RGB or gray with Pillow's formulas. Decoding a file is the browser's work: `createImageBitmap`, which
 * rotates by the EXIF data, and `getImageData` of a canvas.
 */

import { InputError, ModelFileError } from "../base/errors.js";
import { IMAGE, type Preprocessing } from "../format/manifest.js";
import {
  boolean,
  integer,
  list,
  mapping,
  nullable,
  number,
  object,
  oneOf,
  readTyped,
  type Reader,
} from "../format/typedJson.js";
import { FILTERS, resize, type Raster } from "./resize.js";
import { cut, gridOf, MAX_EDGE, NO_GRID, rescaledSize, wholeTilesSize, type Grid, type Size } from "./tiles.js";

const SIZE_NAMES: readonly (readonly string[])[] = [
  // the sets of keys of a size
  ["height", "width"],
  ["shortest_edge"],
  ["longest_edge", "shortest_edge"],
  ["max_height", "max_width"],
  ["longest_edge"], // with tiles
];
const MAX_PIXELS = 61_000_000; // as in the Python runtime
const MAX_IMAGE_EDGE = 1 << 20;
const MAX_RESIZED_PIXELS = 1 << 25; // of an image before its crop. A long thin image grows by far with its shorter edge.
const MAX_MODEL_PIXELS = 1 << 24; // of the pixels of a model, which take 12 bytes each
const MAX_TILES = 1 << 14;
const MAX_TARGET_EDGE = 2 ** 14; // of a resized or cropped image
const DAMAGED = "the image settings of the file are damaged";

const edge = integer(1, MAX_TARGET_EDGE);

/**
 * size: the target of resizing, with keys of `SIZE_NAMES`; empty for none.
 * resample: the filter.
 * crop: height and width of the center crop, which pads smaller images with zeros; empty for none.
 * scale: the factor of values from 0 to 255; undefined for none.
 * mean, std: of each channel; empty for none.
 * channels: 3 (RGB) or 1 (gray).
 * tile: the edge of square tiles into which the resized image is made; 0 for none.
 * splits: whether an image is cut into tiles (`cut`). Otherwise it is resized to one.
 * onWhite: whether a transparent image is laid on white. Otherwise its colours are taken as they are.
 */
const imageSettings = object({
  size: mapping(edge),
  resample: oneOf(...FILTERS),
  crop: list(edge),
  scale: nullable(number),
  mean: list(number),
  std: list(number),
  channels: integer(1, 3),
  tile: integer(0, MAX_TARGET_EDGE),
  splits: boolean,
  onWhite: boolean,
});

/** How images become pixels. The fields are those of the manifest. */
export type ImageSettings = typeof imageSettings extends Reader<infer T> ? T : never;

/** A decoded image, such as ImageData: 1 (gray), 3 (RGB) or 4 (RGB and alpha) values from 0 to 255 for each pixel. */
export interface ImageInput {
  readonly data: Uint8Array | Uint8ClampedArray;
  readonly width: number;
  readonly height: number;
}

/** The pixels of an image, in row-major order: uint8 without scale and mean. */
export interface Pixels {
  readonly data: Float32Array | Uint8Array;
  readonly shape: readonly number[];
}

/** Makes the pixels of one input of a model. */
export class ImagePreprocessor {
  constructor(readonly settings: ImageSettings) {}

  /** Return the preprocessor of an entry of the manifest. Throw ModelFileError for a damaged entry. */
  static of(entry: Preprocessing): ImagePreprocessor {
    const settings = readTyped(imageSettings, Object.fromEntries(entry.numbers), DAMAGED);
    const problem = contradiction(settings);
    if (problem) throw new ModelFileError(`${DAMAGED} (${problem}): export the model again`);
    return new ImagePreprocessor(settings);
  }

  /** Height and width of the pixels; undefined if they depend on the image. */
  get shape(): Size | undefined {
    const { tile, crop, size } = this.settings;
    if (tile) return [tile, tile];
    if (crop.length) return [crop[0], crop[1]];
    return size.has("height") ? [size.get("height")!, size.get("width")!] : undefined;
  }

  /** Return the pixels of an image, (channels, height, width). Arguments and errors: see `tiles`. */
  pixels(image: ImageInput): Pixels {
    const { data, shape } = this.tiles(image).pixels;
    const [, ...rest] = shape;
    return { data: data.subarray(0, rest[0] * rest[1] * rest[2]), shape: rest };
  }

  /**
   * Return the pixels of an image's tiles, (tiles, channels, height, width), and its grid.
   *
   * An image without tiles is one. Throw InputError for an image that cannot be read. Cost: linear in the pixels.
   */
  tiles(image: ImageInput): { pixels: Pixels; grid: Grid } {
    const { tile, splits, resample } = this.settings;
    let raster = this.resized(converted(image, this.settings.channels, this.settings.onWhite));
    if (!tile) return { pixels: this.values([raster]), grid: NO_GRID };
    let parts = [raster];
    let grid = NO_GRID;
    if (splits) {
      raster = this.resizedTo(raster, wholeTilesSize(tile, raster.height, raster.width));
      parts = cut(raster, tile, resample);
      grid = gridOf(tile, raster.height, raster.width);
    }
    return { pixels: this.values(parts.map((part) => this.resizedTo(part, [tile, tile]))), grid };
  }

  private resized(raster: Raster): Raster {
    const { size, crop } = this.settings;
    if (size.size) return this.resizedTo(raster, targetSize(size, raster.height, raster.width));
    if (!crop.length && raster.width * raster.height > MAX_MODEL_PIXELS) {
      throw new InputError(
        `the image is ${raster.width} × ${raster.height} pixels, and the model reads at most ` +
          `${MAX_MODEL_PIXELS.toLocaleString("en-US")}: make it smaller`,
      );
    }
    return raster;
  }

  private resizedTo(raster: Raster, [height, width]: Size): Raster {
    const { crop, tile, resample } = this.settings;
    if (tile && raster.width === width && raster.height === height) return raster;
    if (Math.min(height, width) < 1 || height * width > (crop.length ? MAX_RESIZED_PIXELS : MAX_MODEL_PIXELS)) {
      throw new InputError(
        `the image is ${raster.width} × ${raster.height} pixels and would be resized to ${width} × ${height}: cut ` +
          "it to a shape that is less long",
      );
    }
    return resize(raster, width, height, resample);
  }

  /** Return the numbers of resized images of one size. */
  private values(rasters: readonly Raster[]): Pixels {
    const { crop, scale, mean, channels } = this.settings;
    const [height, width] = crop.length ? crop : [rasters[0].height, rasters[0].width];
    const shape = [rasters.length, channels, height, width];
    const area = height * width;
    const isRaw = scale === undefined && !mean.length;
    const data = new (isRaw ? Uint8Array : Float32Array)(rasters.length * channels * area);
    const tables = Array.from({ length: channels }, (_, channel) => this.table(channel));
    rasters.forEach((raster, number) => {
      // A smaller image is padded with zeros, and an odd one before it.
      const top = cropBegin(raster.height, height);
      const left = cropBegin(raster.width, width);
      for (let channel = 0; channel < channels; channel++) {
        const table = tables[channel];
        let at = (number * channels + channel) * area;
        for (let y = top; y < top + height; y++) {
          for (let x = left; x < left + width; x++) {
            const isInside = y >= 0 && y < raster.height && x >= 0 && x < raster.width;
            const value = isInside ? raster.data[(y * raster.width + x) * channels + channel] : 0;
            data[at++] = isRaw ? value : table[value];
          }
        }
      }
    });
    return { data, shape };
  }

  /** Return the number of the model for each value from 0 to 255 of a channel, rounded to float32 after each step. */
  private table(channel: number): Float32Array {
    const { scale, mean, std } = this.settings;
    const table = Float32Array.from({ length: 256 }, (_, value) => (scale === undefined ? value : value * scale));
    if (!mean.length) return table;
    const [center, width] = [Math.fround(mean[channel]), Math.fround(std[channel])];
    return table.map((value) => Math.fround(value - center) / width);
  }
}

/** Return the preprocessors of the inputs that read images, by name. Throw ModelFileError for a damaged entry. */
export function imageInputs(preprocessing: ReadonlyMap<string, Preprocessing>): Map<string, ImagePreprocessor> {
  const images = [...preprocessing].filter(([, entry]) => entry.kind === IMAGE);
  return new Map(images.map(([name, entry]) => [name, ImagePreprocessor.of(entry)]));
}

/** Return whether a value is a decoded image. */
export function isImage(value: unknown): value is ImageInput {
  if (typeof value !== "object" || value === null) return false;
  const { data, width, height } = value as Partial<Record<string, unknown>>;
  const isBytes = data instanceof Uint8Array || data instanceof Uint8ClampedArray;
  return isBytes && typeof width === "number" && typeof height === "number";
}

/**
 * Return the height and width after resizing, by the formulas of transformers with their roundings.
 *
 * https://github.com/huggingface/transformers, image_transforms.py, get_resize_output_image_size and
 * get_size_with_aspect_ratio; image_utils.py, get_image_size_for_max_height_width
 */
export function targetSize(size: ReadonlyMap<string, number>, height: number, width: number): Size {
  if (size.has("height")) return [size.get("height")!, size.get("width")!];
  if (size.has("max_height")) {
    const ratio = Math.min(size.get("max_height")! / height, size.get("max_width")! / width);
    return [Math.trunc(height * ratio), Math.trunc(width * ratio)];
  }
  if (!size.has("shortest_edge")) return rescaledSize(size.get("longest_edge")!, height, width);
  const [short, long] = [Math.min(height, width), Math.max(height, width)];
  let shortest = size.get("shortest_edge")!;
  let exact = shortest;
  const longest = size.get("longest_edge");
  if (longest !== undefined && (long / short) * shortest > longest) {
    exact = (longest * short) / long;
    shortest = roundedToEven(exact);
  }
  if (longest !== undefined && short === shortest) return [height, width];
  const other = Math.trunc((exact * long) / short);
  return height <= width ? [shortest, other] : [other, shortest];
}

/** Return the nearest whole number; of two that are equally near, the even one. */
function roundedToEven(value: number): number {
  const below = Math.floor(value);
  const isUp = value - below > 0.5 || (value - below === 0.5 && below % 2 === 1);
  return below + Number(isUp);
}

/** Return where a center crop begins; a negative number if it begins before the image. */
function cropBegin(size: number, target: number): number {
  return target > size ? -Math.floor((target - size + 1) / 2) : Math.floor((size - target) / 2);
}

/** Return pixels of RGB and alpha on white, by Pillow's formula with 7 bits more than a byte. */
function laidOnWhite(pixels: Uint8Array): Uint8Array<ArrayBuffer> {
  const result = new Uint8Array(pixels.length);
  for (let i = 0; i < pixels.length; i++) {
    const alpha = pixels[i | 3];
    const sum = 128 * (pixels[i] * alpha + 255 * (255 - alpha)) + 128 * 128;
    result[i] = (((sum >> 8) + sum) >> 8) >> 7;
  }
  return result;
}

/** Return the raster of an image, with 3 channels (RGB) or 1 (gray). Throw InputError for another value. */
function converted(image: ImageInput, channels: number, onWhite: boolean): Raster {
  if (!isImage(image)) {
    throw new InputError(
      "an image is decoded, such as ImageData: data (a Uint8Array), width and height. Decode a file with " +
        "createImageBitmap, and read the pixels of a canvas with getImageData",
    );
  }
  const { data, width, height } = image;
  if (!Number.isInteger(width) || !Number.isInteger(height) || Math.min(width, height) < 1) {
    throw new InputError(`the image has no pixels: its size is ${width} × ${height}`);
  }
  const pixels = width * height;
  if (pixels > MAX_PIXELS) {
    const limit = MAX_PIXELS.toLocaleString("en-US");
    throw new InputError(
      `the image is ${width} × ${height} pixels, and at most ${limit} are read: make it smaller first`,
    );
  }
  if (Math.max(width, height) > MAX_IMAGE_EDGE) {
    const limit = MAX_IMAGE_EDGE.toLocaleString("en-US");
    throw new InputError(
      `the image is ${width} × ${height} pixels, and an edge has at most ${limit} of them: cut the image`,
    );
  }
  const given = data.length / pixels;
  if (given !== 1 && given !== 3 && given !== 4) {
    throw new InputError(
      `an image has 1, 3 or 4 values for each pixel, and this one has ${data.length} for ${width} × ${height} pixels`,
    );
  }
  let bytes = new Uint8Array(data.buffer, data.byteOffset, data.length);
  if (onWhite && given === 4) bytes = laidOnWhite(bytes);
  if (given === channels) return { data: bytes, width, height, channels };
  const values = new Uint8Array(pixels * channels);
  for (let i = 0, from = 0; i < pixels; i++, from += given) {
    if (channels === 1) {
      values[i] = (bytes[from] * 19595 + bytes[from + 1] * 38470 + bytes[from + 2] * 7471 + 0x8000) >> 16;
    } else {
      values[i * 3] = bytes[from];
      values[i * 3 + 1] = bytes[given === 1 ? from : from + 1];
      values[i * 3 + 2] = bytes[given === 1 ? from : from + 2];
    }
  }
  return { data: values, width, height, channels };
}

/** Return what contradicts itself in the settings; undefined if nothing does. */
function contradiction({ size, crop, tile, channels, mean, std }: ImageSettings): string | undefined {
  const names = [...size.keys()].sort().join(", ");
  if (size.size && !SIZE_NAMES.some((known) => known.join(", ") === names)) {
    const known = SIZE_NAMES.map((some) => some.join(", ")).join("; ");
    return `a size has the names ${known}, not ${names}`;
  }
  if (crop.length !== 0 && crop.length !== 2) return "a crop has two numbers: height and width";
  if (tile && (crop.length || names !== "longest_edge")) {
    return "tiles follow a longest edge and are not cropped";
  }
  const areas = [(crop[0] ?? 0) * (crop[1] ?? 0), (size.get("height") ?? 0) * (size.get("width") ?? 0)];
  if (areas.some((area) => area > MAX_MODEL_PIXELS)) {
    return `the pixels of a model are at most ${MAX_MODEL_PIXELS.toLocaleString("en-US")}`;
  }
  if (tile && Math.floor(Math.min(size.get("longest_edge")!, MAX_EDGE) / tile) ** 2 > MAX_TILES) {
    return `an image has at most ${MAX_TILES.toLocaleString("en-US")} tiles`;
  }
  if (!tile && names === "longest_edge") return "a longest edge alone is for tiles";
  if (channels === 2) return "images have 3 channels or 1, not 2";
  if (mean.length !== std.length || (mean.length && mean.length !== channels) || std.includes(0)) {
    return `mean and std have a number for each of ${channels} channels, no std of them 0`;
  }
  return undefined;
}
