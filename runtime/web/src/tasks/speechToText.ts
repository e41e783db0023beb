/**
 * Speech recognition by a generative model, which writes text and times of a window of audio.
 *
 * The prompt of a window has special tokens for the spoken language and for the task. If no language is given, the likeliest
 * language is detected. A recording that is longer than a window is read in several windows. Each window begins at the
 * last time that the window before has. This is the sequential algorithm of transformers' generate() (Radford et al. 2022,
 * "Robust Speech Recognition via Large-Scale Weak Supervision", 3.8).
 */

import { numberArray, type NumberArray } from "../base/arrays.js";
import { InputError, ModelFileError, OptionError } from "../base/errors.js";
import { checkBoolean, invalidValue } from "../base/validation.js";
import type { Generator } from "../decoding/generator.js";
import { settingsOf, type Settings } from "../decoding/options.js";
import { OPTIONS } from "../decoding/optionTable.js";
import { inOrder, type Item } from "../decoding/ordered.js";
import type { Request, Result } from "../decoding/request.js";
import type { Manifest } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";
import { audioOf, LOG_MEL, type AudioInput, type AudioPreprocessor } from "../preprocess/audio.js";
import type { SettingValues } from "./base.js";
import { DecoderPrompt, splitSegments, timestampRules, type PromptIds } from "./decoderPrompt.js";
import type { Transcription } from "./speech.js";

const MAX_SPECTROGRAM_VALUES = 2 ** 26; // of the recordings in memory: 256 MB, 2 hours
const TIME_DIGITS = 6; // decimals of seconds; a time step is a multiple of 0.01 s
const BATCH_SIZE = 8;
const SETTINGS = ["timestamps", "numBeams", "language", "task"];

/** Settings of a transcription. undefined: those of the file. */
interface SpeechSettings {
  readonly timestamps: boolean | undefined;
  readonly numBeams: number | undefined;
  readonly language: string | undefined;
  readonly task: string | undefined;
}

export interface TranscribeOptions {
  /** Recordings that are decoded together. */
  readonly batchSize: number;
  /** The input that chooses the adapter; empty for a file without adapters. */
  readonly adapter: Sources;
  readonly signal: AbortSignal | undefined;
}

interface TimedSegment {
  readonly ids: readonly number[];
  readonly start: number;
  readonly end: number;
}

/** One recording. timestamps: whether its text has times. */
interface Recording extends Item<Transcription> {
  readonly index: number;
  readonly frames: NumberArray;
  readonly timestamps: boolean;
}

/** The tokens of a recording so far. */
class Transcript {
  /** The frame at which the next window begins. */
  seek = 0;
  score = 0;
  readonly ids: number[] = [];
  readonly segments: TimedSegment[] = [];

  /** prompt: has undefined in the place of a language that is not detected yet. */
  constructor(
    readonly recording: Recording,
    public prompt: PromptIds,
  ) {}

  get detects(): boolean {
    return this.prompt.includes(undefined);
  }

  get framesLeft(): number {
    return this.recording.frames.shape[1] - this.seek;
  }

  /** Equal for recordings whose next requests may be one batch: prompts of one length, and the same rules. */
  get kind(): string {
    return `${this.detects} ${this.recording.timestamps} ${this.prompt.length}`;
  }
}

/** Transcribes with one model file. */
export class SpeechToText {
  readonly does = "transcribes speech";
  readonly call = "transcribe()";
  readonly batchSize = BATCH_SIZE;
  private readonly prompt: DecoderPrompt;
  private readonly inputName: string;
  private readonly audio: AudioPreprocessor;
  private readonly startId: number;
  private readonly endId: number;

  /** Throw ModelFileError for damaged settings of the file. */
  constructor(private readonly manifest: Manifest) {
    this.prompt = DecoderPrompt.of(manifest);
    const audio = audioOf(manifest)!;
    this.inputName = audio.name;
    this.audio = audio.audio;
    const { bosTokenIds, eosTokenIds } = manifest.specialTokens;
    if (!manifest.encode || this.audio.settings.features !== LOG_MEL || !bosTokenIds.length || !eosTokenIds.length) {
      throw new ModelFileError(
        "the token settings of the file are damaged (no start, no end or no spectrogram): export the model again",
      );
    }
    [this.startId] = bosTokenIds;
    [this.endId] = eosTokenIds;
    settingsOf({}, manifest.generationDefaults);
  }

  /** Check the settings of transcriptions. Throw OptionError for an impossible value. */
  settings(values: SettingValues): SpeechSettings {
    const given = Object.keys(values).filter((name) => values[name] !== undefined);
    const others = given.filter((name) => !SETTINGS.includes(name));
    if (others.length) throw new OptionError(`this file ${this.does}: it takes no ${others.join(", ")}`, others[0]);
    const { timestamps, numBeams, language, task } = values;
    const { multilingual, noTimestamps } = this.prompt.settings;
    if (timestamps !== undefined && checkBoolean("timestamps", timestamps) && noTimestamps === undefined) {
      throw new OptionError(
        "timestamps are not written by this model: its generation config names no tokens for them",
        "timestamps",
      );
    }
    for (const [name, value, find] of [
      ["language", language, (text: string) => this.prompt.languageId(text)],
      ["task", task, (text: string) => this.prompt.taskId(text)],
    ] as const) {
      if (value === undefined) continue;
      if (!multilingual) {
        throw new OptionError(`this model has one language and one task, and takes no ${name}`, name);
      }
      if (typeof value !== "string") throw invalidValue(name, "a text", value);
      find(value);
    }
    if (numBeams !== undefined) OPTIONS.numBeams[0]("numBeams", numBeams);
    return { timestamps, numBeams, language, task } as SpeechSettings;
  }

  /**
   * Yield the transcriptions of any number of recordings, in their order.
   *
   * recordings: read lazily.
   * Memory: the spectrograms of `batchSize` recordings. No further recording is read once these have
   * MAX_SPECTROGRAM_VALUES values. Cost: for each window of a recording, a run of the encoder and a step for each token.
   * Without a language, another run of the encoder for the first window.
   */
  transcribeAll(
    generator: Generator,
    recordings: Iterable<AudioInput> | AsyncIterable<AudioInput>,
    settings: SpeechSettings,
    options: TranscribeOptions,
  ): AsyncGenerator<Transcription> {
    return inOrder<AudioInput, Recording, Transcription>(recordings, {
      windowSize: options.batchSize,
      limit: { size: MAX_SPECTROGRAM_VALUES, of: ({ frames }) => frames.data.length },
      read: (recording, index) => this.read(index, recording, settings),
      batches: (items) => [items],
      run: async (batch) => {
        const all = batch.map((recording) => this.begin(recording, settings));
        for (let left = all; left.length; left = left.filter(({ framesLeft }) => framesLeft > 0)) {
          for (const kind of new Set(left.map((one) => one.kind))) {
            const group = left.filter((one) => one.kind === kind);
            await this.generate(generator, group, settings, options);
          }
        }
        batch.forEach((item, i) => (item.outcome = { value: this.transcription(generator, all[i]) }));
      },
    });
  }

  /** Read a recording. Throw InputError. */
  private read(index: number, recording: AudioInput, settings: SpeechSettings): Recording {
    const { audio } = this;
    const frames = audio.spectrogram(audio.read(givenAudio(recording, this.inputName)));
    const { noTimestamps, timestamps: byDefault } = this.prompt.settings;
    const isLong = frames.shape[1] > audio.frames;
    const window = `${audio.settings.nSamples / audio.settings.samplingRate} s`;
    if (isLong && noTimestamps === undefined) {
      throw new InputError(
        `the recording is longer than ${window}, and this model writes no timestamps: cut it into parts`,
      );
    }
    if (isLong && settings.timestamps === false) {
      throw new InputError(
        `the recording is longer than ${window}, so that it is read in windows, whose starts follow from timestamps: ` +
          "leave out timestamps: false",
      );
    }
    return { index, frames, timestamps: (settings.timestamps ?? byDefault) || isLong };
  }

  private begin(recording: Recording, { language, task }: SpeechSettings): Transcript {
    return new Transcript(recording, this.prompt.ids(this.startId, language, task, recording.timestamps));
  }

  /** Generate what is next for recordings of one kind: their languages, or the texts of their next windows. */
  private async generate(
    generator: Generator,
    group: readonly Transcript[],
    settings: SpeechSettings,
    { adapter, signal }: TranscribeOptions,
  ): Promise<void> {
    const [{ detects, prompt, recording }] = group;
    const { maxNewTokens } = this.prompt.settings;
    const room = this.manifest.maxLength - prompt.length;
    const requests = group.map((one): Request => ({
      index: one.recording.index,
      sources: new Map([[this.inputName, this.window(one)], ...adapter]),
      prompt: detects ? Int32Array.of(this.startId) : Int32Array.from(one.prompt as readonly number[]),
      maxTokens: detects ? 1 : Math.min(room, maxNewTokens ?? room),
      prefixTokens: 0,
    }));
    const generation = detects
      ? this.languageSettings()
      : this.windowSettings(settings, recording.timestamps, prompt.length);
    const results = await generator.generateAll(requests, generation, signal);
    group.forEach((one, i) => {
      if (detects) one.prompt = one.prompt.map((id) => id ?? results[i].tokenIds[0]);
      else this.append(one, results[i]);
    });
  }

  /** Return settings that choose the likeliest language token after the start token. */
  private languageSettings(): Settings {
    const languages = new Set(this.prompt.settings.languages.values());
    return settingsOf(
      {
        numBeams: 1,
        temperature: 0,
        logitsProcessor: (_, scores) => scores.map((score, id) => (languages.has(id) ? score : -Infinity)),
      },
      new Map(),
    );
  }

  private windowSettings({ numBeams }: SpeechSettings, timestamps: boolean, promptTokens: number): Settings {
    const rules = timestamps ? timestampRules(this.prompt.settings, this.endId, promptTokens) : undefined;
    return settingsOf({ numBeams, logitsProcessor: rules }, this.manifest.generationDefaults);
  }

  /** Return the frames (numMelBins, frames) of the next window, padded with zeros at the end. */
  private window({ recording: { frames }, seek }: Transcript): NumberArray {
    const [bands, length] = frames.shape;
    const size = this.audio.frames;
    const data = new Float32Array(bands * size);
    const end = Math.min(length, seek + size);
    for (let band = 0; band < bands; band++) {
      data.set(frames.data.subarray(band * length + seek, band * length + end), band * size);
    }
    return numberArray(data, [bands, size]);
  }

  /** Append the segments of a window, and set where the next window begins. */
  private append(transcript: Transcript, result: Result): void {
    const { settings } = this.prompt;
    const ids = result.finishReason === "end" ? result.tokenIds.slice(0, -1) : result.tokenIds;
    transcript.score += result.tokenLogprobs.reduce((sum, logprob) => sum + logprob, 0);
    const windowFrames = Math.min(transcript.framesLeft, this.audio.frames);
    const begin = (transcript.seek * settings.step) / settings.stride;
    const { segments, advance } = splitSegments(ids, settings, windowFrames);
    for (const segment of segments) {
      const [start, end] = [segment.first, segment.last].map((step) => begin + step * settings.step);
      transcript.segments.push({ ids: segment.ids, start, end });
      for (const id of segment.ids) transcript.ids.push(id);
    }
    transcript.seek += advance > 0 ? advance : windowFrames;
  }

  private transcription(generator: Generator, transcript: Transcript): Transcription {
    const { ids, score, prompt, recording } = transcript;
    const segments = (recording.timestamps ? transcript.segments : []).map((segment) => ({
      text: this.text(generator, segment.ids),
      start: rounded(segment.start),
      end: rounded(segment.end),
    }));
    return {
      text: this.text(generator, ids),
      tokenIds: ids,
      score,
      segments,
      language: this.prompt.languageOf(prompt),
    };
  }

  /** Decode ids without the times. The ids before and after a time are decoded separately. */
  private text({ codec }: Generator, ids: readonly number[]): string {
    if (!codec) return "";
    const { noTimestamps = Infinity } = this.prompt.settings;
    let text = "";
    for (let begin = 0; begin < ids.length;) {
      let end = begin;
      while (end < ids.length && ids[end] <= noTimestamps) end++;
      if (end > begin) text += codec.decode(ids.slice(begin, end));
      begin = end + 1;
    }
    return text.trim();
  }
}

/** Return the recording of an input, which may be an object with the name of the input. */
function givenAudio(input: unknown, name: string): AudioInput {
  const isNamed = typeof input === "object" && input !== null && Object.keys(input).join() === name;
  return (isNamed ? (input as Record<string, unknown>)[name] : input) as AudioInput;
}

function rounded(seconds: number): number {
  return Number(seconds.toFixed(TIME_DIGITS));
}
