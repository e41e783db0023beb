/**
 * Images in a prompt: the text with a marker for each image, and the pixels of all.
 *
 * A prompt is a text, ids, or an object with the names of the inputs: {input_ids: "… <image> …", pixel_values: [image, …]}.
 * The images take the places of the markers in their order. Ids hold the placeholders of each image already.
 */

import { numberArray, sizeOf, type NumberArray } from "../base/arrays.js";
import { InputError, ModelFileError, TformerError } from "../base/errors.js";
import type { Manifest, Placeholder, RequestInput } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";
import { isImage, type ImageInput, type ImagePreprocessor } from "./images.js";
import { gridName, NO_GRID, type Grid } from "./tiles.js";
import { arrayOf, isMapping, type Input, type Mapping, type Value } from "./values.js";

/** The pixels of an image's tiles. */
interface Tiles {
  readonly data: Float32Array;
  readonly count: number;
  readonly grid: Grid;
}

/** The input that holds the images of prompts. */
export class PromptItems {
  private readonly shape: readonly number[]; // of the pixels of a tile

  /**
   * preprocessor: from an image to pixels; undefined in a file that takes pixels alone.
   * maxLength: tokens that the model holds.
   */
  constructor(
    readonly spec: RequestInput,
    private readonly placeholder: Placeholder,
    private readonly preprocessor: ImagePreprocessor | undefined,
    private readonly maxLength: number,
  ) {
    this.shape = spec.shape.slice(2).map(Number);
  }

  /** Return the input of a file that reads images. Throw ModelFileError if it is damaged. */
  static of(manifest: Manifest, preprocessors: ReadonlyMap<string, ImagePreprocessor>): PromptItems {
    const specs = manifest.encode?.inputs ?? [];
    const [[name, placeholder], ...others] = manifest.placeholders;
    const isFixed = specs.length === 1 && specs[0].shape.slice(2).every((size) => typeof size === "number");
    if (others.length || !isFixed || specs[0].name !== name || !manifest.decode) {
      throw new ModelFileError("the file's placeholders do not fit its inputs: export the model again");
    }
    return new PromptItems(specs[0], placeholder, preprocessors.get(name), manifest.maxLength);
  }

  /**
   * Return the text or the ids of an input, with the placeholders of its images, and the pixels.
   *
   * step: the name of the input for the text or the ids. Throw InputError for an impossible input.
   */
  read(input: Input, step: string): { prompt: Value; sources: Sources } {
    const { name } = this.spec;
    let prompt = input as Value;
    let images: unknown;
    if (isMapping(input)) {
      const given = Object.keys(input);
      if (!given.includes(step) || !given.every((one) => one === step || one === name)) {
        throw new InputError(
          `the model reads ${step} and, if there are images, ${name}, not ${given.join(", ") || "nothing"}`,
        );
      }
      const values = input as Mapping;
      [prompt, images] = [values[step], values[name]];
    }
    const values = this.listed(images);
    this.checkPositions(values.length, values.length); // before any image is resized
    const tiles = this.tiles(values);
    if (typeof prompt === "string") {
      prompt = this.expanded(
        prompt,
        tiles.map(({ grid }) => grid),
      );
    }
    const count = tiles.reduce((sum, one) => sum + one.count, 0);
    const data = new Float32Array(count * sizeOf(this.shape));
    let place = 0;
    for (const one of tiles) {
      data.set(one.data, place);
      place += one.data.length;
    }
    return { prompt, sources: new Map([[name, numberArray(data, [count, ...this.shape])]]) };
  }

  /** Throw InputError unless the ids hold the placeholders of the images. */
  check(ids: Int32Array, sources: Sources): void {
    const { tokenId, positions } = this.placeholder;
    const count = ids.reduce((sum, id) => sum + Number(id === tokenId), 0);
    const [images] = sources.get(this.spec.name)!.shape;
    if (count !== images * positions) {
      throw new InputError(
        `the ids hold ${count} placeholders (id ${tokenId}), and ${images} images need ${images * positions}, ` +
          `${positions} each`,
      );
    }
  }

  /** Throw InputError for images that the model does not hold. */
  private checkPositions(images: number, tiles: number): void {
    const positions = tiles * this.placeholder.positions;
    if (positions >= this.maxLength) {
      throw new InputError(
        `${images} images take ${positions} tokens and the model holds ${this.maxLength}: give fewer`,
      );
    }
  }

  private listed(images: unknown): readonly unknown[] {
    if (images === undefined || images === null) return [];
    if (Array.isArray(images)) return images;
    const array = isImage(images) ? undefined : arrayOf(images);
    if (!array || array.shape.length !== this.shape.length + 1) {
      throw new InputError(`${this.spec.name} takes a list of images; a single image is a list of one: [image]`);
    }
    const [count, ...shape] = array.shape;
    const size = sizeOf(shape);
    return Array.from({ length: count }, (_, i) => numberArray(array.data.subarray(i * size, (i + 1) * size), shape));
  }

  /** Return a text with the placeholders of each image in the place of its marker. */
  private expanded(text: string, grids: readonly Grid[]): string {
    const { marker } = this.placeholder;
    const parts = marker ? text.split(marker) : [text];
    if (parts.length - 1 !== grids.length) {
      throw new InputError(
        `the text names ${parts.length - 1} images (${marker}), and ${grids.length} are given: write ${marker} where ` +
          "each image belongs, or use the chat template of the file",
      );
    }
    return parts[0] + grids.map((grid, i) => this.replacement(grid) + parts[i + 1]).join("");
  }

  /** Return the text that stands for an image of a grid. */
  private replacement(grid: Grid): string {
    const { replacement, marker, positions, grids } = this.placeholder;
    if (gridName(grid) === gridName(NO_GRID)) return replacement;
    const between = grids.get(gridName(grid));
    if (!between) {
      throw new InputError(
        `an image becomes ${grid[0]} × ${grid[1]} tiles, which the model does not read: change its shape`,
      );
    }
    return between.join(marker.repeat(positions));
  }

  /** Return the tiles of all images. Throw InputError with the number of a bad image. */
  private tiles(images: readonly unknown[]): Tiles[] {
    let count = 0;
    return images.map((image, i) => {
      try {
        const tiles = this.tilesOf(image);
        count += tiles.count;
        this.checkPositions(images.length, count);
        return tiles;
      } catch (error) {
        if (!(error instanceof InputError) || images.length === 1) throw error;
        const Kind = error.constructor as new (reason: string) => TformerError;
        throw new Kind(`image ${i + 1}: ${error.reason}`);
      }
    });
  }

  /** Return the tiles of an image. Pixels of the caller are one tile. */
  private tilesOf(image: unknown): Tiles {
    const { name } = this.spec;
    const shape = `(${this.shape.join(", ")})`;
    if (isImage(image)) {
      if (!this.preprocessor) {
        throw new InputError(`the file does not say how images become ${name}: give pixels ${shape}`);
      }
      const { pixels, grid } = this.preprocessor.tiles(image as ImageInput);
      const [, ...size] = pixels.shape;
      if (size.join() !== this.shape.join()) {
        throw new InputError(`the image becomes pixels (${size.join(", ")}) and the model reads ${shape}: resize it`);
      }
      return { data: Float32Array.from(pixels.data), count: pixels.shape[0], grid };
    }
    const array: NumberArray | undefined = arrayOf(image);
    if (!array) throw new InputError(`${name} takes images or arrays of ${this.spec.dtype}`);
    const fits = array.shape.join() === this.shape.join() && array.data.every(Number.isFinite);
    if (!fits) {
      throw new InputError(`${name} takes finite numbers ${shape}, and this is (${array.shape.join(", ")})`);
    }
    return { data: Float32Array.from(array.data), count: 1, grid: NO_GRID };
  }
}
