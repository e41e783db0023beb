/** The special tokens of a generative speech recognizer: languages, tasks and times. */

import { ModelFileError, OptionError } from "../base/errors.js";
import { shown } from "../base/validation.js";
import type { LogitsProcessor } from "../decoding/optionChecks.js";
import type { Manifest } from "../format/manifest.js";
import {
  boolean,
  count,
  index,
  list,
  mapping,
  nullable,
  number,
  object,
  readTyped,
  text,
  type Reader,
} from "../format/typedJson.js";

const DAMAGED = "the token settings of the file are damaged";
const MAX_STEP_SECONDS = 1_000_000;
const TRANSCRIBE = "transcribe";

/**
 * languages, tasks: name → id.
 * language, task: the defaults.
 * forced: the ids after the start token if there is no language and no task; undefined for a language that is detected.
 * multilingual: whether the caller can set the language and the task.
 * noTimestamps: the id that turns times off; the ids after it are times. undefined if the model has no times.
 * timestamps: whether times are on by default.
 * latest: the maximum of the first time, in steps.
 * step: seconds of a time step.
 * stride: frames of a time step.
 * maxNewTokens: the maximum number of tokens of a window.
 */
const promptSettings = object({
  languages: mapping(index),
  tasks: mapping(index),
  language: nullable(text),
  task: nullable(text),
  forced: list(nullable(index)),
  multilingual: boolean,
  noTimestamps: nullable(index),
  timestamps: boolean,
  latest: nullable(index),
  step: number,
  stride: count,
  maxNewTokens: nullable(count),
});

/** The special tokens of a model. The fields are those of the manifest. */
export type PromptSettings = typeof promptSettings extends Reader<infer T> ? T : never;

/** Ids of a prompt, with undefined in the place of a language that has to be detected. */
export type PromptIds = readonly (number | undefined)[];

/** The prompt that a generative speech recognizer decodes from. */
export class DecoderPrompt {
  constructor(readonly settings: PromptSettings) {}

  /** Return the prompt of a file. Throw ModelFileError for settings that are damaged. */
  static of(manifest: Manifest): DecoderPrompt {
    const settings = readTyped(promptSettings, Object.fromEntries(manifest.outputMeaning.settings), DAMAGED);
    const { languages, tasks, forced, noTimestamps, step } = settings;
    const { shape } = manifest.decode!.logits;
    const vocabulary = Number(shape[shape.length - 1]);
    const ids = [...languages.values(), ...tasks.values(), ...forced, noTimestamps];
    if (ids.some((id) => id !== undefined && id >= vocabulary)) {
      throw new ModelFileError(`${DAMAGED} (an id beyond the ${vocabulary} of the model): export the model again`);
    }
    if (!(step > 0 && step <= MAX_STEP_SECONDS)) {
      throw new ModelFileError(`${DAMAGED} (a time step of ${step} s): export the model again`);
    }
    for (const [name, known] of [
      [settings.language, languages],
      [settings.task, tasks],
    ] as const) {
      if (name !== undefined && !known.has(name) && !known.has(inBrackets(name))) {
        throw new ModelFileError(`${DAMAGED} (no token of ${shown(name)}): export the model again`);
      }
    }
    return new DecoderPrompt(settings);
  }

  /** Return the id of a language. Throw OptionError for a language that the model does not have. */
  languageId(name: string): number {
    const { languages } = this.settings;
    const id = languages.get(name.toLowerCase()) ?? languages.get(inBrackets(name));
    if (id !== undefined) return id;
    const known = [...languages.keys()].map(languageCode).sort().join(", ");
    throw new OptionError(`language must be one of ${known || "none, in this model"}, not ${shown(name)}`, "language");
  }

  /** Return the id of a task. Throw OptionError for a task that the model does not have. */
  taskId(name: string): number {
    const { tasks } = this.settings;
    const id = tasks.get(name);
    if (id !== undefined) return id;
    const known = [...tasks.keys()].join(", ");
    throw new OptionError(`task must be one of ${known || "none, in this model"}, not ${shown(name)}`, "task");
  }

  /** Return the code of the language whose token a prompt has; undefined without one. */
  languageOf(ids: PromptIds): string | undefined {
    const codes = new Map([...this.settings.languages].map(([name, id]) => [id, languageCode(name)]));
    const id = ids.find((one) => one !== undefined && codes.has(one));
    return id === undefined ? undefined : codes.get(id);
  }

  /** Return the ids of the prompt. start: the start token. */
  ids(start: number, language: string | undefined, task: string | undefined, timestamps: boolean): PromptIds {
    const { languages, tasks, forced, noTimestamps } = this.settings;
    language = language || this.settings.language;
    task = task || this.settings.task;
    const ids: (number | undefined)[] = [start];
    if (task === undefined && language === undefined) ids.push(...forced);
    const isForced = ids.length > 1 && ids[1] !== undefined;
    if (language !== undefined || (languages.size && !isForced)) {
      ids.splice(1, 1, language === undefined ? undefined : this.languageId(language));
    }
    if (task !== undefined) ids.push(this.taskId(task));
    else if (language !== undefined && tasks.has(TRANSCRIBE)) {
      const hasTask = [...tasks.values()].some((id) => ids.includes(id));
      if (!hasTask) ids.push(tasks.get(TRANSCRIBE)!);
    }
    const last = ids[ids.length - 1];
    if (!timestamps && noTimestamps !== undefined && last !== noTimestamps) ids.push(noTimestamps);
    else if (timestamps && noTimestamps !== undefined && last === noTimestamps) ids.pop();
    const detected = languages.size && language === undefined && !isForced ? 1 : undefined;
    return ids.filter((id, place) => id !== undefined || place === detected);
  }
}

/**
 * Return rules for times among the tokens of one row.
 *
 * Times come in pairs, never before an earlier time, and one at the beginning. A time is forced where all times together
 * are likelier than the likeliest other token. Cost: two passes over the scores.
 */
export function timestampRules(settings: PromptSettings, endId: number, promptTokens: number): LogitsProcessor {
  const first = settings.noTimestamps! + 1;
  const { latest } = settings;
  return (ids, scores) => {
    const generated = ids.subarray(promptTokens);
    scores[first - 1] = -Infinity;
    const isTime = (id: number | undefined) => id !== undefined && id >= first;
    const lastIsTime = isTime(generated[generated.length - 1]);
    const pairIsComplete = generated.length < 2 || isTime(generated[generated.length - 2]);
    if (lastIsTime) {
      if (pairIsComplete) scores.fill(-Infinity, first);
      else scores.fill(-Infinity, 0, endId);
    }
    const latestTime = generated.findLast(isTime);
    if (latestTime !== undefined) {
      scores.fill(-Infinity, first, Math.max(first, latestTime + (lastIsTime && !pairIsComplete ? 0 : 1)));
    }
    if (!generated.length) {
      scores.fill(-Infinity, 0, first);
      if (latest !== undefined) scores.fill(-Infinity, first + latest + 1);
    }
    let most = -Infinity;
    for (let id = first; id < scores.length; id++) most = Math.max(most, scores[id]);
    if (most > -Infinity) {
      let sum = 0;
      for (let id = first; id < scores.length; id++) sum += Math.exp(scores[id] - most);
      let other = -Infinity;
      for (let id = 0; id < first; id++) other = Math.max(other, scores[id]);
      if (Math.fround(most + Math.log(sum)) > other) scores.fill(-Infinity, 0, first);
    }
    return scores;
  };
}

/** The ids of a piece of a window, with its first and last time in steps. */
export interface TimedIds {
  readonly ids: readonly number[];
  readonly first: number;
  readonly last: number;
}

/**
 * Split the ids of a window into segments. Return these, and the number of frames to the next window.
 *
 * Two times in a row end one segment and begin the next. Ids after the last such pair are discarded, because the next
 * window reads them again. If the ids end with a single time, nothing was said after it, and no id is discarded.
 */
export function splitSegments(
  ids: readonly number[],
  settings: PromptSettings,
  windowFrames: number,
): { segments: TimedIds[]; advance: number } {
  const { noTimestamps, step, stride } = settings;
  const first = noTimestamps === undefined ? Infinity : noTimestamps + 1;
  const isTime = (place: number) => ids[place] >= first;
  const ends: number[] = [];
  for (let place = 0; place < ids.length - 1; place++) if (isTime(place) && isTime(place + 1)) ends.push(place + 1);
  if (!ends.length) {
    let last = Math.trunc((windowFrames * (step / stride)) / step);
    const latest = ids.findLast((id) => id >= first);
    if (latest !== undefined && latest !== first) last = latest - first;
    return { segments: [{ ids, first: 0, last }], advance: windowFrames };
  }
  const isComplete = !isTime(ids.length - 2) && isTime(ids.length - 1);
  if (isComplete) ends.push(ids.length);
  else ends[ends.length - 1]++;
  let begin = 0;
  const segments = ends.map((end, number) => {
    const segment = ids.slice(begin, end);
    begin = end;
    const hasNextTime = number === ends.length - 1 && !isComplete;
    return { ids: segment, first: segment[0] - first, last: segment[segment.length - (hasNextTime ? 2 : 1)] - first };
  });
  return { segments, advance: isComplete ? windowFrames : (ids[begin - 2] - first) * stride };
}

function inBrackets(name: string): string {
  return `<|${name.toLowerCase()}|>`;
}

function languageCode(name: string): string {
  return name.replace(/^[<|>]+|[<|>]+$/g, "");
}
