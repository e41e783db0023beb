/**
 * Run a single-pass model (one run for each input) over any number of inputs.
 *
 * Padding costs time too, so the inputs of a window are sorted by length before they are put into batches. Padding is cut
 * out of the results. If padding would change the results of a file, all inputs of a batch have the same size.
 */

import { asNumbers, numberArray, sizeOf } from "../base/arrays.js";
import { checkAborted, InputError } from "../base/errors.js";
import { inOrder, WINDOW_BATCHES, type Item } from "../decoding/ordered.js";
import { NOT_FINITE } from "../decoding/sequence.js";
import type { Engine } from "../engine/engine.js";
import type { EncodeStage } from "../format/manifest.js";
import { crop, inputAndOutputSizes, type Sources } from "../format/sizes.js";
import type { Inputs } from "../preprocess/inputs.js";
import type { Input } from "../preprocess/values.js";
import type { Outputs, Task, TaskInput } from "./base.js";

const MAX_BATCH_POSITIONS = 512; // so that the output of one operator is still in the cache when the next one reads it
const IMAGE_POSITIONS = 196; // assumed for an image: 224 × 224 pixels in patches of 16 × 16

/** One run of the model: its inputs, then its outputs. */
interface Request {
  readonly sources: Sources;
  outputs?: Outputs;
}

interface PassItem<Result> extends Item<Result> {
  readonly reading: TaskInput;
  readonly requests: readonly Request[];
}

export interface PassOptions {
  readonly batchSize: number;
  readonly truncate: boolean;
  readonly signal?: AbortSignal;
  /** The input that chooses the adapter; empty for a file without adapters. */
  readonly adapter: Sources;
}

/** Yield the results of any number of inputs, in their order. Errors: see `inOrder`. */
export function runSinglePass<Result, Settings>(
  engine: Engine,
  inputs: Inputs,
  task: Task<Result, Settings>,
  settings: Settings,
  values: Iterable<Input> | AsyncIterable<Input>,
  options: PassOptions,
): AsyncGenerator<Result> {
  const { batchSize, truncate, adapter, signal } = options;
  return inOrder<Input, PassItem<Result>, Result>(values, {
    windowSize: WINDOW_BATCHES * batchSize,
    read: async (input) => {
      const reading = await task.readInput(input, inputs, truncate, settings);
      for (const sources of reading.requests) inputs.checkRow(sources);
      const requests = reading.requests.map((sources) => ({ sources: new Map([...sources, ...adapter]) }));
      return { reading, requests };
    },
    batches: (items) => batchesOf(engine.manifest.encode!, items, batchSize),
    run: async (batch) => {
      const requests = batch.flatMap((item) => item.requests);
      for (let begin = 0; begin < requests.length; begin += batchSize) {
        checkAborted(signal);
        await runBatch(engine, task, requests.slice(begin, begin + batchSize));
      }
      for (const item of batch) {
        const outputs = item.requests.map((request) => request.outputs!);
        checkNumbers(outputs);
        item.outcome = { value: task.makeResult(item.reading, outputs, settings) };
      }
    },
  });
}

/** Yield batches of inputs, the largest first. All of a batch have one size if padding would change their results. */
function* batchesOf<One extends { readonly requests: readonly Request[] }>(
  encode: EncodeStage,
  items: readonly One[],
  batchSize: number,
): Generator<One[]> {
  const groups = new Map<string, One[]>();
  for (const item of [...items].sort((one, other) => sizeOfItem(other) - sizeOfItem(one))) {
    const shapes = item.requests.map(({ sources }) => [...sources.values()].map(({ shape }) => shape.join(" ")).join());
    const alone = !encode.ragged && new Set(shapes).size > 1; // its parts are of different sizes
    const key = alone ? `alone ${groups.size}` : encode.ragged ? "" : shapes[0];
    const group = groups.get(key);
    if (group) group.push(item);
    else groups.set(key, [item]);
  }
  for (const group of groups.values()) {
    let batch: One[] = [];
    let rows = 0;
    let limit = batchSize;
    for (const item of group) {
      if (!batch.length) {
        const positions = Math.max(...item.requests.map((request) => positionsOf(encode, request.sources)));
        limit = Math.min(batchSize, Math.max(1, Math.floor(MAX_BATCH_POSITIONS / positions)));
      }
      batch.push(item);
      rows += item.requests.length;
      if (rows >= limit) {
        yield batch;
        batch = [];
        rows = 0;
      }
    }
    if (batch.length) yield batch;
  }
}

function sizeOfItem(item: { readonly requests: readonly Request[] }): number {
  return Math.max(...item.requests.flatMap(({ sources }) => [...sources.values()].map(({ shape }) => sizeOf(shape))));
}

/** Return an estimate of the positions that the model computes. For a recording these are frames, not samples. */
function positionsOf(encode: EncodeStage, sources: Sources): number {
  const sizes = inputAndOutputSizes(encode, sources);
  const frames = new Map([...encode.derivedLengths].map(([name, rule]) => [rule.of, sizes.get(name)!]));
  let most = 1;
  for (const spec of encode.inputs) {
    const shape = sources.get(spec.name)?.shape;
    if (!shape?.length) continue;
    most = Math.max(most, shape.length > 2 ? IMAGE_POSITIONS : (frames.get(String(spec.shape[1])) ?? shape[0]));
  }
  return most;
}

/** Run requests as one batch and store their outputs. If padding would change the results, they have one size. */
async function runBatch(engine: Engine, task: Task, requests: readonly Request[]): Promise<void> {
  const encode = engine.manifest.encode!;
  const sameShape = (one: Request) => [...one.sources.values()].map(({ shape }) => shape.join(" ")).join();
  if (!encode.ragged && requests.some((request) => sameShape(request) !== sameShape(requests[0]))) {
    for (const request of requests) await runBatch(engine, task, [request]);
    return;
  }
  const names = [...requests[0].sources.keys()];
  const sources = new Map(names.map((name) => [name, requests.map((request) => request.sources.get(name)!)]));
  const encoded = await engine.encode(sources, requests.length, [], undefined, true);
  try {
    const outputs = encode.outputs.map((spec) => {
      const tensor = encoded.get(spec.name)!;
      return { spec, values: asNumbers(tensor.data(), tensor.dtype), shape: tensor.dims.slice(1) };
    });
    requests.forEach((request, row) => {
      const sizes = inputAndOutputSizes(encode, request.sources);
      const own = outputs.map(({ spec, values, shape }) => {
        const { data, shape: kept } = crop(sizes, spec.shape.slice(1), values, row * sizeOf(shape), shape);
        return numberArray(data, kept);
      });
      request.outputs = task.selectOutputs(own, request.sources);
    });
  } finally {
    for (const tensor of encoded.values()) tensor.dispose();
  }
}

/** Throw InputError for NaN in the outputs of an input; infinity may stand for a mask. */
export function checkNumbers(outputs: readonly Outputs[]): void {
  for (const { data } of outputs.flat()) {
    if (!(data instanceof Int32Array) && data.some(Number.isNaN)) throw new InputError(NOT_FINITE);
  }
}
