import { describe, expect, test } from "vitest";
import type { Manifest } from "../../src/format/manifest.js";
import { audioOf, AudioPreprocessor, isAudio, type AudioInput, type Samples } from "../../src/preprocess/audio.js";
import { errorOf, Golden, type Place } from "../golden/golden.js";

const WAVEFORM = {
  sampling_rate: 16000,
  features: "waveform",
  normalize: false,
  min_samples: 1,
  num_mel_bins: 0,
  n_fft: 0,
  hop_length: 0,
  max_frequency: 0,
  n_samples: 0,
};
const LOG_MEL = {
  ...WAVEFORM,
  features: "log-mel",
  num_mel_bins: 4,
  n_fft: 40,
  hop_length: 20,
  max_frequency: 8000,
  n_samples: 1600,
};

function of(settings: object): AudioPreprocessor {
  return AudioPreprocessor.of({ kind: "audio", numbers: new Map(Object.entries(settings)) });
}

describe("With random recordings and settings of files", () => {
  interface Case {
    settings: object;
    channels: Place<"float32" | "float64" | "int16" | "int32">[];
    features: Place<"float32">;
    direct?: boolean;
  }
  const golden = new Golden<Case>("preprocess/audio.py");

  test("features are those of the Python runtime", () => {
    let different = 0;
    for (const { settings, channels, features, direct } of golden.cases) {
      const audio = of(settings);
      const samples = channels.map((channel) => golden.array(channel) as Samples);
      const { samplingRate } = audio.settings;
      const given: AudioInput = samples.length === 1 ? samples[0] : { samples, samplingRate };
      const found = direct ? audio.spectrogram(samples[0] as Float32Array) : audio.fromSamples(given);
      expect(found.shape).toEqual(features.shape);
      const expected = golden.array(features);
      if (audio.settings.features === "waveform") {
        // Means and variances of n samples have two sums, whose roundings differ by n * 2 ** -52 of the loudness. After
        // that a sample may be rounded to the next float32.
        const sums = found.data.length * 2 ** -50;
        found.data.forEach((value, i) => {
          expect(Math.abs(value - expected[i])).toBeLessThanOrEqual(2 ** -23 * Math.abs(expected[i]) + sums);
        });
        continue;
      }
      // A logarithm of up to 10 and the maximum are rounded to float32, 2 ** -21 at most each, and divided by 4. Errors
      // of float64 are far below: power is kept to 8 digits below the maximum.
      const errors = expected.map((value, i) => Math.abs(value - found.data[i]));
      expect(Math.max(...errors), JSON.stringify(settings)).toBeLessThanOrEqual(2 ** -22);
      different += errors.filter((error) => error > 0).length / errors.length;
    }
    expect(different / golden.cases.length).toBeLessThan(0.001); // nearly all numbers are the same
  });
});

test("A spectrogram is taken as it is", () => {
  const data = new Float32Array(4 * 80).fill(3);
  const found = of(LOG_MEL).fromSamples({ data, shape: [4, 80] });
  expect(found).toEqual({ data, shape: [4, 80] });
  expect(errorOf(() => of(LOG_MEL).fromSamples({ data, shape: [80, 4] })).name).toBe("InputError");
});

test("A recording of a browser has channels and a rate", () => {
  const channels = [Float32Array.of(1, 0.5, 0), Float32Array.of(0, 0.5, 0.25)];
  const buffer = { sampleRate: 16000, numberOfChannels: 2, getChannelData: (i: number) => channels[i] };
  expect([...of(WAVEFORM).read(buffer)]).toEqual([0.5, 0.5, 0.125]);
  expect(isAudio(buffer)).toBe(true);
  expect([isAudio("x.wav"), isAudio([1, 2]), isAudio(null), isAudio(new Uint8Array(3))]).toEqual(
    new Array(4).fill(false),
  );
});

test("A value that is not a recording is refused with what to do", () => {
  const samples = Float32Array.of(1, 2);
  for (const [value, message] of [
    ["x.wav", /^a recording is samples .* not "x\.wav"$/],
    [[1, 2], /^a recording is samples .* not \[1, 2\]$/],
    [new Uint8Array(4), /^a recording is samples/],
    [{ samples: [], samplingRate: 16000 }, /^a recording is samples/],
    [{ samples: [samples, [1, 2]], samplingRate: 16000 }, /^a recording is samples .* not \[1, 2\]$/],
    [{ samples: [samples, Float32Array.of(1)], samplingRate: 16000 }, /equal lengths, and these 2, 1$/],
    [{ samples, samplingRate: 999 }, /^the sampling rate of the recording must be a whole number .* not 999$/],
    [{ samples, samplingRate: "16000" }, /^the sampling rate .* not "16000"$/],
    [new Float32Array(0), /^the recording is empty$/],
    [Float32Array.of(0, NaN), /^the recording holds a sample that is not a number, \[NaN\] at 0\.000 s$/],
    [{ samples: [samples, Float32Array.of(0, Infinity)], samplingRate: 1000 }, /\[2, Infinity\] at 0\.001 s$/],
    [{ samples: new Float32Array(9).fill(3.4e38), samplingRate: 8000 }, /too large to be resampled/],
  ] as const) {
    const error = errorOf(() => of(WAVEFORM).read(value as unknown as AudioInput));
    expect(error.name, error.message).toBe("InputError");
    expect(error.message).toMatch(message);
  }
});

test("A recording that is too short or too long is refused", () => {
  const short = errorOf(() => of({ ...WAVEFORM, min_samples: 400 }).read(new Float32Array(100)));
  expect(short.message).toBe(
    "the recording is 100 samples long at 16000 Hz (0.0063 s) and the model reads 400 at least",
  );
  const long = errorOf(() => of(LOG_MEL).fromSamples(new Float32Array(1601)));
  expect(long.message).toMatch(
    /^the recording is 0\.10 s long and 0\.1 s are read at once: transcribe\(\) reads longer ones/,
  );
  const most = errorOf(() => of(WAVEFORM).read(new Float32Array(11), 10));
  expect(most.message).toBe("the recording has 11 samples, and at most 10 are read: cut it into parts");
  const resampled = errorOf(() => of(WAVEFORM).read({ samples: new Float32Array(10), samplingRate: 8000 }, 10));
  expect(resampled.message).toMatch(/^the recording, resampled to 16000 Hz, has 20 samples, and at most 10 are read/);
});

test("Damaged settings are refused with what is damaged", () => {
  for (const change of [
    { sampling_rate: 0 },
    { features: "mfcc" },
    { num_mel_bins: 0 },
    { n_fft: 1 },
    { hop_length: 0 },
    { hop_length: 1601 },
    { max_frequency: 0 },
    { max_frequency: -1 },
    { num_mel_bins: 65536, n_samples: 2 ** 28, hop_length: 1 },
    { n_samples: 1.5 },
    { window: 3 },
  ]) {
    const error = errorOf(() => of({ ...LOG_MEL, ...change }));
    expect(error.name, JSON.stringify(change)).toBe("ModelFileError");
    expect(error.message).toMatch(/^the audio settings of the file are damaged \(.*\): export the model again$/);
  }
});

test("The input that reads a recording is found by its kind, and its shape is that of the spectrogram", () => {
  const entry = { kind: "audio", numbers: new Map(Object.entries(LOG_MEL)) };
  const manifest = (shape: unknown[]) =>
    ({
      preprocessing: new Map([["features", entry]]),
      encode: { inputs: [{ name: "features", shape }] },
    }) as unknown as Manifest;
  const { name, audio } = audioOf(manifest(["batch", 4, 80]))!;
  expect([name, audio.frames]).toEqual(["features", 80]);
  expect(audioOf({ preprocessing: new Map() } as unknown as Manifest)).toBeUndefined();
  expect(errorOf(() => audioOf(manifest(["batch", 5, 80]))).message).toMatch(
    /\(a spectrogram of 4 × 80, an input of 5 × 80\): export the model again$/,
  );
});
