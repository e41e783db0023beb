/** Compare a model with a golden file (docs/golden.md): the logits of calls of the engine, and the calls of `Model`. */

import type { Input, Model, NumberArray } from "../../src/index.js";
import type { Engine } from "../../src/engine/engine.js";
import type { Inputs } from "../../src/preprocess/inputs.js";
import type { Task } from "../../src/tasks/base.js";
import { runSinglePass } from "../../src/tasks/singlePass.js";
import { requestDifferences } from "./goldenRequests.js";
import { arrayDifference, decodeArray, logitsDifference, type Json, type Stored } from "./goldenValues.js";

/** Return how a model differs from a golden file, a sentence each. */
export async function differences(model: Model, golden: Json): Promise<string[]> {
  const { engine, inputs } = model as unknown as { engine: Engine; inputs: Inputs };
  const found: string[] = [];
  for (const example of golden.outputs ?? []) found.push(...(await outputDifferences(engine, inputs, golden, example)));
  for (const example of golden.decode ?? []) found.push(...(await decodeDifferences(engine, golden, example)));
  for (const example of golden.generation ?? []) {
    if (example.expected.read) found.push(...readDifferences(inputs, example));
  }
  return [...found, ...(await requestDifferences(model, golden, readPng))];
}

async function outputDifferences(engine: Engine, inputs: Inputs, golden: Json, example: Json): Promise<string[]> {
  const { outputs } = engine.manifest.encode!;
  const task = {
    readInput: async (sources: unknown) => ({ requests: [sources] }),
    selectOutputs: (values: unknown) => values,
    makeResult: (_: unknown, [values]: unknown[]) => values,
  } as unknown as Task<readonly NumberArray[]>;
  const rows = (example.rows as Json[]).map((each) => sourcesOf(each.inputs));
  const options = { batchSize: rows.length, truncate: false, adapter: new Map() };
  const found: string[] = [];
  let row = 0;
  for await (const values of runSinglePass(engine, inputs, task, {}, rows as unknown as Input[], options)) {
    for (const [place, { name }] of outputs.entries()) {
      const difference = arrayDifference(example.expected[row][name], values[place], golden.tolerance);
      if (difference) found.push(`outputs (${example.name}): row ${row}: ${name}: ${difference}`);
    }
    row++;
  }
  if (row !== rows.length) found.push(`outputs (${example.name}): there are ${row} rows, not ${rows.length}`);
  return found;
}

interface Row {
  readonly logits: Float32Array[]; // of each call
  readonly extras: Map<string, { data: number[]; shape: readonly number[] }>;
}

/** Feed the tokens of the rows of a case: the prompts together, then as many new tokens as each step has. */
async function decodeDifferences(engine: Engine, golden: Json, example: Json): Promise<string[]> {
  const { decode, encode } = engine.manifest;
  const requests = (example.rows as Json[]).map((row) => sourcesOf(row.inputs));
  const tokens = (example.rows as Json[]).map((row) => decodeArray(row.tokens));
  const width = tokens[0].shape.slice(1).reduce((product, size) => product * size, 1);
  const prompts = Int32Array.from(example.prompts as number[]);
  const names = [...(encode?.extras ?? []), ...decode!.extras].map(({ name }) => name);
  const sources = new Map([...requests[0].keys()].map((name) => [name, requests.map((row) => row.get(name)!)]));
  const state = await engine.start(sources, { rows: tokens.length, extras: names });
  const rows: Row[] = tokens.map(() => ({ logits: [], extras: new Map() }));
  const feed = async (lengths: Int32Array, starts: Int32Array, counts?: Int32Array) => {
    const longest = Math.max(...lengths);
    const fed = new Float64Array(tokens.length * longest * width);
    tokens.forEach(({ data }, row) =>
      fed.set(data.subarray(starts[row] * width, (starts[row] + lengths[row]) * width), row * longest * width),
    );
    const logits = await engine.step(state, fed, counts, "all");
    const size = logits.length / tokens.length / longest;
    rows.forEach(({ logits: kept, extras }, row) => {
      kept.push(logits.slice(row * longest * size, (row * longest + lengths[row]) * size));
      for (const [name, { data, shape }] of state.extras) {
        const each = shape.slice(2).reduce((product, one) => product * one, 1);
        const begin = row * longest * each;
        const values = [...(extras.get(name)?.data ?? []), ...data.subarray(begin, begin + lengths[row] * each)];
        extras.set(name, { data: values, shape: [values.length / each, ...shape.slice(2)] });
      }
    });
  };
  try {
    await feed(prompts, new Int32Array(tokens.length), prompts);
    const fed = prompts.slice();
    for (const step of example.steps as number[]) {
      await feed(
        fed.map(() => step),
        fed,
      );
      fed.forEach((length, row) => (fed[row] = length + step));
    }
    return rows.flatMap(({ logits, extras }, row) => {
      const expected = example.expected[row];
      const [, ...features] = tokens[row].shape;
      const length = tokens[row].shape[0];
      const data = joined(logits);
      const found = { data, shape: features.length ? expected.outputs.shape : [length, data.length / length] };
      for (const [name, { data, shape }] of state.encoded) {
        const size = data.length / tokens.length;
        extras.set(name, { data: [...data.subarray(row * size, (row + 1) * size)], shape: shape.slice(1) });
      }
      const differences = [
        "outputs" in expected
          ? arrayDifference(expected.outputs, found, golden.tolerance)
          : logitsDifference(expected.logits, found, golden.tolerance),
        ...Object.entries(expected.extras as Json).map(([name, values]) => {
          const difference = arrayDifference(values, extras.get(name)!, golden.tolerance);
          return difference && `${name}: ${difference}`;
        }),
      ];
      return differences.filter(Boolean).map((one) => `decode (${example.name}): row ${row}: ${one}`);
    });
  } finally {
    state.release();
  }
}

function joined(parts: readonly Float32Array[]): Float32Array {
  const whole = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    whole.set(part, place);
    place += part.length;
  }
  return whole;
}

function sourcesOf(inputs: Json): Map<string, Stored> {
  return new Map(Object.entries(inputs as Json).map(([name, json]) => [name, decodeArray(json)]));
}

/** Compare the ids that a text is read as. */
function readDifferences(inputs: Inputs, { text, expected }: Json): string[] {
  const { sources, prompt } = inputs.generationInputs(text as string);
  const found = {
    inputs: Object.fromEntries([...sources].map(([name, { data }]) => [name, [...data]])),
    prompt: [...prompt],
  };
  const [one, other] = [found, expected.read].map((json) => JSON.stringify(json));
  return one === other ? [] : [`${text} is read as ${one}, not ${other}`];
}

/** Return the pixels of a PNG file of 8 bits for each of red, green and blue, without interlacing. */
export function readPng(file: Uint8Array): { data: Uint8Array; width: number; height: number } {
  const view = new DataView(file.buffer, file.byteOffset);
  const [width, height] = [view.getUint32(16), view.getUint32(20)];
  if (file[24] !== 8 || file[25] !== 2 || file[28]) throw new Error("only plain PNG files are read here");
  const parts: Uint8Array[] = [];
  for (let at = 8; at < file.length;) {
    const size = view.getUint32(at);
    const kind = String.fromCharCode(...file.subarray(at + 4, at + 8));
    if (kind === "IDAT") parts.push(file.subarray(at + 8, at + 8 + size));
    at += size + 12;
  }
  const { inflateSync } = process.getBuiltinModule("node:zlib"); // pages replay files without images
  const raw = inflateSync(Buffer.concat(parts));
  const line = 3 * width;
  const data = new Uint8Array(line * height);
  for (let y = 0; y < height; y++) {
    const filter = raw[y * (line + 1)];
    for (let x = 0; x < line; x++) {
      const left = x < 3 ? 0 : data[y * line + x - 3];
      const up = y ? data[(y - 1) * line + x] : 0;
      const corner = x < 3 || !y ? 0 : data[(y - 1) * line + x - 3];
      const guess = [0, left, up, (left + up) >> 1, nearest(left, up, corner)][filter];
      data[y * line + x] = raw[y * (line + 1) + 1 + x] + guess;
    }
  }
  return { data, width, height };
}

/** Return the one of three neighbours that is nearest to left + up - corner. */
function nearest(left: number, up: number, corner: number): number {
  const guess = left + up - corner;
  const [one, two, three] = [left, up, corner].map((value) => Math.abs(guess - value));
  if (one <= two && one <= three) return left;
  return two <= three ? up : corner;
}
