/** The discrete Fourier transform of real frames of any length. */

const MAX_FACTOR = 61; // a transform whose length has a greater prime factor is made of transforms of other lengths

/**
 * Computes power spectra of frames of one length.
 *
 * Two real frames are one complex frame: their spectra are its even and its odd part.
 */
export class PowerSpectrum {
  private readonly transform: (input: Complex, output: Complex) => void;
  private readonly input: Complex;
  private readonly output: Complex;

  constructor(readonly length: number) {
    this.transform = transformOf(length);
    this.input = complex(length);
    this.output = complex(length);
  }

  /**
   * Compute the power |X| ² of two frames at the frequencies 0 … n / 2.
   *
   * one, other: the places in `values` where the frames begin. Each is multiplied by the window.
   */
  ofTwo(
    values: Float32Array,
    one: number,
    other: number,
    window: Float64Array,
    onePower: Float64Array,
    otherPower: Float64Array,
  ): void {
    const { length, input, output } = this;
    for (let i = 0; i < length; i++) {
      input.re[i] = values[one + i] * window[i];
      input.im[i] = values[other + i] * window[i];
    }
    this.transform(input, output);
    for (let i = 0; i <= length >> 1; i++) {
      const mirror = i === 0 ? 0 : length - i;
      const [a, b, c, d] = [output.re[i], output.im[i], output.re[mirror], output.im[mirror]];
      onePower[i] = ((a + c) ** 2 + (b - d) ** 2) / 4;
      otherPower[i] = ((b + d) ** 2 + (c - a) ** 2) / 4;
    }
  }
}

interface Complex {
  readonly re: Float64Array;
  readonly im: Float64Array;
}

function complex(length: number): Complex {
  return { re: new Float64Array(length), im: new Float64Array(length) };
}

/** Return a function from values to their transform. Cost of a call: n · log n. */
function transformOf(length: number): (input: Complex, output: Complex) => void {
  const factors = primeFactors(length);
  if (Math.max(1, ...factors) > MAX_FACTOR) return chirpTransform(length);
  const { cos, sin } = turns(length, -2, (i) => i);
  const scratch = complex(MAX_FACTOR);

  /**
   * Transform n values of the input, `stride` apart, to n values of the output next to each other: p transforms of n / p
   * values, for a prime factor p of n (Cooley and Tukey 1965).
   */
  function transform(input: Complex, output: Complex, to = 0, from = 0, stride = 1, n = length, level = 0): void {
    if (n === 1) {
      output.re[to] = input.re[from];
      output.im[to] = input.im[from];
      return;
    }
    const p = factors[level];
    const m = n / p;
    for (let k = 0; k < p; k++) transform(input, output, to + k * m, from + k * stride, stride * p, m, level + 1);
    for (let i = 0; i < m; i++) {
      for (let k = 0; k < p; k++) {
        scratch.re[k] = output.re[to + k * m + i];
        scratch.im[k] = output.im[to + k * m + i];
      }
      for (let q = 0; q < p; q++) {
        const step = stride * (i + q * m);
        let [re, im, angle] = [scratch.re[0], scratch.im[0], 0];
        for (let k = 1; k < p; k++) {
          angle += step;
          if (angle >= length) angle -= length;
          re += scratch.re[k] * cos[angle] - scratch.im[k] * sin[angle];
          im += scratch.re[k] * sin[angle] + scratch.im[k] * cos[angle];
        }
        output.re[to + q * m + i] = re;
        output.im[to + q * m + i] = im;
      }
    }
  }
  return transform;
}

/**
 * Return a function from values to their transform, for lengths with great prime factors: it is a convolution with
 * exp(πi k² / n), which transforms of a power of 2 compute (Bluestein 1970).
 */
function chirpTransform(length: number): (input: Complex, output: Complex) => void {
  const size = 2 ** Math.ceil(Math.log2(2 * length - 1));
  const inner = transformOf(size);
  const { cos, sin } = turns(length, -1, (i) => (i * i) % (2 * length)); // exact below 2 ** 53
  const [padded, spectrum, filter] = [complex(size), complex(size), complex(size)];
  for (let i = 0; i < length; i++) {
    padded.re[i] = padded.re[(size - i) % size] = cos[i];
    padded.im[i] = padded.im[(size - i) % size] = -sin[i];
  }
  inner(padded, filter);
  return (input, output) => {
    padded.re.fill(0);
    padded.im.fill(0);
    for (let i = 0; i < length; i++) {
      padded.re[i] = input.re[i] * cos[i] - input.im[i] * sin[i];
      padded.im[i] = input.re[i] * sin[i] + input.im[i] * cos[i];
    }
    inner(padded, spectrum);
    for (let i = 0; i < size; i++) {
      // The inverse transform is the transform of the conjugate values, conjugated and divided by the length.
      padded.re[i] = spectrum.re[i] * filter.re[i] - spectrum.im[i] * filter.im[i];
      padded.im[i] = -(spectrum.re[i] * filter.im[i] + spectrum.im[i] * filter.re[i]);
    }
    inner(padded, spectrum);
    for (let i = 0; i < length; i++) {
      const [re, im] = [spectrum.re[i] / size, -spectrum.im[i] / size];
      output.re[i] = re * cos[i] - im * sin[i];
      output.im[i] = re * sin[i] + im * cos[i];
    }
  };
}

/** Return cosine and sine of π · times · place(i) / length, for i = 0 … length - 1. */
function turns(length: number, times: number, place: (i: number) => number): { cos: Float64Array; sin: Float64Array } {
  const angles = Float64Array.from({ length }, (_, i) => (times * Math.PI * place(i)) / length);
  return { cos: angles.map(Math.cos), sin: angles.map(Math.sin) };
}

function primeFactors(n: number): number[] {
  const factors: number[] = [];
  for (let p = 2; n > 1; p = p * p > n ? n : p + 1) {
    for (; n % p === 0; n /= p) factors.push(p);
  }
  return factors;
}
