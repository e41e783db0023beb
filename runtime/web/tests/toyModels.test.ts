import { describe, expect, test } from "vitest";
import { Model, type NumberArray, type Result, type Transcription } from "../src/index.js";
import { camelCase } from "../src/format/typedJson.js";
import { Golden, type Place } from "./golden/golden.js";

interface Expected {
  text: string;
  ids: number[];
  score: number;
  finish: string;
  alternatives: Expected[];
}

interface Generating {
  kind: "generate";
  name: string;
  file: Place<"uint8">;
  texts: string[];
  runs: { name: string; options: Record<string, unknown>; results: Expected[] }[];
  scores: number[][];
  chat: Expected[] | null;
}

interface Bytes {
  kind: "bytes";
  file: Place<"uint8">;
  texts: string[];
  options: Record<string, unknown>;
  results: Expected[];
}

interface Tasks {
  kind: "tasks";
  files: Record<string, Place<"uint8">>;
  texts: string[];
  vectors: Place<"float32">[];
  states: Place<"float32">[];
  relevance: number[];
  masked: string[];
  filled: [string, number, number, string][][][];
  chosen: number[][][];
  images: Place<"uint8">[];
  labels: [string, number][][];
  recordings: Place<"float32">[];
  transcriptions: { text: string; ids: number[]; score: number; segments: [string, number, number][] }[];
  histories: Place<"float64">[];
  forecasts: Place<"float32">[];
}

const golden = new Golden<Generating | Bytes | Tasks>("toy_results.py");
const toys = golden.cases.filter((one): one is Generating => one.kind === "generate");
const [bytes] = golden.cases.filter((one): one is Bytes => one.kind === "bytes");
const [tasks] = golden.cases.filter((one): one is Tasks => one.kind === "tasks");

function compare(found: Result, expected: Expected): void {
  expect(found.text).toBe(expected.text);
  expect(found.tokenIds).toEqual(expected.ids);
  expect(found.finishReason).toBe(expected.finish);
  expect(Math.abs(found.score - expected.score)).toBeLessThan(1e-4);
  expect(found.alternatives.length).toBe(expected.alternatives.length);
  found.alternatives.forEach((one, i) => compare(one, expected.alternatives[i]));
}

function inCamelCase(options: Record<string, unknown>): object {
  return Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
}

async function all<T>(values: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const value of values) list.push(value);
  return list;
}

function close(found: ArrayLike<number>, expected: ArrayLike<number>, tolerance = 1e-4): void {
  expect(found.length).toBe(expected.length);
  Array.from(found, (value, i) => expect(Math.abs(value - expected[i])).toBeLessThan(tolerance));
}

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each(toys)("a model with $name", async ({ file, texts, runs, scores, chat }) => {
    const model = await Model.load(golden.array(file), { device, threads: 1 });
    for (const run of runs) {
      const options = inCamelCase(run.options);
      const together = await all(model.generateBatch(texts, { ...options, batchSize: 4 }));
      together.forEach((result, i) => compare(result, run.results[i]));
      if (run.name !== "samples") compare(await model.generate(texts[3], options), run.results[3]);
    }
    for (const [i, text] of texts.entries()) close(await model.score(text, "abcab"), scores[i]);
    expect(model.memory().usedBytes).toBe(0);
    if (chat) {
      const conversation = model.chat();
      for (const [i, answer] of chat.slice(0, -1).entries()) {
        compare(await conversation.send(texts[i], { maxNewTokens: 4 }), answer);
      }
      conversation.rewind(2);
      compare(await conversation.send("q", { maxNewTokens: 4 }), chat[chat.length - 1]);
      conversation.release();
      expect(model.memory().usedBytes).toBe(0);
    }
    await model.dispose();
  });

  test("a model that writes bytes", async () => {
    const model = await Model.load(golden.array(bytes.file), { device });
    const results = await all(model.generateBatch(bytes.texts, inCamelCase(bytes.options)));
    results.forEach((result, i) => compare(result, bytes.results[i]));
    await model.dispose();
  });

  test("vectors, and numbers for each position", async () => {
    const vectors = await Model.load(golden.array(tasks.files["vector"]), { device });
    const found = await vectors.embed(tasks.texts, { batchSize: 2 });
    found.forEach((vector, i) => close(vector, golden.array(tasks.vectors[i])));
    await expect(vectors.classify(["a"])).rejects.toThrow("it cannot classify; call embed() or predict()");
    await vectors.dispose();
    const states = await Model.load(golden.array(tasks.files["states"]), { device });
    const predicted = (await all(states.predictBatch(tasks.texts))) as NumberArray[];
    predicted.forEach(({ data, shape }, i) => {
      expect(shape).toEqual(tasks.states[i].shape);
      close(data, golden.array(tasks.states[i]));
    });
    await expect(states.embed(["a"])).rejects.toThrow("numbers for each position of an input, not a vector");
    await expect(states.predict("good ".repeat(20))).rejects.toThrow("have it cut with truncate: true");
    expect(((await states.predict("good ".repeat(20), { truncate: true })) as NumberArray).shape[0]).toBe(12);
    await states.dispose();
  });

  test("scores of pairs of texts", async () => {
    const model = await Model.load(golden.array(tasks.files["relevance"]), { device });
    const pairs = tasks.texts.map((text, i) => [text, tasks.texts[tasks.texts.length - 1 - i]] as const);
    const results = await model.classify(pairs, { batchSize: 4 });
    close(
      results.map(({ score }) => score),
      tasks.relevance,
    );
    await model.dispose();
  });

  test("tokens for masks", async () => {
    const model = await Model.load(golden.array(tasks.files["masks"]), { device });
    const filled = await model.fill(tasks.masked, { topK: 3 });
    filled.forEach((masks, i) => {
      masks.forEach((candidates, k) => {
        const expected = tasks.filled[i][k];
        expect(candidates.map(({ token, id, text }) => [token, id, text])).toEqual(
          expected.map(([token, id, , text]) => [token, id, text]),
        );
        close(
          candidates.map(({ score }) => score),
          expected.map(([, , score]) => score),
        );
      });
    });
    const chosen = await model.fill(tasks.masked, { topK: 2, candidateTokens: ["good", 4] });
    expect(chosen.map((masks) => masks.map((mask) => mask.map(({ id }) => id)))).toEqual(tasks.chosen);
    await expect(model.fill(["good"])).rejects.toThrow("the input has no mask: write old where it belongs");
    await expect(model.fill(["old"], { candidateTokens: "x y" })).rejects.toThrow("is not one token");
    await model.dispose();
  });

  test("labels of images", async () => {
    const model = await Model.load(golden.array(tasks.files["images"]), { device });
    for (const [i, place] of tasks.images.entries()) {
      const [height, width] = place.shape;
      const image = { data: golden.array(place), width, height };
      const { scores } = (await model.predict(image)) as { scores: Record<string, number> };
      expect(Object.keys(scores)).toEqual(tasks.labels[i].map(([label]) => label));
      close(
        Object.values(scores),
        tasks.labels[i].map(([, score]) => score),
      );
    }
    await expect(model.predict("a")).rejects.toThrow("takes an array of float32, not text");
    await expect(model.predict(golden.array(tasks.images[0]), { truncate: true })).rejects.toThrow("takes no truncate");
    await model.dispose();
  });

  test("transcriptions, of long recordings in windows", async () => {
    const model = await Model.load(golden.array(tasks.files["audio"]), { device });
    const options = { timestamps: "char", numBeams: 3, chunkLengthS: 1 };
    for (const [i, place] of tasks.recordings.entries()) {
      const found: Transcription = await model.transcribe(golden.array(place), options);
      const expected = tasks.transcriptions[i];
      expect([found.text, found.tokenIds]).toEqual([expected.text, expected.ids]);
      expect(Math.abs(found.score - expected.score)).toBeLessThan(1e-3 * Math.abs(expected.score));
      expect(found.segments.map(({ text, start, end }) => [text, start, end])).toEqual(expected.segments);
    }
    await expect(model.transcribe(golden.array(tasks.recordings[0]), { strideLengthS: 40 })).rejects.toThrow(
      "strideLengthS",
    );
    await model.dispose();
  });

  test("forecasts of several columns", async () => {
    const model = await Model.load(golden.array(tasks.files["series"]), { device });
    const histories = tasks.histories.map((place) => ({ data: golden.array(place), shape: place.shape }));
    const forecasts = await all(model.forecastBatch(histories, { batchSize: 2 }));
    forecasts.forEach(({ data, shape }, i) => {
      expect(shape).toEqual(tasks.forecasts[i].shape);
      close(data, golden.array(tasks.forecasts[i]));
    });
    await model.dispose();
  });
});
