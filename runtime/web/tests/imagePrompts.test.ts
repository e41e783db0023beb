import { describe, expect, test } from "vitest";
import { camelCase } from "../src/format/typedJson.js";
import {
  InputError,
  Model,
  UnsupportedCallError,
  type ImageInput,
  type MessagePart,
  type Result,
} from "../src/index.js";
import type { Inputs } from "../src/preprocess/inputs.js";
import { Golden, type Place } from "./golden/golden.js";
import { modelPath } from "./support/models.js";
import { expectResult, type PlainResult } from "./support/plainResult.js";

interface Case {
  name: string;
  images: Place<"uint8">[];
  prompts: [string, number[]][];
  ids: number[][];
  pixels: Place<"float32">[];
  runs: [Record<string, unknown>, PlainResult[]][];
  scores: number[][];
  continued: PlainResult[];
  prompt: number[];
  answers: PlainResult[];
  refused: [string | number[], number[], string][];
}

const golden = new Golden<Case>("image_prompts.py");

function compareAll(found: readonly Result[], expected: readonly PlainResult[]): void {
  expect(found.length).toBe(expected.length);
  found.forEach((result, i) => expectResult(result, expected[i]));
}

async function all<T>(values: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const value of values) list.push(value);
  return list;
}

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each(golden.cases)("$name", async (one) => {
    const model = await Model.load(modelPath(one.name), { device, threads: 1 });
    const images: ImageInput[] = one.images.map((place) => {
      const [height, width] = place.shape;
      return { data: golden.array(place), width, height };
    });
    const picked = (places: number[]) => places.map((place) => images[place]);
    const inputs = one.prompts.map(([text, places]) => model.imagePrompt(text, picked(places)));

    const reader = (model as unknown as { inputs: Inputs }).inputs;
    inputs.forEach((input, i) => {
      const { prompt, sources } = reader.generationInputs(input);
      expect([...prompt]).toEqual(one.ids[i]);
      const { data, shape } = sources.get("pixel_values")!;
      expect(shape).toEqual(one.pixels[i].shape);
      const expected = golden.array(one.pixels[i]);
      expect(data.length).toBe(expected.length);
      expect(data.every((value, k) => Math.abs(value - expected[k]) < 1e-6)).toBe(true);
    });

    for (const [options, expected] of one.runs) {
      const own = Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
      compareAll(await all(model.generateBatch(inputs, own)), expected);
      if (own["seed"] !== undefined) continue; // a sample depends on the number of its input
      const [text, places] = one.prompts[3];
      expectResult(await model.generate(text, { ...own, images: picked(places) }), expected[3]);
    }
    for (const [i, input] of inputs.entries()) {
      const scores = await model.score(input, "abc");
      expect(scores.length).toBe(one.scores[i].length);
      scores.forEach((score, k) => expect(Math.abs(score - one.scores[i][k])).toBeLessThan(1e-4));
    }
    const [text, places] = one.prompts[0];
    const pieces = await all(model.stream(text, { maxNewTokens: 12, images: picked(places) }));
    expect(pieces.join("")).toBe(one.runs[0][1][0].text);

    const prefix = await model.cachePrefix(model.imagePrompt("what <image> is", [images[0]]));
    const continued = await all(model.generateBatch([" it", "?", " now"], { prefix, maxNewTokens: 7 }));
    compareAll(continued, one.continued);
    await expect(model.generate("<image>", { prefix, images: [images[0]] })).rejects.toThrow(
      "pixel_values cannot follow a cached prefix",
    );
    prefix.release();

    const parts: MessagePart[] = [
      { type: "image", image: images[0] },
      { type: "text", text: "what?" },
    ];
    const prompt = (await model.prompt([{ role: "user", content: parts }])) as unknown as { input_ids: Int32Array };
    expect([...prompt.input_ids]).toEqual(one.prompt);
    expectResult(await model.generate(prompt as never, { maxNewTokens: 8 }), one.answers[0]);
    const chat = model.chat();
    const turns = [parts, "and then?", [...parts, { type: "image" as const, image: images[2] }]];
    for (const [i, message] of turns.entries())
      expectResult(await chat.send(message, { maxNewTokens: 8 }), one.answers[i]);
    chat.rewind(2);
    expectResult(await chat.send(turns[1], { maxNewTokens: 8 }), one.answers[1]);
    chat.release();

    for (const [given, where, message] of one.refused) {
      const error = await model.generate(given, { images: picked(where) }).catch((thrown: unknown) => thrown);
      expect(error).toBeInstanceOf(InputError);
      expect((error as Error).message).toBe(message);
    }
    await expect(model.generate("<image>", { images: images[0] as never })).rejects.toThrow(
      "pixel_values takes a list of images; a single image is a list of one: [image]",
    );
    await expect(model.generate("<image><image>", { images: [images[0], { ...images[1], width: 0 }] })).rejects.toThrow(
      /^image 2: /,
    );
    await expect(model.generate(inputs[0], { images: [] })).rejects.toThrow("has its images already");
    const url = [{ role: "user", content: [{ type: "image", url: "https://example.org/a.png" }] }];
    await expect(model.prompt(url as never)).rejects.toThrow("an image of a message is decoded before");
    expect(model.memory().usedBytes).toBe(0);
    await model.dispose();
  });

  test("a model of texts refuses images", async () => {
    const model = await Model.load(modelPath("words"), { device, threads: 1 });
    const image = { data: new Uint8Array(3), width: 1, height: 1 };
    await expect(model.generate("a", { images: [image] })).rejects.toThrow(UnsupportedCallError);
    const message = [{ role: "user", content: [{ type: "image" as const, image }] }];
    await expect(model.prompt(message)).rejects.toThrow(/reads no images|no chat template/);
    await model.dispose();
  });
});
