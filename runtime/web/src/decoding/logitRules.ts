/**
 * Rules: options that change the scores of the next token before it is chosen.
 *
 * A rule gets all ids of a row and changes the row's scores in place. It has no state, so that beams can be copied and
 * rows dropped. Scores are logits in greedy decoding and sampling, and log-probabilities in beam search, as in
 * transformers. repetitionPenalty depends on the sign of a score, so its effect differs a little between the two.
 *
 * The order is that of transformers' generate(), with the options that it does not have:
 *
 *  1. logitBias (sequence_bias of single tokens)
 *  2. repetitionPenalty
 *  3. presencePenalty, frequencyPenalty (no options of generate(); as in vLLM)
 *  4. noRepeatNgramSize
 *  5. badWordsIds
 *  6. minNewTokens
 *  7. forcedBosTokenId
 *  8. suppressTokens
 *  9. beginSuppressTokens
 * 10. logitsProcessor
 *
 * Temperature, topK, topP and minP come after the rules (`sampling`).
 *
 * Most rules only forbid ids. They return these ids (`ForbiddingRule`), so that searches need not copy and rank whole rows
 * of scores.
 */

import { OptionError } from "../base/errors.js";
import { shown } from "../base/validation.js";
import type { SpecialTokens } from "../format/manifest.js";
import type { LogitsProcessor } from "./optionChecks.js";
import type { Settings } from "./options.js";

const { fround } = Math;

export const NO_IDS = new Int32Array(0);

/** The effect of one or two options on one row. */
export interface Rule {
  /**
   * Change the scores of a row, one for each id of the vocabulary, in place.
   *
   * ids: all decoder ids of the row. The first `prompt` ids are the prompt, with start tokens and a forced prefix.
   */
  apply(ids: Int32Array, prompt: number, scores: Float32Array): void;
}

/** A rule that only forbids ids, at most steps. */
export abstract class ForbiddingRule implements Rule {
  /** Whether rows of the same length have the same forbidden ids. */
  readonly readsLengthAlone: boolean = false;

  /**
   * Return the ids whose scores become -Infinity at this step; undefined if the rule does more. All ids have scores.
   */
  abstract forbidden(ids: Int32Array, prompt: number): Int32Array | undefined;

  apply(ids: Int32Array, prompt: number, scores: Float32Array): void {
    for (const id of this.forbidden(ids, prompt) ?? NO_IDS) scores[id] = -Infinity;
  }
}

/**
 * Return the ids that several rules forbid, maybe with repetitions; undefined if a rule does more. Arguments: see `Rule`.
 */
export function forbiddenIds(rules: readonly Rule[], ids: Int32Array, prompt: number): Int32Array | undefined {
  const parts: Int32Array[] = [];
  for (const rule of rules) {
    const forbidden = rule instanceof ForbiddingRule ? rule.forbidden(ids, prompt) : undefined;
    if (!forbidden) return undefined;
    if (forbidden.length) parts.push(forbidden);
  }
  return concatenated(parts);
}

/** Return whether rules only forbid ids, the same for all rows of one length. */
export function readLengthAlone(rules: readonly Rule[]): boolean {
  return rules.every((rule) => rule instanceof ForbiddingRule && rule.readsLengthAlone);
}

/**
 * Return the rules of the settings, in their order; none for most settings.
 *
 * vocabulary: the number of scores. Throw OptionError if an option has an id that is not in the vocabulary. A rule costs at
 *     most a few passes over its own ids and over the ids of the row. Only forcedBosTokenId and logitsProcessor touch all
 *     scores.
 */
export function makeRules(settings: Settings, special: SpecialTokens, vocabulary: number): Rule[] {
  checkIds(settings, vocabulary);
  const forcedBos = settings.forcedPrefix.length ? undefined : settings.forcedBosTokenId; // it is before the prefix
  const isLoneEnd = (sequence: readonly number[]) => sequence.length === 1 && special.eosTokenIds.includes(sequence[0]);
  const sequences = settings.badWordsIds.filter((sequence) => !isLoneEnd(sequence));
  const ends = special.eosTokenIds.filter((end) => end < vocabulary);
  const rules: Rule[] = [];
  if (settings.logitBias.length) rules.push(new Bias(settings.logitBias));
  if (settings.repetitionPenalty !== 1) rules.push(new RepetitionPenalty(settings.repetitionPenalty));
  if (settings.presencePenalty || settings.frequencyPenalty) {
    rules.push(new CountPenalty(settings.presencePenalty, settings.frequencyPenalty));
  }
  if (settings.noRepeatNgramSize) rules.push(new NoRepeatNgram(settings.noRepeatNgramSize, vocabulary));
  if (sequences.length) rules.push(new SuppressSequences(sequences));
  if (settings.minNewTokens && ends.length) rules.push(new SuppressUntil(ends, settings.minNewTokens));
  if (forcedBos !== undefined) rules.push(new FirstToken(forcedBos));
  if (settings.suppressTokens.length) rules.push(new Suppress(settings.suppressTokens));
  if (settings.beginSuppressTokens.length) {
    rules.push(new SuppressAt(settings.beginSuppressTokens, forcedBos === undefined ? 0 : 1));
  }
  if (settings.logitsProcessor) rules.push(new Processor(settings.logitsProcessor));
  return rules;
}

function checkIds(settings: Settings, vocabulary: number): void {
  const named: Record<string, readonly number[]> = {
    forcedBosTokenId: settings.forcedBosTokenId === undefined ? [] : [settings.forcedBosTokenId],
    suppressTokens: settings.suppressTokens,
    beginSuppressTokens: settings.beginSuppressTokens,
    badWordsIds: settings.badWordsIds.flat(),
    logitBias: settings.logitBias.map(([token]) => token),
  };
  for (const [name, ids] of Object.entries(named)) {
    const token = ids.find((id) => id >= vocabulary);
    if (token !== undefined) {
      throw new OptionError(`${name} names the id ${token}, and the model's end at ${vocabulary - 1}`, name);
    }
  }
}

/** Adds numbers to the scores of some ids. */
export class Bias implements Rule {
  /** bias: pairs of id and number, each id once. */
  constructor(private readonly bias: readonly (readonly [number, number])[]) {}

  apply(_ids: Int32Array, _prompt: number, scores: Float32Array): void {
    for (const [token, added] of this.bias) scores[token] += fround(added);
  }
}

/**
 * Divides positive scores of all ids so far, the prompt included, by the penalty, and multiplies negative ones (Keskar et
 * al. 2019).
 */
export class RepetitionPenalty implements Rule {
  private readonly penalty: number;

  constructor(penalty: number) {
    this.penalty = fround(penalty);
  }

  apply(ids: Int32Array, _prompt: number, scores: Float32Array): void {
    for (const id of new Set(ids)) {
      if (id >= scores.length) continue; // the step input may have ids that are never generated
      scores[id] = scores[id] < 0 ? scores[id] * this.penalty : scores[id] / this.penalty;
    }
  }
}

/** score -= presence · [count > 0] + frequency · count, with the counts of the generated ids. */
export class CountPenalty implements Rule {
  constructor(
    private readonly presence: number,
    private readonly frequency: number,
  ) {}

  apply(ids: Int32Array, prompt: number, scores: Float32Array): void {
    const counts = new Map<number, number>();
    for (const id of ids.subarray(prompt)) counts.set(id, (counts.get(id) ?? 0) + 1);
    for (const [id, count] of counts) scores[id] -= fround(this.presence + this.frequency * count);
  }
}

/** Forbids repeated n-grams: an id that followed the last n - 1 ids before. */
export class NoRepeatNgram extends ForbiddingRule {
  constructor(
    private readonly size: number,
    private readonly vocabulary: number,
  ) {
    super();
  }

  forbidden(ids: Int32Array, _prompt: number): Int32Array {
    const others = this.size - 1; // ids before the last of an n-gram
    const latest = ids.length - others;
    const nextIds: number[] = [];
    for (let begin = 0; begin < latest; begin++) {
      const next = ids[begin + others];
      if (next >= this.vocabulary) continue; // the step input may have ids that are never generated
      let i = 0;
      while (i < others && ids[begin + i] === ids[latest + i]) i++;
      if (i === others) nextIds.push(next);
    }
    return Int32Array.from(nextIds);
  }
}

/** Forbids the last id of a sequence after the other ids of the sequence. */
export class SuppressSequences extends ForbiddingRule {
  private readonly lastIds: ReadonlyMap<string, Int32Array>; // the other ids, joined → the last ids
  private readonly lengths: readonly number[];

  constructor(sequences: readonly (readonly number[])[]) {
    super();
    const lastIds = new Map<string, number[]>();
    for (const sequence of sequences) {
      const others = sequence.slice(0, -1).join();
      const known = lastIds.get(others);
      if (known) known.push(sequence[sequence.length - 1]);
      else lastIds.set(others, [sequence[sequence.length - 1]]);
    }
    this.lastIds = new Map([...lastIds].map(([others, ids]) => [others, Int32Array.from(ids)]));
    this.lengths = [...new Set(sequences.map((sequence) => sequence.length - 1))].sort((one, other) => one - other);
  }

  forbidden(ids: Int32Array, _prompt: number): Int32Array {
    const lengths = this.lengths.filter((length) => length <= ids.length);
    const parts = lengths.map((length) => this.lastIds.get(ids.subarray(ids.length - length).join()) ?? NO_IDS);
    return concatenated(parts.filter((part) => part.length));
  }
}

/** Forbids some ids at every step. */
export class Suppress extends ForbiddingRule {
  override readonly readsLengthAlone = true;
  protected readonly tokens: Int32Array;

  constructor(tokens: readonly number[]) {
    super();
    this.tokens = Int32Array.from(new Set(tokens)); // a step costs as much as the vocabulary at most
  }

  forbidden(_ids: Int32Array, _prompt: number): Int32Array {
    return this.tokens;
  }
}

/** Forbids some ids after exactly `generated` generated ids. */
export class SuppressAt extends Suppress {
  constructor(
    tokens: readonly number[],
    private readonly generated: number,
  ) {
    super(tokens);
  }

  override forbidden(ids: Int32Array, prompt: number): Int32Array {
    return ids.length - prompt === this.generated ? this.tokens : NO_IDS;
  }
}

/** Forbids some ids before `generated` generated ids. */
export class SuppressUntil extends Suppress {
  constructor(
    tokens: readonly number[],
    private readonly generated: number,
  ) {
    super(tokens);
  }

  override forbidden(ids: Int32Array, prompt: number): Int32Array {
    return ids.length - prompt < this.generated ? this.tokens : NO_IDS;
  }
}

/** Forces the first generated id, with a score of 0, so that it costs nothing in beam search. */
export class FirstToken extends ForbiddingRule {
  override readonly readsLengthAlone = true;

  constructor(private readonly token: number) {
    super();
  }

  forbidden(ids: Int32Array, prompt: number): Int32Array | undefined {
    return ids.length === prompt ? undefined : NO_IDS;
  }

  override apply(ids: Int32Array, prompt: number, scores: Float32Array): void {
    if (ids.length !== prompt) return;
    scores.fill(-Infinity);
    scores[this.token] = 0;
  }
}

/** The caller's logitsProcessor. It gets copies, so that it may keep them. */
export class Processor implements Rule {
  constructor(private readonly processor: LogitsProcessor) {}

  apply(ids: Int32Array, _prompt: number, scores: Float32Array): void {
    const returned: unknown = this.processor(ids.slice(), scores.slice());
    const isList = Array.isArray(returned) || (ArrayBuffer.isView(returned) && !(returned instanceof DataView));
    const logits = isList ? (returned as ArrayLike<unknown>) : undefined;
    if (logits?.length !== scores.length) {
      const description = logits ? `${logits.length} values` : shown(returned);
      throw new OptionError(
        `logitsProcessor must return ${scores.length} logits, not ${description}`,
        "logitsProcessor",
      );
    }
    for (let i = 0; i < logits.length; i++) {
      if (typeof logits[i] !== "number" || Number.isNaN(logits[i])) {
        throw new OptionError(
          `logitsProcessor must return numbers, and it returned ${shown(logits[i])} for the id ${i}`,
          "logitsProcessor",
        );
      }
    }
    scores.set(logits as ArrayLike<number>);
  }
}

function concatenated(parts: readonly Int32Array[]): Int32Array {
  if (parts.length < 2) return parts[0] ?? NO_IDS;
  const all = new Int32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let begin = 0;
  for (const part of parts) {
    all.set(part, begin);
    begin += part.length;
  }
  return all;
}
