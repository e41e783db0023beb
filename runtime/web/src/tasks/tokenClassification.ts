/**
 * Token classification: labelled spans of a text, such as names of people, as in transformers' pipeline.
 *
 * `aggregation` decides how tokens become spans:
 *
 * none     each token is a span
 * simple   each token has its most probable label; adjacent tokens of one label are one span, and B- begins a new one
 * first    as simple, but each word has the label of its first token
 * average  as simple, but each word has the most probable label of the mean of its tokens' probabilities
 * max      as simple, but each word has the label of its token with the highest probability
 *
 * The score of a span is the mean of the scores of its tokens, or of its words.
 * https://huggingface.co/docs/transformers/main_classes/pipelines, TokenClassificationPipeline
 */

import { InputError, OptionError } from "../base/errors.js";
import { checkInt, invalidValue, shown } from "../base/validation.js";
import type { Manifest } from "../format/manifest.js";
import type { Inputs } from "../preprocess/inputs.js";
import type { Input } from "../preprocess/values.js";
import type { TextCode, TextReader } from "../preprocess/textReader.js";
import { windowArrays, WindowReader, type TextWindow } from "../preprocess/textWindows.js";
import { Task, type Outputs, type SettingValues, type TaskInput } from "./base.js";
import { softmax } from "./classification.js";

/**
 * A labelled span of a text.
 *
 * start, end: `text` is `input.slice(start, end)`. (Python counts a character beyond U+FFFF once, and JavaScript twice.)
 */
export interface Span {
  readonly label: string;
  /** The probability of the label. */
  readonly score: number;
  readonly text: string;
  readonly start: number;
  readonly end: number;
}

interface Settings {
  readonly aggregation: string;
  readonly ignoreLabels: readonly string[];
  readonly docStride: number | undefined;
}

/** A token or a word of a text. start, end: in characters. */
interface Part {
  readonly scores: Float64Array;
  readonly start: number;
  readonly end: number;
  /** Whether a token belongs to the word of the token before it. */
  readonly continuesWord: boolean;
}

interface Details {
  readonly characters: readonly string[];
  readonly windows: readonly TextWindow[];
}

const OUTSIDE = "O"; // the label of tokens outside all spans
const [NONE, SIMPLE] = ["none", "simple"];
const AGGREGATIONS = [NONE, SIMPLE, "first", "average", "max"];
const UNKNOWN = "unknown"; // setting of the manifest: the id of the unknown token

export class TokenClassification extends Task<Span[], Settings> {
  readonly does = "labels spans of its inputs";
  readonly call = "entities()";
  private readonly reader: TextReader;
  private readonly windowReader: WindowReader;
  private readonly unknown: number | undefined;

  constructor(manifest: Manifest, textCodes: readonly TextCode[]) {
    super(manifest);
    const [index] = manifest.tokenizerOf.values();
    this.reader = textCodes[index].reader;
    this.windowReader = new WindowReader(this.reader.parts);
    this.unknown = this.fileSetting(UNKNOWN, "number") ?? this.reader.unknown;
  }

  /**
   * aggregation: see above.
   * ignoreLabels: labels whose spans are left out; O by default, and none if it is empty, as in the pipeline.
   * docStride: tokens by which windows overlap, if a long text is read in windows; undefined to refuse such a text.
   */
  settings(values: SettingValues): Settings {
    this.checkKnown(values, ["aggregation", "ignoreLabels", "docStride"]);
    const aggregation = values["aggregation"] ?? SIMPLE;
    if (!AGGREGATIONS.includes(aggregation as string)) {
      throw new OptionError(
        `aggregation must be one of ${AGGREGATIONS.join(", ")}, not ${shown(aggregation)}`,
        "aggregation",
      );
    }
    const docStride = values["docStride"] === undefined ? undefined : this.checkedStride(values["docStride"]);
    if (docStride !== undefined && aggregation === NONE) {
      throw new OptionError(
        "docStride merges spans of several windows, but aggregation none makes no spans: choose another aggregation",
        "docStride",
      );
    }
    const ignoreLabels = this.checkedLabels(values["ignoreLabels"] ?? [OUTSIDE], aggregation as string);
    return { aggregation: aggregation as string, ignoreLabels, docStride };
  }

  /** Throw OptionError for a stride of a whole window, because no window would bring more of the text. */
  private checkedStride(value: unknown): number {
    const stride = checkInt("docStride", value, 0);
    const limits = this.manifest.encode!.inputs.flatMap((spec) => spec.maxLength ?? []);
    const room = limits.length ? this.windowReader.room(Math.min(...limits)) : Infinity;
    if (stride >= room) {
      throw new OptionError(
        `docStride must be less than the ${room} tokens of text in a window, not ${stride}`,
        "docStride",
      );
    }
    return stride;
  }

  /** Return the labels as a list. Throw OptionError for a label that the model does not have. */
  private checkedLabels(value: unknown, aggregation: string): string[] {
    const given: unknown = typeof value === "string" ? [value] : value;
    if (!Array.isArray(given) || !given.every((label) => typeof label === "string")) {
      throw invalidValue("ignoreLabels", "labels", value);
    }
    const labels = (given as string[]).filter(Boolean);
    const known = this.labels.map((label) => (aggregation === NONE ? label : tagOf(label).tag));
    const other = labels.find((label) => label !== OUTSIDE && !known.includes(label));
    if (known.length && other !== undefined) {
      throw new OptionError(
        `ignoreLabels names ${shown(other)}, and the labels are ${[...new Set(known)].join(", ")}`,
        "ignoreLabels",
      );
    }
    return labels;
  }

  /** The labels of the model; empty if the file holds neither their names nor their number. */
  private get labels(): readonly string[] {
    const { shape } = this.manifest.encode!.outputs[0];
    const size = shape[shape.length - 1];
    if (this.meaning.labels.length) return this.meaning.labels;
    return Array.from({ length: typeof size === "number" ? size : 0 }, (_, i) => `LABEL_${i}`);
  }

  override truncates(truncate: unknown, settings: Settings): boolean {
    const truncates = super.truncates(truncate, settings);
    if (truncates && settings.docStride !== undefined) {
      throw new OptionError(
        "truncate and docStride exclude each other: a text that is too long is either cut or read in windows",
      );
    }
    return truncates;
  }

  override async readInput(input: Input, inputs: Inputs, truncate: boolean, settings: Settings): Promise<TaskInput> {
    if (typeof input !== "string") {
      throw new InputError("spans are parts of a text: give a text, not a pair, ids or an object");
    }
    const windows = inputs.windows(input, this.windowReader, { truncate, stride: settings.docStride });
    const details: Details = { characters: [...input], windows };
    return {
      requests: windows.map((window) => windowArrays(this.manifest, inputs.textInput.spec.name, window)),
      details,
    };
  }

  makeResult(reading: TaskInput, outputs: readonly Outputs[], settings: Settings): Span[] {
    const { characters, windows } = reading.details as Details;
    const spans = windows
      .flatMap((window, i) => this.spans(characters, this.tokens(characters, window, outputs[i]), settings.aggregation))
      .filter(({ label }) => !settings.ignoreLabels.includes(label));
    const separate = windows.length > 1 ? withoutOverlaps(spans) : spans;
    const units = [0]; // the place of each character in UTF-16
    for (const character of characters) units.push(units[units.length - 1] + character.length);
    return separate.map((span) => ({ ...span, start: units[span.start], end: units[span.end] }));
  }

  /** Return the tokens of the text. Words begin by the rules of transformers' pipeline. */
  private tokens(characters: readonly string[], window: TextWindow, [logits]: Outputs): Part[] {
    const width = logits.shape[1];
    const parts: Part[] = [];
    window.ids.forEach((id, i) => {
      if (window.texts[i] < 0) return;
      const [start, end] = [window.starts[i], window.ends[i]];
      const continues = this.windowReader.marksSubwords
        ? [...this.reader.token(id)].length !== end - start
        : start > 0 && !characters.slice(start - 1, start + 1).includes(" "); // spaces separate words
      const scores = softmax(Float64Array.from(logits.data.subarray(i * width, (i + 1) * width)));
      parts.push({ scores, start, end, continuesWord: continues && id !== this.unknown });
    });
    return parts;
  }

  private spans(characters: readonly string[], tokens: readonly Part[], aggregation: string): Span[] {
    if (aggregation === NONE) return tokens.map((token) => this.span(characters, [token], this.label(token)));
    const parts = aggregation === SIMPLE ? tokens : wordsOf(tokens).map((word) => wordPart(word, aggregation));
    const groups: Part[][] = [];
    for (const part of parts) {
      const { begins, tag } = tagOf(this.label(part));
      const group = groups[groups.length - 1];
      if (group && !begins && tag === tagOf(this.label(group[group.length - 1])).tag) group.push(part);
      else groups.push([part]);
    }
    return groups.map((group) => this.span(characters, group, this.label(group[0]).replace(/^[^-]*-/, "")));
  }

  private label(part: Part): string {
    const best = bestOf(part.scores);
    return this.meaning.labels.length ? this.meaning.labels[best] : `LABEL_${best}`;
  }

  private span(characters: readonly string[], parts: readonly Part[], label: string): Span {
    const { start } = parts[0];
    const { end } = parts[parts.length - 1];
    const score = parts.reduce((sum, { scores }) => sum + scores[bestOf(scores)], 0) / parts.length;
    return { label, score, text: characters.slice(start, end).join(""), start, end };
  }
}

function bestOf(scores: Float64Array): number {
  let best = 0;
  for (let i = 1; i < scores.length; i++) if (scores[i] > scores[best]) best = i;
  return best;
}

function wordsOf(tokens: readonly Part[]): Part[][] {
  const words: Part[][] = [];
  for (const token of tokens) {
    if (words.length && token.continuesWord) words[words.length - 1].push(token);
    else words.push([token]);
  }
  return words;
}

/** Return a word from its tokens. Its probabilities follow from the aggregation. */
function wordPart(tokens: readonly Part[], aggregation: string): Part {
  const highest = (part: Part) => part.scores[bestOf(part.scores)];
  let { scores } = tokens[0];
  if (aggregation === "max") {
    scores = tokens.reduce((best, token) => (highest(token) > highest(best) ? token : best)).scores;
  } else if (aggregation === "average") {
    scores = scores.map((_, i) => tokens.reduce((sum, token) => sum + token.scores[i], 0) / tokens.length);
  }
  return { scores, start: tokens[0].start, end: tokens[tokens.length - 1].end, continuesWord: false };
}

/** Return whether a label begins a span, and the label without B- or I-. */
function tagOf(label: string): { begins: boolean; tag: string } {
  return { begins: label.startsWith("B-"), tag: /^[BI]-/.test(label) ? label.slice(2) : label };
}

/** Return the longest of overlapping spans; of equally long ones that with the highest score. */
function withoutOverlaps(spans: readonly Span[]): Span[] {
  const separate: Span[] = [];
  for (const span of [...spans].sort((one, other) => one.start - other.start)) {
    const before = separate[separate.length - 1];
    if (!before || before.start > span.start || span.start >= before.end) separate.push(span);
    else {
      const longer = span.end - span.start - (before.end - before.start);
      if (longer > 0 || (longer === 0 && span.score > before.score)) separate[separate.length - 1] = span;
    }
  }
  return separate;
}
