import { describe, expect, test } from "vitest";
import { backendOf } from "../../src/backend/devices.js";
import { ModelFileError, TformerError } from "../../src/base/errors.js";
import { Engine } from "../../src/engine/engine.js";
import { manifestFromJson, MANIFEST_KEY } from "../../src/format/manifest.js";
import { checkManifest } from "../../src/format/manifestChecks.js";
import { manifestOf, readMetadata, withMappedWeights } from "../../src/format/modelFile.js";
import { graphTensors, parseModel } from "../../src/format/onnxGraph.js";
import { bytesField, concatBytes } from "../../src/format/onnxWire.js";
import { extractStage } from "../../src/format/stageSplit.js";
import { Model } from "../../src/index.js";
import { modelBytes } from "../support/models.js";

const g2p = modelBytes("g2p");
const elnino = modelBytes("elnino");

/** Numbers that are the same in each run: a linear congruential generator. */
function* randomNumbers(seed: number): Generator<number> {
  for (;;) {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    yield seed / 2 ** 32;
  }
}

const product = { matrix: 0, source: "x", result: "y", scale: "s", bias: null, scaling: null };

function changedManifest(change: (manifest: Record<string, unknown>) => void): string {
  const manifest = JSON.parse(readMetadata(g2p).get(MANIFEST_KEY)!) as Record<string, unknown>;
  change(manifest);
  return JSON.stringify(manifest);
}

test("a model with mapped weights is small, and has the graph of the file", () => {
  const mapped = withMappedWeights(g2p, "model.onnx");
  expect(mapped.length).toBeLessThan(g2p.length / 10);
  expect([...graphTensors(parseModel(mapped).graph).inputs]).toEqual([...graphTensors(parseModel(g2p).graph).inputs]);
  expect(readMetadata(mapped)).toEqual(readMetadata(g2p));
});

test("each stage has its own inputs and outputs", () => {
  const manifest = manifestOf(readMetadata(g2p));
  const mapped = withMappedWeights(g2p, "model.onnx");
  const encode = graphTensors(parseModel(extractStage(mapped, "encode")).graph);
  const decode = graphTensors(parseModel(extractStage(mapped, "decode")).graph);
  expect([...encode.inputs.keys()]).toEqual(["src"]);
  expect([...encode.outputs.keys()].sort()).toEqual(manifest.encode!.outputs.map(({ name }) => name).sort());
  expect(encode.inputs.get("src")).toEqual({ dtype: "int64", shape: [undefined, undefined] });
  expect([...decode.outputs.keys()]).toContain("logits");
  expect(decode.inputs.has("src")).toBe(false);
  expect(() => extractStage(elnino, "encode")).toThrow("the file's stages are not the branches of one If");
});

describe("manifests", () => {
  const cases: [string, (manifest: Record<string, unknown>) => void, string][] = [
    [
      "of a later version",
      (m) => (m["version"] = 12),
      "has version 12 and this runtime reads version 11: upgrade tformer",
    ],
    ["of an earlier version", (m) => (m["version"] = 9), "was written by an earlier tformer"],
    ["without a version", (m) => delete m["version"], "manifest is damaged: export the model again"],
    ["with another field", (m) => (m["futureThing"] = 1), "unknown field `futureThing`"],
    ["without a field", (m) => delete m["max_length"], "missing field `max_length`"],
    ["with a wrong type", (m) => (m["max_length"] = "64"), "a whole number from 0 to 2147483647 - at `$.max_length`"],
    ["with a wrong size", (m) => ((m["decode"] as any).caches[0].shape[1] = -1), "$.decode.caches[0].shape[1]"],
    ["without stages", (m) => (m["encode"] = m["decode"] = null), "it has no stage"],
    ["with an unknown control", (m) => (m["decode"] as any).controls.push("x"), "'x' is not a control input"],
    ["with a special token", (m) => ((m["special_tokens"] as any).eos_token_ids = [42]), "the special token 42"],
    ["with a tokenizer", (m) => ((m["tokenizer_of"] as any).tgt = 2), "tokenizer 2 of 'tgt' does not exist"],
    ["with equal caches", (m) => ((m["decode"] as any).caches[1] = (m["decode"] as any).caches[0]), "occurs twice"],
    [
      "with a product of no matrix",
      (m) => (m["stored_products"] = { matrices: [], products: { y: product } }),
      "the matrix 0 of the product 'y' does not exist",
    ],
    ["with less context", (m) => (m["decode"] as any).context.pop(), "decode reads 8 context tensors and encode has 9"],
  ];
  test.each(cases)("%s", (_, change, sentence) => {
    const read = () => checkManifest(manifestFromJson(changedManifest(change)));
    expect(read).toThrow(ModelFileError);
    expect(read).toThrow(sentence);
  });

  test("of the version before have no records of products", () => {
    const before = changedManifest((m) => {
      delete m["stored_products"];
      m["version"] = 10;
    });
    expect(manifestFromJson(before).storedProducts).toEqual({ matrices: [], products: new Map() });
  });

  test("say how many weights have how many bits", () => {
    expect([...manifestFromJson(changedManifest(() => {})).weightBits.keys()]).toContain("32");
  });

  test("that are not JSON", () => {
    for (const text of ["", "{", "[]", "null", "7", `${"[".repeat(100_000)}`]) {
      expect(() => manifestFromJson(text)).toThrow(ModelFileError);
    }
  });
});

describe.each(["node", "wasm"])("damaged files on %s", (device) => {
  async function outcome(bytes: Uint8Array): Promise<string> {
    try {
      const model = await Model.load(bytes, { device, verify: false });
      await model.dispose();
      return "opened";
    } catch (error) {
      expect(error, String((error as Error).stack)).toBeInstanceOf(TformerError);
      expect((error as Error).message.length).toBeGreaterThan(10);
      return (error as Error).name;
    }
  }

  test("cut short anywhere", async () => {
    for (let i = 0; i < 24; i++) {
      const size = Math.floor((elnino.length * i) / 24);
      expect(await outcome(elnino.subarray(0, size)), `${size} bytes`).toBe("ModelFileError");
    }
    expect(await outcome(new TextEncoder().encode("<!doctype html><title>404</title>"))).toBe("ModelFileError");
  });

  test("with changed bytes", async () => {
    const random = randomNumbers(7);
    const counts = new Map<string, number>();
    for (let i = 0; i < 60; i++) {
      const changed = elnino.slice();
      for (let change = 0; change <= i % 4; change++) {
        const place = Math.floor(random.next().value! * changed.length);
        changed[place] = Math.floor(random.next().value! * 256);
      }
      const found = await outcome(changed);
      counts.set(found, (counts.get(found) ?? 0) + 1);
    }
    expect(counts.get("ModelFileError")).toBeGreaterThan(5);
  });

  test("with another graph than their manifest says", async () => {
    const backend = await backendOf(device, {});
    const entry = (json: string) =>
      concatBytes(bytesField(14, [...bytesField(1, MANIFEST_KEY), ...bytesField(2, json)]));
    const open = (change: (manifest: any) => void) => {
      const bytes = concatBytes([g2p, entry(changedManifest(change as () => void))]); // the last entry of a key holds
      return Engine.open({ name: "g2p.onnx", bytes }, backend);
    };
    await expect(open((m) => (m.decode.caches[0].shape[1] = 5))).rejects.toThrow(
      "in the graph float32 (free, 4, free, 32)",
    );
    await expect(open((m) => m.decode.controls.pop())).rejects.toThrow("that it does not describe");
    await expect(open((m) => (m.decode.logits.name = "scores"))).rejects.toThrow("the graph has no output 'scores'");
    await expect(open((m) => (m.precision = "bf16"))).rejects.toThrow("computes in bfloat16");
    const engine = await open((m) => (m.special_tokens.pad_token_id = null));
    engine.close();
  });
});

test("a file without a manifest is refused", () => {
  expect(() => manifestOf(new Map())).toThrow("the file has no tformer manifest: export the model with tformer-export");
});
