import { expect, test } from "vitest";
import { placeRows } from "../../src/decoding/rowPlacement.js";

function check(parents: number[], requests?: number[]): number[] {
  const { places, order } = placeRows(Int32Array.from(parents), requests && Int32Array.from(requests));
  expect([...places].sort((one, other) => one - other)).toEqual(parents.map((_, i) => i));
  places.forEach((place, i) => expect(order[place]).toBe(parents[i]));
  return [...order];
}

test("a row takes the place of the row that it continues, if that is free", () => {
  expect(check([0, 1, 2])).toEqual([0, 1, 2]);
  expect(check([0, 2, 3])).toEqual([0, 3, 2]);
  expect(check([3, 1])).toEqual([3, 1]);
  expect(check([1, 1, 0])).toEqual([0, 1, 1]);
});

test("rows of one request are neighbours if all requests have as many", () => {
  const order = check([0, 2, 1, 3, 0, 3], [0, 1, 0, 1]);
  expect(order.map((row) => [0, 1, 0, 1][row])).toEqual([0, 0, 0, 1, 1, 1]);
  check([0, 1, 1], [0, 1]);
});
