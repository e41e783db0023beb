/** Compare calls of `Model` with a golden file: generation, streams and results of tasks. It runs in pages too. */

import type { Input, Model, NumberArray, Result, Value } from "../../src/index.js";
import {
  arrayDifference,
  bytesOf,
  decodeArray,
  jsonDifference,
  numberDifference,
  type Json,
  type Stored,
  type Values,
} from "./goldenValues.js";

const SCORE_ROUNDING = 2 ** -20; // of a score for each of its tokens: sums of float32 in another order
const ADAPTER = "request.adapter";
/** Task → the settings with which a golden file has its results (docs/golden.md). */
const SETTINGS: Record<string, object> = {
  "token-classification": { aggregation: "none", ignoreLabels: [] },
  "question-answering": { topK: 10 ** 6 },
};

/** Turns the bytes of a PNG file into an image. */
export type ImageReader = (png: Uint8Array<ArrayBuffer>) => Value;

/** Return how the results of a model differ from a golden file, a sentence each. */
export async function requestDifferences(model: Model, golden: Json, readImage?: ImageReader): Promise<string[]> {
  const found: string[] = [];
  const add = (place: string, differences: readonly (string | undefined)[]) =>
    found.push(...differences.filter((one) => one !== undefined).map((one) => `${place}: ${one}`));
  for (const [number, example] of (golden.generation ?? []).entries()) {
    add(`generation ${number}`, await generation(model, golden, example));
  }
  for (const [number, example] of (golden.streams ?? []).entries()) {
    add(`streams ${number}`, [await stream(model, example)]);
  }
  if (golden.results?.length) add("results", await results(model, golden, readImage));
  return found;
}

/** Return an input of `generate`. */
export function generationInput(example: Json): Input {
  if ("text" in example) return example.text as string;
  const inputs = Object.entries(example.inputs as Json).filter(([name]) => name !== ADAPTER);
  return Object.fromEntries(inputs.map(([name, json]) => [name, valueOf(decodeArray(json))]));
}

function valueOf({ data, shape }: Stored): Value {
  if (!shape.length) return data[0];
  return shape.length === 1 ? data : { data, shape };
}

/** Return options of the Python runtime as those of JavaScript. */
function optionsOf(options: Json): object {
  const camelCase = (name: string) => name.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase());
  return Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
}

function adapterOf(model: Model, example: Json): object {
  if (!example.inputs || !(ADAPTER in example.inputs)) return {};
  const number = decodeArray(example.inputs[ADAPTER]).data[0];
  return { adapter: ["base", ...model.manifest.adapters][number] };
}

async function generation(model: Model, golden: Json, example: Json): Promise<(string | undefined)[]> {
  const { expected, options } = example;
  const best = await model.generate(generationInput(example), { ...optionsOf(options), ...adapterOf(model, example) });
  const all = [best, ...best.alternatives];
  const sequences = expected.sequences as Json[];
  if (all.length !== sequences.length) return [`there are ${all.length} sequences, not ${sequences.length}`];
  return all.map((result, place) => {
    if (expected.all_decided) return sequenceDifference(result, sequences[place], logprobTolerance(golden));
    const count = expected.decided_tokens[place] as number;
    const [found, decided] = [result.tokenIds, sequences[place].token_ids].map((ids) => `${ids.slice(0, count)}`);
    return found === decided ? undefined : `sequence ${place}: the ids begin ${found}, not ${decided}`;
  });
}

function sequenceDifference(result: Result, sequence: Json, allowed: number): string | undefined {
  const found = { token_ids: [...result.tokenIds], text: result.text, finish_reason: result.finishReason };
  const expected = { token_ids: sequence.token_ids, text: sequence.text, finish_reason: sequence.finish_reason };
  const { data } = decodeArray(sequence.token_logprobs);
  const sums = [data, result.tokenLogprobs].map((all) => Array.from(all).reduce((sum, one) => sum + one, 0));
  // A score is the sum over a power of the length, which is the same for the same ids.
  const score = sums[1] ? (result.score * sums[0]) / sums[1] : result.score;
  return (
    jsonDifference(found, expected, 0) ??
    numberDifference(data, result.tokenLogprobs, allowed) ??
    numberDifference(
      Float64Array.of(sequence.score),
      [score],
      SCORE_ROUNDING * data.length * Math.max(1, Math.abs(score)),
    )
  );
}

/** Return the allowed difference of a log-probability: twice that of a logit, of the widest range in the file. */
function logprobTolerance(golden: Json): number {
  let span = 0;
  for (const { expected } of golden.decode) {
    for (const { logits } of expected) {
      const [low, high] = [logits.minimum, logits.maximum].map((json) => decodeArray(json).data);
      high.forEach((value, i) => (span = Math.max(span, value - low[i])));
    }
  }
  return 2 * golden.tolerance * span;
}

async function stream(model: Model, example: Json): Promise<string | undefined> {
  const pieces: string[] = [];
  for await (const piece of model.stream(generationInput(example), optionsOf(example.options))) pieces.push(piece);
  return example.expected.decided ? jsonDifference(pieces, example.expected.pieces, 0) : undefined;
}

async function results(model: Model, golden: Json, readImage?: ImageReader): Promise<(string | undefined)[]> {
  const inputs = golden.results.map(({ input }: Json) => rawInput(input, readImage)) as Input[];
  const found: unknown[] = [];
  if ("series" in golden.results[0].input) {
    for (const [i, history] of inputs.entries()) {
      found.push(await model.forecast(history as NumberArray, { horizon: golden.results[i].input.horizon as number }));
    }
  } else {
    const task = golden.file.task as string;
    const readsTexts = typeof inputs[0] === "string" || Array.isArray(inputs[0]);
    const canTruncate = readsTexts && task !== "question-answering"; // which reads a long context in windows
    const options = { ...SETTINGS[task], ...(canTruncate ? { truncate: true } : {}) };
    for await (const result of model.predictBatch(inputs, options)) found.push(result);
  }
  if (found.length !== golden.results.length)
    return [`there are ${found.length} results, not ${golden.results.length}`];
  return found.map((value, number) => {
    const { numbers, fields } = golden.results[number].expected;
    const result = inCharacters(value as Json, golden.results[number].input);
    const difference =
      arrayDifference(numbers, numbersOf(result), golden.tolerance) ??
      (fields && jsonDifference(fieldsOf(result, fields), fields, golden.tolerance));
    return difference && `input ${number}: ${difference}`;
  });
}

function rawInput(raw: Json, readImage?: ImageReader): unknown {
  if ("text" in raw) return raw.text;
  if ("fields" in raw) return raw.fields;
  if ("texts" in raw) return raw.texts;
  if ("png" in raw) return readImage!(bytesOf(raw.png as string));
  if ("series" in raw) return decodeArray(raw.series);
  const samples = decodeArray(raw.samples).data.map((sample) => Math.fround(sample * raw.volume));
  return { samples, samplingRate: raw.rate as number };
}

/** Return spans and answers with places in characters, as in Python. JavaScript counts those beyond U+FFFF twice. */
function inCharacters(result: Json, input: Json): Json {
  const [text] = [input.text, input.texts?.[1]].filter((one) => one !== undefined) as string[];
  const counted = (one: Json): Json => ({
    ...one,
    start: [...text.slice(0, one.start)].length,
    end: [...text.slice(0, one.end)].length,
    ...("alternatives" in one ? { alternatives: one.alternatives.map(counted) } : {}),
  });
  if (areSpans(result)) return result.map(counted);
  return isAnswer(result) ? counted(result) : result;
}

function areSpans(result: Json): boolean {
  return Array.isArray(result) && result.every((one: Json) => "label" in one);
}

function isAnswer(result: Json): boolean {
  return "alternatives" in result && "start" in result;
}

/** Return the numbers of a result, as the Python runtime's tasks do. */
function numbersOf(result: Json): Values {
  const vector = (data: number[]) => ({ data, shape: [data.length] });
  if (isAnswer(result)) return vector([result.score]);
  if (areSpans(result)) {
    const length = Math.max(0, ...result.map((span: Json) => span.end as number)) || 1;
    const data = result.flatMap((span: Json) => [span.score, span.start / length, span.end / length]);
    return { data, shape: [result.length, 3] };
  }
  if ("shape" in result) return result as Values;
  if ("scores" in result) return vector(Object.values(result.scores));
  if ("tokenIds" in result) return vector(result.tokenIds);
  if (Array.isArray(result)) {
    const data = result.flatMap((mask: Json[]) => mask.map(({ score }) => score as number));
    return { data, shape: [result.length, data.length / result.length] };
  }
  throw new Error(`no numbers are known of ${JSON.stringify(result)}`);
}

/** Return the fields of a result, as the Python runtime's tasks do. expected: says which kind of array it is. */
function fieldsOf(result: Json, expected: Json): Json {
  if ("shape" in result) {
    const name = Object.keys(expected).find((key) => ["vector", "vectors", "forecast"].includes(key))!;
    return { ...expected, [name]: nested(result as Values) };
  }
  if (isAnswer(result)) {
    const [best, ...others] = [result, ...result.alternatives].map(({ alternatives: _, ...answer }) => answer);
    return others.length ? { ...best, alternatives: others } : best;
  }
  if ("spans" in expected) return { spans: result };
  if (Array.isArray(result)) return { masks: result };
  if ("tokenIds" in result) {
    const segments = result.segments.length ? { segments: result.segments } : {};
    const language = result.language === undefined ? {} : { language: result.language };
    return { text: result.text, token_ids: result.tokenIds, score: result.score, ...language, ...segments };
  }
  return { label: result.label, score: result.score, scores: result.scores };
}

/** Return nested lists of the numbers of an array. */
function nested({ data, shape }: Values, axis = 0, start = 0): Json {
  if (axis === shape.length) return data[start];
  const size = shape.slice(axis + 1).reduce((product, one) => product * one, 1);
  return Array.from({ length: shape[axis] }, (_, i) => nested({ data, shape }, axis + 1, start + i * size));
}
