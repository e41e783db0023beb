/** Results of generating, compared with those of the Python runtime (`golden/plain_result.py`). */

import { expect } from "vitest";

import type { Result } from "../../src/index.js";

export interface PlainResult {
  text: string;
  ids: number[];
  score: number;
  alternatives: PlainResult[];
}

export function expectResult(found: Result, expected: PlainResult): void {
  expect(found.tokenIds).toEqual(expected.ids);
  expect(found.text).toBe(expected.text);
  expect(Math.abs(found.score - expected.score)).toBeLessThan(1e-4);
  expect(found.alternatives.length).toBe(expected.alternatives.length);
  found.alternatives.forEach((one, i) => expectResult(one, expected.alternatives[i]));
}
