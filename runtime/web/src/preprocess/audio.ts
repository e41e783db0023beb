/**
 * From samples to the features of a model, as transformers' feature extractors compute them.
 *
 * mean of the channels → resample to the rate of the model → features:
 *
 * waveform   the samples x, or (x - mean) / √(variance + 1e-7) of each recording
 * log-mel    log10 of the power in bands of the mel scale, in frames `hopLength` samples apart, limited to 8 below the
 *            maximum: (max(log10 S, max log10 S - 8) + 4) / 4, S = M · |FFT(hann · x)| ²
 *
 * The mel scale and its triangles of equal area are those of Slaney's Auditory Toolbox (1998), as in librosa. Decoding a
 * file is the browser's work: `decodeAudioData` returns an AudioBuffer.
 */

import { sum, type NumberArray } from "../base/arrays.js";
import { InputError, ModelFileError, OutOfMemoryError } from "../base/errors.js";
import { PowerSpectrum } from "../base/fourier.js";
import { resample } from "../base/resample.js";
import { shown } from "../base/validation.js";
import { AUDIO, type Manifest, type Preprocessing } from "../format/manifest.js";
import { boolean, count, integer, number, object, oneOf, readTyped, type Reader } from "../format/typedJson.js";

export const WAVEFORM = "waveform";
export const LOG_MEL = "log-mel";

const VARIANCE_EPSILON = 1e-7;
const MIN_POWER = 1e-10;
const LOG10_POWER_RANGE = 8;
const MAX_SAMPLES = 2 ** 30; // of all channels, 4 GiB: 18 hours at 16 kHz
const MAX_SPECTRUM = 1 << 16; // bands, and samples of a frame
const MIN_RATE = 1_000; // samples per second
const MAX_RATE = 1_000_000;
const DAMAGED = "the audio settings of the file are damaged";

const size = integer(0, MAX_SPECTRUM);

/**
 * samplingRate: samples per second.
 * features: WAVEFORM or LOG_MEL.
 * normalize: whether each waveform is normalized to mean 0 and variance 1.
 * minSamples: the minimum number of samples.
 * numMelBins: bands of the spectrogram.
 * nFft, hopLength: samples of a Fourier transform, and from one transform to the next.
 * maxFrequency: the upper end of the bands, in Hz.
 * nSamples: the length of a spectrogram's input; shorter recordings are padded with silence.
 */
const audioSettings = object({
  samplingRate: integer(1, MAX_RATE),
  features: oneOf(WAVEFORM, LOG_MEL),
  normalize: boolean,
  minSamples: count,
  numMelBins: size,
  nFft: size,
  hopLength: size,
  maxFrequency: number,
  nSamples: integer(0, MAX_SAMPLES),
});

/** How a model reads a recording. The fields are those of the manifest. */
export type AudioSettings = typeof audioSettings extends Reader<infer T> ? T : never;

/** Samples of one channel: floats from -1 to 1, or integers of 16 or 32 bits. */
export type Samples = Float32Array | Float64Array | Int16Array | Int32Array;

/** Samples at the rate of the model, or a recording with its rate and channels, such as an AudioBuffer. */
export type AudioInput =
  | Samples
  | { readonly samples: Samples | readonly Samples[]; readonly samplingRate: number }
  | {
      readonly sampleRate: number;
      readonly numberOfChannels: number;
      getChannelData(channel: number): Float32Array;
    };

/** Makes the features of one input of a model. */
export class AudioPreprocessor {
  constructor(readonly settings: AudioSettings) {}

  /** Return the preprocessor of an entry of the manifest. Throw ModelFileError for a damaged entry. */
  static of(entry: Preprocessing): AudioPreprocessor {
    const audio = new AudioPreprocessor(readTyped(audioSettings, Object.fromEntries(entry.numbers), DAMAGED));
    const problem = audio.contradiction();
    if (problem) throw new ModelFileError(`${DAMAGED} (${problem}): export the model again`);
    return audio;
  }

  /** The number of frames of a padded spectrogram. */
  get frames(): number {
    return Math.floor(this.settings.nSamples / this.settings.hopLength);
  }

  /**
   * Return the features of a recording without a batch axis: (samples,), or (numMelBins, frames).
   *
   * audio: see `read`; an array with the shape of a spectrogram is one.
   * Throw InputError for a recording that cannot be read or is longer than a spectrogram.
   */
  fromSamples(audio: AudioInput | NumberArray): NumberArray {
    const { features, numMelBins, nSamples, samplingRate } = this.settings;
    if (features === WAVEFORM) {
      const data = this.waveform(this.read(audio as AudioInput));
      return { data, shape: [data.length] };
    }
    if (isArray(audio) && audio.shape.length === 2 && audio.shape[0] === numMelBins && audio.shape[1] === this.frames) {
      return { data: Float32Array.from(audio.data), shape: audio.shape };
    }
    const samples = this.read(audio as AudioInput);
    if (samples.length > nSamples) {
      throw new InputError(
        `the recording is ${(samples.length / samplingRate).toFixed(2)} s long and ${nSamples / samplingRate} s are read ` +
          "at once: transcribe() reads longer ones piece by piece",
      );
    }
    return this.spectrogram(samples);
  }

  /** Return the samples of `read`, normalized if the model requires that. */
  waveform(samples: Float32Array): Float32Array {
    if (!this.settings.normalize) return samples;
    return withMemory(() => {
      const mean = sum(samples) / samples.length;
      const centered = Float64Array.from(samples, (sample) => sample - mean);
      const variance = sum(centered.map((value) => value * value)) / samples.length;
      const scale = Math.sqrt(variance + VARIANCE_EPSILON);
      return Float32Array.from(centered, (value) => value / scale);
    });
  }

  /**
   * Return the log-mel spectrogram (numMelBins, frames) of a recording of any length.
   *
   * Frames begin half a window before the recording, which is reflected at its ends. Cost: linear in the length. Memory:
   * the recording and the result.
   */
  spectrogram(samples: Float32Array): NumberArray {
    return withMemory(() => this.computedSpectrogram(samples));
  }

  private computedSpectrogram(samples: Float32Array): NumberArray {
    const { nFft, hopLength, nSamples, numMelBins } = this.settings;
    const length = Math.max(samples.length, nSamples);
    const frames = Math.floor(length / hopLength);
    const values = reflected(samples, length, Math.floor(nFft / 2));
    const hann = Float64Array.from({ length: nFft }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / nFft));
    const bands = melBands(this.settings);
    const spectrum = new PowerSpectrum(nFft);
    const powers = [0, 1].map(() => new Float64Array(Math.floor(nFft / 2) + 1));
    const spectrogram = new Float32Array(numMelBins * frames);
    for (let frame = 0; frame < frames; frame += 2) {
      const next = Math.min(frame + 1, frames - 1);
      spectrum.ofTwo(values, frame * hopLength, next * hopLength, hann, powers[0], powers[1]);
      bands.forEach(({ first, weights }, band) => {
        for (let i = 0; i <= next - frame; i++) {
          let sum = 0;
          for (let j = 0; j < weights.length; j++) sum += weights[j] * powers[i][first + j];
          spectrogram[band * frames + frame + i] = Math.log10(Math.max(sum, MIN_POWER));
        }
      });
    }
    let top = -Infinity;
    for (const value of spectrogram) top = Math.max(top, value);
    const least = Math.fround(top - LOG10_POWER_RANGE);
    for (let i = 0; i < spectrogram.length; i++) {
      spectrogram[i] = Math.fround(Math.max(spectrogram[i], least) + 4) / 4;
    }
    return { data: spectrogram, shape: [numMelBins, frames] };
  }

  /**
   * Return the samples of a recording with one channel at the rate of the model.
   *
   * maxSamples: of all channels before resampling, and after it.
   * Throw InputError for a recording that cannot be read, and for one with more samples. Cost and memory: linear in
   * both numbers.
   */
  read(audio: AudioInput, maxSamples = MAX_SAMPLES): Float32Array {
    const { samplingRate, minSamples } = this.settings;
    const { channels, rate } = readChannels(audio, samplingRate);
    if (!channels[0].length) throw new InputError("the recording is empty");
    if (channels.length * channels[0].length > maxSamples)
      throw tooLong("the recording", channels.length * channels[0].length, maxSamples);
    const samples = withMemory(() => {
      const mono = meanOf(channels, rate);
      if (rate === samplingRate) return mono;
      const length = Math.floor((mono.length * samplingRate) / rate);
      if (length > maxSamples) throw tooLong(`the recording, resampled to ${samplingRate} Hz,`, length, maxSamples);
      const resampled = resample(mono, rate, samplingRate);
      if (!resampled.every(Number.isFinite)) {
        throw new InputError(
          "the recording holds samples that are too large to be resampled: samples are from -1 to 1",
        );
      }
      return resampled;
    });
    if (samples.length < minSamples) {
      const seconds = (samples.length / samplingRate).toFixed(4);
      throw new InputError(
        `the recording is ${samples.length} samples long at ${samplingRate} Hz (${seconds} s) and the model reads ` +
          `${minSamples} at least`,
      );
    }
    return samples;
  }

  private contradiction(): string | undefined {
    const { features, numMelBins, nFft, hopLength, maxFrequency } = this.settings;
    if (maxFrequency < 0 || maxFrequency > MAX_RATE) return `a maximum frequency of ${maxFrequency} Hz`;
    if (features === WAVEFORM) return undefined;
    if (Math.min(numMelBins, nFft - 1, hopLength, maxFrequency) <= 0 || !this.frames)
      return "a spectrogram without size";
    if (numMelBins * Math.max(nFft, this.frames) > MAX_SAMPLES / 4) return "a spectrogram of an impossible size";
    return undefined;
  }
}

/** Return the name of the input that reads a recording, and its preprocessor; undefined without one. */
export function audioOf(manifest: Manifest): { name: string; audio: AudioPreprocessor } | undefined {
  for (const [name, entry] of manifest.preprocessing) {
    if (entry.kind !== AUDIO) continue;
    const audio = AudioPreprocessor.of(entry);
    const { features, numMelBins } = audio.settings;
    const shape = manifest.encode?.inputs.find((input) => input.name === name)?.shape ?? [];
    const fixed = shape.slice(1).filter((axis) => typeof axis === "number");
    if (features === LOG_MEL && !fixed.every((axis) => axis === numMelBins || axis === audio.frames)) {
      throw new ModelFileError(
        `${DAMAGED} (a spectrogram of ${numMelBins} × ${audio.frames}, an input of ${fixed.join(" × ")}): export the ` +
          "model again",
      );
    }
    return { name, audio };
  }
  return undefined;
}

/** Return whether a value is a recording. */
export function isAudio(value: unknown): value is AudioInput {
  return isSamples(value) || "samples" in Object(value) || "getChannelData" in Object(value);
}

function isSamples(value: unknown): value is Samples {
  return [Float32Array, Float64Array, Int16Array, Int32Array].some((Class) => value instanceof Class);
}

function isArray(value: unknown): value is NumberArray {
  return "shape" in Object(value) && "data" in Object(value);
}

/** Return the channels of a recording, of equal lengths, and their rate. Throw InputError for another value. */
function readChannels(audio: AudioInput, ownRate: number): { channels: readonly Samples[]; rate: number } {
  let [channels, rate]: [unknown, unknown] = [[audio], ownRate];
  if (!isSamples(audio) && isAudio(audio)) {
    if ("getChannelData" in audio) {
      channels = Array.from({ length: audio.numberOfChannels }, (_, channel) => audio.getChannelData(channel));
      rate = audio.sampleRate;
    } else {
      channels = Array.isArray(audio.samples) ? audio.samples : [audio.samples];
      rate = audio.samplingRate;
    }
  }
  const all = channels as readonly unknown[];
  if (!all.length || !all.every(isSamples)) {
    const kind = isAudio(audio) ? shown(all.find((channel) => !isSamples(channel))) : shown(audio);
    throw new InputError(
      "a recording is samples (a Float32Array of numbers from -1 to 1, an Int16Array or an Int32Array), an AudioBuffer, " +
        `or { samples, samplingRate } with one array for each channel, not ${kind}`,
    );
  }
  if (all.some((channel) => channel.length !== all[0].length)) {
    throw new InputError(
      `the channels of a recording have equal lengths, and these ${all.map((one) => one.length).join(", ")}`,
    );
  }
  if (typeof rate !== "number" || !Number.isInteger(rate) || rate < MIN_RATE || rate > MAX_RATE) {
    throw new InputError(
      "the sampling rate of the recording must be a whole number of samples per second from 1,000 to 1,000,000, not " +
        shown(rate),
    );
  }
  return { channels: all, rate };
}

/** Return the mean of channels in float32. Throw InputError unless the samples are finite numbers. */
function meanOf(channels: readonly Samples[], rate: number): Float32Array {
  const scaled = channels.map((channel) => {
    if (channel instanceof Float32Array) return channel;
    const scale = channel instanceof Int16Array ? 2 ** -15 : channel instanceof Int32Array ? 2 ** -31 : 1;
    return Float32Array.from(channel, (sample) => sample * scale);
  });
  const length = scaled[0].length;
  const mono = scaled.length === 1 ? scaled[0] : new Float32Array(length);
  const values = new Float64Array(scaled.length);
  for (let i = 0; i < length; i++) {
    for (let channel = 0; channel < values.length; channel++) values[channel] = scaled[channel][i];
    if (!values.every(Number.isFinite)) {
      throw new InputError(
        `the recording holds a sample that is not a number, [${values.join(", ")}] at ${(i / rate).toFixed(3)} s`,
      );
    }
    if (scaled.length > 1) mono[i] = sum(values) / values.length;
  }
  return mono;
}

function tooLong(name: string, samples: number, maxSamples: number): InputError {
  const [given, limit] = [samples, maxSamples].map((value) => value.toLocaleString("en-US"));
  return new InputError(`${name} has ${given} samples, and at most ${limit} are read: cut it into parts`);
}

/** Return the result of a function. Throw OutOfMemoryError if there is no memory for its arrays. */
function withMemory<T>(compute: () => T): T {
  try {
    return compute();
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    throw new OutOfMemoryError(
      "the recording is too long for the memory there is: cut it into parts",
      undefined,
      error,
    );
  }
}

/** Return samples, followed by silence up to a length, with `margin` samples on both sides that mirror them. */
function reflected(samples: Float32Array, length: number, margin: number): Float32Array {
  const values = new Float32Array(length + 2 * margin);
  values.set(samples, margin);
  const period = Math.max(1, 2 * (length - 1));
  const mirrored = (place: number) => {
    const within = ((place % period) + period) % period;
    return samples[within < length ? within : period - within] ?? 0;
  };
  for (let i = 1; i <= margin; i++) {
    values[margin - i] = mirrored(-i);
    values[margin + length - 1 + i] = mirrored(length - 1 + i);
  }
  return values;
}

/** A band: the weights of the frequencies from `first` on. All other weights are 0. */
interface Band {
  readonly first: number;
  readonly weights: Float64Array;
}

/** Return the bands of the mel scale: triangles of area 1, over the frequencies of a spectrum. */
function melBands({ samplingRate, nFft, numMelBins, maxFrequency }: AudioSettings): Band[] {
  const count = Math.floor(nFft / 2) + 1;
  const frequencyStep = Math.floor(samplingRate / 2) / (count - 1);
  const melStep = toMel(maxFrequency) / (numMelBins + 1);
  const corners = Float64Array.from({ length: numMelBins + 2 }, (_, i) => toHertz(i * melStep));
  return Array.from({ length: numMelBins }, (_, band) => {
    const [begin, middle, end] = corners.subarray(band, band + 3);
    const weights = Float64Array.from({ length: count }, (_, i) => {
      const frequency = i * frequencyStep;
      const rising = (frequency - begin) / (middle - begin);
      const falling = (end - frequency) / (end - middle);
      return Math.max(0, Math.min(rising, falling)) * (2 / (end - begin));
    });
    const first = weights.findIndex((weight) => weight > 0);
    const last = weights.findLastIndex((weight) => weight > 0);
    return first < 0 ? { first: 0, weights: new Float64Array(0) } : { first, weights: weights.slice(first, last + 1) };
  });
}

const LINEAR_MAX_HERTZ = 1000; // the mel scale is linear up to here, and logarithmic above
const LINEAR_MAX_MELS = 15;
const MELS_PER_E = 27 / Math.log(6.4); // for each factor of e above

function toMel(hertz: number): number {
  if (hertz < LINEAR_MAX_HERTZ) return (3 * hertz) / 200;
  return LINEAR_MAX_MELS + Math.log(hertz / LINEAR_MAX_HERTZ) * MELS_PER_E;
}

function toHertz(mels: number): number {
  if (mels < LINEAR_MAX_MELS) return (200 * mels) / 3;
  return LINEAR_MAX_HERTZ * Math.exp((mels - LINEAR_MAX_MELS) / MELS_PER_E);
}
