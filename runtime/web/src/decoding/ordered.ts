/**
 * Run lazily read inputs in batches and yield their results in the order of the inputs.
 *
 * A window of inputs is read and sorted by length, so that inputs of a batch are of similar length. Each result is given
 * as soon as it and all results before it are finished. An error is thrown in the turn of its input, after the results of
 * the inputs before it. The memory is that of one batch and of one window, for any number of inputs.
 */

import { AbortedError, InputError, TformerError, withInputNumber } from "../base/errors.js";

export const WINDOW_BATCHES = 16; // batches that a window has inputs for

/** An input with its result or its error. */
export interface Item<Output> {
  outcome?: { readonly value: Output } | { readonly error: unknown };
}

export interface Batching<In, One extends Item<Out>, Out> {
  /** The inputs of a window. */
  readonly windowSize: number;
  /** A window is complete, too, when the sizes of its items sum to `size`. */
  readonly limit?: { readonly size: number; of(item: One): number };
  /** Read an input. index: its place in the list of inputs. */
  read(input: In, index: number): One | Promise<One>;
  /** Split a window into batches, in the order in which they run. */
  batches(items: readonly One[]): Iterable<readonly One[]>;
  /** Compute a batch, and set the outcome of each item. */
  run(batch: readonly One[]): Promise<void>;
}

/** Yield the results of all inputs in their order. An InputError gets the number of its input, from 1. */
export async function* inOrder<In, One extends Item<Out>, Out>(
  inputs: Iterable<In> | AsyncIterable<In>,
  batching: Batching<In, One, Out>,
): AsyncGenerator<Out> {
  let index = 0;
  let size = 0;
  let window: { item: One; index: number }[] = [];
  let readError: { error: unknown } | undefined;
  for await (const input of inputs) {
    try {
      const item = await batching.read(input, index);
      window.push({ item, index });
      size += batching.limit?.of(item) ?? 0;
    } catch (error) {
      readError = { error: numbered(error, index) };
      break;
    }
    index++;
    if (window.length === batching.windowSize || size >= (batching.limit?.size ?? Infinity)) {
      yield* runWindow(window, batching);
      window = [];
      size = 0;
    }
  }
  yield* runWindow(window, batching);
  if (readError) throw readError.error;
}

async function* runWindow<In, One extends Item<Out>, Out>(
  window: { item: One; index: number }[],
  batching: Batching<In, One, Out>,
): AsyncGenerator<Out> {
  let next = 0;
  for (const batch of batching.batches(window.map(({ item }) => item))) {
    await runBatch(batch, batching);
    for (; next < window.length && window[next].item.outcome; next++) {
      const { item, index } = window[next];
      const outcome = item.outcome!;
      if ("error" in outcome) throw numbered(outcome.error, index);
      item.outcome = undefined; // the caller keeps the result, or nobody
      yield outcome.value;
    }
  }
}

/** Run items as one batch. If that fails, run each alone, so that only the items with an error fail. */
async function runBatch<In, One extends Item<Out>, Out>(
  batch: readonly One[],
  batching: Batching<In, One, Out>,
): Promise<void> {
  try {
    await batching.run(batch);
  } catch (error) {
    if (error instanceof AbortedError || !(error instanceof TformerError)) throw error;
    if (batch.length === 1) {
      batch[0].outcome = { error };
      return;
    }
    for (const item of batch) await runBatch([item], batching);
  }
}

function numbered(error: unknown, index: number): unknown {
  const isNumbered = error instanceof InputError && error.inputNumber === undefined;
  return isNumbered ? withInputNumber(error, index + 1) : error;
}
