/**
 * The table of generation options: the interface of JavaScript, the checks and the defaults.
 *
 * `make options` writes this file from the table of the Python runtime, `decoding/options/option_table.py`.
 */

import * as check from "./optionChecks.js";
import type { Check, EarlyStopping, LogitsProcessor } from "./optionChecks.js";

/** Generation options with every value set. */
export interface Settings {
  readonly maxNewTokens: number | undefined;
  readonly minNewTokens: number;
  readonly stopStrings: readonly string[];
  readonly forcedPrefix: string | readonly number[];
  readonly forcedBosTokenId: number | undefined;
  readonly numBeams: number;
  readonly numReturnSequences: number;
  readonly lengthPenalty: number;
  readonly earlyStopping: EarlyStopping;
  readonly patience: number;
  readonly numBeamGroups: number;
  readonly diversityPenalty: number;
  readonly temperature: number | undefined;
  readonly topK: number | undefined;
  readonly topP: number | undefined;
  readonly minP: number | undefined;
  readonly seed: bigint | undefined;
  readonly suppressTokens: readonly number[];
  readonly beginSuppressTokens: readonly number[];
  readonly badWordsIds: readonly (readonly number[])[];
  readonly logitBias: readonly (readonly [number, number])[];
  readonly repetitionPenalty: number;
  readonly presencePenalty: number;
  readonly frequencyPenalty: number;
  readonly noRepeatNgramSize: number;
  readonly logitsProcessor: LogitsProcessor | undefined;
  readonly shortlist: boolean;
  readonly adapter: string | undefined;
  readonly topLogprobs: number;
  readonly crossAttentions: boolean;
  readonly hiddenStates: boolean;
}

/** Options of one generation request. A missing option has the default of the model file, and then of the table. */
export interface GenerationOptions {
  /** Generate at most this many tokens, the end token included; by default as many as the model can hold. */
  maxNewTokens?: number;
  /** Forbid the end token before this many other tokens. */
  minNewTokens?: number;
  /** End the text before the first of these strings. */
  stopStrings?: string | readonly string[];
  /**
   * Begin each result with this text or these ids. The prefix is part of the result and counts as prompt. It follows
   * the id of `forcedBosTokenId`, if that is set.
   */
  forcedPrefix?: string | readonly number[];
  /** Begin each result with this id, such as the target language of a multilingual translator. */
  forcedBosTokenId?: number;
  /** Keep this many hypotheses at each step; 1 is greedy. */
  numBeams?: number;
  /** Return this many results for each input: the best hypotheses of beam search, or samples. */
  numReturnSequences?: number;
  /** Divide the log-probability of a hypothesis by length ** X. */
  lengthPenalty?: number;
  /**
   * When enough hypotheses are complete: true stops at once, false stops when a better one is unlikely, never stops
   * when a better one is impossible.
   */
  earlyStopping?: EarlyStopping;
  /** Set how many complete hypotheses are enough: X times `numBeams`, rounded (Kasai et al. 2022). */
  patience?: number;
  /** Split the beams into this many groups, which are searched one after another at each step. */
  numBeamGroups?: number;
  /**
   * Subtract X from a token's log-probability for each beam of the earlier groups that has just chosen it (Vijayakumar
   * et al. 2016).
   */
  diversityPenalty?: number;
  /** Divide logits by X and sample; 0 is greedy. */
  temperature?: number;
  /** Sample from the N likeliest tokens; 0 is no limit. */
  topK?: number;
  /** Sample from the fewest tokens whose probabilities sum to X or more. */
  topP?: number;
  /** Sample from the tokens that are at least X times as likely as the likeliest one. */
  minP?: number;
  /**
   * Seed the random numbers. With a seed, an input draws the same tokens in each run where it has the same number,
   * whatever else the batch holds.
   */
  seed?: number | bigint;
  /** Never generate these ids (5,9). */
  suppressTokens?: readonly number[];
  /** Do not begin with these ids. With `forcedBosTokenId` this holds for the token after it. */
  beginSuppressTokens?: readonly number[];
  /** Never generate these ids one after another. A single end token is ignored: use `suppressTokens`. */
  badWordsIds?: readonly (readonly number[])[];
  /** Add X to the logit of an id. */
  logitBias?: Readonly<Record<number, number>> | ReadonlyMap<number, number> | readonly (readonly [number, number])[];
  /** Divide positive logits of all ids so far, the prompt included, by X, and multiply negative ones. */
  repetitionPenalty?: number;
  /** Subtract X from the logit of each id that has been generated. */
  presencePenalty?: number;
  /** Subtract X from the logit of an id for each time that it has been generated. */
  frequencyPenalty?: number;
  /** Never repeat a sequence of N ids, the prompt included; 0 is no limit. */
  noRepeatNgramSize?: number;
  /**
   * A callable (ids so far, float32 logits (vocabulary,)) → logits of that shape. Beam search passes log-probabilities.
   * The arrays are copies.
   */
  logitsProcessor?: LogitsProcessor;
  /**
   * For a file with a shortlist, a table of the target ids that are likely for each source id. true (the default)
   * computes the logits of these candidates only, which is faster; false computes the logits of all ids. Ids in
   * `forcedPrefix`, `forcedBosTokenId` and `logitBias` are always candidates. With a constraint or a `logitsProcessor`
   * all ids are candidates. Log-probabilities are normalised over the candidates.
   */
  shortlist?: boolean;
  /** Use this adapter of the file, by its name; base is the model without any. */
  adapter?: string;
  /** Return the N likeliest tokens at each position with their log-probabilities. */
  topLogprobs?: number;
  /** Return the cross-attention weights of each result. The file must have been exported with them. */
  crossAttentions?: boolean;
  /** Return the hidden states of each result. The file must have been exported with some. */
  hiddenStates?: boolean;
}

export type OptionName = keyof Settings;
type Table = {
  readonly [N in OptionName]: readonly [check: Check<NonNullable<Settings[N]>>, fallback: Settings[N]];
};

/** Option → its check, and the value that holds if neither the caller nor the file sets one. */
export const OPTIONS: Table = {
  maxNewTokens: [check.wholeNumber(1), undefined],
  minNewTokens: [check.wholeNumber(0), 0],
  stopStrings: [check.stopStrings, []],
  forcedPrefix: [check.prefix, []],
  forcedBosTokenId: [check.tokenId, undefined],
  numBeams: [check.wholeNumber(1, 4096), 1],
  numReturnSequences: [check.wholeNumber(1, 4096), 1],
  lengthPenalty: [check.number("a number from -50 to 50", { minimum: -50, maximum: 50 }), 1],
  earlyStopping: [check.earlyStopping, false],
  patience: [check.number("more than 0 and at most 1000", { above: 0, maximum: 1000 }), 1],
  numBeamGroups: [check.wholeNumber(1), 1],
  diversityPenalty: [check.number("0 or more", { minimum: 0 }), 0],
  temperature: [check.number("0, or a number of at least 1e-6", { minimum: 1e-6, orZero: true }), undefined],
  topK: [check.wholeNumber(0), undefined],
  topP: [check.number("more than 0 and at most 1", { above: 0, maximum: 1 }), undefined],
  minP: [check.number("at least 0 and at most 1", { minimum: 0, maximum: 1 }), undefined],
  seed: [check.bigInteger(0n, 18446744073709551615n), undefined],
  suppressTokens: [check.tokenIds, []],
  beginSuppressTokens: [check.tokenIds, []],
  badWordsIds: [check.tokenSequences, []],
  logitBias: [check.logitBias, []],
  repetitionPenalty: [check.number("more than 0", { above: 0 }), 1],
  presencePenalty: [check.number("a number"), 0],
  frequencyPenalty: [check.number("a number"), 0],
  noRepeatNgramSize: [check.wholeNumber(0), 0],
  logitsProcessor: [check.logitsProcessor, undefined],
  shortlist: [check.boolean, true],
  adapter: [check.text, undefined],
  topLogprobs: [check.wholeNumber(0), 0],
  crossAttentions: [check.boolean, false],
  hiddenStates: [check.boolean, false],
};

/** Options of the Python runtime that this one lacks → advice. */
export const ABSENT: Readonly<Record<string, string>> = {
  regex: "run the model with the Python runtime for constraints",
  jsonSchema: "run the model with the Python runtime for constraints",
  grammar: "run the model with the Python runtime for constraints",
  choices: "run the model with the Python runtime for constraints, or compare the choices with score()",
  promptLookup: "leave it out: results are the same without speculation",
  draftModel: "leave it out: results are the same without speculation",
  numDraftTokens: "leave it out: results are the same without speculation",
};

/** Options whose values no file can hold → their kind. */
export const NOT_IN_FILES: Readonly<Record<string, string>> = {
  logitsProcessor: "a function",
};
