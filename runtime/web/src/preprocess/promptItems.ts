/**
 * Pictures in a prompt: the text with a marker for each picture, and the pixels of all.
 *
 * A prompt is a text, ids, or an object with the names of the inputs: {input_ids: "… <image> …", pixel_values: [picture, …]}.
 * The pictures take the places of the markers in their order. Ids hold the placeholders of each picture already.
 */

import { numberArray, sizeOf, type NumberArray } from "../base/arrays.js";
import { InputError, ModelFileError, TformerError } from "../base/errors.js";
import type { Manifest, Placeholder, RequestInput } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";
import { isPicture, type ImageInput, type ImagePreprocessor } from "./images.js";
import { gridName, NO_GRID, type Grid } from "./tiles.js";
import { arrayOf, isMapping, type Input, type Mapping, type Value } from "./values.js";

/** The pixels of a picture's tiles. */
interface Tiles {
  readonly data: Float32Array;
  readonly count: number;
  readonly grid: Grid;
}

/** The input that holds the pictures of prompts. */
export class PromptItems {
  private readonly shape: readonly number[]; // of the pixels of a tile

  /**
   * images: from a picture to pixels; undefined in a file that takes pixels alone.
   * maxLength: tokens that the model holds.
   */
  constructor(
    readonly spec: RequestInput,
    private readonly placeholder: Placeholder,
    private readonly images: ImagePreprocessor | undefined,
    private readonly maxLength: number,
  ) {
    this.shape = spec.shape.slice(2).map(Number);
  }

  /** Return the input of a file that reads pictures. Throw ModelFileError if it is damaged. */
  static of(manifest: Manifest, images: ReadonlyMap<string, ImagePreprocessor>): PromptItems {
    const specs = manifest.encode?.inputs ?? [];
    const [[name, placeholder], ...others] = manifest.placeholders;
    const isFixed = specs.length === 1 && specs[0].shape.slice(2).every((size) => typeof size === "number");
    if (others.length || !isFixed || specs[0].name !== name || !manifest.decode) {
      throw new ModelFileError("the file's placeholders do not fit its inputs: export the model again");
    }
    return new PromptItems(specs[0], placeholder, images.get(name), manifest.maxLength);
  }

  /**
   * Return the text or the ids of an input, with the placeholders of its pictures, and the pixels.
   *
   * step: the name of the input for the text or the ids. Throw InputError for an impossible input.
   */
  read(input: Input, step: string): { prompt: Value; sources: Sources } {
    const { name } = this.spec;
    let prompt = input as Value;
    let pictures: unknown;
    if (isMapping(input)) {
      const given = Object.keys(input);
      if (!given.includes(step) || !given.every((one) => one === step || one === name)) {
        throw new InputError(
          `the model reads ${step} and, if there are pictures, ${name}, not ${given.join(", ") || "nothing"}`,
        );
      }
      const values = input as Mapping;
      [prompt, pictures] = [values[step], values[name]];
    }
    const values = this.listed(pictures);
    this.checkPositions(values.length, values.length); // before any picture is resized
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

  /** Throw InputError unless the ids hold the placeholders of the pictures. */
  check(ids: Int32Array, sources: Sources): void {
    const { tokenId, positions } = this.placeholder;
    const count = ids.reduce((sum, id) => sum + Number(id === tokenId), 0);
    const [pictures] = sources.get(this.spec.name)!.shape;
    if (count !== pictures * positions) {
      throw new InputError(
        `the ids hold ${count} placeholders (id ${tokenId}), and ${pictures} pictures need ${pictures * positions}, ` +
          `${positions} each`,
      );
    }
  }

  /** Throw InputError for pictures that the model does not hold. */
  private checkPositions(pictures: number, tiles: number): void {
    const positions = tiles * this.placeholder.positions;
    if (positions >= this.maxLength) {
      throw new InputError(
        `${pictures} pictures take ${positions} tokens and the model holds ${this.maxLength}: give fewer`,
      );
    }
  }

  private listed(pictures: unknown): readonly unknown[] {
    if (pictures === undefined || pictures === null) return [];
    if (Array.isArray(pictures)) return pictures;
    const array = isPicture(pictures) ? undefined : arrayOf(pictures);
    if (!array || array.shape.length !== this.shape.length + 1) {
      throw new InputError(`${this.spec.name} takes a list of pictures; a single picture is a list of one: [picture]`);
    }
    const [count, ...shape] = array.shape;
    const size = sizeOf(shape);
    return Array.from({ length: count }, (_, i) => numberArray(array.data.subarray(i * size, (i + 1) * size), shape));
  }

  /** Return a text with the placeholders of each picture in the place of its marker. */
  private expanded(text: string, grids: readonly Grid[]): string {
    const { marker } = this.placeholder;
    const parts = marker ? text.split(marker) : [text];
    if (parts.length - 1 !== grids.length) {
      throw new InputError(
        `the text names ${parts.length - 1} pictures (${marker}), and ${grids.length} are given: write ${marker} where ` +
          "each picture belongs, or use the chat template of the file",
      );
    }
    return parts[0] + grids.map((grid, i) => this.replacement(grid) + parts[i + 1]).join("");
  }

  /** Return the text that stands for a picture of a grid. */
  private replacement(grid: Grid): string {
    const { replacement, marker, positions, grids } = this.placeholder;
    if (gridName(grid) === gridName(NO_GRID)) return replacement;
    const between = grids.get(gridName(grid));
    if (!between) {
      throw new InputError(
        `a picture becomes ${grid[0]} × ${grid[1]} tiles, which the model does not read: change its shape`,
      );
    }
    return between.join(marker.repeat(positions));
  }

  /** Return the tiles of all pictures. Throw InputError with the number of a bad picture. */
  private tiles(pictures: readonly unknown[]): Tiles[] {
    let count = 0;
    return pictures.map((picture, i) => {
      try {
        const tiles = this.tilesOf(picture);
        count += tiles.count;
        this.checkPositions(pictures.length, count);
        return tiles;
      } catch (error) {
        if (!(error instanceof InputError) || pictures.length === 1) throw error;
        const Kind = error.constructor as new (reason: string) => TformerError;
        throw new Kind(`picture ${i + 1}: ${error.reason}`);
      }
    });
  }

  /** Return the tiles of a picture. Pixels of the caller are one tile. */
  private tilesOf(picture: unknown): Tiles {
    const { name } = this.spec;
    const shape = `(${this.shape.join(", ")})`;
    if (isPicture(picture)) {
      if (!this.images) {
        throw new InputError(`the file does not say how pictures become ${name}: give pixels ${shape}`);
      }
      const { pixels, grid } = this.images.tiles(picture as ImageInput);
      const [, ...size] = pixels.shape;
      if (size.join() !== this.shape.join()) {
        throw new InputError(`the picture becomes pixels (${size.join(", ")}) and the model reads ${shape}: resize it`);
      }
      return { data: Float32Array.from(pixels.data), count: pixels.shape[0], grid };
    }
    const array: NumberArray | undefined = arrayOf(picture);
    if (!array) throw new InputError(`${name} takes pictures or arrays of ${this.spec.dtype}`);
    const fits = array.shape.join() === this.shape.join() && array.data.every(Number.isFinite);
    if (!fits) {
      throw new InputError(`${name} takes finite numbers ${shape}, and this is (${array.shape.join(", ")})`);
    }
    return { data: Float32Array.from(array.data), count: 1, grid: NO_GRID };
  }
}
