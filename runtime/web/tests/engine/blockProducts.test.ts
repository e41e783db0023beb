/** Products of quantised weights on each device, beside their values in float64: which of two devices is right. */

import { describe, expect, test } from "vitest";
import { Model, type NumberArray } from "../../src/index.js";
import { Golden, type Place } from "../golden/golden.js";

interface Case {
  name: string;
  /** Whether native kernels may round the activations to 8 bits: MatMulNBits at accuracy level 4. WebAssembly does not. */
  mayRound: boolean;
  /** The number of last runs whose activations differ in one bit. */
  pair: number;
  file: Place<"uint8">;
  /** exact: without this rounding; rounded: with it; python: of the Python runtime. */
  runs: { x: Place<"float32">; exact: Place<"float64">; rounded: Place<"float64">; python: Place<"float32"> }[];
}

const golden = new Golden<Case>("block_products.py");
const FLOAT_ERROR = 2e-6; // of the range of the products: that of sums in float32

/** Return the largest error over the range of the numbers. */
function error(found: ArrayLike<number>, expected: Float64Array): number {
  const [high, low] = [Math.max, Math.min].map((extreme) => expected.reduce((one, other) => extreme(one, other)));
  return expected.reduce((most, value, i) => Math.max(most, Math.abs(value - found[i])), 0) / (high - low);
}

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each(golden.cases)("$name", async ({ mayRound, pair, file, runs }) => {
    const model = await Model.load(golden.array(file), { device, threads: 1 });
    const products: Float64Array[] = [];
    for (const run of runs) {
      const { data } = (await model.predict({ data: golden.array(run.x), shape: run.x.shape })) as NumberArray;
      const [exact, rounded, python] = [golden.array(run.exact), golden.array(run.rounded), golden.array(run.python)];
      // Not every processor has kernels that round.
      const native = (numbers: ArrayLike<number>) => Math.min(error(numbers, exact), error(numbers, rounded));
      expect(native(python)).toBeLessThan(FLOAT_ERROR);
      expect(device === "wasm" ? error(data, exact) : native(data)).toBeLessThan(FLOAT_ERROR);
      if (mayRound) expect(error(Float64Array.from(rounded), exact)).toBeGreaterThan(1e-3); // far beyond the allowed error
      products.push(Float64Array.from(data));
    }
    // One bit of an activation, which sums in another order change, is 10⁻⁷ of it. Rounded, it is 1/127 of the largest.
    if (pair) expect(error(products[runs.length - 2], products[runs.length - 1])).toBeGreaterThan(2e-4);
    await model.dispose();
  });
});
