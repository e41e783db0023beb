import { describe, expect, test } from "vitest";
import { camelCase } from "../../src/format/typedJson.js";
import { Model } from "../../src/index.js";
import { Golden, type Place } from "../golden/golden.js";

type Options = Record<string, unknown>;

interface Case {
  name: string;
  spansFile: Place<"uint8">;
  answersFile: Place<"uint8">;
  spans: [string[], Options, [string, number, string, number, number][][]][];
  pairs: [string, string][];
  answers: [Options, [string, number, number, number][][]][];
}

const golden = new Golden<Case>("text_tasks.py");

function inCamelCase(options: Options): Options {
  return Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
}

/** Return a place in a text in JavaScript's units, from one in characters. */
function units(text: string, place: number): number {
  return [...text].slice(0, place).join("").length;
}

describe.each(golden.cases)("$name", (one) => {
  test("spans of texts are those of the Python runtime", async () => {
    const model = await Model.load(golden.array(one.spansFile), { threads: 1 });
    for (const [texts, options, expected] of one.spans) {
      const found = await model.entities(texts, { ...inCamelCase(options), batchSize: 4 });
      found.forEach((spans, i) => {
        const places = expected[i].map(([label, , text, start, end]) => ({
          label,
          text,
          start: units(texts[i], start),
          end: units(texts[i], end),
        }));
        expect(
          spans.map(({ score: _, ...place }) => place),
          JSON.stringify([texts[i], options]),
        ).toEqual(places);
        spans.forEach(({ score, text, start, end }, k) => {
          expect(Math.abs(score - expected[i][k][1])).toBeLessThan(1e-6);
          expect(texts[i].slice(start, end)).toBe(text);
        });
      });
    }
    await model.dispose();
  });

  test("answers are those of the Python runtime", async () => {
    const model = await Model.load(golden.array(one.answersFile), { threads: 1 });
    for (const [options, expected] of one.answers) {
      const found = await model.answer(one.pairs, { ...inCamelCase(options), batchSize: 4 });
      found.forEach((best, i) => {
        const context = one.pairs[i][1];
        const ranked = [best, ...best.alternatives];
        expect(
          ranked.map(({ text, start, end }) => [text, start, end]),
          JSON.stringify([one.pairs[i], options]),
        ).toEqual(expected[i].map(([text, , start, end]) => [text, units(context, start), units(context, end)]));
        ranked.forEach(({ score }, k) => expect(Math.abs(score - expected[i][k][1])).toBeLessThan(1e-6));
      });
    }
    const [question, context] = one.pairs[0];
    expect(await model.answer([{ question, context }])).toEqual(await model.answer([[question, context]]));
    await model.dispose();
  });
});

test("places are indices of JavaScript's strings, in which an emoji has two units", async () => {
  const [one] = golden.cases;
  const text = "😀 good";
  const spans = await Model.load(golden.array(one.spansFile), { threads: 1 });
  const found = (await spans.entities([text], { aggregation: "none", ignoreLabels: [] }))[0];
  const last = found[found.length - 1];
  expect([last.text, last.start, last.end]).toEqual(["good", 3, 7]); // in Python 2 and 6
  expect(found.map(({ start, end }) => text.slice(start, end))).toEqual(found.map((span) => span.text));
  await spans.dispose();
  const answers = await Model.load(golden.array(one.answersFile), { threads: 1 });
  const context = "😀😀 good bad";
  const [best] = await answers.answer([["the day", context]], { topK: 9 });
  const all = [best, ...best.alternatives].filter((answer) => answer.text);
  const good = all.find((answer) => answer.text === "good")!;
  expect([good.start, good.end]).toEqual([5, 9]); // in Python 3 and 7
  expect(all.map(({ start, end }) => context.slice(start, end))).toEqual(all.map((answer) => answer.text));
  await answers.dispose();
});

test("wrong calls are refused in one sentence", async () => {
  const [{ spansFile, answersFile }] = golden.cases;
  const spans = await Model.load(golden.array(spansFile), { threads: 1 });
  await expect(spans.entities(["a"], { aggregation: "last" })).rejects.toThrow(
    'aggregation must be one of none, simple, first, average, max, not "last"',
  );
  await expect(spans.entities(["a"], { ignoreLabels: ["X"] })).rejects.toThrow('ignoreLabels names "X"');
  await expect(spans.entities(["a"], { docStride: 10 })).rejects.toThrow(
    "docStride must be less than the 10 tokens of text in a window, not 10",
  );
  await expect(spans.entities(["a"], { docStride: 1, aggregation: "none" })).rejects.toThrow("makes no spans");
  await expect(spans.entities(["a"], { docStride: 1, truncate: true })).rejects.toThrow("exclude each other");
  await expect(spans.entities([["a", "b"] as unknown as string])).rejects.toThrow("give a text, not a pair");
  await expect(spans.entities(["a ".repeat(20)])).rejects.toThrow("tokens long and the model takes at most 12");
  await expect(spans.answer([["a", "b"]])).rejects.toThrow(
    "labels spans of its inputs: it cannot answer; call entities()",
  );
  await spans.dispose();
  const answers = await Model.load(golden.array(answersFile), { threads: 1 });
  await expect(answers.answer(["a"])).rejects.toThrow("give a question and the context to answer it from: two texts");
  await expect(answers.answer([[" ", "a"]])).rejects.toThrow("the question is empty");
  await expect(answers.answer([["a", " "]])).rejects.toThrow("the context is empty");
  await expect(answers.answer([["a", "b"]], { maxSeqLen: 13 })).rejects.toThrow("maxSeqLen must be at most 12");
  await expect(answers.answer([["a", "b"]], { maxSeqLen: 5, docStride: 5 })).rejects.toThrow("less than a window, 5");
  await expect(answers.answer([["a ".repeat(12), "b"]])).rejects.toThrow("leave no room in a window of 12 tokens");
  await answers.dispose();
});
