/**
 * Draw the next token from logits.
 *
 * A draw takes float64 numbers through the operations of the Python runtime, so that the same logits and the same seed
 * give the same token. Only last bits differ: those of `Math.exp`, and those of the total, which numpy adds up in another
 * order. The total scales all probabilities alike. The other bits move the limits between tokens by about 1e-16 of the total
 * probability each. A draw falls between the two places of a limit with a probability of less than 1e-16 for each token
 * that can be drawn, 1e-11 for a vocabulary of 100,000. Tokens of equal logits have equal weights in both.
 */

import { OptionError } from "../base/errors.js";
import { sum } from "../base/arrays.js";
import { TopValues } from "./logProbabilities.js";
import type { Settings } from "./options.js";
import { RandomGenerator } from "./randomGenerator.js";

const MAX_SCANNED = 256; // greatest logits that one pass finds faster than a sort does

/** The tokens that can be drawn, in the order of the vocabulary, and their probabilities. */
export interface Distribution {
  readonly tokens: Int32Array;
  readonly probabilities: Float64Array;
}

/** Return the seed of the settings, or a random seed at each call if they have none. */
export function seedOrRandom(settings: Pick<Settings, "seed">): bigint {
  return settings.seed ?? crypto.getRandomValues(new BigUint64Array(1))[0];
}

/**
 * Draws from a row's distribution, after temperature, topK, topP and minP (in transformers' order).
 *
 * Each row has its own random generator, so that its draws do not depend on other rows. The generator is seeded by the
 * seed, the index of the request and the number of the sample. It gives one number for a token.
 */
export class Sampler {
  private readonly generator: RandomGenerator;

  constructor(
    seed: number | bigint,
    index: number,
    copy: number,
    private readonly temperature = 1,
    private readonly topK = 0,
    private readonly topP = 1,
    private readonly minP = 0,
  ) {
    this.generator = new RandomGenerator([seed, index, copy]);
  }

  /** Return the sampler for settings. copy: the number of the sample. */
  static fromSettings(
    settings: Pick<Settings, "temperature" | "topK" | "topP" | "minP">,
    seed: number | bigint,
    index: number,
    copy: number,
  ): Sampler {
    return new Sampler(seed, index, copy, settings.temperature, settings.topK, settings.topP, settings.minP);
  }

  /** Return a token for the logits of a vocabulary. Throw OptionError if all logits are -Infinity. */
  sample(logits: Float32Array): number {
    const { tokens, probabilities } = warp(logits, this.temperature, this.topK, this.topP, this.minP);
    const cumulative = probabilities.slice();
    for (let i = 1; i < cumulative.length; i++) cumulative[i] += cumulative[i - 1];
    const drawn = this.generator.random() * cumulative[cumulative.length - 1];
    let [low, high] = [0, cumulative.length - 1]; // rounding may draw the total, which is beyond the last token
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (cumulative[middle] > drawn) high = middle;
      else low = middle + 1;
    }
    return tokens[low];
  }
}

/**
 * Return the tokens that can be drawn and their probabilities.
 *
 * topK keeps ties with the k-th token. topP drops the least likely tokens as long as their sum is at most 1 - p. minP drops
 * the tokens that are less than p times as likely as the likeliest. The likeliest token always stays (Holtzman et al. 2020
 * and Nguyen et al. 2024, as in transformers' TopPLogitsWarper and MinPLogitsWarper). Throw OptionError if all logits are
 * -Infinity. Cost: topP sorts numbers of the vocabulary, and so does a topK of more than 256.
 */
export function warp(logits: Float32Array, temperature: number, topK = 0, topP = 1, minP = 0): Distribution {
  let tokens = topTokens(logits, topK);
  const weights = new Float64Array(tokens.length);
  let top = -Infinity;
  for (let i = 0; i < tokens.length; i++) {
    weights[i] = logits[tokens[i]] / temperature;
    if (weights[i] > top) top = weights[i];
  }
  for (let i = 0; i < tokens.length; i++) weights[i] = Math.exp(weights[i] - top);
  let kept: Distribution = { tokens, probabilities: weights };
  if (topP < 1) kept = keepTopP(kept, topP);
  if (minP > 0) kept = keepWhere(kept, (weight) => weight >= minP);
  const total = sum(kept.probabilities);
  return { tokens: kept.tokens, probabilities: kept.probabilities.map((weight) => weight / total) };
}

/** Return the tokens with the `topK` greatest logits, ties included; with 0, all whose logits are not -Infinity. */
function topTokens(logits: Float32Array, topK: number): Int32Array {
  const tokens = new Int32Array(logits.length);
  let count = 0;
  for (let i = 0; i < logits.length; i++) if (logits[i] !== -Infinity) tokens[count++] = i;
  if (!count) throw new OptionError("the options leave no token that may come next");
  const possible = tokens.subarray(0, count);
  if (!(0 < topK && topK < count)) return possible;
  const threshold = topK <= MAX_SCANNED ? scanned(logits, topK) : logits.slice().sort()[logits.length - topK];
  return possible.filter((token) => logits[token] >= threshold);
}

/** Return the `count`-th greatest value. */
function scanned(values: Float32Array, count: number): number {
  const top = new TopValues(count);
  top.scan(values, 0, values.length);
  return top.values[count - 1];
}

/** Drop the least likely tokens: of equal ones, those that come first in the vocabulary. */
function keepTopP({ tokens, probabilities: weights }: Distribution, topP: number): Distribution {
  const sorted = weights.slice().sort();
  const limit = (1 - topP) * sum(weights);
  let dropped = 0;
  for (let least = sorted[0]; dropped < sorted.length - 1 && !(least > limit); least += sorted[dropped]) dropped++;
  const threshold = sorted[dropped];
  let ties = dropped; // that are dropped, once the tokens with smaller weights are subtracted
  for (let i = 0; i < weights.length; i++) if (weights[i] < threshold) ties--;
  return keepWhere(
    { tokens, probabilities: weights },
    (weight) => weight > threshold || (weight === threshold && ties-- <= 0),
  );
}

function keepWhere({ tokens, probabilities }: Distribution, keeps: (weight: number) => boolean): Distribution {
  const kept = Uint8Array.from(probabilities, (weight) => Number(keeps(weight)));
  return {
    tokens: tokens.filter((_, i) => kept[i]),
    probabilities: probabilities.filter((_, i) => kept[i]),
  };
}
