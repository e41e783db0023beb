import { describe, expect, test } from "vitest";
import { backendOf } from "../../src/backend/devices.js";
import { Engine } from "../../src/engine/engine.js";
import { maxColumns, Shortlist } from "../../src/engine/shortlist.js";
import { MANIFEST_KEY } from "../../src/format/manifest.js";
import { readMetadata } from "../../src/format/modelFile.js";
import { ENTRY_KEY, ENTRY_VALUE, MODEL_METADATA_PROPS } from "../../src/format/onnxFields.js";
import { bytesField, concatBytes } from "../../src/format/onnxWire.js";
import { readShortlist, SHORTLIST_KEY } from "../../src/format/shortlistFile.js";
import { camelCase } from "../../src/format/typedJson.js";
import { Model, ModelFileError, OptionError, UnsupportedCallError, type Result } from "../../src/index.js";
import { numberArray } from "../../src/base/arrays.js";
import { Golden } from "../golden/golden.js";
import { modelBytes, modelPath } from "../support/models.js";

interface Expected {
  ids: number[];
  score: number;
  top: [number, number][][];
  alternatives: Expected[];
}

type Case =
  | { kind: "model"; name: string; sources: number[][]; runs: [Record<string, unknown>, Expected[]][] }
  | { kind: "tables"; cases: [string, number, number, [Record<string, number[]>, number[], number[]][]][] }
  | { kind: "damaged"; texts: Record<string, string | null> }
  | { kind: "mask"; text: string };

const golden = new Golden<Case>("shortlists.py");

function ofKind<K extends Case["kind"]>(kind: K): Extract<Case, { kind: K }>[] {
  return golden.cases.filter((one): one is Extract<Case, { kind: K }> => one.kind === kind);
}

function compare(found: Result, expected: Expected): void {
  expect(found.tokenIds).toEqual(expected.ids);
  expect(Math.abs(found.score - expected.score)).toBeLessThan(1e-4);
  expect(found.topLogprobs.map((one) => one.map(([id]) => id))).toEqual(
    expected.top.map((one) => one.map(([id]) => id)),
  );
  expect(found.alternatives.length).toBe(expected.alternatives.length);
  found.alternatives.forEach((one, i) => compare(one, expected.alternatives[i]));
}

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each(ofKind("model"))("$name gives the results of the Python runtime", async ({ name, sources, runs }) => {
    const model = await Model.load(modelPath(name), { device, threads: 1 });
    for (const [options, expected] of runs) {
      const own = Object.fromEntries(Object.entries(options).map(([key, value]) => [camelCase(key), value]));
      let i = 0;
      for await (const result of model.generateBatch(sources, { ...own, batchSize: 4 })) compare(result, expected[i++]);
      expect(i).toBe(expected.length);
      if (own["seed"] === undefined) compare(await model.generate(sources[2], own), expected[2]);
    }
    expect(model.memory().usedBytes).toBe(0);
    await expect(model.generate(sources[0], { shortlist: "yes" as never })).rejects.toThrow(OptionError);
    await model.dispose();
  });

  test("a step computes the columns of the candidates alone, with the logits of the whole projection", async () => {
    const model = await Model.load(modelPath("shortlist"), { device, threads: 1 });
    const { engine } = model as unknown as { engine: Engine };
    const candidates = [Int32Array.of(2, 5, 77), Int32Array.of(9, 300)];
    const row = numberArray(Int32Array.of(10, 20, 30), [3]);
    const sources = new Map([["src", [row, row]]]);
    const whole = await engine.start(sources, { rows: 2 });
    const expected = (await engine.step(whole, [1, 1])).slice();
    const state = await engine.start(sources, { rows: 2, candidates });
    expect([...state.candidates!.ids]).toEqual([2, 5, 9, 77, 300]);
    expect(state.candidates!.weight!.dims).toEqual([32, 5]);
    const check = (logits: Float32Array, rows: Int32Array[]) => {
      rows.forEach((ids, i) => {
        for (let id = 0; id < 600; id++) {
          const found = logits[i * 600 + id];
          if (ids.includes(id)) expect(Math.abs(found - expected[id])).toBeLessThan(1e-5);
          else expect(found).toBe(-Infinity);
        }
      });
    };
    check(await engine.step(state, [1, 1]), candidates);
    engine.reorder(state, Int32Array.of(1));
    state.rewind(0);
    check(await engine.step(state, [1]), [candidates[1]]);
    whole.release();
    state.release();
    expect(model.memory().usedBytes).toBe(0);
    await model.dispose();
  });

  test("a file without a shortlist refuses the option", async () => {
    const model = await Model.load(modelPath("g2p"), { device, threads: 1 });
    await expect(model.generate("a", { shortlist: true })).rejects.toThrow(UnsupportedCallError);
    expect((await model.generate("a", { shortlist: false })).text).toBe((await model.generate("a")).text);
    await model.dispose();
  });
});

test("candidates of tables are those of the Python runtime", async () => {
  const [{ cases }] = ofKind("tables");
  for (const [text, size, most, requests] of cases) {
    const { vocabulary, common, tables } = await readShortlist(text);
    expect(vocabulary).toBe(size);
    expect(maxColumns(size)).toBe(most);
    const shortlist = new Shortlist(vocabulary, common, tables);
    for (const [sources, named, expected] of requests) {
      const arrays = Object.entries(sources).map(
        ([name, ids]) => [name, numberArray(Int32Array.from(ids), [ids.length])] as const,
      );
      expect([...shortlist.candidates(new Map(arrays), named)]).toEqual(expected);
    }
  }
});

test("damaged tables are refused", async () => {
  const [{ texts }] = ofKind("damaged");
  for (const [name, text] of Object.entries(texts)) {
    const error = await readShortlist(text ?? undefined).catch((thrown: unknown) => thrown);
    expect(error, name).toBeInstanceOf(ModelFileError);
    expect((error as Error).message, name).toMatch(/^the file's shortlist is damaged \(.+\): export the model again$/);
  }
});

test("a table of a mask is refused: a request has no ids for it", async () => {
  const [{ text }] = ofKind("mask");
  const bytes = modelBytes("shortlist");
  const manifest = JSON.parse(readMetadata(bytes).get(MANIFEST_KEY)!);
  const [src] = manifest.encode.inputs;
  const mask = { ...src, name: "src_mask", dtype: "bool", role: "mask", of: "src", max_length: null, vocabulary: null };
  manifest.encode.inputs.push(mask);
  // Later entries of the metadata take the place of earlier ones.
  const entries = Object.entries({ [SHORTLIST_KEY]: text, [MANIFEST_KEY]: JSON.stringify(manifest) });
  const file = concatBytes([
    bytes,
    ...entries.flatMap(([key, value]) =>
      bytesField(MODEL_METADATA_PROPS, [...bytesField(ENTRY_KEY, key), ...bytesField(ENTRY_VALUE, value)]),
    ),
  ]);
  const opening = Engine.open({ name: "m.onnx", bytes: file }, await backendOf("wasm", { threads: 1 }));
  await expect(opening.then(String)).rejects.toThrow(
    "m.onnx: the file's shortlist is of other inputs: export it again",
  );
});
