/**
 * The options of generation: one table for the interface of JavaScript, the checks and the defaults.
 *
 * The names are those of the Python runtime in camelCase, and so are the rules of their choice:
 *
 * - sampling, if temperature, topK, topP or minP is set and temperature is not 0;
 * - otherwise beam search, if numBeams is more than 1;
 * - otherwise greedy decoding.
 *
 * A sampling option of the caller overrides numBeams of the file, and the other way round. An error follows if the caller
 * sets both. What this runtime lacks (grammars, speculation) is in `ABSENT` and refused by name.
 */

import { OptionError } from "../base/errors.js";
import { checkNames } from "../base/validation.js";
import { camelCase, snakeCase } from "../format/typedJson.js";
import * as check from "./optionChecks.js";
import type { Check, EarlyStopping, LogitsProcessor } from "./optionChecks.js";

export const MAX_WIDTH = 4096; // rows of a request: each has a cache of its own

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
  readonly adapter: string | undefined;
  readonly shortlist: boolean;
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
  /** Begin each result with this text or these ids. The prefix is part of the result and counts as prompt. */
  forcedPrefix?: string | readonly number[];
  /** Begin each result with this id, such as the target language of a multilingual translator. */
  forcedBosTokenId?: number;
  /** Keep this many hypotheses at each step; 1 is greedy. */
  numBeams?: number;
  /** Return this many results for each input: the best hypotheses of beam search, or samples. */
  numReturnSequences?: number;
  /** Divide the log-probability of a hypothesis by length ** X. */
  lengthPenalty?: number;
  /** When enough hypotheses are complete: true stops at once, false when a better one is unlikely, "never" when none is possible. */
  earlyStopping?: EarlyStopping;
  /** Set how many complete hypotheses are enough: X times `numBeams`, rounded. */
  patience?: number;
  /** Split the beams into this many groups, which are searched one after another at each step. */
  numBeamGroups?: number;
  /** Subtract X from a token's log-probability for each beam of the earlier groups that has just chosen it. */
  diversityPenalty?: number;
  /** Divide logits by X and sample; 0 is greedy. */
  temperature?: number;
  /** Sample from the N likeliest tokens; with 0, from all. */
  topK?: number;
  /** Sample from the fewest tokens whose probabilities sum to X or more. */
  topP?: number;
  /** Sample from the tokens that are at least X times as likely as the likeliest one. */
  minP?: number;
  /** Seed the random numbers. With a seed, an input draws the same tokens in each run, here and in Python. */
  seed?: number | bigint;
  /** Never generate these ids. */
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
  /** Never repeat a sequence of N ids, the prompt included; with 0, repeat any. */
  noRepeatNgramSize?: number;
  /** A function (ids so far, logits of the vocabulary) → logits. Beam search passes log-probabilities. */
  logitsProcessor?: LogitsProcessor;
  /** Use this adapter of the file, by its name; base is the model without any. */
  adapter?: string;
  /**
   * For a file with a shortlist, a table of the target ids that are likely for each source id: true (the default) computes
   * the logits of these candidates only, which is faster; false those of all ids. Ids in `forcedPrefix`, `forcedBosTokenId`
   * and `logitBias` are always candidates. With a `logitsProcessor` all ids are. Log-probabilities are normalised over the
   * candidates.
   */
  shortlist?: boolean;
  /** Return the N likeliest tokens at each position with their log-probabilities. */
  topLogprobs?: number;
  /** Return the cross-attention weights of each result. The file must have been exported with them. */
  crossAttentions?: boolean;
  /** Return the hidden states of each result. The file must have been exported with some. */
  hiddenStates?: boolean;
}

type Name = keyof Settings;
type Table = { readonly [N in Name]: readonly [check: Check<NonNullable<Settings[N]>>, fallback: Settings[N]] };

/** Option → its check, and the value that holds if neither the caller nor the file sets one. */
const OPTIONS: Table = {
  maxNewTokens: [check.wholeNumber(1), undefined],
  minNewTokens: [check.wholeNumber(0), 0],
  stopStrings: [check.stopStrings, []],
  forcedPrefix: [check.prefix, []],
  forcedBosTokenId: [check.tokenId, undefined],
  numBeams: [check.wholeNumber(1, MAX_WIDTH), 1],
  numReturnSequences: [check.wholeNumber(1, MAX_WIDTH), 1],
  lengthPenalty: [check.number("a number from -50 to 50", (x) => -50 <= x && x <= 50), 1],
  earlyStopping: [check.earlyStopping, false],
  patience: [check.number("more than 0 and at most 1000", (x) => 0 < x && x <= 1000), 1],
  numBeamGroups: [check.wholeNumber(1), 1],
  diversityPenalty: [check.number("0 or more", (x) => x >= 0), 0],
  temperature: [check.number("0, or a number of at least 1e-6", (x) => x === 0 || x >= 1e-6), undefined],
  topK: [check.wholeNumber(0), undefined],
  topP: [check.number("more than 0 and at most 1", (x) => 0 < x && x <= 1), undefined],
  minP: [check.number("at least 0 and at most 1", (x) => 0 <= x && x <= 1), undefined],
  seed: [check.seed, undefined],
  suppressTokens: [check.tokenIds, []],
  beginSuppressTokens: [check.tokenIds, []],
  badWordsIds: [check.tokenSequences, []],
  logitBias: [check.logitBias, []],
  repetitionPenalty: [check.number("more than 0", (x) => x > 0), 1],
  presencePenalty: [check.number("a number"), 0],
  frequencyPenalty: [check.number("a number"), 0],
  noRepeatNgramSize: [check.wholeNumber(0), 0],
  logitsProcessor: [check.logitsProcessor, undefined],
  adapter: [check.text, undefined],
  shortlist: [check.boolean, true],
  topLogprobs: [check.wholeNumber(0), 0],
  crossAttentions: [check.boolean, false],
  hiddenStates: [check.boolean, false],
};

export const OPTION_NAMES = Object.keys(OPTIONS) as readonly Name[];

/** Options of the Python runtime that this one lacks → what to do. */
const ABSENT: Readonly<Record<string, string>> = {
  regex: "run the model with the Python runtime for constraints",
  jsonSchema: "run the model with the Python runtime for constraints",
  grammar: "run the model with the Python runtime for constraints",
  choices: "run the model with the Python runtime for constraints, or compare the choices with score()",
  promptLookup: "leave it out: results are the same without speculation",
  draftModel: "leave it out: results are the same without speculation",
  numDraftTokens: "leave it out: results are the same without speculation",
};

const SAMPLING = ["temperature", "topK", "topP", "minP"] as const;
const GROUPS = ["numBeamGroups", "diversityPenalty"] as const;

type Checked = { -readonly [N in Name]?: Settings[N] };

/** Return options with each value checked. Throw OptionError for an unknown name or an impossible value. */
function checked(options: Readonly<Record<string, unknown>>): Checked {
  for (const [name, advice] of Object.entries(ABSENT)) {
    if (options[name] !== undefined) {
      throw new OptionError(`${name} is an option that the JavaScript runtime does not have: ${advice}`, name);
    }
  }
  const given = Object.entries(options).filter(([, value]) => value !== undefined && value !== null);
  checkNames(
    given.map(([name]) => name),
    OPTION_NAMES,
  );
  return Object.fromEntries(given.map(([name, value]) => [name, OPTIONS[name as Name][0](name, value)]));
}

/**
 * Return the caller's options; without one, the default of the file; without that, the default of the table.
 *
 * defaults: of the file, whose names are in snake_case.
 * Throw OptionError if options contradict each other, or if the file has a default that does not exist.
 */
export function settingsOf(options: GenerationOptions, defaults: ReadonlyMap<string, unknown>): Settings {
  if (typeof options !== "object" || options === null) throw new OptionError("options must be an object");
  const caller = checked(options as Record<string, unknown>);
  let file = fileDefaults(defaults);
  const isSet = (names: readonly Name[]) => names.some((name) => caller[name] !== undefined);
  if (caller.temperature !== 0 && isSet(SAMPLING)) {
    file = without(file, ["numBeams", "numReturnSequences", "patience", ...GROUPS]);
  } else if ((caller.numBeams ?? 1) > 1) {
    file = without(file, SAMPLING);
  } else if (caller.numBeams !== undefined) {
    file = without(file, ["patience", ...GROUPS]);
  }
  const fallbacks = Object.fromEntries(OPTION_NAMES.map((name) => [name, OPTIONS[name][1]]));
  const settings = { ...fallbacks, ...file, ...caller } as unknown as Settings;
  if (caller.seed !== undefined && caller.temperature === undefined && !samples(settings)) {
    throw new OptionError(`seed: ${settings.seed} changes nothing without sampling: set a temperature`, "seed");
  }
  checkTogether(settings);
  return settings;
}

/** Return the generation defaults of a model file as options. Throw OptionError for those that no file can have. */
export function fileDefaults(defaults: ReadonlyMap<string, unknown>): Checked {
  try {
    const options = checked(Object.fromEntries([...defaults].map(([name, value]) => [camelCase(name), value])));
    if (options.logitsProcessor) throw new OptionError("logitsProcessor is a function, which a file cannot hold");
    return options;
  } catch (error) {
    if (!(error instanceof OptionError)) throw error;
    throw new OptionError(
      `the model file's generation defaults: ${error.reason}`,
      error.option && snakeCase(error.option),
    );
  }
}

/** Return whether tokens are drawn at random. */
export function samples(settings: Settings): boolean {
  return settings.temperature !== 0 && SAMPLING.some((name) => settings[name] !== undefined);
}

/** Return whether beam search chooses the tokens. */
export function usesBeams(settings: Settings): boolean {
  return settings.numBeams > 1 && !samples(settings);
}

/** Return the rows of a batch that a request takes. */
export function widthOf(settings: Settings): number {
  return Math.max(settings.numBeams, settings.numReturnSequences);
}

function checkTogether(settings: Settings): void {
  const { numBeams, numReturnSequences, minNewTokens, maxNewTokens, numBeamGroups, diversityPenalty } = settings;
  if (samples(settings) && numBeams > 1) {
    throw new OptionError(`numBeams: ${numBeams} and sampling (${SAMPLING.join(", ")}) exclude each other`);
  }
  if (!samples(settings) && numReturnSequences > numBeams) {
    throw new OptionError(
      `numReturnSequences: ${numReturnSequences} needs a numBeams of at least ${numReturnSequences}, or sampling`,
      "numReturnSequences",
    );
  }
  if (maxNewTokens !== undefined && minNewTokens > maxNewTokens) {
    throw new OptionError(`minNewTokens: ${minNewTokens} is more than maxNewTokens: ${maxNewTokens}`, "minNewTokens");
  }
  if (numBeams % numBeamGroups) {
    throw new OptionError(
      `numBeamGroups: ${numBeamGroups} must divide numBeams, which is ${numBeams}`,
      "numBeamGroups",
    );
  }
  if (diversityPenalty && numBeamGroups === 1) {
    throw new OptionError(
      `diversityPenalty: ${diversityPenalty} needs a numBeamGroups of at least 2`,
      "diversityPenalty",
    );
  }
  const enough = Math.floor(numBeams * settings.patience + 0.5);
  if (numBeams > 1 && enough < numReturnSequences) {
    throw new OptionError(
      `patience: ${settings.patience} ends at ${enough} hypotheses, fewer than numReturnSequences: ${numReturnSequences}`,
      "patience",
    );
  }
  if (settings.forcedBosTokenId !== undefined && settings.suppressTokens.includes(settings.forcedBosTokenId)) {
    throw new OptionError(
      `forcedBosTokenId: ${settings.forcedBosTokenId} is one of the ids that suppressTokens forbids`,
      "forcedBosTokenId",
    );
  }
}

function without(options: Checked, names: readonly Name[]): Checked {
  return Object.fromEntries(Object.entries(options).filter(([name]) => !names.includes(name as Name)));
}
