import { expect, test } from "vitest";
import { isIdentity, planMoves } from "../../src/engine/rowMoves.js";

function moved(sources: number[]): number[] {
  const rows = Array.from({ length: 6 }, (_, i) => i);
  const { saved, copies } = planMoves(sources);
  const kept = new Map(saved.map((row) => [row, rows[row]]));
  for (const { target, source, fromSaved } of copies) rows[target] = fromSaved ? kept.get(source)! : rows[source];
  return rows.slice(0, sources.length);
}

test("rows move as if at once, each target is written once, and cycles need a saved row each", () => {
  for (const sources of [
    [0, 1, 2],
    [1, 0],
    [1, 2, 0],
    [0, 0, 0, 0],
    [3, 3, 1, 0],
    [1, 0, 3, 2, 5, 4],
    [5, 4, 3, 2, 1, 0],
    [2, 2, 1],
    [1, 2, 3, 4, 5, 5],
  ]) {
    expect(moved(sources), `${sources}`).toEqual(sources);
    expect(planMoves(sources).copies.length).toBe(sources.filter((source, i) => source !== i).length);
  }
  expect(planMoves([0, 0, 1, 2]).saved).toEqual([]);
  expect(planMoves([1, 0, 3, 2]).saved.length).toBe(2);
  expect([isIdentity([0, 1], 2), isIdentity([0, 1], 3), isIdentity([1, 0], 2)]).toEqual([true, false, false]);
});
