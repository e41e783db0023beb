/** Greedy decoding and sampling, in which rows are independent of each other. */

import { InputError, OptionError } from "../base/errors.js";
import type { StepHistory } from "../engine/stepOutputs.js";
import { logNormalizer } from "./logNormalizer.js";
import { argmax, topAlternatives, type Alternatives } from "./logProbabilities.js";
import { samples } from "./options.js";
import { Sampler, seedOrRandom } from "./sampling.js";
import {
  NOT_FINITE,
  NOTHING_LEFT,
  type FinishReason,
  type Hypothesis,
  type SequenceSearch,
  type SequenceTask,
} from "./sequence.js";

const { fround } = Math;

/** One sample of a task, or its only sequence. */
class SampledSequence {
  readonly logprobs: number[] = [];
  readonly alternatives: Alternatives[] = [];
  private readonly allIds: Int32Array;
  private readonly hasStopString: ((token: number) => boolean) | undefined;
  private readonly sampler: Sampler | undefined;

  constructor(
    readonly task: SequenceTask,
    readonly copy: number,
    seed: bigint,
  ) {
    this.allIds = new Int32Array(task.maxPositions);
    this.allIds.set(task.prompt);
    this.hasStopString = task.options.stopChecker?.();
    const { settings } = task;
    this.sampler = samples(settings) ? Sampler.fromSettings(settings, seed, task.options.index, copy) : undefined;
  }

  /** The ids of the prompt and the generated ids. */
  get ids(): Int32Array {
    return this.allIds.subarray(0, this.task.prompt.length + this.logprobs.length);
  }

  /** Return the next token of a row of logits and its log-probability. The logits are unchanged on return. */
  choose(logits: Float32Array, begin: number, end: number): { token: number; logprob: number } {
    const norm = logNormalizer(logits, begin, end);
    if (!(norm < Infinity)) throw new InputError(NOT_FINITE);
    const token = this.chooseToken(logits, begin, end);
    const count = this.task.settings.topLogprobs;
    if (count) this.alternatives.push(topAlternatives(logits, begin, end, norm, count));
    return { token, logprob: fround(logits[begin + token] - norm) };
  }

  private chooseToken(logits: Float32Array, begin: number, end: number): number {
    const { task } = this;
    if (!this.sampler) {
      const forbidden = task.options.rules.length ? task.forbiddenIds(this.ids) : NO_IDS;
      if (forbidden) return likeliestAllowed(logits, begin, end, forbidden);
    }
    let scores = logits.subarray(begin, end);
    if (task.options.rules.length) {
      scores = scores.slice();
      task.applyRules(this.ids, scores);
    }
    if (this.sampler) return this.sampler.sample(scores);
    return possible(scores, 0, argmax(scores, 0, scores.length));
  }

  /** Append a token. Return why the sequence ends, or undefined. */
  take(token: number, logprob: number): FinishReason | undefined {
    this.allIds[this.task.prompt.length + this.logprobs.length] = token;
    this.logprobs.push(logprob);
    const stopped = this.hasStopString?.(token) ?? false;
    const finish = this.task.finishReason(token, this.logprobs.length, stopped);
    const alternatives = this.alternatives[this.alternatives.length - 1] ?? [];
    this.task.options.onToken?.({ copy: this.copy, id: token, logprob, finish, alternatives });
    return finish;
  }

  hypothesis(finish: FinishReason, history: StepHistory | undefined): Hypothesis {
    const ids = Array.from(this.ids.subarray(this.task.prompt.length));
    const sum = this.logprobs.reduce((total, logprob) => total + logprob, 0);
    const score = sum / ids.length ** this.task.settings.lengthPenalty;
    return { ids, logprobs: this.logprobs, score, finish, alternatives: this.alternatives, history };
  }
}

const NO_IDS = new Int32Array(0);

/** Return the likeliest token that is not forbidden. Cost: a pass over the logits; two if the likeliest is forbidden. */
function likeliestAllowed(logits: Float32Array, begin: number, end: number, forbidden: Int32Array): number {
  const token = argmax(logits, begin, end);
  if (!forbidden.includes(token)) return possible(logits, begin, token);
  const saved = Float32Array.from(forbidden, (id) => logits[begin + id]);
  for (const id of forbidden) logits[begin + id] = -Infinity;
  try {
    return possible(logits, begin, argmax(logits, begin, end));
  } finally {
    // An id that occurs twice has -Infinity the second time, so that the first value is written last.
    for (let i = forbidden.length - 1; i >= 0; i--) logits[begin + forbidden[i]] = saved[i];
  }
}

function possible(logits: Float32Array, begin: number, token: number): number {
  if (logits[begin + token] === -Infinity) throw new OptionError(NOTHING_LEFT);
  return token;
}

/**
 * Rows that take one token each in a step.
 *
 * The samples of a task share one row of logits for the first token. Afterwards each sample has its own row.
 */
export class TokenSearch implements SequenceSearch {
  private rows: SampledSequence[] = [];
  private rowNumbers: number[] = []; // the row of logits of each sequence
  private readonly hypotheses = new Map<SequenceTask, Hypothesis[]>();

  constructor(tasks: readonly SequenceTask[]) {
    tasks.forEach((task, rowNumber) => {
      const seed = seedOrRandom(task.settings);
      this.hypotheses.set(task, []);
      for (let copy = 0; copy < task.settings.numReturnSequences; copy++) {
        this.rows.push(new SampledSequence(task, copy, seed));
        this.rowNumbers.push(rowNumber);
      }
    });
  }

  get width(): number {
    return this.rowNumbers.length ? this.rowNumbers[this.rowNumbers.length - 1] + 1 : 0;
  }

  renumber(rows: Int32Array): void {
    const numbers = this.rowNumbers.map((row) => rows[row]);
    const order = numbers.map((_, i) => i).sort((one, other) => numbers[one] - numbers[other]);
    this.rows = order.map((i) => this.rows[i]);
    this.rowNumbers = order.map((i) => numbers[i]);
  }

  advance(
    logits: Float32Array,
    vocabulary: number,
    histories: readonly (StepHistory | undefined)[] | undefined,
  ): { parents: Int32Array; tokens: Int32Array } {
    const continuing: number[] = [];
    const tokens: number[] = [];
    this.rows.forEach((row, i) => {
      const { task } = row;
      if (task.finished) return;
      const begin = this.rowNumbers[i] * vocabulary;
      try {
        const { token, logprob } = row.choose(logits, begin, begin + vocabulary);
        const finish = row.take(token, logprob);
        if (finish === undefined) {
          continuing.push(i);
          tokens.push(token);
          return;
        }
        const done = this.hypotheses.get(task)!;
        done[row.copy] = row.hypothesis(finish, histories?.[this.rowNumbers[i]]);
        if (Object.keys(done).length === task.settings.numReturnSequences) task.hypotheses = done;
      } catch (error) {
        task.error ??= error; // of the task's own rule or callback: only this task ends
      }
    });
    const going = continuing.map((i) => !this.rows[i].task.finished); // the other samples of a failed task end, too
    const kept = continuing.filter((_, i) => going[i]);
    const parents = Int32Array.from(kept, (i) => this.rowNumbers[i]);
    if (kept.length < this.rows.length || this.width < this.rows.length) {
      this.rows = kept.map((i) => this.rows[i]);
      this.rowNumbers = kept.map((_, i) => i);
    }
    return { parents, tokens: Int32Array.from(tokens.filter((_, i) => going[i])) };
  }
}
