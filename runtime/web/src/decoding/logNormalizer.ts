/**
 * log Σ exp of logits in float32, with the last bit that it has in the Python runtime.
 *
 * Beam search compares sums of log-probabilities, so that another last bit could change the order of beams that are
 * nearly alike. The formulas are those of numpy on processors with AVX2 or AVX-512 (loops_exponent_log.dispatch.c.src):
 * exponential and logarithm are quotients of polynomials, computed with fused multiply-adds. numpy takes others on other
 * processors, whose last bits differ.
 *
 * A fused multiply-add rounds once. Here the product is exact in float64 and the sum is rounded twice. The second
 * rounding changes one result of about 2 ** 29.
 */

const { fround } = Math;

const LOG2_E = fround(Math.LOG2E);
const LN_2 = fround(Math.LN2);
const LN_2_HIGH = fround(-6.93145752e-1); // minus ln 2 in two parts
const LN_2_LOW = fround(-1.42860677e-6);
const ROUNDS = fround(1.5 * 2 ** 23); // a float32 of this size has no fraction: adding it rounds to whole numbers

const E0 = fround(9.99999999998087e-1);
const E1 = fround(7.257664613233124e-1);
const E2 = fround(2.473615434895521e-1);
const E3 = fround(5.114512081637298e-2);
const E4 = fround(6.757896990527505e-3);
const E5 = fround(5.082762527590694e-4);
const D1 = fround(-2.7423353904116675e-1);
const D2 = fround(2.1595093756858299e-2);

const LOG_NUMERATOR = [
  2.5899791179079227e-2, 3.808837741388408e-1, 1.4800006335765066, 2.112677543073053, 0.9999999999999999, 0,
].map(fround);
const LOG_DENOMINATOR = [
  5.875095403124574e-3, 1.5464763749839067e-1, 9.864942958519418e-1, 2.4530060717847364, 2.6126775430731092, 1,
].map(fround);

const MIN_EXPONENT = -160; // smaller powers are 0 in float32
const POWERS = Float64Array.from({ length: 1 - MIN_EXPONENT }, (_, i) => 2 ** (i + MIN_EXPONENT));
const BLOCK = 128;

/**
 * Return log Σ exp(logits) of the logits begin … end - 1; logits minus this are log-probabilities. It is NaN if a logit is
 * NaN or infinite, or if all are -Infinity. Cost: two passes over the logits.
 */
export function logNormalizer(logits: Float32Array, begin = 0, end = logits.length): number {
  let top = -Infinity;
  for (let i = begin; i < end; i++) if (logits[i] > top) top = logits[i];
  if (!Number.isFinite(top)) return NaN;
  return fround(top + log(sumOfExp(logits, begin, end, top)));
}

/** Return Σ exp(logits - top), added up in the order of numpy (`pairwiseSum`). */
function sumOfExp(logits: Float32Array, begin: number, end: number, top: number): number {
  const count = end - begin;
  if (count > BLOCK) {
    const half = Math.floor(count / 2);
    const middle = begin + half - (half % 8);
    return fround(sumOfExp(logits, begin, middle, top) + sumOfExp(logits, middle, end, top));
  }
  exponentials(logits, begin, count, top);
  let [sum, i] = [0, 0];
  if (count >= 8) {
    let [a, b, c, d, e, f, g, h] = [0, 0, 0, 0, 0, 0, 0, 0];
    for (; i + 8 <= count; i += 8) {
      a = fround(a + exps[i]);
      b = fround(b + exps[i + 1]);
      c = fround(c + exps[i + 2]);
      d = fround(d + exps[i + 3]);
      e = fround(e + exps[i + 4]);
      f = fround(f + exps[i + 5]);
      g = fround(g + exps[i + 6]);
      h = fround(h + exps[i + 7]);
    }
    sum = fround(fround(fround(a + b) + fround(c + d)) + fround(fround(e + f) + fround(g + h)));
  }
  for (; i < count; i++) sum = fround(sum + exps[i]);
  return sum;
}

const powers = new Float32Array(BLOCK);
const remainders = new Float32Array(BLOCK);
const denominators = new Float32Array(BLOCK);
const exps = new Float32Array(BLOCK);

/**
 * Write exp(logits - top) of `count` logits to `exps`. Storing a number rounds it.
 *
 * The steps are loops of their own: in one loop each step would wait for the one before, which takes 1.7 times as long.
 */
function exponentials(logits: Float32Array, begin: number, count: number, top: number): void {
  for (let i = 0; i < count; i++) {
    const x = fround(logits[begin + i] - top);
    const power = fround(fround(fround(x * LOG2_E) + ROUNDS) - ROUNDS);
    powers[i] = power;
    remainders[i] = power * LN_2_LOW + fround(power * LN_2_HIGH + x);
  }
  for (let i = 0; i < count; i++) {
    const y = remainders[i];
    exps[i] = fround(E5 * y + E4) * y + E3;
    denominators[i] = fround(D2 * y + D1) * y + 1;
  }
  for (let i = 0; i < count; i++) {
    const y = remainders[i];
    exps[i] = fround(exps[i] * y + E2) * y + E1;
  }
  for (let i = 0; i < count; i++) {
    const power = powers[i];
    const quotient = fround(fround(exps[i] * remainders[i] + E0) / denominators[i]);
    exps[i] = power < MIN_EXPONENT ? 0 : quotient * POWERS[power - MIN_EXPONENT];
  }
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
