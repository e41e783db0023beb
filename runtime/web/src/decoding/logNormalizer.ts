/**
 * log Σ exp of logits in float32, with the last bit that it has in the Python runtime.
 *
 * Beam search compares sums of log-probabilities, so that another last bit could change the order of beams that are
 * nearly alike. The formulas are those of numpy on processors with AVX2 or AVX-512, as in `exponentialSum`.
 */

import { exponentialSum } from "./exponentialSum.js";

const { fround } = Math;

const LN_2 = fround(Math.LN2);

const LOG_NUMERATOR = [
  2.5899791179079227e-2, 3.808837741388408e-1, 1.4800006335765066, 2.112677543073053, 0.9999999999999999, 0,
].map(fround);
const LOG_DENOMINATOR = [
  5.875095403124574e-3, 1.5464763749839067e-1, 9.864942958519418e-1, 2.4530060717847364, 2.6126775430731092, 1,
].map(fround);

/**
 * Return log Σ exp(logits) of the logits begin … end - 1; logits minus this are log-probabilities. It is NaN if a logit is
 * NaN or infinite, or if all are -Infinity. Cost: two passes over the logits.
 */
export function logNormalizer(logits: Float32Array, begin = 0, end = logits.length): number {
  let top = -Infinity;
  for (let i = begin; i < end; i++) if (logits[i] > top) top = logits[i];
  if (!Number.isFinite(top)) return NaN;
  return fround(top + log(exponentialSum(logits, begin, end, top)));
}

/** Return the natural logarithm of x, a normal number of float32. */
function log(x: number): number {
  let exponent = Math.floor(Math.log2(x)) + 1; // x = fraction · 2 ** exponent, fraction from ½ to 1
  let fraction = x / 2 ** exponent;
  if (fraction >= 1) [fraction, exponent] = [fraction / 2, exponent + 1];
  if (fraction < 0.5) [fraction, exponent] = [fraction * 2, exponent - 1];
  if (fraction <= fround(Math.SQRT1_2)) [fraction, exponent] = [fraction * 2, exponent - 1];
  const y = fround(fraction - 1);
  const [numerator, denominator] = [LOG_NUMERATOR, LOG_DENOMINATOR].map((factors) =>
    factors.reduce((sum, factor) => fround(sum * y + factor)),
  );
  return fround(exponent * LN_2 + fround(numerator / denominator));
}
