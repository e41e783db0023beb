import { describe, expect, test } from "vitest";
import type { Preprocessing } from "../../src/format/manifest.js";
import { imageInputs, ImagePreprocessor, isImage, targetSize } from "../../src/preprocess/images.js";
import { gridName } from "../../src/preprocess/tiles.js";
import { errorOf, Golden, type Place } from "../golden/golden.js";

const PLAIN = {
  size: {},
  resample: "bilinear",
  crop: [],
  scale: null,
  mean: [],
  std: [],
  channels: 3,
  tile: 0,
  splits: false,
  on_white: false,
};

function of(settings: object): ImagePreprocessor {
  return ImagePreprocessor.of({ kind: "image", numbers: new Map(Object.entries(settings)) });
}

function blank(width: number, height: number, channels = 3) {
  return { data: new Uint8Array(width * height * channels), width, height };
}

describe("With random settings of files", () => {
  interface Case {
    settings: Record<string, unknown>;
    width: number;
    height: number;
    data: Place<"uint8">;
    tiles: Place<"float32" | "uint8">;
    grid: number[];
    shape: number[] | null;
    sizes: number[][];
  }
  const golden = new Golden<Case>("preprocess/images.py");

  test("pixels, tiles and grids are those of the Python runtime, to the last bit", () => {
    expect(golden.cases.filter(({ grid }) => grid[0] > 1).length).toBeGreaterThan(10);
    for (const { settings, width, height, data, tiles, grid, shape } of golden.cases) {
      const images = of(settings);
      const image = { data: golden.array(data), width, height };
      const found = images.tiles(image);
      const place = `${width} × ${height}, ${JSON.stringify(settings)}`;
      expect(images.shape ?? null, place).toEqual(shape);
      expect(found.grid, place).toEqual(grid);
      expect(found.pixels.shape, place).toEqual(tiles.shape);
      expect(found.pixels.data, place).toEqual(golden.array(tiles));
      const first = images.pixels({ ...image, data: new Uint8ClampedArray(image.data) });
      expect(first.shape).toEqual(tiles.shape.slice(1));
      expect(first.data).toEqual(found.pixels.data.slice(0, first.data.length));
    }
  });

  test("target sizes are those of the Python runtime for images of all shapes", () => {
    let checked = 0;
    for (const { settings, sizes } of golden.cases) {
      const size = new Map(Object.entries(settings["size"] as Record<string, number>));
      for (const [height, width, newHeight, newWidth] of sizes) {
        expect(targetSize(size, height, width)).toEqual([newHeight, newWidth]);
        checked++;
      }
    }
    expect(checked).toBeGreaterThan(3000);
  });
});

test("A half is rounded to the even number, as Python's round does", () => {
  const size = new Map([
    ["shortest_edge", 100],
    ["longest_edge", 25],
  ]);
  expect(targetSize(size, 10, 100)).toEqual([2, 25]); // 25 · 10 / 100 = 2.5
  expect(targetSize(size, 30, 500)).toEqual([2, 25]); // 1.5
});

test("Alpha is dropped", () => {
  const data = Uint8Array.of(1, 2, 3, 0, 4, 5, 6, 255);
  expect([...of(PLAIN).pixels({ data, width: 2, height: 1 }).data]).toEqual([1, 4, 2, 5, 3, 6]);
});

test("Transparent pixels are laid on white if the file says so", () => {
  const data = Uint8Array.of(1, 2, 3, 0, 4, 5, 6, 255);
  const { data: numbers } = of({ ...PLAIN, on_white: true }).pixels({ data, width: 2, height: 1 });
  expect([...numbers]).toEqual([255, 4, 255, 5, 255, 6]);
});

test("A value that is not an image is refused with what to do", () => {
  for (const [image, message] of [
    ["cat.png", /^an image is decoded, such as ImageData.*createImageBitmap/],
    [{ data: [1, 2, 3], width: 1, height: 1 }, /^an image is decoded/],
    [null, /^an image is decoded/],
    [blank(0, 3), /^the image has no pixels: its size is 0 × 3$/],
    [{ ...blank(2, 2), width: 1.5 }, /^the image has no pixels/],
    [blank(2, 2, 2), /^an image has 1, 3 or 4 values for each pixel, and this one has 8 for 2 × 2 pixels$/],
    [{ data: new Uint8Array(0), width: 1e5, height: 1e5 }, /at most 61,000,000 are read: make it smaller first$/],
    [{ data: new Uint8Array(0), width: 2 ** 21, height: 1 }, /an edge has at most 1,048,576 of them: cut the image$/],
  ] as const) {
    const error = errorOf(() => of(PLAIN).pixels(image as never));
    expect(error.name).toBe("InputError");
    expect(error.message).toMatch(message);
  }
  expect(isImage(blank(1, 1))).toBe(true);
  expect([isImage("x"), isImage([1]), isImage(undefined)]).toEqual([false, false, false]);
});

test("An image that would become too large or too thin is refused", () => {
  const message = /would be resized to \d+ × \d+: cut it to a shape that is less long$/;
  expect(errorOf(() => of({ ...PLAIN, size: { shortest_edge: 8000 } }).pixels(blank(90, 10))).message).toMatch(message);
  const thin = { ...PLAIN, size: { max_height: 9, max_width: 9 } };
  expect(errorOf(() => of(thin).pixels(blank(90, 1))).message).toMatch(message);
  expect(errorOf(() => of(PLAIN).pixels(blank(4097, 4096))).message).toMatch(/the model reads at most 16,777,216/);
});

test("Damaged settings are refused with what is damaged", () => {
  for (const [change, reason] of [
    [{ size: { width: 3 } }, "a size has the names"],
    [{ size: { height: 0, width: 3 } }, "expected a whole number from 1 to 16384"],
    [{ crop: [3] }, "a crop has two numbers"],
    [{ crop: [16384, 16384] }, "the pixels of a model are at most 16,777,216"],
    [{ resample: "sharp" }, "expected one of nearest, lanczos"],
    [{ channels: 2 }, "images have 3 channels or 1"],
    [{ mean: [1], std: [1] }, "a number for each of 3 channels"],
    [{ mean: [1, 1, 1], std: [1, 0, 1] }, "no std of them 0"],
    [{ tile: 4, size: { longest_edge: 4000 } }, "at most 16,384 tiles"],
    [{ tile: 4 }, "tiles follow a longest edge"],
    [{ size: { longest_edge: 4 } }, "a longest edge alone is for tiles"],
    [{ splits: 1 }, "expected true or false"],
    [{ blur: 1 }, "unknown field `blur`"],
  ] as const) {
    const error = errorOf(() => of({ ...PLAIN, ...change }));
    expect(error.name).toBe("ModelFileError");
    expect(error.message).toContain(`the image settings of the file are damaged (`);
    expect(error.message).toContain(reason);
    expect(error.message).toMatch(/export the model again$/);
  }
  const missing = errorOf(() => of({ ...PLAIN, scale: undefined, tile: undefined }));
  expect(missing.message).toMatch(/damaged/);
});

test("The inputs that read images are found by their kind", () => {
  const entry: Preprocessing = { kind: "image", numbers: new Map(Object.entries(PLAIN)) };
  const inputs = imageInputs(
    new Map([
      ["pixel_values", entry],
      ["other", { kind: "series", numbers: new Map() }],
    ]),
  );
  expect([...inputs.keys()]).toEqual(["pixel_values"]);
  expect(inputs.get("pixel_values")!.shape).toBeUndefined();
});

test("Grids have the names of the manifest", () => {
  expect(gridName([2, 3])).toBe("2x3");
});
