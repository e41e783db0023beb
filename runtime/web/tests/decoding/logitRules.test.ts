import { describe, expect, test } from "vitest";
import { forbiddenIds, makeRules, NO_IDS, readLengthAlone } from "../../src/decoding/logitRules.js";
import { settingsOf, type GenerationOptions } from "../../src/decoding/options.js";
import { camelCase } from "../../src/format/typedJson.js";
import { errorOf, Golden, type Place } from "../golden/golden.js";

const VOCABULARY = 24;
const NONE = { bosTokenIds: [], eosTokenIds: [], padTokenId: undefined };

function rulesOf(options: GenerationOptions, vocabulary = VOCABULARY, eosTokenIds: number[] = []) {
  return makeRules(settingsOf(options, new Map()), { ...NONE, eosTokenIds }, vocabulary);
}

/** Return the scores after the rules, of a row of some ids without a prompt. */
function changed(options: GenerationOptions, ids: number[], scores: number[], prompt = 0): number[] {
  const row = Float32Array.from(scores);
  for (const rule of rulesOf(options, scores.length)) rule.apply(Int32Array.from(ids), prompt, row);
  return [...row];
}

describe("With random options and rows", () => {
  interface Case {
    options: Record<string, unknown>;
    ends: number[];
    prompt: number;
    ids: number[];
    scores: Place<"float32">;
    changed: Place<"float32">;
    forbidden: number[] | null;
    length_alone: boolean;
    rules: string[];
  }
  const golden = new Golden<Case>("decoding/rules.py");

  test("scores, forbidden ids and the order of rules are those of the Python runtime", () => {
    const seen = new Set<string>();
    let forbidding = 0;
    for (const { options, ends, prompt, ids, ...expected } of golden.cases) {
      const camel = Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
      const rules = rulesOf(camel, VOCABULARY, ends);
      const row = Int32Array.from(ids);
      expect(rules.map((rule) => rule.constructor.name)).toEqual(expected.rules);
      expect(readLengthAlone(rules)).toBe(expected.length_alone);
      const forbidden = forbiddenIds(rules, row, prompt);
      expect(forbidden && [...forbidden]).toEqual(expected.forbidden ?? undefined);
      const scores = golden.array(expected.scores);
      for (const rule of rules) rule.apply(row, prompt, scores);
      expect(scores, JSON.stringify(options)).toEqual(golden.array(expected.changed));
      expected.rules.forEach((rule) => seen.add(rule));
      forbidding += Number(Boolean(forbidden?.length));
    }
    expect(seen.size).toBe(9);
    expect(forbidding).toBeGreaterThan(100);
  });
});

test("Without options there are no rules, and none forbids an id", () => {
  expect(rulesOf({})).toEqual([]);
  expect(forbiddenIds([], NO_IDS, 0)).toHaveLength(0);
});

test("An id beyond the vocabulary is refused with the name of its option", () => {
  for (const [options, name] of [
    [{ suppressTokens: [1, 24] }, "suppressTokens"],
    [{ beginSuppressTokens: [24] }, "beginSuppressTokens"],
    [{ badWordsIds: [[1], [2, 24]] }, "badWordsIds"],
    [{ logitBias: { 24: 1 } }, "logitBias"],
    [{ forcedBosTokenId: 24 }, "forcedBosTokenId"],
  ] as const) {
    const error = errorOf(() => rulesOf(options));
    expect(`${error}`).toBe(`OptionError: ${name} names the id 24, and the model's end at 23`);
    expect(error).toHaveProperty("option", name);
  }
});

describe("logitsProcessor", () => {
  test("gets copies of the ids and the logits, and its result replaces the logits", () => {
    const seen: unknown[] = [];
    const logitsProcessor = (ids: Int32Array, logits: Float32Array) => {
      seen.push([...ids], [...logits]);
      ids.fill(0);
      return logits.map((logit) => -logit);
    };
    const rules = rulesOf({ logitsProcessor }, 3);
    const [ids, row] = [Int32Array.of(5, 6), Float32Array.of(1, 2, 3)];
    rules[0].apply(ids, 1, row);
    expect(seen).toEqual([
      [5, 6],
      [1, 2, 3],
    ]);
    expect([...row]).toEqual([-1, -2, -3]);
    expect([...ids]).toEqual([5, 6]);
    expect(forbiddenIds(rules, ids, 1)).toBeUndefined();
  });

  test("sees the scores that the other rules have changed", () => {
    const logitsProcessor = (_: Int32Array, logits: Float32Array) => logits.map((x) => (x === -Infinity ? 9 : x));
    expect(changed({ logitsProcessor, suppressTokens: [1] }, [], [1, 2, 3])).toEqual([1, 9, 3]);
  });

  test("must return as many numbers as there are logits", () => {
    for (const [returned, message] of [
      [[1, 2], "logitsProcessor must return 3 logits, not 2 values"],
      [undefined, "logitsProcessor must return 3 logits, not undefined"],
      ["abc", 'logitsProcessor must return 3 logits, not "abc"'],
      [[1, NaN, 3], "logitsProcessor must return numbers, and it returned NaN for the id 1"],
      [[1, "2", 3], 'logitsProcessor must return numbers, and it returned "2" for the id 1'],
      [new BigInt64Array(3), "logitsProcessor must return numbers, and it returned 0 for the id 0"],
    ] as const) {
      const logitsProcessor = () => returned as unknown as number[];
      expect(errorOf(() => changed({ logitsProcessor }, [], [1, 2, 3])).message).toBe(message);
    }
  });

  test("ends with its own error", () => {
    const mine = new Error("mine");
    const logitsProcessor = () => {
      throw mine;
    };
    expect(errorOf(() => changed({ logitsProcessor }, [], [1]))).toBe(mine);
  });
});
