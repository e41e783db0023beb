/** Attention weights, hidden states and cached prefixes, next to those of the Python runtime. */

import { describe, expect, test } from "vitest";
import { camelCase } from "../src/format/typedJson.js";
import { InputError, Model, OptionError, UnsupportedCallError, type NumberArray } from "../src/index.js";
import { Golden, type Place } from "./golden/golden.js";
import { modelPath } from "./support/models.js";
import { expectResult, type PlainResult } from "./support/plainResult.js";

type Case =
  | {
      kind: "alignments";
      pairs: [string, string][];
      weights: Place<"float32">[];
      labels: [string[], string[]][];
      states: Record<string, Place<"float32">>[];
    }
  | { kind: "attentions"; texts: string[]; weights: Place<"float32">[]; labels: string[][]; classes: string[] }
  | { kind: "prefixes"; prefix: string; rest: string[]; runs: [Record<string, unknown>, PlainResult[]][] };

const golden = new Golden<Case>("token_values.py");

function ofKind<K extends Case["kind"]>(kind: K): Extract<Case, { kind: K }> {
  return golden.cases.find((one): one is Extract<Case, { kind: K }> => one.kind === kind)!;
}

function close(found: NumberArray, place: Place<"float32">, tolerance = 1e-5): void {
  expect(found.shape).toEqual(place.shape);
  const expected = golden.array(place);
  expect(found.data.length).toBe(expected.length);
  found.data.forEach((value, i) => expect(Math.abs(value - expected[i])).toBeLessThan(tolerance));
}

describe.each(["node", "wasm"])("on %s", (device) => {
  test("alignments, their labels and hidden states", async () => {
    const { pairs, weights, labels, states } = ofKind("alignments");
    const model = await Model.load(modelPath("g2p-extras"), { device, threads: 1 });
    for (const [i, [source, target]] of pairs.entries()) {
      close(await model.align(source, target), weights[i]);
      const result = await model.generate(source, { crossAttentions: true });
      expect(await model.labels(source, result)).toEqual({ source: labels[i][0], tokens: labels[i][1] });
      for (const [k, found] of [await model.hiddenStates(source), await model.hiddenStates(source, target)].entries()) {
        const expected = states[2 * i + k];
        expect([...found.keys()].sort()).toEqual(Object.keys(expected).sort());
        for (const [name, values] of found) close(values, expected[name], 1e-4);
      }
    }
    const [word] = pairs[2];
    const whole = await model.generate(word, { crossAttentions: true });
    const [, positions] = whole.crossAttentions!.shape;
    let text = "";
    for await (const piece of model.stream(word)) {
      text += piece;
      const sounds = text.split(" ").slice(0, -1); // as the page of `demo` does: the last one may be half a sound
      if (!sounds.length) continue;
      const { data, shape } = await model.align(word, sounds.join(" "));
      expect(shape).toEqual([sounds.length, positions]);
      data.forEach((value, i) => expect(Math.abs(value - whole.crossAttentions!.data[i])).toBeLessThan(1e-5));
    }
    expect(text).toBe(whole.text);
    await expect(model.align("a", "AH ".repeat(90))).rejects.toThrow(
      /the tokens are \d+ tokens long and the model holds/,
    );
    await expect(model.attentions("a")).rejects.toThrow("generates: it cannot give attention; call generate()");
    expect(model.memory().usedBytes).toBe(0);
    await model.dispose();
    const plain = await Model.load(modelPath("g2p"), { device, threads: 1 });
    await expect(plain.align("a", "AH")).rejects.toThrow(
      "holds no cross-attention weights: export the model with --cross",
    );
    await expect(plain.hiddenStates("a")).rejects.toThrow(UnsupportedCallError);
    await expect(plain.cachePrefix("a")).rejects.toThrow(
      "reads its input in an encoder, all at once: it cannot prefix",
    );
    await plain.dispose();
  });

  test("attention weights of a model that classifies", async () => {
    const { texts, weights, labels, classes } = ofKind("attentions");
    const model = await Model.load(modelPath("languages-attentions"), { device, threads: 1 });
    for (const [i, text] of texts.entries()) {
      const found = await model.attentions(text);
      close(found.weights, weights[i]);
      expect(found.labels).toEqual(labels[i]);
    }
    expect((await model.classify(texts)).map(({ label }) => label)).toEqual(classes);
    await expect(model.attentions(texts[0], { topP: 1 })).rejects.toThrow(OptionError);
    await model.dispose();
  });

  test("requests after a cached prefix", async () => {
    const { prefix: before, rest, runs } = ofKind("prefixes");
    const model = await Model.load(modelPath("words"), { device, threads: 1 });
    const other = await Model.load(modelPath("words"), { device, threads: 1 });
    const prefix = await model.cachePrefix(before);
    const used = model.memory().usedBytes;
    expect(used).toBeGreaterThan(0);
    for (const [options, expected] of runs) {
      const own = Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
      let i = 0;
      for await (const result of model.generateBatch(rest, { ...own, prefix })) expectResult(result, expected[i++]);
      expect(i).toBe(rest.length);
      expectResult(await model.generate(rest[0], { ...own, prefix }), expected[0]);
    }
    let text = "";
    for await (const piece of model.stream(rest[1], { maxNewTokens: 8, prefix })) text += piece;
    expect(text).toBe(runs[0][1][1].text);
    expect(model.memory().usedBytes).toBe(used);
    await expect(other.generate("a", { prefix })).rejects.toThrow("was read by another model");
    await expect(model.generate("a", { prefix: {} as never })).rejects.toThrow("prefix must be a cached prefix");
    await expect(model.cachePrefix("a".repeat(5000))).rejects.toThrow(InputError);
    prefix.release();
    prefix.release();
    expect(model.memory().usedBytes).toBe(0);
    await expect(model.generate("a", { prefix })).rejects.toThrow(
      "the prefix has been released and cannot be continued",
    );
    await model.dispose();
    await other.dispose();
  });
});
