import { expect, test } from "vitest";
import { OptionError } from "../../src/base/errors.js";
import {
  fileDefaults,
  samples,
  settingsOf,
  usesBeams,
  widthOf,
  type GenerationOptions,
} from "../../src/decoding/options.js";

const NONE = new Map<string, unknown>();

test("the caller's options, then the file's defaults, then those of the table", () => {
  const defaults = new Map<string, unknown>([
    ["max_new_tokens", 48],
    ["suppress_tokens", [0]],
    ["num_beams", 4],
  ]);
  const settings = settingsOf({ maxNewTokens: 5 }, defaults);
  expect([settings.maxNewTokens, settings.numBeams, settings.lengthPenalty]).toEqual([5, 4, 1]);
  expect(settings.suppressTokens).toEqual([0]);
  expect([usesBeams(settings), samples(settings), widthOf(settings)]).toEqual([true, false, 4]);
  expect(settingsOf({ numBeams: undefined }, defaults).numBeams).toBe(4);
});

test("sampling of the caller removes beams of the file, and the other way round", () => {
  const beams = new Map<string, unknown>([
    ["num_beams", 4],
    ["num_return_sequences", 2],
    ["num_beam_groups", 2],
  ]);
  expect(samples(settingsOf({ topK: 3 }, beams))).toBe(true);
  expect(settingsOf({ topK: 3 }, beams).numReturnSequences).toBe(1);
  expect(usesBeams(settingsOf({ numBeams: 2 }, new Map([["temperature", 0.7]])))).toBe(true);
  expect(samples(settingsOf({ temperature: 0 }, new Map([["top_p", 0.7]])))).toBe(false);
});

test("values become those of the settings", () => {
  const settings = settingsOf(
    {
      stopStrings: "x",
      forcedPrefix: "",
      logitBias: { 7: 1, 3: -2 },
      badWordsIds: [Int32Array.of(1, 2) as unknown as number[]],
      temperature: 1,
      seed: 5,
    },
    NONE,
  );
  expect(settings.stopStrings).toEqual(["x"]);
  expect(settings.forcedPrefix).toEqual([]);
  expect(settings.logitBias).toEqual([
    [3, -2],
    [7, 1],
  ]);
  expect(settings.badWordsIds).toEqual([[1, 2]]);
  expect(settings.seed).toBe(5n);
  expect(settingsOf({ logitBias: new Map([[1, 2]]) }, NONE).logitBias).toEqual([[1, 2]]);
});

test("impossible options are refused by name", () => {
  const cases: [Record<string, unknown>, string][] = [
    [{ maxNewTokens: 0 }, "maxNewTokens must be a whole number of at least 1, not 0"],
    [{ maxNewTokens: 2.5 }, "not 2.5"],
    [{ maxNewTokens: 2 ** 40 }, "a whole number of at most 2,147,483,647"],
    [{ temperature: -1 }, "temperature must be 0, or a number of at least 1e-6, not -1"],
    [{ topP: 0 }, "topP must be more than 0 and at most 1"],
    [{ earlyStopping: "soon" }, 'earlyStopping must be true, false or "never"'],
    [{ stopStrings: [""] }, "stopStrings must be strings that are not empty"],
    [{ stopStrings: ["\ud800"] }, "stopStrings holds '\\ud800' (character 1), which is half of a character"],
    [{ suppressTokens: [-1] }, "suppressTokens must be a sequence of token ids"],
    [{ badWordsIds: [[]] }, "none of them empty"],
    [
      {
        logitBias: [
          [1, 2],
          [1, 3],
        ],
      },
      "each id once",
    ],
    [{ logitBias: { a: 1 } }, "a mapping from token ids to numbers"],
    [{ seed: -1, temperature: 1 }, "seed must be a whole number from 0"],
    [{ seed: 2 ** 60, temperature: 1 }, "a bigint beyond 2 ** 53"],
    [{ seed: 1 }, "seed: 1 changes nothing without sampling"],
    [{ logitsProcessor: 1 }, "logitsProcessor must be a function"],
    [{ numReturnSequences: 2 }, "needs a numBeams of at least 2, or sampling"],
    [{ minNewTokens: 3, maxNewTokens: 2 }, "minNewTokens: 3 is more than maxNewTokens: 2"],
    [{ numBeams: 4, numBeamGroups: 3 }, "must divide numBeams, which is 4"],
    [{ diversityPenalty: 1 }, "needs a numBeamGroups of at least 2"],
    [{ numBeams: 4, numReturnSequences: 4, patience: 0.5 }, "ends at 2 hypotheses"],
    [{ forcedBosTokenId: 3, suppressTokens: [3] }, "is one of the ids that suppressTokens forbids"],
    [{ temprature: 1 }, 'there is no option "temprature": did you mean temperature?'],
    [{ xyzzyxyzzyxyzzy: 1 }, "there are maxNewTokens, minNewTokens"],
    [{ grammar: "start: /a/" }, "grammar is an option that the JavaScript runtime does not have"],
    [{ draftModel: {} }, "results are the same without speculation"],
  ];
  for (const [options, sentence] of cases) {
    expect(() => settingsOf(options as GenerationOptions, NONE), sentence).toThrow(OptionError);
    expect(() => settingsOf(options as GenerationOptions, NONE)).toThrow(sentence);
  }
});

test("defaults that no file can have", () => {
  for (const [name, value] of [
    ["num_beam", 2],
    ["num_beams", "2"],
    ["prompt_lookup", true],
    ["logits_processor", () => []],
  ]) {
    expect(() => fileDefaults(new Map([[name as string, value]]))).toThrow("the model file's generation defaults: ");
  }
});
