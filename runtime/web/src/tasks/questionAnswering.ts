/**
 * Extractive question answering: the span of a context that answers a question, as in transformers' pipeline.
 *
 * The context is read in windows, each after the question. In a window, the probability of the answer from token i to
 * token j is
 *
 * p(i, j) = softmax(start)ᵢ · softmax(end)ⱼ    for i ≤ j < i + maxAnswerTokens
 *
 * where softmax is over the context tokens and the first token of the window. Spans are widened to whole words. Spans with
 * the same text are one answer, and their probabilities are added. The probability of no answer is the probability of the
 * first token alone, its minimum over the windows.
 */

import { InputError, OptionError } from "../base/errors.js";
import { checkBoolean, checkInt } from "../base/validation.js";
import type { Manifest } from "../format/manifest.js";
import type { Inputs } from "../preprocess/inputs.js";
import { isPair, type Input } from "../preprocess/values.js";
import type { TextCode } from "../preprocess/textReader.js";
import { windowArrays, WindowReader, type TextWindow } from "../preprocess/textWindows.js";
import { Task, type Outputs, type SettingValues, type TaskInput } from "./base.js";

/**
 * An answer.
 *
 * start, end: `text` is `context.slice(start, end)`. (Python counts a character beyond U+FFFF once, and JavaScript twice.)
 */
export interface Answer {
  /** Part of the context; empty if the context holds no answer. */
  readonly text: string;
  /** Its probability. */
  readonly score: number;
  readonly start: number;
  readonly end: number;
  /** The next best answers. */
  readonly alternatives: readonly Answer[];
}

interface Settings {
  readonly topK: number;
  readonly allowNoAnswer: boolean;
  readonly maxAnswerTokens: number;
  readonly maxSeqLen: number;
  readonly docStride: number;
}

interface Details {
  readonly characters: readonly string[];
  readonly windows: readonly TextWindow[];
}

type Scored = Omit<Answer, "alternatives">;

const FIRST = "first"; // setting of the manifest: the id of the first token, which stands for "no answer"; absent if none does
const [DEFAULT_MAX_SEQ_LEN, DEFAULT_DOC_STRIDE, DEFAULT_MAX_ANSWER_TOKENS] = [384, 128, 15];
const MIN_SPANS_PER_WINDOW = 10; // beyond twice topK: several spans may widen to one answer

export class QuestionAnswering extends Task<Answer, Settings> {
  readonly does = "answers questions from a context";
  readonly call = "answer()";
  override readonly canTruncate = false; // a context is read in windows
  private readonly windowReader: WindowReader;
  private readonly first: number;

  constructor(manifest: Manifest, textCodes: readonly TextCode[]) {
    super(manifest);
    const [index] = manifest.tokenizerOf.values();
    this.windowReader = new WindowReader(textCodes[index].reader.parts);
    this.first = this.fileSetting(FIRST, "number") ?? -1;
  }

  /**
   * topK: the number of answers: the best and its `alternatives`.
   * allowNoAnswer: whether "no answer" may be an answer, which has no text.
   * maxAnswerTokens: the maximum length of an answer.
   * maxSeqLen: tokens of a window of the context, with the question; by default 384, or the limit of the model.
   * docStride: tokens by which windows overlap; by default 128, or half a window.
   */
  settings(values: SettingValues): Settings {
    this.checkKnown(values, ["topK", "allowNoAnswer", "maxAnswerTokens", "maxSeqLen", "docStride"]);
    const limits = this.manifest.encode!.inputs.flatMap((spec) => spec.maxLength ?? []);
    const limit = Math.min(Infinity, ...limits);
    const allowNoAnswer = values["allowNoAnswer"] ?? false;
    checkBoolean("allowNoAnswer", allowNoAnswer);
    const topK = checkInt("topK", values["topK"] ?? 1);
    const maxAnswerTokens = checkInt("maxAnswerTokens", values["maxAnswerTokens"] ?? DEFAULT_MAX_ANSWER_TOKENS);
    const maxSeqLen = checkInt("maxSeqLen", values["maxSeqLen"] ?? Math.min(limit, DEFAULT_MAX_SEQ_LEN));
    if (maxSeqLen > limit) {
      throw new OptionError(
        `maxSeqLen must be at most ${limit}, for the model takes no more, not ${maxSeqLen}`,
        "maxSeqLen",
      );
    }
    const half = Math.min(Math.floor(maxSeqLen / 2), DEFAULT_DOC_STRIDE);
    const docStride = checkInt("docStride", values["docStride"] ?? half, 0);
    if (docStride >= maxSeqLen) {
      throw new OptionError(`docStride must be less than a window, ${maxSeqLen}, not ${docStride}`, "docStride");
    }
    return { topK, allowNoAnswer: allowNoAnswer as boolean, maxAnswerTokens, maxSeqLen, docStride };
  }

  override async readInput(input: Input, inputs: Inputs, _truncate: boolean, settings: Settings): Promise<TaskInput> {
    const named = input as { question?: unknown; context?: unknown };
    const isNamed =
      typeof input === "object" && input !== null && Object.keys(input).sort().join() === "context,question";
    const pair: unknown = isNamed ? [named.question, named.context] : input;
    if (!isPair(pair)) throw new InputError("give a question and the context to answer it from: two texts");
    const [question, context] = pair;
    if (!question.trim()) throw new InputError("the question is empty");
    const { maxSeqLen, docStride } = settings;
    const windows = inputs.windows(pair, this.windowReader, { maxTokens: maxSeqLen, stride: docStride });
    if (!context.trim() || !windows.some(({ texts }) => texts.includes(1))) {
      throw new InputError("the context is empty");
    }
    const details: Details = { characters: [...context], windows };
    return {
      requests: windows.map((window) => windowArrays(this.manifest, inputs.textInput.spec.name, window)),
      details,
    };
  }

  makeResult(reading: TaskInput, outputs: readonly Outputs[], settings: Settings): Answer {
    const { characters, windows } = reading.details as Details;
    const answers = new Map<string, Scored>(); // by text in lower case
    let noAnswer = Infinity;
    const spanCount = 2 * settings.topK + MIN_SPANS_PER_WINDOW;
    windows.forEach((window, i) => {
      const [startLogits, endLogits] = outputs[i];
      const starts = this.probabilities(window, startLogits.data);
      const ends = this.probabilities(window, endLogits.data);
      noAnswer = Math.min(noAnswer, starts[0] * ends[0]);
      for (let token = 0; token < starts.length; token++) {
        if (window.texts[token] !== 1) starts[token] = ends[token] = 0;
      }
      for (const { first, last, score } of bestSpans(starts, ends, spanCount, settings.maxAnswerTokens)) {
        const [start, end] = [wordPlace(window, first)[0], wordPlace(window, last)[1]];
        const text = characters.slice(start, end).join("");
        const same = answers.get(text.toLowerCase());
        answers.set(text.toLowerCase(), same ? { ...same, score: same.score + score } : { text, score, start, end });
      }
    });
    const candidates = [...answers.values()];
    if (settings.allowNoAnswer || !candidates.length) candidates.push({ text: "", score: noAnswer, start: 0, end: 0 });
    const units = [0]; // the place of each character in UTF-16
    for (const character of characters) units.push(units[units.length - 1] + character.length);
    const [best, ...others] = candidates
      .sort((one, other) => other.score - one.score)
      .slice(0, settings.topK)
      .map((one) => ({ ...one, start: units[one.start], end: units[one.end], alternatives: [] }));
    return { ...best, alternatives: others };
  }

  /** Return the probabilities of a start or an end at each token, and at the first token, which stands for no answer. */
  private probabilities(window: TextWindow, logits: ArrayLike<number>): Float64Array {
    const counts = (i: number) => window.texts[i] === 1 || window.ids[i] === this.first;
    let top = -Infinity;
    for (let i = 0; i < logits.length; i++) if (counts(i)) top = Math.max(top, logits[i]);
    const weights = Float64Array.from(logits, (logit, i) => (counts(i) && top > -Infinity ? Math.exp(logit - top) : 0));
    const sum = weights.reduce((one, other) => one + other, 0) || 1;
    return weights.map((weight) => weight / sum);
  }
}

/**
 * Return the most probable spans, best first.
 *
 * starts, ends: (time,) probabilities. Cost: tokens × maxAnswerTokens.
 */
function bestSpans(
  starts: Float64Array,
  ends: Float64Array,
  maxSpans: number,
  maxAnswerTokens: number,
): { first: number; last: number; score: number }[] {
  const spans: { first: number; last: number; score: number }[] = [];
  for (let first = 0; first < starts.length; first++) {
    for (let last = first; last < Math.min(starts.length, first + maxAnswerTokens); last++) {
      const score = starts[first] * ends[last];
      if (score > 0) spans.push({ first, last, score });
    }
  }
  return spans.sort((one, other) => other.score - one.score).slice(0, maxSpans);
}

/** Return the characters of a token's word, as far as the window has them; of the token if the tokenizer has no words. */
function wordPlace(window: TextWindow, token: number): [number, number] {
  const word = window.words[token];
  if (word < 0) return [window.starts[token], window.ends[token]];
  const tokens = [...window.ids.keys()].filter((i) => window.words[i] === word && window.texts[i] === 1);
  return [window.starts[tokens[0]], window.ends[tokens[tokens.length - 1]]];
}
