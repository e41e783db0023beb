/**
 * Beam search with the hypotheses and scores of transformers' generate(num_beams=…), for prompts of any lengths.
 *
 * At each step the likeliest continuations of a prompt's beams are ranked by summed log-probability. Continuations that
 * end and are among the first `numBeams` become hypotheses. The best of the others are the next beams. More continuations
 * are ranked than kept, so that enough of them continue even if every beam could end.
 *
 * With several groups, each prompt's beams are divided: each group is a beam search of its own. Before a group is
 * searched, the log-probabilities of the tokens that the groups before it have chosen at this step are lowered (diverse
 * beam search, Vijayakumar et al. 2016).
 */

import { InputError, OptionError } from "../base/errors.js";
import type { StepHistory } from "../engine/stepOutputs.js";
import { logNormalizer } from "./logNormalizer.js";
import { topAlternatives, TopValues, type Alternatives } from "./logProbabilities.js";
import { NOT_FINITE, NOTHING_LEFT, type Hypothesis, type SequenceSearch, type SequenceTask } from "./sequence.js";

const { fround } = Math;

/** One beam: its row of logits, and what it has generated. score: summed log-probabilities after rules. */
interface Beam {
  row: number;
  readonly ids: readonly number[];
  readonly logprobs: readonly number[];
  readonly score: number;
  readonly alternatives: readonly Alternatives[];
}

/** A continuation of a beam. top: the summed score. gain: the log-probability of the token. */
interface Continuation {
  readonly top: number;
  readonly beam: Beam;
  readonly token: number;
  readonly gain: number;
  readonly possible: boolean;
  readonly ended: boolean;
}

/** One group of a task's beams. chosen: the tokens of the latest step. done: the hypotheses, best first. */
class BeamGroup {
  beams: Beam[];
  length = 0;
  over = false;
  chosen: number[] = [];
  done: Hypothesis[] = [];
  private readonly maxHypotheses: number;

  constructor(
    readonly task: SequenceTask,
    readonly count: number,
    row: number,
  ) {
    this.beams = [{ row, ids: [], logprobs: [], score: 0, alternatives: [] }]; // until the first tokens are known
    this.maxHypotheses = Math.max(1, Math.floor(count * task.settings.patience + 0.5));
  }

  addHypothesis(hypothesis: Hypothesis): void {
    this.done.push(hypothesis);
  }

  sortHypotheses(): void {
    this.done.sort((one, other) => other.score - one.score);
    this.done.length = Math.min(this.done.length, this.maxHypotheses);
  }

  /** Return whether the beams may still improve the hypotheses. bestScore: the best beam's summed log-probability. */
  canImprove(bestScore: number): boolean {
    const { settings, options } = this.task;
    if (this.done.length < this.maxHypotheses) return true;
    if (settings.earlyStopping === true) return false;
    const usesMaxLength = settings.earlyStopping === "never" && settings.lengthPenalty > 0;
    const length = usesMaxLength ? options.maxTokens : this.length + 1;
    return fround(bestScore / fround(length ** settings.lengthPenalty)) > fround(this.done[this.done.length - 1].score);
  }
}

export class BeamSearch implements SequenceSearch {
  private groups: BeamGroup[][];
  width: number;

  constructor(tasks: readonly SequenceTask[]) {
    this.width = tasks.length;
    this.groups = tasks.map((task, row) => {
      const { numBeams, numBeamGroups } = task.settings;
      return Array.from({ length: numBeamGroups }, () => new BeamGroup(task, numBeams / numBeamGroups, row));
    });
  }

  renumber(rows: Int32Array): void {
    for (const groups of this.groups) {
      for (const group of groups) for (const beam of group.over ? [] : group.beams) beam.row = rows[beam.row];
    }
  }

  advance(
    logits: Float32Array,
    vocabulary: number,
    histories: readonly (StepHistory | undefined)[] | undefined,
  ): { parents: Int32Array; tokens: Int32Array } {
    const norms = Float32Array.from({ length: this.width }, (_, row) =>
      logNormalizer(logits, row * vocabulary, (row + 1) * vocabulary),
    );
    const parents: number[] = [];
    const tokens: number[] = [];
    for (const groups of this.groups) {
      const { task } = groups[0];
      const first = parents.length;
      try {
        this.advanceTask(groups, { logits, vocabulary, norms, histories }, parents, tokens);
        if (groups.every((group) => group.over)) finish(task, groups);
      } catch (error) {
        task.error ??= error; // of the task's own rule or stop string: only this task ends
      }
      if (task.finished) parents.length = tokens.length = first;
    }
    this.groups = this.groups.filter(([group]) => !group.task.finished);
    this.width = parents.length;
    return { parents: Int32Array.from(parents), tokens: Int32Array.from(tokens) };
  }

  /** Advance all groups of a task. Append the row that each new beam continues, and its token. */
  private advanceTask(groups: readonly BeamGroup[], step: Step, parents: number[], tokens: number[]): void {
    for (const group of groups) {
      if (!group.over && group.beams.some((beam) => !(step.norms[beam.row] < Infinity)))
        throw new InputError(NOT_FINITE);
      group.chosen = [];
    }
    groups.forEach((group, level) => {
      if (group.over) return;
      const ranked = rank(group, groups.slice(0, level), step);
      const going = ranked.filter((one) => one.possible && !one.ended).slice(0, group.count);
      const ended = ranked.slice(0, group.count).filter((one) => one.possible && one.ended);
      for (const one of ended) group.addHypothesis(hypothesisOf(group, one, step));
      if (ended.length) group.sortHypotheses();
      if (!going.length || !group.canImprove(going[0].top)) {
        group.over = true;
        group.chosen = ranked
          .filter((one) => one.possible)
          .slice(0, group.count)
          .map((one) => one.token);
        return;
      }
      group.beams = going.map((one) => {
        parents.push(one.beam.row);
        tokens.push(one.token);
        return {
          row: parents.length - 1,
          ids: [...one.beam.ids, one.token],
          logprobs: [...one.beam.logprobs, one.gain],
          score: one.top,
          alternatives: alternativesOf(group.task, one.beam, step),
        };
      });
      group.length++;
      group.chosen = going.map((one) => one.token);
    });
  }
}

interface Step {
  readonly logits: Float32Array;
  readonly vocabulary: number;
  readonly norms: Float32Array;
  readonly histories: readonly (StepHistory | undefined)[] | undefined;
}

/** Return the best continuations of a group, best first. earlier: the groups before it. */
function rank(group: BeamGroup, earlier: readonly BeamGroup[], step: Step): Continuation[] {
  const { task, count, beams } = group;
  const { logits, vocabulary, norms } = step;
  const width = count * Math.max(2, 1 + task.options.endIds.length);
  const best = new TopValues(width); // their places are numbers of continuations, beam by beam
  const found: { beam: Beam; token: number }[] = [];
  const forbidden = earlier.length ? undefined : forbiddenOf(group);
  for (const [b, beam] of beams.entries()) {
    const [begin, end] = [beam.row * vocabulary, (beam.row + 1) * vocabulary];
    const norm = norms[beam.row];
    const top = new TopValues(width);
    if (forbidden) {
      // The best by the logits: norm and score so far shift all values of a row alike.
      const ids = forbidden[b];
      const saved = Float32Array.from(ids, (id) => logits[begin + id]);
      for (const id of ids) logits[begin + id] = -Infinity;
      top.scan(logits, begin, end);
      for (let i = ids.length - 1; i >= 0; i--) logits[begin + ids[i]] = saved[i];
      for (let i = 0; i < top.size; i++) top.values[i] = fround(fround(top.values[i] - norm) + beam.score);
    } else {
      const scores = new Float32Array(vocabulary);
      for (let i = 0; i < vocabulary; i++) scores[i] = logits[begin + i] - norm;
      const penalty = fround(task.settings.diversityPenalty);
      const counts = new Map<number, number>(); // the product of the count is rounded once, as in Python
      for (const token of earlier.flatMap((before) => before.chosen)) counts.set(token, (counts.get(token) ?? 0) + 1);
      for (const [token, count] of counts) scores[token] -= penalty * count;
      if (task.options.rules.length) task.applyRules(idsOf(task, beam), scores);
      for (let i = 0; i < vocabulary; i++) scores[i] += beam.score;
      top.scan(scores, 0, vocabulary);
    }
    for (let i = 0; i < top.size; i++) {
      best.insert(top.values[i], found.length);
      found.push({ beam, token: top.places[i] });
    }
  }
  return Array.from({ length: best.size }, (_, i) => {
    const { beam, token } = found[best.places[i]];
    const top = best.values[i];
    const gain = fround(logits[beam.row * vocabulary + token] - norms[beam.row]);
    const ended = finishReasonOf(group, beam, token) !== undefined;
    return { top, beam, token, gain, possible: Number.isFinite(top), ended };
  });
}

/** Return the forbidden next ids of each beam; undefined if the rules do more than forbid. */
function forbiddenOf(group: BeamGroup): Int32Array[] | undefined {
  const { task, beams } = group;
  const all: Int32Array[] = [];
  for (const beam of beams) {
    const ids = task.options.rules.length ? task.forbiddenIds(idsOf(task, beam)) : NO_IDS;
    if (!ids) return undefined;
    all.push(ids);
  }
  return all;
}

const NO_IDS = new Int32Array(0);

/** Return all ids of a beam, with the prompt. */
function idsOf(task: SequenceTask, beam: Beam): Int32Array {
  const ids = new Int32Array(task.prompt.length + beam.ids.length);
  ids.set(task.prompt);
  ids.set(beam.ids, task.prompt.length);
  return ids;
}

function finishReasonOf(group: BeamGroup, beam: Beam, token: number) {
  const { task } = group;
  const stopped = task.options.truncatesText?.([...beam.ids, token]) ?? false;
  return task.finishReason(token, group.length + 1, stopped);
}

function hypothesisOf(group: BeamGroup, one: Continuation, step: Step): Hypothesis {
  const { beam, token } = one;
  const length = group.length + 1;
  return {
    ids: [...beam.ids, token],
    logprobs: [...beam.logprobs, one.gain],
    score: fround(one.top / fround(length ** group.task.settings.lengthPenalty)),
    finish: finishReasonOf(group, beam, token) ?? "length",
    alternatives: alternativesOf(group.task, beam, step),
    history: step.histories?.[beam.row],
  };
}

/** Return the alternatives of a beam with those of the next position, if the options ask for them. */
function alternativesOf(task: SequenceTask, beam: Beam, step: Step): readonly Alternatives[] {
  const count = task.settings.topLogprobs;
  if (!count) return beam.alternatives;
  const begin = beam.row * step.vocabulary;
  const norm = step.norms[beam.row];
  return [...beam.alternatives, topAlternatives(step.logits, begin, begin + step.vocabulary, norm, count)];
}

function finish(task: SequenceTask, groups: readonly BeamGroup[]): void {
  const hypotheses = groups.flatMap((group) => group.done).sort((one, other) => other.score - one.score);
  if (hypotheses.length) task.hypotheses = hypotheses.slice(0, task.settings.numReturnSequences);
  else task.error = new OptionError(NOTHING_LEFT);
}
