import { expect, test } from "vitest";
import { logNormalizer } from "../../src/decoding/logNormalizer.js";
import { Golden, type Place } from "../golden/golden.js";

test("Normalizers are those of numpy in float64, and those of the Python runtime up to its roundings", () => {
  interface Case {
    rows: Place<"float32">;
    exact: Place<"float64">;
    norms: Place<"float32">;
  }
  const golden = new Golden<Case>("decoding/log_normalizers.py");
  let checked = 0;
  for (const { rows, ...expected } of golden.cases) {
    const [count, size] = rows.shape;
    const logits = golden.array(rows);
    const exact = golden.array(expected.exact);
    const norms = golden.array(expected.norms);
    for (let i = 0; i < count; i++) {
      const found = logNormalizer(logits, i * size, (i + 1) * size);
      // The result is rounded to float32 once, and powers have a relative error of 3e-12.
      expect(Math.abs(found - exact[i])).toBeLessThanOrEqual(2 ** -24 * Math.abs(exact[i]) + 4e-12);
      // In units of 2 ** -24, Python rounds the difference of a logit of weight p and the greatest by ln(1 / p), which is
      // ln n in the mean over the weights at most; a power of e by 3 last bits, 6; and on its way into the sum 34 times: in
      // one of 8 sums of 16 numbers, 15; these 8, 3; at most 9 halves, 9; and the rest, 7. The logarithm, ln n at most, has
      // an error of 4 last bits, 8. Both results are rounded.
      const units = 40 + 9 * Math.log(size) + 2 * Math.abs(exact[i]);
      expect(Math.abs(found - norms[i])).toBeLessThanOrEqual(2 ** -24 * units);
    }
    checked += count;
  }
  expect(checked).toBeGreaterThan(400);
});

test("Logits that are not numbers have no normalizer", () => {
  for (const row of [[NaN, 1], [1, NaN, 2], [Infinity, 1], [-Infinity, -Infinity], []]) {
    expect(logNormalizer(Float32Array.from(row))).toBeNaN();
  }
});
