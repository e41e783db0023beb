/** Speech recognition by a model that scores tokens at each frame of a recording (CTC). */

import { numberArray } from "../base/arrays.js";
import { ModelFileError, OptionError } from "../base/errors.js";
import { checkInt, invalidValue, shown } from "../base/validation.js";
import { logNormalizer } from "../decoding/logNormalizer.js";
import type { Manifest } from "../format/manifest.js";
import { boolean, index, nullable, object, readTyped, text } from "../format/typedJson.js";
import type { Sources } from "../format/sizes.js";
import { audioOf, LOG_MEL, type AudioInput, type AudioPreprocessor } from "../preprocess/audio.js";
import { alignPath, beamSearch, collapsePath, CtcSpelling, greedyPath, type FrameScores } from "../preprocess/ctc.js";
import type { Inputs } from "../preprocess/inputs.js";
import type { Input } from "../preprocess/values.js";
import { Task, type Outputs, type SettingValues, type TaskInput } from "./base.js";
import type { Transcription } from "./speech.js";

/** Lengths are samples, a multiple of the frame stride. */
interface Settings {
  readonly timestamps: "word" | "char" | false;
  readonly numBeams: number;
  readonly window: number;
  readonly stride: number;
}

/** The frames of a window without its context: from `first` to `end`, which is undefined for the last. */
interface Frames {
  readonly first: number;
  readonly end: number | undefined;
}

const DEFAULT_CHUNK_SECONDS = 60; // window of a long recording
const DEFAULT_STRIDE_SHARE = 1 / 6; // of the window: context on each of its sides
const MAX_SECONDS = 1_000_000;
const DAMAGED = "the token settings of the file are damaged";

/** Settings of the spelling in the file. Each may be missing. */
const SPELLING = { blank: index, delimiter: nullable(text), space: text, lower: boolean, tidy: boolean };

/**
 * Speech recognition from scores of tokens at each frame.
 *
 * A long recording is read in windows with context on both sides. The frames of the context are left out, as in
 * transformers' pipeline. Samples are normalized window by window. Beam search takes the best labelling of each window.
 */
export class CtcRecognition extends Task<Transcription, Settings> {
  readonly does = "transcribes speech";
  readonly call = "transcribe()";
  override readonly canTruncate = false; // recordings may have any length
  override readonly batchSize = 8;
  private readonly frameStride: number; // samples
  private readonly rate: number;
  private readonly minSamples: number;
  private readonly windowed: { readonly name: string; readonly audio: AudioPreprocessor } | undefined;
  private readonly spelling: CtcSpelling;

  constructor(manifest: Manifest) {
    super(manifest);
    const encode = manifest.encode!;
    const audio = audioOf(manifest);
    const frames = encode.derivedLengths.get(String(encode.outputs[0].shape[1]));
    this.frameStride = frames?.stride ?? 1;
    this.rate = audio?.audio.settings.samplingRate ?? 1;
    this.minSamples = audio?.audio.settings.minSamples ?? 1;
    // Windows need samples, and a known relation of frames to samples.
    this.windowed = frames && audio && audio.audio.settings.features !== LOG_MEL ? audio : undefined;
    const given = Object.fromEntries(this.meaning.settings);
    const known = Object.fromEntries(Object.entries(SPELLING).filter(([name]) => Object.hasOwn(given, name)));
    const settings = readTyped(object(known), given, DAMAGED) as { readonly blank?: number };
    const tokens = this.meaning.labels;
    const blank = settings.blank ?? 0;
    const size = encode.outputs[0].shape[encode.outputs[0].shape.length - 1];
    if (typeof size === "number" && (blank >= size || ![0, size].includes(tokens.length))) {
      throw new ModelFileError(
        `${DAMAGED} (${tokens.length} tokens, with the blank ${blank}, of ${size}): export the model again`,
      );
    }
    this.spelling = new CtcSpelling({ ...settings, blank, tokens });
  }

  settings(values: SettingValues): Settings {
    this.checkKnown(values, ["timestamps", "numBeams", "chunkLengthS", "strideLengthS"]);
    const window = seconds("chunkLengthS", values["chunkLengthS"] ?? DEFAULT_CHUNK_SECONDS);
    const stride = seconds("strideLengthS", values["strideLengthS"] ?? window * DEFAULT_STRIDE_SHARE);
    const given = ["chunkLengthS", "strideLengthS"].filter((name) => values[name] !== undefined);
    if (given.length && !this.windowed) {
      throw new OptionError(`this file reads a recording as a whole: it takes no ${given.join(", ")}`, given[0]);
    }
    const context = Math.max(0, Math.ceil((this.minSamples - this.frameStride) / this.frameStride)) * this.frameStride;
    if (this.windowed && !(context <= this.samples(stride) && this.samples(stride) < this.samples(window) / 2)) {
      throw new OptionError(
        `strideLengthS must be from ${context / this.rate} s to less than half of chunkLengthS: ${window} s, not ${stride} s`,
        "strideLengthS",
      );
    }
    const asked = values["timestamps"] ?? false;
    const timestamps = asked === true ? "word" : asked;
    if (timestamps !== false && timestamps !== "word" && timestamps !== "char") {
      throw new OptionError(`timestamps is true, "word" or "char", not ${shown(asked)}`, "timestamps");
    }
    if (timestamps && !this.meaning.labels.length) {
      throw new OptionError(
        "timestamps are of words, and the file has no vocabulary: export it with its tokenizer",
        "timestamps",
      );
    }
    const numBeams = checkInt("numBeams", values["numBeams"] ?? 1);
    return { timestamps, numBeams, window: this.samples(window), stride: this.samples(stride) };
  }

  /** Return the samples of a duration, rounded to whole frames. */
  private samples(duration: number): number {
    return roundHalfToEven((duration * this.rate) / this.frameStride) * this.frameStride;
  }

  override async readInput(input: Input, inputs: Inputs, truncate: boolean, settings: Settings): Promise<TaskInput> {
    if (!this.windowed) {
      const whole: Frames = { first: 0, end: undefined };
      return { requests: [await inputs.singlePassArrays(input, truncate)], details: [whole] };
    }
    const { name, audio } = this.windowed;
    const isNamed = typeof input === "object" && input !== null && Object.keys(input).join() === name;
    const recording = audio.read((isNamed ? (input as Record<string, unknown>)[name] : input) as AudioInput);
    const requests: Sources[] = [];
    const details: Frames[] = [];
    for (const { begin, end, frames } of this.pieces(recording.length, settings)) {
      const data = audio.waveform(recording.subarray(begin, end));
      requests.push(new Map([[name, numberArray(data, [data.length])]]));
      details.push(frames);
    }
    return { requests, details };
  }

  /** Return the windows of a recording: the samples of each, and its frames without the context. */
  private pieces(samples: number, { window, stride }: Settings): { begin: number; end: number; frames: Frames }[] {
    if (samples <= window) return [{ begin: 0, end: samples, frames: { first: 0, end: undefined } }];
    const pieces: { begin: number; end: number; frames: Frames }[] = [];
    for (let begin = 0; begin < samples - 2 * stride; begin += window - 2 * stride) {
      const isLast = begin + window >= samples;
      const end = Math.min(begin + window, samples);
      if (end - begin < this.minSamples) continue; // a shorter piece has no whole frame
      pieces.push({
        begin,
        end,
        frames: {
          first: begin ? Math.floor(stride / this.frameStride) : 0,
          end: isLast ? undefined : Math.floor((window - stride) / this.frameStride),
        },
      });
    }
    return pieces;
  }

  makeResult(reading: TaskInput, outputs: readonly Outputs[], settings: Settings): Transcription {
    const path: number[] = [];
    let score = 0;
    outputs.forEach(([{ data, shape }], i) => {
      const { first, end } = (reading.details as Frames[])[i];
      const part = this.path(
        data as Float32Array,
        shape,
        first,
        Math.min(end ?? shape[0], shape[0]),
        settings.numBeams,
      );
      for (const token of part.path) path.push(token);
      score += part.score;
    });
    const tokenIds = collapsePath(path, this.spelling.settings.blank);
    if (!this.meaning.labels.length) return { text: "", tokenIds, score, segments: [], language: undefined };
    const spans =
      settings.timestamps === "word"
        ? this.spelling.words(path)
        : settings.timestamps === "char"
          ? this.spelling.characters(path)
          : [];
    const time = (frame: number) => (frame * this.frameStride) / this.rate;
    const segments = spans.map((span) => ({ text: span.text, start: time(span.first), end: time(span.end) }));
    return { text: this.spelling.text(path), tokenIds, score, segments, language: undefined };
  }

  /** Return the token of each frame, and a log-probability: of the path if greedy, else of its labelling. */
  private path(
    logits: Float32Array,
    [, tokens]: readonly number[],
    first: number,
    end: number,
    numBeams: number,
  ): { path: ArrayLike<number> & Iterable<number>; score: number } {
    const data = new Float64Array(Math.max(0, end - first) * tokens);
    for (let frame = first; frame < end; frame++) {
      const norm = logNormalizer(logits, frame * tokens, (frame + 1) * tokens);
      for (let token = 0; token < tokens; token++) {
        data[(frame - first) * tokens + token] = Math.fround(logits[frame * tokens + token] - norm);
      }
    }
    const scores: FrameScores = { data, frames: Math.max(0, end - first), tokens };
    const { blank } = this.spelling.settings;
    if (numBeams === 1 || !scores.frames) {
      const { path, best } = greedyPath(scores, blank);
      return { path, score: best.score };
    }
    const [best] = beamSearch(scores, blank, numBeams);
    return { path: alignPath(scores, best.ids, blank), score: best.score };
  }
}

function seconds(name: string, value: unknown): number {
  if (typeof value !== "number" || !(value >= 0 && value <= MAX_SECONDS)) {
    throw invalidValue(name, `a number of seconds from 0 to ${MAX_SECONDS.toLocaleString("en-US")}`, value);
  }
  return value;
}

/** Round as Python does: halves go to the even number. */
function roundHalfToEven(value: number): number {
  const low = Math.floor(value);
  if (value - low !== 0.5) return Math.round(value);
  return low % 2 ? low + 1 : low;
}
