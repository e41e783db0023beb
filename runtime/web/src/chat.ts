/** A conversation, whose cache is kept from turn to turn. */

import { InputError, OptionError, UnsupportedCallError } from "./base/errors.js";
import type { Generator } from "./decoding/generator.js";
import type { GenerationOptions, Settings } from "./decoding/options.js";
import { adapterInput, makeRequest, type Request, type Result } from "./decoding/request.js";
import { generateStream } from "./decoding/streaming.js";
import type { State } from "./engine/state.js";
import { adapterNumber } from "./format/manifest.js";
import { conversation, type Message, type PromptTemplate } from "./preprocess/conversation.js";
import type { Inputs, Value } from "./preprocess/inputs.js";

const PREFILL_CHUNK_TOKENS = 256; // of one step

export type CallOptions = GenerationOptions & { readonly signal?: AbortSignal };

/** A message and its answer. ids: of the conversation up to the end of the answer. */
export interface Turn {
  readonly message: Value;
  readonly result: Result;
  readonly ids: Int32Array;
}

export interface ChatParts {
  readonly generator: Generator;
  readonly inputs: Inputs;
  /** Return the settings of options; those of a stream have a text to give. */
  readonly settings: (options: GenerationOptions, streams: boolean) => Settings;
  readonly template: PromptTemplate | undefined;
  readonly system: string | undefined;
}

/**
 * A conversation with a decoder-only model.
 *
 * The cost of a turn is the generation of its answer, and reading its message and the previous answer. In a file with a
 * chat template, messages and answers are texts, formatted by the template. Otherwise their ids are concatenated.
 */
export class Chat {
  readonly turns: Turn[] = [];
  private state: State | undefined;
  private cachedIds = new Int32Array(0); // a prefix of the ids in the cache
  private released = false;
  private busy = false;

  /** Use `Model.chat`. */
  constructor(private readonly parts: ChatParts) {
    if (parts.system !== undefined && !parts.template) {
      throw new OptionError(
        "the file has no chat template for a system message: begin the first message with it",
        "system",
      );
    }
  }

  /**
   * Generate the answer to a message: a text, or ids in a file without a chat template.
   *
   * An error leaves the conversation unchanged. Throw InputError also for a conversation that is too long.
   */
  async send(message: Value, options: CallOptions = {}): Promise<Result> {
    const { signal, ...generation } = options;
    const settings = this.parts.settings(generation, false);
    return this.alone(async () => {
      const { request, ids } = await this.request(message, settings);
      const [result] = await this.parts.generator.generateAll([request], settings, signal);
      this.addTurn(message, ids, result);
      return result;
    });
  }

  /** Yield the text of the answer of `send` in pieces. The turn is added to the conversation after the last piece. */
  async *stream(message: Value, options: CallOptions = {}): AsyncGenerator<string, Result> {
    const { signal, ...generation } = options;
    const settings = this.parts.settings(generation, true);
    this.begin();
    try {
      const { request, ids } = await this.request(message, settings);
      const result = yield* generateStream(this.parts.generator, request, settings, signal);
      this.addTurn(message, ids, result);
      return result;
    } finally {
      this.busy = false;
    }
  }

  /** Remove the last turns. The cache of their common prefix with the next turn is reused. */
  rewind(turns = 1): void {
    if (!Number.isInteger(turns) || turns < 0 || turns > this.turns.length) {
      throw new OptionError(`there are ${this.turns.length} turns, and ${turns} cannot be taken back`, "turns");
    }
    this.turns.length -= turns;
  }

  /** Free the memory. The conversation cannot continue. */
  release(): void {
    this.released = true;
    this.state?.release();
  }

  private begin(): void {
    if (this.released) {
      throw new UnsupportedCallError("the conversation has been released and cannot be continued: begin another");
    }
    if (this.busy) throw new UnsupportedCallError("the conversation is answering a message: await its end first");
    this.busy = true;
  }

  private async alone<T>(work: () => Promise<T>): Promise<T> {
    this.begin();
    try {
      return await work();
    } finally {
      this.busy = false;
    }
  }

  /** Cache the conversation up to its last id. Return the request for the answer, and the ids up to the answer. */
  private async request(message: Value, settings: Settings): Promise<{ request: Request; ids: Int32Array }> {
    const { generator, inputs } = this.parts;
    const { engine } = generator;
    const { manifest } = engine;
    const ids = this.prompt(message);
    if (ids.length >= manifest.maxLength) {
      throw new InputError(
        `the conversation is ${ids.length} tokens long and the model holds ${manifest.maxLength}: rewind it, or begin ` +
          "another",
      );
    }
    const state = await this.stateFor(settings);
    state.rewind(Math.min(commonLength(this.cachedIds, ids), ids.length - 1));
    let read = state.lengths[0];
    this.cachedIds = ids.slice(0, read);
    while (read < ids.length - 1) {
      const end = Math.min(ids.length - 1, read + PREFILL_CHUNK_TOKENS);
      await engine.step(state, ids.subarray(read, end));
      this.cachedIds = ids.slice(0, end);
      read = end;
    }
    const prefix = { state, tokenIds: this.cachedIds };
    const request = makeRequest(manifest, inputs, ids.subarray(ids.length - 1), 0, settings, prefix);
    return { request, ids };
  }

  /** Return the state of the conversation, which begins anew if the adapter changes: its keys are other numbers. */
  private async stateFor(settings: Settings): Promise<State> {
    const { engine } = this.parts.generator;
    const number = adapterNumber(engine.manifest, settings.adapter);
    if (this.state && (!this.state.adapters || this.state.adapters[0] === number)) return this.state;
    const requests = new Map([...adapterInput(engine.manifest, settings.adapter)].map(([name, one]) => [name, [one]]));
    const state = await engine.start(requests, { rows: 1 });
    this.state?.release();
    this.cachedIds = new Int32Array(0);
    this.state = state;
    return state;
  }

  private addTurn(message: Value, ids: Int32Array, result: Result): void {
    this.turns.push({ message, result, ids: Int32Array.from([...ids, ...result.tokenIds]) });
  }

  /** Return the ids of the conversation up to the answer. */
  private prompt(message: Value): Int32Array {
    const { inputs, template, system } = this.parts;
    if (!template) {
      const before = this.turns[this.turns.length - 1]?.ids ?? [];
      const { prompt } = inputs.generationInputs(message, !this.turns.length);
      return Int32Array.from([...before, ...prompt]);
    }
    if (typeof message !== "string") throw new InputError("a chat template takes text");
    const messages: Message[] = this.turns.flatMap((turn) => [
      { role: "user", content: turn.message as string },
      { role: "assistant", content: turn.result.text },
    ]);
    const all = conversation([...messages, { role: "user", content: message }], system);
    const ids = inputs.conversationIds(template, all);
    return inputs.generationInputs(ids).prompt;
  }
}

/** Return the length of the common prefix of two sequences. */
function commonLength(one: Int32Array, other: Int32Array): number {
  const count = Math.min(one.length, other.length);
  for (let i = 0; i < count; i++) if (one[i] !== other[i]) return i;
  return count;
}
