/** Makes tasks of the search from options and requests, and results from finished tasks. */

import { numberArray, type NumberArray } from "../base/arrays.js";
import type { Engine } from "../engine/engine.js";
import { CROSS_ATTENTIONS, extraOutputs, HIDDEN_STATES, logitCount, moduleOf } from "../format/manifest.js";
import { crop, inputAndOutputSizes, type Sizes } from "../format/sizes.js";
import { Detokenizer, textBeforeStop } from "../preprocess/detokenizer.js";
import type { Codec } from "../preprocess/tokenizer.js";
import { makeRules } from "./logitRules.js";
import type { Settings } from "./options.js";
import type { Request, Result } from "./request.js";
import { Scheduler } from "./scheduler.js";
import { SequenceTask, type Hypothesis, type Token } from "./sequence.js";

export class Generator {
  /** codec: of the generated text; undefined for a file without a tokenizer for it. */
  constructor(
    readonly engine: Engine,
    readonly codec: Codec | undefined,
  ) {}

  /** Return the names of the extra outputs that the settings ask for. */
  private extraNames(settings: Settings): string[] {
    const isNeeded = { [CROSS_ATTENTIONS]: settings.crossAttentions, [HIDDEN_STATES]: settings.hiddenStates };
    return extraOutputs(this.engine.manifest)
      .filter((extra) => isNeeded[extra.kind as keyof typeof isNeeded])
      .map((extra) => extra.name);
  }

  /** Return a scheduler for tasks of the same settings. */
  scheduler(tasks: readonly SequenceTask[], settings: Settings, signal?: AbortSignal): Scheduler {
    return new Scheduler(this.engine, tasks, this.extraNames(settings), signal);
  }

  /** Decode tasks of the same settings until all are finished. Errors of single tasks are kept in them. */
  async run(tasks: readonly SequenceTask[], settings: Settings, signal?: AbortSignal): Promise<void> {
    const scheduler = this.scheduler(tasks, settings, signal);
    try {
      while (!scheduler.finished) await scheduler.step();
    } finally {
      scheduler.release();
    }
  }

  /** Return the results of a few requests, in their order. All requests run in one batch. */
  async generateAll(requests: readonly Request[], settings: Settings, signal?: AbortSignal): Promise<Result[]> {
    const tasks = requests.map((request) => this.makeTask(request, settings));
    await this.run(tasks, settings, signal);
    return tasks.map((task) => this.makeResult(task));
  }

  /**
   * Return the task of a request. Throw OptionError if the settings do not fit the model.
   *
   * onToken: called with each token of greedy decoding and sampling.
   */
  makeTask(request: Request, settings: Settings, onToken?: (token: Token) => void): SequenceTask {
    const { manifest, decode } = this.engine;
    const { codec } = this;
    const stop = settings.stopStrings;
    const prefix = request.prompt.subarray(request.prompt.length - request.prefixTokens);
    const hasStop = codec !== undefined && stop.length > 0;
    return new SequenceTask({
      index: request.index,
      prompt: request.prompt,
      maxTokens: request.maxTokens,
      settings,
      endIds: manifest.specialTokens.eosTokenIds,
      rules: makeRules(settings, manifest.specialTokens, logitCount(decode)),
      onToken,
      sources: request.sources,
      prefixTokens: request.prefixTokens,
      prefixState: request.cachedPrefix?.state,
      ...(hasStop && {
        stopChecker: () => {
          const text = new Detokenizer(codec, stop);
          for (const token of prefix) text.push(token);
          return (token: number) => {
            text.push(token);
            return text.stopped;
          };
        },
        truncatesText: (ids: readonly number[]) =>
          textBeforeStop(codec.decode([...prefix, ...ids]), stop) !== undefined,
      }),
    });
  }

  /** Return the result of a finished task. Throw the error of the task. */
  makeResult(task: SequenceTask): Result {
    if (task.error !== undefined) throw task.error;
    const [first, ...others] = task.hypotheses!.map((hypothesis) => this.makeOneResult(task, hypothesis));
    return { ...first, alternatives: others };
  }

  private makeOneResult(task: SequenceTask, hypothesis: Hypothesis): Result {
    const tokenIds = [...task.prefix, ...hypothesis.ids];
    let finishReason = hypothesis.finish;
    let text = this.codec?.decode(finishReason === "end" ? tokenIds.slice(0, -1) : tokenIds) ?? "";
    const truncated = textBeforeStop(text, task.settings.stopStrings);
    if (truncated !== undefined) [text, finishReason] = [truncated, "stop"];
    const count = task.hypotheses![0].ids.length;
    const timing = {
      firstToken: (task.firstTokenAt - task.startedAt) / 1000,
      perToken: (task.endedAt - task.firstTokenAt) / 1000 / Math.max(1, count - 1),
    };
    return {
      text,
      tokenIds,
      score: hypothesis.score,
      finishReason,
      tokenLogprobs: [...task.prefixLogprobs, ...hypothesis.logprobs],
      alternatives: [],
      topLogprobs: [...task.prefixAlternatives, ...hypothesis.alternatives],
      ...this.extraValues(task, hypothesis),
      timing,
    };
  }

  /** Return the extra outputs of a hypothesis, as fields of `Result`. */
  private extraValues(task: SequenceTask, hypothesis: Hypothesis): Pick<Result, "crossAttentions" | "hiddenStates"> {
    const hiddenStates = new Map<string, NumberArray>();
    const { history } = hypothesis;
    if (!history && !task.encoderOutputs.size) return { crossAttentions: undefined, hiddenStates };
    const { encode } = this.engine.manifest;
    const extras = new Map(extraOutputs(this.engine.manifest).map((extra) => [extra.name, extra]));
    const sizes: Sizes = encode ? inputAndOutputSizes(encode, task.options.sources) : new Map();
    const values = new Map<string, NumberArray>();
    if (history) {
      const shapes = new Map([...history.values.keys()].map((name) => [name, extras.get(name)!.shape.slice(2)]));
      const length = task.options.prefixTokens + hypothesis.ids.length;
      for (const [name, value] of history.stackSteps(length, sizes, shapes)) values.set(name, value);
    }
    for (const [name, { data, shape }] of task.encoderOutputs) {
      const cropped = crop(sizes, extras.get(name)!.shape.slice(1), data, 0, shape);
      values.set(name, numberArray(cropped.data, cropped.shape));
    }
    for (const [name, value] of values) {
      const extra = extras.get(name)!;
      if (extra.kind === HIDDEN_STATES) hiddenStates.set(moduleOf(extra), value);
    }
    return { crossAttentions: values.get(CROSS_ATTENTIONS), hiddenStates };
  }
}
