import { expect, test } from "vitest";
import { RandomGenerator } from "../../src/decoding/randomGenerator.js";
import { Golden, type Place } from "../golden/golden.js";

interface Draws {
  seed: string[];
  draws: Place<"float64">;
}

test("Draws are those of numpy, bit for bit, for small and large seeds", () => {
  const golden = new Golden<Draws>("decoding/random_numbers.py");
  expect(golden.cases.length).toBeGreaterThan(300);
  for (const { seed, draws } of golden.cases) {
    const generator = new RandomGenerator(seed.map(BigInt));
    const expected = golden.array(draws);
    expect(
      Float64Array.from(expected, () => generator.random()),
      `seed ${seed}`,
    ).toEqual(expected);
  }
});

test("A seed of numbers is that of bigints", () => {
  const [numbers, bigints] = [new RandomGenerator([7, 2 ** 40, 3]), new RandomGenerator([7n, 2n ** 40n, 3n])];
  expect(numbers.random()).toBe(bigints.random());
});
