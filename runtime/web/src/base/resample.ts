/**
 * Recordings at another rate, by the filters of soxr's high quality, which the Python runtime resamples with.
 *
 * A sample is the sum of the samples around it, weighted by a sinc under a Kaiser window. The filter passes frequencies up to
 * 0.913 of the lower Nyquist frequency, and stops those above it by 120 dB. For ratios of small whole numbers, such as 3 for
 * 48 kHz, soxr has one stage, and results differ by the rounding of float32. For other ratios, such as the ratio for 44.1 kHz, it
 * has several. Noise then differs by 4e-4 of its loudness, all of it above 0.913 of the Nyquist frequency, and by more within
 * the first and the last 7 ms, where soxr's stages cut what lies outside of the recording.
 */

const CUTOFF = 0.95687183; // where the filter passes half, of the lower Nyquist frequency
const SIMPLE_TERMS = 4; // the greatest number in a ratio for which soxr has one stage
const SIMPLE_BETA = 13.04; // of the Kaiser window
const SIMPLE_TAPS = 193.2; // weights for each sample at the lower rate
const OTHER_BETA = 15.77;
const OTHER_SUPPORT = 109.2; // half of the width of the filter, in samples at the lower rate
const MAX_PHASES = 1024; // with more, weights are interpolated between two phases; the error is π² / 8 / 1024², 1.2e-6

/** Return samples at another rate. Rates are whole numbers. Cost: linear in the samples, some 200 operations for each. */
export function resample(samples: Float32Array, rate: number, targetRate: number): Float32Array {
  const divisor = greatestDivisor(rate, targetRate);
  const [up, down] = [targetRate / divisor, rate / divisor];
  const scale = Math.min(1, up / down);
  const phases = Math.min(up, MAX_PHASES);
  const { weights, reach } = weightsOf(phases, scale, window(up, down));
  const width = 2 * reach;
  const resampled = new Float32Array(Math.floor((samples.length * up) / down + 0.5));
  for (let i = 0; i < resampled.length; i++) {
    const place = i * down;
    const begin = Math.floor(place / up) - reach + 1;
    const phase = ((place % up) * phases) / up;
    const row = Math.floor(phase);
    const first = Math.max(0, -begin);
    const end = Math.min(width, samples.length - begin);
    let sum = dot(weights, row * width, samples, begin, first, end);
    const rest = phase - row;
    if (rest) sum += rest * (dot(weights, (row + 1) * width, samples, begin, first, end) - sum);
    resampled[i] = sum;
  }
  return resampled;
}

function dot(
  weights: Float64Array,
  row: number,
  samples: Float32Array,
  begin: number,
  first: number,
  end: number,
): number {
  let sum = 0;
  for (let j = first; j < end; j++) sum += weights[row + j] * samples[begin + j];
  return sum;
}

/** The window of a filter. support: half of its width, in samples at the lower rate. */
interface Window {
  readonly support: number;
  readonly beta: number;
}

function window(up: number, down: number): Window {
  const terms = Math.max(up, down);
  if (terms > SIMPLE_TERMS) return { support: OTHER_SUPPORT, beta: OTHER_BETA };
  const taps = 4 * Math.floor((Math.ceil(SIMPLE_TAPS * terms + 1) + 2) / 4) + 1;
  return { support: taps / 2 / terms, beta: SIMPLE_BETA };
}

/**
 * Return the weights of the 2 · reach samples around a place, for `phases` places between two samples and for the place of
 * the next sample.
 */
function weightsOf(phases: number, scale: number, { support, beta }: Window): { weights: Float64Array; reach: number } {
  const reach = Math.ceil(support / scale) + 1;
  const weights = new Float64Array((phases + 1) * 2 * reach);
  const top = besselI0(beta);
  for (let phase = 0, at = 0; phase <= phases; phase++) {
    for (let j = 1 - reach; j <= reach; j++) {
      const distance = (j - phase / phases) * scale;
      const inside = 1 - (distance / support) ** 2;
      const angle = Math.PI * CUTOFF * distance;
      const sinc = angle === 0 ? 1 : Math.sin(angle) / angle;
      weights[at++] = inside < 0 ? 0 : (scale * CUTOFF * sinc * besselI0(beta * Math.sqrt(inside))) / top;
    }
  }
  return { weights, reach };
}

/** Return the modified Bessel function of order 0, by its power series. */
function besselI0(x: number): number {
  const square = (x / 2) ** 2;
  let [sum, term] = [1, 1];
  for (let k = 1; term > sum * 2 ** -53; k++) {
    term *= square / (k * k);
    sum += term;
  }
  return sum;
}

function greatestDivisor(one: number, other: number): number {
  return other === 0 ? one : greatestDivisor(other, one % other);
}
