import { afterAll, describe, expect, test } from "vitest";
import { camelCase } from "../../src/format/typedJson.js";
import { AbortedError, InputError, Model, ModelFileError, type Transcription } from "../../src/index.js";
import { DecoderPrompt, splitSegments, timestampRules, type PromptSettings } from "../../src/tasks/decoderPrompt.js";
import { SpeechToText } from "../../src/tasks/speechToText.js";
import { errorOf, Golden, type Place } from "../golden/golden.js";
import { modelPath } from "../support/models.js";

interface Expected {
  text: string;
  ids: number[];
  score: number;
  segments: [string, number, number][];
  language: string | null;
}

type Options = Record<string, unknown>;
type Case =
  | { kind: "model"; recordings: Place<"float32">[]; runs: [Options, Expected[]][]; refused: [Options, string][] }
  | {
      kind: "rules";
      noTimestamps: number;
      latest: number;
      endId: number;
      cases: [number[], Place<"float32">, Place<"float32">][];
    }
  | { kind: "segments"; cases: [number[], number, number | null, [number[], number, number][], number][] }
  | { kind: "prompts"; cases: [Options, string | null, string | null, boolean, (number | null)[]][] };

const golden = new Golden<Case>("transcriptions.py");

function ofKind<K extends Case["kind"]>(kind: K): Extract<Case, { kind: K }> {
  return golden.cases.find((one): one is Extract<Case, { kind: K }> => one.kind === kind)!;
}

const { recordings: places, runs, refused } = ofKind("model");
const recordings = places.map((place) => golden.array(place));
const [, , , long] = recordings;

const SETTINGS: PromptSettings = {
  languages: new Map(),
  tasks: new Map(),
  language: undefined,
  task: undefined,
  forced: [],
  multilingual: true,
  noTimestamps: undefined,
  timestamps: false,
  latest: undefined,
  step: 0.02,
  stride: 2,
  maxNewTokens: undefined,
};

function inCamelCase(options: Options): Options {
  return Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
}

function compare(found: Transcription, expected: Expected): void {
  expect(found.text).toBe(expected.text);
  expect(found.tokenIds).toEqual(expected.ids);
  expect(found.language ?? null).toBe(expected.language);
  expect(found.segments.map(({ text, start, end }) => [text, start, end])).toEqual(expected.segments);
  expect(Math.abs(found.score - expected.score)).toBeLessThan(1e-4 * Math.max(1, Math.abs(expected.score)));
}

async function all<T>(values: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const value of values) list.push(value);
  return list;
}

describe.each(["node", "wasm"])("on %s", (device) => {
  const loading = Model.load(modelPath("tiny-whisper"), { device, threads: 1 });
  afterAll(async () => (await loading).dispose());

  test.each(runs)("tokens, times and texts are those of the Python runtime: %j", async (options, expected) => {
    const model = await loading;
    const settings = inCamelCase(options);
    const together = (await all(model.predictBatch(recordings, { ...settings, batchSize: 4 }))) as Transcription[];
    expect(together.length).toBe(expected.length);
    together.forEach((result, i) => compare(result, expected[i]));
    compare(await model.transcribe(recordings[3], settings), expected[3]);
    const few = await all(model.transcribeBatch(recordings.slice(0, 3), settings));
    expect(few.length).toBe(3);
    few.forEach((result, i) => compare(result, expected[i]));
    compare(
      (await model.predict({ samples: recordings[0], samplingRate: 16000 }, settings)) as Transcription,
      expected[0],
    );
    expect(model.memory().usedBytes).toBe(0);
  });

  test("wrong calls are refused in one sentence", async () => {
    const model = await loading;
    for (const [options, message] of refused) {
      await expect(model.transcribe(recordings[0], options)).rejects.toThrow(message.replaceAll("'", '"'));
    }
    const calls: [Promise<unknown>, string][] = [
      [model.transcribe(recordings[0], { timestamps: "word" }), 'timestamps must be true or false, not "word"'],
      [model.transcribe(recordings[0], { chunkLengthS: 3 }), "transcribes speech: it takes no chunkLengthS"],
      [model.transcribe(recordings[0], { language: 3 }), "language must be a text, not 3"],
      [model.transcribe(long, { timestamps: false }), "longer than 1 s, so that it is read in windows"],
      [model.predict(recordings[0], { truncate: true }), "truncate is not for a model that transcribes speech"],
      [model.generate("a"), "transcribes speech: it cannot generate; call transcribe()"],
      [model.classify(["a"]), "transcribes speech: it cannot classify; call transcribe()"],
      [model.transcribe("a.wav" as never), "a recording is samples"],
    ];
    for (const [call, message] of calls) await expect(call).rejects.toThrow(message);
  });

  test("an error of one recording has its number, and comes after the results before it", async () => {
    const model = await loading;
    const found: unknown[] = [];
    const broken = [recordings[0], recordings[1], new Float32Array(0), recordings[2]];
    const reading = (async () => {
      for await (const result of model.predictBatch(broken, { batchSize: 1 })) found.push(result);
    })();
    const error = await reading.catch((thrown: unknown) => thrown);
    expect(error).toBeInstanceOf(InputError);
    expect((error as InputError).message).toBe("input 3: the recording is empty");
    expect(found.length).toBe(2);
  });

  test("a signal ends a transcription between two steps", async () => {
    const model = await loading;
    const controller = new AbortController();
    const call = model.transcribe(long, { signal: controller.signal });
    setTimeout(() => controller.abort());
    await expect(call).rejects.toThrow(AbortedError);
    expect(model.memory().usedBytes).toBe(0);
  });
});

test("damaged settings of a file are refused", async () => {
  const model = await Model.load(modelPath("tiny-whisper"), { device: "node", threads: 1 });
  const { manifest } = model;
  const changed = (name: string, value: unknown) => {
    const settings = new Map([...manifest.outputMeaning.settings, [name, value]]);
    return { ...manifest, outputMeaning: { ...manifest.outputMeaning, settings } };
  };
  for (const [name, value, reason] of [
    ["languages", { "<|en|>": 9999 }, "an id beyond the 318 of the model"],
    ["forced", [null, 318], "an id beyond the 318 of the model"],
    ["language", "xx", 'no token of "xx"'],
    ["task", "sing", 'no token of "sing"'],
    ["step", 0, "a time step of 0 s"],
    ["stride", 0, "$.stride"],
    ["latest", -1, "$.latest"],
    ["other", 1, "unknown field `other`"],
  ] as const) {
    const error = errorOf(() => DecoderPrompt.of(changed(name, value)));
    expect(error, name).toBeInstanceOf(ModelFileError);
    expect(error.message, name).toContain(reason);
  }
  const special = { ...manifest.specialTokens, bosTokenIds: [] };
  expect(errorOf(() => new SpeechToText({ ...manifest, specialTokens: special })).message).toContain("are damaged");
  await model.dispose();
});

test("rules of times are those of the Python runtime", () => {
  const { noTimestamps, latest, endId, cases } = ofKind("rules");
  const rules = timestampRules({ ...SETTINGS, noTimestamps, latest }, endId, 3);
  for (const [ids, before, after] of cases) {
    const scores = golden.array(before);
    expect(rules(Int32Array.from(ids), scores)).toEqual(golden.array(after));
  }
});

test("segments of windows are those of the Python runtime", () => {
  for (const [ids, frames, noTimestamps, expected, advance] of ofKind("segments").cases) {
    const found = splitSegments(ids, { ...SETTINGS, noTimestamps: noTimestamps ?? undefined }, frames);
    expect(found.segments.map((one) => [one.ids, one.first, one.last])).toEqual(expected);
    expect(found.advance).toBe(advance);
  }
});

test("prompts are those of the Python runtime", () => {
  for (const [settings, language, task, timestamps, expected] of ofKind("prompts").cases) {
    const given = settings as { [name: string]: unknown; forced: (number | null)[] };
    const prompt = new DecoderPrompt({
      ...SETTINGS,
      languages: new Map(Object.entries((given["languages"] ?? {}) as Record<string, number>)),
      tasks: new Map(Object.entries((given["tasks"] ?? {}) as Record<string, number>)),
      forced: given.forced.map((id) => id ?? undefined),
      language: (given["language"] ?? undefined) as string | undefined,
      noTimestamps: given["no_timestamps"] as number,
    });
    const found = prompt.ids(1, language ?? undefined, task ?? undefined, timestamps);
    expect(
      found.map((id) => id ?? null),
      JSON.stringify([settings, language, task, timestamps]),
    ).toEqual(expected);
  }
});
