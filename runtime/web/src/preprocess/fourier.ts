/** The discrete Fourier transform of real frames of any length. */

/**
 * Computes power spectra of frames of one length.
 *
 * A transform of n = p · m values is made of p transforms of m values (Cooley and Tukey 1965), for each prime factor p of n.
 * Two real frames are one complex frame: their spectra are its even and its odd part. Cost of a frame: n · Σ p.
 */
export class PowerSpectrum {
  private readonly factors: readonly number[];
  private readonly cos: Float64Array;
  private readonly sin: Float64Array;
  private readonly input: Complex;
  private readonly output: Complex;
  private readonly scratch: Complex;

  constructor(readonly length: number) {
    this.factors = primeFactors(length);
    const angles = Float64Array.from({ length }, (_, i) => (-2 * Math.PI * i) / length);
    this.cos = angles.map(Math.cos);
    this.sin = angles.map(Math.sin);
    this.input = complex(length);
    this.output = complex(length);
    this.scratch = complex(Math.max(1, ...this.factors));
  }

  /**
   * Compute the power |X| ² of two frames at the frequencies 0 … n / 2.
   *
   * one, other: the frames, which are read from places of `values`, each multiplied by the window.
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
    this.transform(0, 0, 1, length, 0);
    for (let i = 0; i <= length >> 1; i++) {
      const mirror = i === 0 ? 0 : length - i;
      const [a, b, c, d] = [output.re[i], output.im[i], output.re[mirror], output.im[mirror]];
      onePower[i] = ((a + c) ** 2 + (b - d) ** 2) / 4;
      otherPower[i] = ((b + d) ** 2 + (c - a) ** 2) / 4;
    }
  }

  /** Transform n values of the input, `stride` apart, to n values of the output next to each other. */
  private transform(to: number, from: number, stride: number, n: number, level: number): void {
    const { input, output, scratch, cos, sin, length } = this;
    if (n === 1) {
      output.re[to] = input.re[from];
      output.im[to] = input.im[from];
      return;
    }
    const p = this.factors[level];
    const m = n / p;
    for (let k = 0; k < p; k++) this.transform(to + k * m, from + k * stride, stride * p, m, level + 1);
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
}

interface Complex {
  readonly re: Float64Array;
  readonly im: Float64Array;
}

function complex(length: number): Complex {
  return { re: new Float64Array(length), im: new Float64Array(length) };
}

function primeFactors(n: number): number[] {
  const factors: number[] = [];
  for (let p = 2; n > 1; p = p * p > n ? n : p + 1) {
    for (; n % p === 0; n /= p) factors.push(p);
  }
  return factors;
}
