import { expect, test } from "vitest";
import { PowerSpectrum } from "../../src/base/fourier.js";
import { Golden, type Place } from "../golden/golden.js";

interface Case {
  values: Place<"float32">;
  window: Place<"float64">;
  power: Place<"float64">;
}

test("Spectra are those of numpy, for lengths with small and with great prime factors", () => {
  const golden = new Golden<Case>("spectra.py");
  for (const { values, window, power } of golden.cases) {
    const frames = golden.array(values);
    const length = frames.length / 2;
    const powers = [0, 1].map(() => new Float64Array(power.shape[1]));
    new PowerSpectrum(length).ofTwo(frames, 0, length, golden.array(window), powers[0], powers[1]);
    const expected = golden.array(power);
    // A sum of squares of `length` numbers, each with a few errors of 2 ** -53 for each factor 2 of the length.
    const tolerance = length * 8 * (1 + Math.log2(length)) * 2 ** -53 * 8;
    expected.forEach((value, i) => {
      const found = powers[i < power.shape[1] ? 0 : 1][i % power.shape[1]];
      if (!(Math.abs(found - value) <= tolerance)) expect(found, `length ${length}`).toBeCloseTo(value, 20);
    });
  }
});

test("A transform of a great prime length is right", () => {
  const length = 65_521; // the greatest prime that a file may have
  const values = new Float32Array(length);
  values[1] = 1;
  const powers = [0, 1].map(() => new Float64Array((length + 1) / 2));
  new PowerSpectrum(length).ofTwo(values, 0, 0, new Float64Array(length).fill(1), powers[0], powers[1]);
  expect(powers[0].every((power) => Math.abs(power - 1) < 1e-10)).toBe(true);
});
