/**
 * Tasks of the search: the state of a request while it is decoded, and the interface of a search.
 *
 * This module knows no files and no sessions. A search holds rows of some tasks. It gets the logits of the rows, chooses
 * the next tokens, and returns the row that each of them continues. The result of a row does not depend on other rows.
 */

import type { NumberArray } from "../base/arrays.js";
import type { Sources } from "../format/sizes.js";
import type { State } from "../engine/state.js";
import type { StepHistory } from "../engine/stepOutputs.js";
import { forbiddenIds, type Rule } from "./logitRules.js";
import type { Alternatives } from "./logProbabilities.js";
import { widthOf, type Settings } from "./options.js";

export const NOT_FINITE = "the model gives no numbers for this input: its results are NaN or infinite";
export const NOTHING_LEFT = "the options leave no token that may come next: suppress less, or allow more beams";

/** Why a text ends: an end token, a stop string, or no more tokens. */
export type FinishReason = "end" | "stop" | "length";

/** A generated token. copy: the number of the sample of the task. finish: set for the last token. */
export interface Token {
  readonly copy: number;
  readonly id: number;
  readonly logprob: number;
  readonly finish: FinishReason | undefined;
  readonly alternatives: Alternatives;
}

/**
 * A complete sequence of generated ids, with the end token.
 *
 * score: Σ logprobs / length ** lengthPenalty.
 * alternatives: of each position, if the options ask for them.
 */
export interface Hypothesis {
  readonly ids: readonly number[];
  readonly logprobs: readonly number[];
  readonly score: number;
  readonly finish: FinishReason;
  readonly alternatives: readonly Alternatives[];
  readonly history: StepHistory | undefined;
}

/** The arguments of a task; see its fields. */
export interface TaskOptions {
  /** The number of the request, which is part of the seed of samples. */
  readonly index: number;
  /** The decoder's ids before the first generated id. */
  readonly prompt: Int32Array;
  /** The maximum number of ids to generate. */
  readonly maxTokens: number;
  readonly settings: Settings;
  readonly endIds: readonly number[];
  readonly rules: readonly Rule[];
  /** Makes a function for a row, which takes each generated id, and returns true when the text has a stop string. */
  readonly stopChecker?: () => (token: number) => boolean;
  /** Returns whether the text of all generated ids has a stop string, for beams. */
  readonly truncatesText?: (ids: readonly number[]) => boolean;
  /** Called with each token of greedy decoding and sampling when it is chosen. */
  readonly onToken?: (token: Token) => void;
  readonly sources: Sources;
  /** The number of last ids of the prompt with which the result begins. */
  readonly prefixTokens: number;
  /** A state of one row that has read the first ids of the prompt. */
  readonly prefixState?: State;
}

/** One request while it is decoded. */
export class SequenceTask {
  prefixLogprobs: readonly number[] = [];
  prefixAlternatives: readonly Alternatives[] = [];
  /** Extra outputs of the encoder. */
  encoderOutputs: ReadonlyMap<string, NumberArray> = new Map();
  readonly startedAt = performance.now();
  firstTokenAt = 0;
  endedAt = 0;
  /** Of the finished task, best first. */
  hypotheses: readonly Hypothesis[] | undefined;
  error: unknown;

  constructor(readonly options: TaskOptions) {}

  get settings(): Settings {
    return this.options.settings;
  }

  get prompt(): Int32Array {
    return this.options.prompt;
  }

  /** The ids of the prompt that `prefixState` has not read. */
  get unreadPrompt(): Int32Array {
    const { prefixState } = this.options;
    return prefixState ? this.prompt.subarray(prefixState.lengths[0]) : this.prompt;
  }

  /** The ids with which the result begins. */
  get prefix(): Int32Array {
    return this.prompt.subarray(this.prompt.length - this.options.prefixTokens);
  }

  /** The positions that are computed before the first token. Batches are packed by it. */
  get prefillPositions(): number {
    let positions = this.unreadPrompt.length;
    for (const source of this.options.sources.values()) positions += source.shape[0] ?? 0;
    return positions;
  }

  /** The maximum number of rows of the task. */
  get width(): number {
    return widthOf(this.settings);
  }

  /** The maximum number of ids of a row: prompt and generated ids. */
  get maxPositions(): number {
    return this.prompt.length + this.options.maxTokens;
  }

  get finished(): boolean {
    return this.hypotheses !== undefined || this.error !== undefined;
  }

  /** Return why a sequence of `length` generated ids, with `token` as the last, ends; undefined if it continues. */
  finishReason(token: number, length: number, stopped: boolean): FinishReason | undefined {
    if (this.options.endIds.includes(token)) return "end";
    return stopped ? "stop" : length >= this.options.maxTokens ? "length" : undefined;
  }

  /** Return the ids that may not be next; undefined if rules do more than forbid ids. Then use `applyRules`. */
  forbiddenIds(ids: Int32Array): Int32Array | undefined {
    return forbiddenIds(this.options.rules, ids, this.prompt.length) ?? undefined;
  }

  /** Apply the rules to the scores of a row's next token, in place. */
  applyRules(ids: Int32Array, scores: Float32Array): void {
    for (const rule of this.options.rules) rule.apply(ids, this.prompt.length, scores);
  }
}

/** Tasks that are decoded together. Row numbers count within the search. */
export interface SequenceSearch {
  /** The number of rows of logits that `advance` takes. */
  readonly width: number;

  /** Map row i of the search to row rows[i] of the next logits. */
  renumber(rows: Int32Array): void;

  /**
   * Choose the next tokens. Return the row that each new row continues, and its token.
   *
   * logits: (width, vocabulary), unchanged on return.
   * histories: the extra outputs of each row, if any are recorded.
   */
  advance(
    logits: Float32Array,
    vocabulary: number,
    histories: readonly (StepHistory | undefined)[] | undefined,
  ): { parents: Int32Array; tokens: Int32Array };
}
