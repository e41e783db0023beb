import { afterAll, beforeAll, describe, expect, test, vi } from "vitest";
import {
  AbortedError,
  InputError,
  Model,
  ModelFileError,
  OptionError,
  UnsupportedCallError,
  type Result,
} from "../src/index.js";
import type { Engine } from "../src/engine/engine.js";
import { camelCase } from "../src/format/typedJson.js";
import { Golden, type Place } from "./golden/golden.js";
import { modelBytes, modelPath } from "./support/models.js";

interface Expected {
  text: string;
  ids: number[];
  score: number;
  finish: string;
  logprobs: (number | null)[];
  top: [number, number][][];
  alternatives: Expected[];
}

type Case =
  | {
      kind: "generate";
      model: string;
      words: string[];
      runs: { name: string; options: Record<string, unknown>; results: Expected[] }[];
      scores: [string, string, number[]][];
    }
  | {
      kind: "chat";
      messages: string[];
      answers: Expected[];
      turns: number[][];
      continued: Expected[];
      scores: number[];
      prompt: number[];
    }
  | { kind: "classify"; texts: string[]; ids: number[][]; results: [string, number][][] }
  | {
      kind: "extras";
      words: string[];
      runs: {
        options: Record<string, unknown>;
        results: { text: string; cross: Place<"float32">; hidden: Record<string, Place<"float32">> }[][];
      }[];
    }
  | {
      kind: "forecast";
      histories: Place<"float64">[];
      forecasts: Place<"float32">[];
      short: Place<"float32">;
    }
  | { kind: "errors"; cases: [string, string][] };

// Kernels of one row and of several, and those of another processor, round in their own ways.
const TOLERANCE = 2e-5;

const golden = new Golden<Case>("model_results.py");

function ofKind<K extends Case["kind"]>(kind: K): Extract<Case, { kind: K }>[] {
  return golden.cases.filter((one): one is Extract<Case, { kind: K }> => one.kind === kind);
}

function close(found: readonly number[], expected: readonly (number | null)[], tolerance: number): void {
  expect(found.length).toBe(expected.length);
  found.forEach((value, i) => {
    const other = expected[i] ?? -Infinity;
    if (value !== other) expect(Math.abs(value - other)).toBeLessThan(tolerance);
  });
}

function compare(found: Result, expected: Expected, tolerance = TOLERANCE): void {
  expect(found.text).toBe(expected.text);
  expect(found.tokenIds).toEqual(expected.ids);
  expect(found.finishReason).toBe(expected.finish);
  close([found.score, ...found.tokenLogprobs], [expected.score, ...expected.logprobs], tolerance);
  expect(found.topLogprobs.map((top) => top.map(([id]) => id))).toEqual(
    expected.top.map((top) => top.map(([id]) => id)),
  );
  expect(found.alternatives.length).toBe(expected.alternatives.length);
  found.alternatives.forEach((one, i) => compare(one, expected.alternatives[i], tolerance));
}

function optionsOf(run: { options: Record<string, unknown> }) {
  const options = Object.entries(run.options).map(([name, value]) => [
    camelCase(name),
    name === "seed" ? BigInt(value as string) : value,
  ]);
  return Object.fromEntries(options) as object;
}

async function all<T>(values: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const value of values) list.push(value);
  return list;
}

describe.each(["node", "wasm"])("on %s", (device) => {
  describe.each(ofKind("generate").filter(({ model }) => model === "g2p" || device === "node"))(
    "$model",
    (expected) => {
      let model: Model;
      beforeAll(async () => {
        model = await Model.load(modelPath(expected.model), { device, threads: 1 });
      });
      afterAll(() => model.dispose());

      test.each(expected.runs)("a batch with the options $name", async (run) => {
        const results = await all(model.generateBatch(expected.words, { ...optionsOf(run), batchSize: 7 }));
        expect(results.length).toBe(run.results.length);
        results.forEach((result, i) => compare(result, run.results[i], TOLERANCE));
      });

      test.each(expected.runs.filter(({ name }) => !["samples", "nucleus"].includes(name)))(
        "single requests with the options $name",
        async (run) => {
          for (const [i, word] of expected.words.entries()) {
            compare(await model.generate(word, optionsOf(run)), run.results[i], TOLERANCE);
          }
        },
      );

      test("streams give the text of the result in pieces", async () => {
        for (const name of ["greedy", "stop", "prefix", "beams"]) {
          const run = expected.runs.find((one) => one.name === name)!;
          for (const [i, word] of expected.words.slice(0, 8).entries()) {
            const options = { ...optionsOf(run), numReturnSequences: 1 };
            const pieces = await all(model.stream(word, options));
            expect(pieces.join("")).toBe(run.results[i].text);
            if (name === "greedy" && run.results[i].ids.length > 4) expect(pieces.length).toBeGreaterThan(1);
          }
        }
      });

      test("scores of given targets", async () => {
        for (const [source, target, scores] of expected.scores) {
          close([...(await model.score(source, target))], scores, TOLERANCE);
        }
      });

      test("memory is free after all requests", () => {
        expect(model.memory().usedBytes).toBe(0);
        expect(model.memory().peakBytes).toBeGreaterThan(0);
      });
    },
  );

  test("a conversation keeps its cache", async () => {
    const [expected] = ofKind("chat");
    const model = await Model.load(modelPath("words"), { device });
    const chat = model.chat();
    for (const [i, message] of expected.messages.entries()) {
      compare(await chat.send(message), expected.answers[i], TOLERANCE);
    }
    expect(chat.turns.map((turn) => [...turn.ids])).toEqual(expected.turns);
    chat.rewind(2);
    compare(await chat.send(expected.messages[2]), expected.answers[2], TOLERANCE);
    chat.rewind();
    expect((await all(chat.stream(expected.messages[2]))).join("")).toBe(expected.answers[2].text);
    chat.release();
    await expect(chat.send("a")).rejects.toThrow("has been released");
    const continued = await all(model.generateBatch(["he", "str", "un"], { maxNewTokens: 8 }));
    continued.forEach((result, i) => compare(result, expected.continued[i], TOLERANCE));
    close([...(await model.score("hello"))], expected.scores, TOLERANCE);
    expect([...((await model.prompt("hello")) as Int32Array)]).toEqual(expected.prompt);
    expect(() => model.chat({ system: "Be brief" })).not.toThrow();
    await expect(model.chat({ system: "Be brief" }).send("a")).rejects.toThrow(
      "the chat template refuses: it has users and assistants, and no system",
    );
    expect(model.memory().usedBytes).toBe(0);
    await model.dispose();
  });

  test("classification", async () => {
    const [expected] = ofKind("classify");
    const model = await Model.load(modelPath("languages"), { device });
    const results = await model.classify(expected.texts, { topK: 3, batchSize: 3 });
    results.forEach(({ top, label, score }, i) => {
      expect(top.map(([name]) => name)).toEqual(expected.results[i].map(([name]) => name));
      close(
        top.map(([, value]) => value),
        expected.results[i].map(([, value]) => value),
        TOLERANCE,
      );
      expect([label, score]).toEqual(top[0]);
    });
    const one = (await model.predict(expected.texts[0])) as { label: string };
    expect(one.label).toBe(expected.results[0][0][0]);
    await expect(model.generate("a")).rejects.toThrow(UnsupportedCallError);
    await expect(model.embed(["a"])).rejects.toThrow("classifies its inputs: it cannot embed; call classify()");
    await expect(model.classify("abc")).rejects.toThrow("give a list of inputs");
    await model.dispose();
  });

  test("cross-attention weights and hidden states of each token", async () => {
    const [expected] = ofKind("extras");
    const model = await Model.load(modelPath("g2p-extras"), { device });
    for (const run of expected.runs) {
      const options = { ...optionsOf(run), crossAttentions: true, hiddenStates: true };
      const results = await all(model.generateBatch(expected.words, options));
      results.forEach((result, i) => {
        [result, ...result.alternatives].forEach((one, k) => {
          const { text, cross, hidden } = run.results[i][k];
          expect(one.text).toBe(text);
          expect(one.crossAttentions!.shape).toEqual(cross.shape);
          close([...one.crossAttentions!.data], [...golden.array(cross)], TOLERANCE);
          expect([...one.hiddenStates.keys()].sort()).toEqual(Object.keys(hidden).sort());
          for (const [name, value] of one.hiddenStates) {
            expect(value.shape, name).toEqual(hidden[name].shape);
            close([...value.data], [...golden.array(hidden[name])], 1e-4);
          }
        });
      });
    }
    expect(() => model.stream("a", { crossAttentions: true })).toThrow("a stream gives text alone");
    await model.dispose();
  });

  test("forecasts in the units of the data", async () => {
    const [expected] = ofKind("forecast");
    const model = await Model.load(modelPath("elnino"), { device });
    const histories = expected.histories.map((place) => golden.array(place));
    const forecasts = await all(model.forecastBatch(histories, { truncate: true, batchSize: 4 }));
    forecasts.forEach(({ data, shape }, i) => {
      expect(shape).toEqual([12, 1]);
      close([...data], [...golden.array(expected.forecasts[i])], 1e-4);
    });
    const short = await model.forecast(
      [...histories[0]].map((value) => [value]),
      { horizon: 5 },
    );
    close([...short.data], [...golden.array(expected.short)], 1e-4);
    await expect(model.forecast(histories[1])).rejects.toThrow("67 rows and the model reads at most 60");
    await expect(model.forecast(histories[0], { horizon: 13 })).rejects.toThrow("horizon must be at most 12");
    await expect(model.forecast([1, NaN])).rejects.toThrow(InputError);
    await expect(model.generate("a")).rejects.toThrow(
      "continues series of numbers: it cannot generate; call forecast()",
    );
    await model.dispose();
    await expect(model.forecast(histories[0])).rejects.toThrow("the model is closed");
  });

  test("wrong inputs have the sentences of Python", async () => {
    const model = await Model.load(modelPath("g2p"), { device });
    for (const [text, sentence] of ofKind("errors")[0].cases) {
      await expect(model.generate(text), text).rejects.toThrow(sentence);
    }
    await expect(all(model.generateBatch(["a", "é", "b"]))).rejects.toThrow("input 2: 'é' (character 1 of the input)");
    await model.dispose();
  });

  test("a closed model refuses calls, and may be closed again", async () => {
    const model = await Model.load(modelPath("g2p"), { device });
    await model.dispose();
    await model.dispose();
    expect(model.disposed).toBe(true);
    await expect(model.generate("a")).rejects.toThrow("the model is closed: load the file again with Model.load()");
  });

  test("bytes and files give the same model", async () => {
    const model = await Model.load(modelBytes("g2p"), { device });
    expect((await model.generate("hello")).text).toBe("HH EH L OW");
    await model.dispose();
  });
});

test("integers on wasm choose the tokens of integers on node", async () => {
  // Activations are rounded to integers, so that the last bit of a float changes a logit by hundredths now and then.
  const expected = ofKind("generate").find(({ model }) => model === "g2p-int8")!;
  const model = await Model.load(modelPath(expected.model), { device: "wasm" });
  for (const name of ["greedy", "beams"]) {
    const run = expected.runs.find((one) => one.name === name)!;
    const results = await all(model.generateBatch(expected.words, optionsOf(run)));
    const equal = results.filter(({ text }, i) => text === run.results[i].text);
    expect(equal.length).toBeGreaterThanOrEqual(expected.words.length - 1);
    results.forEach(({ score }, i) => expect(Math.abs(score - run.results[i].score)).toBeLessThan(0.05));
  }
  await model.dispose();
});

test("requests of a batch that fail do not end the others before them", async () => {
  const model = await Model.load(modelPath("g2p"), { device: "node" });
  const found: string[] = [];
  const words = ["hello", "be", "a"];
  await expect(
    (async () => {
      const logitsProcessor = (ids: Int32Array, logits: Float32Array) => (ids.length > 3 ? [1] : logits);
      for await (const { text } of model.generateBatch(words, { logitsProcessor })) found.push(text);
    })(),
  ).rejects.toThrow("logitsProcessor must return 42 logits");
  expect(found).toEqual([]);
  const options = { stopStrings: "L" };
  for await (const { text } of model.generateBatch(words, options)) found.push(text);
  expect(found).toEqual(["HH EH ", "B IY", "AH"]);
  await model.dispose();
});

test("a signal ends a call", async () => {
  const model = await Model.load(modelPath("g2p"), { device: "wasm" });
  const controller = new AbortController();
  const pieces: string[] = [];
  await expect(
    (async () => {
      for await (const piece of model.stream("transformer", { signal: controller.signal })) {
        pieces.push(piece);
        controller.abort();
      }
    })(),
  ).rejects.toThrow(AbortedError);
  expect(pieces.length).toBe(1);
  await expect(model.generate("a", { signal: controller.signal })).rejects.toThrow(AbortedError);
  await expect(all(model.generateBatch(["a"], { signal: controller.signal }))).rejects.toThrow(AbortedError);
  await expect(Model.load(modelPath("g2p"), { signal: controller.signal })).rejects.toThrow(AbortedError);
  for await (const piece of model.stream("transformer")) {
    expect(piece).toBeTruthy();
    break; // frees the memory
  }
  expect(model.memory().usedBytes).toBe(0);
  await model.dispose();
});

test("a turn of a conversation reads only what is new", async () => {
  const model = await Model.load(modelPath("words"), { device: "wasm" });
  const engine = (model as unknown as { engine: Engine }).engine;
  const chat = model.chat();
  await chat.send("hello");
  const step = vi.spyOn(engine, "step");
  await chat.send("world");
  const read = step.mock.calls.reduce((sum, [, tokens]) => sum + tokens.length, 0);
  const [first, second] = chat.turns;
  // The first prompt is in the cache, but for its last id. The last id of the answer is not read.
  const prompt = first.ids.length - first.result.tokenIds.length;
  expect(read).toBe(second.ids.length - 1 - (prompt - 1));
  step.mockRestore();
  await expect(Promise.all([chat.send("a"), chat.send("b")])).rejects.toThrow("is answering a message");
  await model.dispose();
});

test("calls at the same time have the results of single ones, and leave no memory behind", async () => {
  const model = await Model.load(modelPath("g2p"), { device: "wasm" });
  const words = ["hello", "transformer", "a", "quantization", "be"];
  const alone: string[] = [];
  for (const word of words) alone.push((await model.generate(word, { numBeams: 3 })).text);
  let heap: number | undefined; // after the first round
  for (let round = 0; round < 12; round++) {
    if (round === 1) heap = model.memory().heapBytes;
    const together = await Promise.all(words.map((word) => model.generate(word, { numBeams: 3 })));
    expect(together.map(({ text }) => text)).toEqual(alone);
    for await (const piece of model.stream("transformer")) if (piece) break;
  }
  expect(model.memory()).toMatchObject({ usedBytes: 0, heapBytes: heap });
  await model.dispose();
});

test("options are refused by name", async () => {
  const model = await Model.load(modelPath("g2p"));
  const wrong: [object, string][] = [
    [{ numBeam: 2 }, 'there is no option "numBeam": did you mean numBeams?'],
    [{ regex: "a" }, "regex is an option that the JavaScript runtime does not have"],
    [{ numBeams: 0 }, "numBeams must be a whole number of at least 1, not 0"],
    [{ numBeams: 2, temperature: 1 }, "exclude each other"],
    [{ suppressTokens: [99] }, "the id 99, and the model's end at 41"],
    [{ crossAttentions: true }, "holds no cross-attention weights: export the model with --cross-attentions"],
    [{ adapter: "x" }, "names an adapter and the file holds none"],
  ];
  for (const [options, sentence] of wrong) await expect(model.generate("a", options)).rejects.toThrow(sentence);
  expect(() => model.stream("a", { numBeams: 2, numReturnSequences: 2 })).toThrow(OptionError);
  await expect(Model.load(modelPath("g2p"), { gpu: true } as object)).rejects.toThrow('there is no option "gpu"');
  await expect(Model.load(modelPath("g2p"), { device: "tpu" })).rejects.toThrow('there is no device "tpu"');
  const controller = new AbortController();
  for (const signal of [controller, "stop"] as unknown as AbortSignal[]) {
    await expect(model.generate("a", { signal })).rejects.toThrow("signal must be an AbortSignal");
    await expect(Model.load(modelPath("g2p"), { signal })).rejects.toThrow(OptionError);
  }
  await expect(Model.load(modelPath("g2p"), { onProgress: 1 } as object)).rejects.toThrow(
    "onProgress must be a function",
  );
  await expect(Model.load("/nowhere/model.onnx")).rejects.toThrow("/nowhere/model.onnx does not exist");
  await expect(Model.load("/")).rejects.toThrow(ModelFileError);
  await model.dispose();
});
