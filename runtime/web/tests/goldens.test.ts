/**
 * Golden files: the results of the Python runtime for seeded requests (docs/golden.md), for the models of this repository
 * in several precisions and for small files of all kinds of caches and tasks.
 */

import { describe, expect, test } from "vitest";
import { Model } from "../src/index.js";
import { differences } from "./support/goldenReplay.js";
import { bytesOf, pattern } from "./support/goldenValues.js";
import { goldenOf, modelPath } from "./support/models.js";

const MODELS = [
  "g2p",
  "g2p-int8",
  "g2p-extras",
  "g2p-web",
  "g2p-web-int8",
  "g2p-web-int4",
  "words",
  "words-int8",
  "words-web-int8",
  "languages",
  "languages-int8",
  "languages-web",
  "elnino",
  "elnino-int8",
  "elnino-web",
];
const TOYS = [
  "toy-scatter",
  "toy-stride",
  "toy-shared-context",
  "toy-carries",
  "toy-vector",
  "toy-states",
  "toy-spans",
  "toy-answers",
  "toy-masks",
  "toy-images",
  "toy-audio",
  "toy-series",
  "tiny-whisper",
  "tiny-llava",
  "tiny-smolvlm",
  "shortlist",
  "shortlist-int8",
];

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each([...MODELS, ...TOYS])("%s gives the results of its golden file", async (name) => {
    const model = await Model.load(modelPath(name), { device, threads: 1 });
    try {
      expect(await differences(model, goldenOf(name))).toEqual([]);
      expect(model.memory().usedBytes).toBe(0);
    } finally {
      await model.dispose();
    }
  });
});

test("a golden file of another model differs in all kinds of requests", async () => {
  const model = await Model.load(modelPath("toy-stride"), { device: "node" });
  const golden = goldenOf("toy-shared-context");
  const kinds = new Set((await differences(model, golden)).map((one) => one.split(" ")[0]));
  expect([...kinds].sort()).toEqual(["decode", "generation", "streams"]);
  await model.dispose();
});

test("patterns have the numbers that docs/golden.md defines", () => {
  // With whole numbers of any size, which JavaScript has as bigint.
  const expected = [0, 1, 2, 1000].map((i) => {
    const mask = 0xffffffffn;
    let h = ((BigInt(i) + 7n) * 0x9e3779b1n) & mask;
    h = ((h ^ (h >> 15n)) * 0x85ebca6bn) & mask;
    h ^= h >> 13n;
    return Math.fround(Number(h) / 2 ** 31 - 1);
  });
  const numbers = pattern(7, 1001);
  expect([0, 1, 2, 1000].map((i) => numbers[i])).toEqual(expected);
  expect([...bytesOf("AAH/")]).toEqual([0, 1, 255]);
});
