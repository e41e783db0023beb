/** Read given tokens, and return the log-probability of each, given the tokens before it. */

import { InputError } from "../base/errors.js";
import { logNormalizer } from "../decoding/logNormalizer.js";
import { NOT_FINITE } from "../decoding/sequence.js";
import type { Engine } from "../engine/engine.js";
import { logitCount } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";

const CHUNK_TOKENS = 128; // of one step

/** Return the log-probabilities of ids[1], ids[2], …. Throw InputError for more tokens than the model holds. */
export async function scoreTokens(engine: Engine, sources: Sources, ids: Int32Array): Promise<Float32Array> {
  const { maxLength } = engine.manifest;
  if (ids.length > maxLength) {
    throw new InputError(`source and target are ${ids.length} tokens long and the model holds ${maxLength}`);
  }
  const scores = new Float32Array(Math.max(0, ids.length - 1));
  const requests = new Map([...sources].map(([name, source]) => [name, [source]]));
  const state = await engine.start(requests, { rows: 1, maxTokens: ids.length });
  try {
    const vocabulary = logitCount(engine.decode);
    for (let begin = 0; begin < scores.length; begin += CHUNK_TOKENS) {
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
