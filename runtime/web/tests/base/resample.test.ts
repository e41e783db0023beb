import { expect, test } from "vitest";
import { resample } from "../../src/base/resample.js";
import { Golden, type Place } from "../golden/golden.js";

interface Case {
  rate: number;
  target: number;
  samples: Place<"float32">;
  resampled: Place<"float32">;
}

function rms(values: Float32Array): number {
  if (!values.length) return 0;
  return Math.sqrt(values.reduce((sum, value) => sum + value * value, 0) / values.length);
}

test("Noise at another rate is that of soxr", () => {
  const golden = new Golden<Case>("resampled_audio.py");
  for (const { rate, target, samples, resampled } of golden.cases) {
    const given = golden.array(samples);
    const expected = golden.array(resampled);
    const found = resample(given, rate, target);
    const place = `${given.length} samples, ${rate} → ${target} Hz`;
    expect(found.length, place).toBe(expected.length);
    const [larger, smaller] = [Math.max(rate, target), Math.min(rate, target)];
    const errors = expected.map((value, i) => value - found[i]);
    if ([2, 3, 4, 1.5, 4 / 3].includes(larger / smaller)) {
      // soxr adds up some 600 products in float32, each rounded by 2 ** -25 of its part.
      expect(rms(errors) / rms(given), place).toBeLessThan(1e-6);
    } else {
      const margin = Math.ceil(120 * Math.max(1, target / rate)); // more than half of the filter
      const inside = errors.subarray(margin, -margin);
      expect(rms(inside) / rms(given), place).toBeLessThan(4e-4);
      expect(rms(errors) / rms(given), place).toBeLessThan(0.06);
    }
  }
});

test("A tone keeps its amplitude and its phase, and one above the new limit is silenced", () => {
  const tone = (rate: number, hertz: number, length: number) =>
    Float32Array.from({ length }, (_, i) => Math.sin((2 * Math.PI * hertz * i) / rate));
  for (const rate of [48000, 44100, 22050, 44101]) {
    const found = resample(tone(rate, 3000, rate), rate, 16000).subarray(2000, 14000);
    const expected = tone(16000, 3000, 16000).subarray(2000, 14000);
    expect(rms(found.map((value, i) => value - expected[i]))).toBeLessThan(1e-5);
    const silenced = resample(tone(rate, 8200, rate), rate, 16000).subarray(2000, 14000);
    expect(rms(silenced)).toBeLessThan(2e-6); // 114 dB
  }
});
