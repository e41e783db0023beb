import { expect, test } from "vitest";
import { cropped, FILTERS, resize, type Filter } from "../../src/preprocess/resize.js";
import { Golden, type Place } from "../golden/golden.js";

interface Case {
  width: number;
  height: number;
  channels: number;
  data: Place<"uint8">;
  filter: Filter;
  new_width: number;
  new_height: number;
  resized: Place<"uint8">;
}

test("Pixels are those of Pillow, with all its filters, for smaller and larger images", () => {
  const golden = new Golden<Case>("preprocess/resizes.py");
  expect(new Set(golden.cases.map(({ filter }) => filter))).toEqual(new Set(FILTERS));
  for (const { width, height, channels, data, filter, ...target } of golden.cases) {
    const image = { data: golden.array(data), width, height, channels };
    const resized = resize(image, target.new_width, target.new_height, filter);
    const place = `${filter}, ${width} × ${height} × ${channels} → ${target.new_width} × ${target.new_height}`;
    expect(resized, place).toMatchObject({ width: target.new_width, height: target.new_height, channels });
    expect(resized.data, place).toEqual(golden.array(target.resized));
  }
});

test("An image of one colour keeps it, with all filters", () => {
  const image = { data: new Uint8Array(31 * 17 * 3).fill(77), width: 31, height: 17, channels: 3 };
  for (const filter of FILTERS) {
    expect(new Set(resize(image, 5, 40, filter).data)).toEqual(new Set([77]));
  }
});

test("A part of an image is its rows and columns", () => {
  const image = { data: Uint8Array.from({ length: 12 }, (_, i) => i), width: 4, height: 3, channels: 1 };
  expect([...cropped(image, 1, 1, 2, 2).data]).toEqual([5, 6, 9, 10]);
});
