/**
 * Decoding of tasks in one batch, until all are finished.
 *
 * Each step feeds every row the token that was chosen for it, and chooses the next token. The step ends there, so that a
 * token is returned before the model reads it. Finished tasks leave at once. The result of a task does not depend on the
 * other tasks of the batch.
 */

import { takeTurn } from "../base/eventLoop.js";
import type { Engine } from "../engine/engine.js";
import { isIdentity } from "../engine/rowMoves.js";
import type { Shortlist } from "../engine/shortlist.js";
import type { State } from "../engine/state.js";
import { rowOf, StepHistory } from "../engine/stepOutputs.js";
import { numberArray, type NumberArray } from "../base/arrays.js";
import { logitCount } from "../format/manifest.js";
import { BeamSearch } from "./beamSearch.js";
import { logNormalizer } from "./logNormalizer.js";
import { topAlternatives } from "./logProbabilities.js";
import { usesBeams } from "./options.js";
import { placeRows } from "./rowPlacement.js";
import type { SequenceSearch, SequenceTask } from "./sequence.js";
import { TokenSearch } from "./tokenSearch.js";

/** The maximum number of padded prompt and source positions that one call computes before the first token. */
export const MAX_PREFILL_POSITIONS = 4096;

export class Scheduler {
  private state: State | undefined;
  private search: SequenceSearch | undefined;
  private logits: Float32Array | undefined; // of the rows, until tokens are chosen
  private tokens: Int32Array | undefined; // chosen, until the model has read them
  private histories: (StepHistory | undefined)[] = [];

  /** tasks: of the same settings. extraNames: the extra outputs that are returned. */
  constructor(
    private readonly engine: Engine,
    private readonly tasks: readonly SequenceTask[],
    private readonly extraNames: readonly string[],
    private readonly signal?: AbortSignal,
  ) {}

  get finished(): boolean {
    return this.tasks.every((task) => task.finished);
  }

  /** Decode one token for every row. Throw AbortedError if the signal of the call is aborted. */
  async step(): Promise<void> {
    await takeTurn(this.signal);
    if (!this.state) await this.begin();
    else if (this.tokens) {
      this.logits = await this.engine.step(this.state, this.tokens);
      this.record();
    }
    this.choose();
  }

  release(): void {
    this.state?.release();
  }

  /** Encode the sources of the tasks and read their prompts. A task with a cached prefix continues a copy of it. */
  private async begin(): Promise<void> {
    const { engine, tasks } = this;
    const [first] = tasks;
    const width = tasks.reduce((sum, task) => sum + task.width, 0);
    const maxTokens = Math.max(...tasks.map((task) => task.maxPositions));
    const options = { roomForRows: width, extras: this.extraNames, maxTokens };
    const prefix = first.options.prefixState;
    if (prefix) {
      this.state = engine.copy(prefix, new Int32Array(tasks.length), options); // its only row, for each task
    } else {
      const names = [...first.options.sources.keys()];
      const requests = new Map(names.map((name) => [name, tasks.map((task) => task.options.sources.get(name)!)]));
      const candidates = engine.shortlist && tasks.map((task) => candidatesOf(engine.shortlist!, task));
      this.state = await engine.start(requests, { rows: tasks.length, candidates, ...options });
    }
    tasks.forEach((task, row) => {
      task.encoderOutputs = new Map([...this.state!.encoded].map(([name, values]) => [name, rowOf(values, row)]));
    });
    this.histories = tasks.map(() => undefined);
    await this.readPrompts(this.state);
    this.search = usesBeams(first.settings) ? new BeamSearch(tasks) : new TokenSearch(tasks);
  }

  /** Read the unread ids of the prompts, and keep the logits after them. */
  private async readPrompts(state: State): Promise<void> {
    const { engine, tasks } = this;
    const prompts = tasks.map((task) => task.unreadPrompt);
    const longest = Math.max(...prompts.map((prompt) => prompt.length));
    const tokens = new Int32Array(tasks.length * longest);
    prompts.forEach((prompt, row) => tokens.set(prompt, row * longest));
    const counts = Int32Array.from(prompts, (prompt) => prompt.length);
    if (tasks.some((task) => task.options.prefixTokens)) {
      const vocabulary = logitCount(engine.decode);
      const all = await engine.step(state, tokens, counts, "all");
      this.logits = new Float32Array(tasks.length * vocabulary);
      const extras = state.extras;
      tasks.forEach((task, row) => {
        const last = row * longest + counts[row] - 1;
        for (let position = last - task.options.prefixTokens; position < last; position++) {
          if (extras.size) this.histories[row] = new StepHistory(this.histories[row], valuesAt(extras, position));
        }
        setPrefixLogprobs(task, all, last - task.options.prefixTokens, vocabulary);
        this.logits!.set(all.subarray(last * vocabulary, (last + 1) * vocabulary), row * vocabulary);
        if (extras.size) this.histories[row] = new StepHistory(this.histories[row], valuesAt(extras, last));
      });
      return;
    }
    this.logits =
      tasks.length === 1 ? await engine.stepInParts(state, prompts[0]) : await engine.step(state, tokens, counts);
    this.record();
  }

  /** Append the extra outputs of the latest step to the history of each row. */
  private record(): void {
    const extras = this.state!.extras;
    if (!extras.size) return;
    this.histories = this.histories.map((history, row) => {
      return new StepHistory(history, new Map([...extras].map(([name, values]) => [name, rowOf(values, row)])));
    });
  }

  /** Choose the next tokens of the rows, and move the rows that continue to their places. */
  private choose(): void {
    const { engine, search, state, tasks } = this;
    const vocabulary = logitCount(engine.decode);
    const histories = state!.stepExtras.length ? this.histories : undefined;
    const { parents, tokens } = search!.advance(this.logits!, vocabulary, histories);
    const now = performance.now();
    for (const task of tasks) {
      task.firstTokenAt ||= now;
      if (task.finished) task.endedAt ||= now;
    }
    this.tokens = tokens;
    if (!parents.length) {
      this.release();
      return;
    }
    if (isIdentity(parents, state!.rows)) return;
    const requests = engine.decode.sharesContext ? state!.context.requests : undefined;
    const { places, order } = placeRows(parents, requests);
    engine.reorder(state!, order);
    this.histories = Array.from(order, (row) => this.histories[row]);
    this.tokens = new Int32Array(tokens.length);
    places.forEach((place, i) => (this.tokens![place] = tokens[i]));
    if (!isIdentity(places, places.length)) search!.renumber(places);
  }
}

/** Return the candidates of a task; undefined if its options turn the shortlist off or may ask for any id. */
function candidatesOf(shortlist: Shortlist, task: SequenceTask): Int32Array | undefined {
  const { settings, prefix } = task;
  if (!settings.shortlist || settings.logitsProcessor) return undefined;
  const first = settings.forcedBosTokenId === undefined ? [] : [settings.forcedBosTokenId];
  return shortlist.candidates(task.options.sources, [...prefix, ...first, ...settings.logitBias.map(([id]) => id)]);
}

/** Return the values at a position of (rows, positions, …), where positions are counted through all rows. */
function valuesAt(extras: ReadonlyMap<string, NumberArray>, position: number): Map<string, NumberArray> {
  return new Map(
    [...extras].map(([name, { data, shape }]) => {
      const flat = numberArray(data, [shape[0] * shape[1], ...shape.slice(2)]);
      return [name, rowOf(flat, position)];
    }),
  );
}

/** Set the log-probabilities and the alternatives of the forced prefix. first: the position of the logits for it. */
function setPrefixLogprobs(task: SequenceTask, logits: Float32Array, first: number, vocabulary: number): void {
  const count = task.settings.topLogprobs;
  const rows = Array.from(task.prefix, (id, i) => {
    const begin = (first + i) * vocabulary;
    const norm = logNormalizer(logits, begin, begin + vocabulary);
    // The step input may have ids that are never generated.
    const logprob = id < vocabulary ? Math.fround(logits[begin + id] - norm) : -Infinity;
    return { logprob, alternatives: topAlternatives(logits, begin, begin + vocabulary, norm, count) };
  });
  task.prefixLogprobs = rows.map(({ logprob }) => logprob);
  task.prefixAlternatives = count ? rows.map(({ alternatives }) => alternatives) : [];
}
