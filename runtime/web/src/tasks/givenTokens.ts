/** Read given tokens, and return values at each: log-probabilities, attention weights, hidden states. */

import { asNumbers, numberArray, sizeOf, type NumberArray } from "../base/arrays.js";
import { InputError } from "../base/errors.js";
import { takeTurn } from "../base/eventLoop.js";
import { logNormalizer } from "../decoding/logNormalizer.js";
import { NOT_FINITE } from "../decoding/sequence.js";
import type { Engine } from "../engine/engine.js";
import { rowOf } from "../engine/stepOutputs.js";
import { logitCount } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";

const CHUNK_TOKENS = 128; // of one step

/**
 * Return the log-probabilities of ids[1], ids[2], ….
 *
 * Throw InputError for more tokens than the model holds, AbortedError if the signal is aborted.
 */
export async function scoreTokens(
  engine: Engine,
  sources: Sources,
  ids: Int32Array,
  signal?: AbortSignal,
): Promise<Float32Array> {
  checkLength(engine, "source and target", ids);
  await takeTurn(signal);
  const scores = new Float32Array(Math.max(0, ids.length - 1));
  const state = await engine.start(oneRow(sources), { rows: 1, maxTokens: ids.length });
  try {
    const vocabulary = logitCount(engine.decode);
    for (let begin = 0; begin < scores.length; begin += CHUNK_TOKENS) {
      await takeTurn(signal);
      const end = Math.min(scores.length, begin + CHUNK_TOKENS);
      const logits = await engine.step(state, ids.subarray(begin, end), undefined, "all");
      for (let i = begin; i < end; i++) {
        const row = (i - begin) * vocabulary;
        const norm = logNormalizer(logits, row, row + vocabulary);
        if (!(norm < Infinity)) throw new InputError(NOT_FINITE);
        // The step input may have ids that are never generated.
        scores[i] = ids[i + 1] < vocabulary ? logits[row + ids[i + 1]] - norm : -Infinity;
      }
    }
    return scores;
  } finally {
    state.release();
  }
}

/**
 * Return extra outputs by name: of the encode stage, and of the decode stage at each token, (tokens, …).
 *
 * ids: the tokens; without any, the outputs come from the encode stage alone.
 * names: of the outputs. Throw InputError for more tokens than the model holds, AbortedError if the signal is aborted.
 */
export async function extraValues(
  engine: Engine,
  sources: Sources,
  ids: Int32Array,
  names: readonly string[],
  signal?: AbortSignal,
): Promise<Map<string, NumberArray>> {
  checkLength(engine, "the tokens", ids);
  await takeTurn(signal);
  if (!ids.length) return encodedValues(engine, sources, names);
  const state = await engine.start(oneRow(sources), { rows: 1, maxTokens: ids.length, extras: names });
  try {
    const parts = new Map<string, NumberArray[]>(state.stepExtras.map((name) => [name, []]));
    for (let begin = 0; begin < ids.length; begin += CHUNK_TOKENS) {
      await takeTurn(signal);
      await engine.step(state, ids.subarray(begin, begin + CHUNK_TOKENS), undefined, "all");
      for (const [name, values] of state.extras) parts.get(name)!.push(rowOf(values, 0));
    }
    const encoded = [...state.encoded].map(([name, values]) => [name, rowOf(values, 0)] as const);
    return new Map([...encoded, ...[...parts].map(([name, all]) => [name, concatenated(all)] as const)]);
  } finally {
    state.release();
  }
}

async function encodedValues(
  engine: Engine,
  sources: Sources,
  names: readonly string[],
): Promise<Map<string, NumberArray>> {
  const outputs = await engine.encode(oneRow(sources), 1, names);
  try {
    const extras = [...outputs].filter(([name]) => names.includes(name));
    return new Map(
      extras.map(([name, tensor]) => {
        return [name, rowOf(numberArray(asNumbers(tensor.data(), tensor.dtype), tensor.dims), 0)];
      }),
    );
  } finally {
    for (const tensor of outputs.values()) tensor.dispose();
  }
}

/** Return one array of the parts of several steps, (tokens, …). */
function concatenated(parts: readonly NumberArray[]): NumberArray {
  const [, ...rest] = parts[0].shape;
  const count = parts.reduce((sum, { shape }) => sum + shape[0], 0);
  const data = new Float32Array(count * sizeOf(rest));
  let place = 0;
  for (const part of parts) {
    data.set(part.data, place);
    place += part.data.length;
  }
  return numberArray(data, [count, ...rest]);
}

function checkLength({ manifest }: Engine, subject: string, ids: Int32Array): void {
  if (ids.length <= manifest.maxLength) return;
  throw new InputError(`${subject} are ${ids.length} tokens long and the model holds ${manifest.maxLength}`);
}

function oneRow(sources: Sources): Map<string, NumberArray[]> {
  return new Map([...sources].map(([name, source]) => [name, [source]]));
}
