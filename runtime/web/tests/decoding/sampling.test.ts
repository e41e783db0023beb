import { beforeAll, expect, test } from "vitest";
import { Sampler, seedOrRandom, warp } from "../../src/decoding/sampling.js";
import { errorOf, Golden, type Place } from "../golden/golden.js";

interface Case {
  seed: number;
  index: number;
  options: { temperature?: number; top_k?: number; top_p?: number; min_p?: number };
  logits: Place<"float32">;
  draws: number[];
  tokens: Place<"int32">;
  probabilities: Place<"float64">;
}

let golden: Golden<Case>;
beforeAll(() => {
  golden = new Golden<Case>("decoding/samples.py");
});

test("Draws are those of the Python runtime with the same seed", () => {
  expect(golden.cases.length).toBeGreaterThan(200);
  for (const { seed, index, options, logits, draws } of golden.cases) {
    const { temperature, top_k: topK, top_p: topP, min_p: minP } = options;
    const sampler = Sampler.fromSettings({ temperature, topK, topP, minP }, BigInt(seed), index, 2);
    const row = golden.array(logits);
    expect(
      draws.map(() => sampler.sample(row)),
      JSON.stringify(options),
    ).toEqual(draws);
  }
});

test("The tokens that can be drawn are those of the Python runtime, and their probabilities to the last bits", () => {
  for (const { options, logits, tokens, probabilities } of golden.cases) {
    const { temperature, top_k: topK, top_p: topP, min_p: minP } = options;
    const found = warp(golden.array(logits), temperature ?? 1, topK, topP, minP);
    expect(found.tokens, JSON.stringify(options)).toEqual(golden.array(tokens));
    const expected = golden.array(probabilities);
    // One unit for each of the two exponentials, for a sum whose terms have them too, and for a division; and half a unit
    // for each number that two sums add up in different orders.
    const units = 4 + expected.length;
    const errors = expected.map((value, i) => Math.abs(found.probabilities[i] - value) / (units * 2 ** -52 * value));
    expect(errors.filter((error) => error > 1)).toHaveLength(0);
  }
});

test("The likeliest token is drawn if no number of the generator can reach another", () => {
  const sampler = new Sampler(0, 0, 0, 1e-6);
  for (let i = 0; i < 50; i++) expect(sampler.sample(Float32Array.of(1, 3, 2))).toBe(1);
});

test("A row without a possible token is refused", () => {
  const error = errorOf(() => new Sampler(0, 0, 0).sample(new Float32Array(5).fill(-Infinity)));
  expect(`${error}`).toBe("OptionError: the options leave no token that may come next");
});

test("Without a seed each call has another, of 64 bits", () => {
  const seeds = new Set(Array.from({ length: 20 }, () => seedOrRandom({ seed: undefined })));
  expect(seeds.size).toBe(20);
  expect([...seeds].some((seed) => seed > 2n ** 53n)).toBe(true);
  expect(seedOrRandom({ seed: 5n })).toBe(5n);
});
