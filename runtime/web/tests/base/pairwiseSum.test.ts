import { expect, test } from "vitest";
import { pairwiseSum } from "../../src/base/pairwiseSum.js";
import { Golden, type Place } from "../golden/golden.js";

test("Sums are those of numpy to the last bit, at all lengths", () => {
  const golden = new Golden<{ values: Place<"float64">; sum: number }>("sums.py");
  for (const { values, sum } of golden.cases) {
    const row = golden.array(values);
    expect(pairwiseSum(row), `${row.length} values`).toBe(sum);
    const shifted = Float64Array.of(1e9, ...row.subarray(0, 5000), 1e9);
    expect(pairwiseSum(shifted, 1, shifted.length - 1)).toBe(pairwiseSum(row.subarray(0, 5000)));
  }
});
