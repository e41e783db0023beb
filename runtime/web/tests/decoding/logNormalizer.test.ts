import { expect, test } from "vitest";
import { logNormalizer } from "../../src/decoding/logNormalizer.js";
import { Golden, type Place } from "../golden/golden.js";

test("Normalizers are those of the Python runtime to the last bit, where numpy computes with AVX", () => {
  interface Case {
    rows: Place<"float32">;
    norms: Place<"float32">;
    exact: boolean;
  }
  const golden = new Golden<Case>("decoding/log_normalizers.py");
  let checked = 0;
  for (const { rows, norms, exact } of golden.cases) {
    const [count, size] = rows.shape;
    const logits = golden.array(rows);
    const found = Float32Array.from({ length: count }, (_, i) => logNormalizer(logits, i * size, (i + 1) * size));
    const expected = golden.array(norms);
    if (exact) {
      expect(found, `${size} logits`).toEqual(expected);
    } else {
      // Other exponentials differ by 3 units of their last bit at most, and the sum of 20 rounded sums by 20 half units.
      found.forEach((norm, i) =>
        expect(Math.abs(norm - expected[i])).toBeLessThan(2 ** -24 * (26 + 2 * Math.abs(norm))),
      );
    }
    checked += count;
  }
  expect(checked).toBeGreaterThan(400);
});

test("Logits that are no numbers have no normalizer", () => {
  for (const row of [[NaN, 1], [1, NaN, 2], [Infinity, 1], [-Infinity, -Infinity], []]) {
    expect(logNormalizer(Float32Array.from(row))).toBeNaN();
  }
});
