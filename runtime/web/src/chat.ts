/** Caches that outlive a request: a common prefix of many requests, and a conversation. */

import { InputError, OptionError, UnsupportedCallError } from "./base/errors.js";
import { takeTurn } from "./base/eventLoop.js";
import { readerOf, StreamControl } from "./base/ownedStream.js";
import type { Generator } from "./decoding/generator.js";
import type { GenerationOptions, Settings } from "./decoding/options.js";
import {
  adapterInput,
  makeRequest,
  releasedPrefixError,
  type PromptPrefix,
  type Request,
  type Result,
} from "./decoding/request.js";
import { generateStream } from "./decoding/streaming.js";
import type { Engine } from "./engine/engine.js";
import type { State } from "./engine/state.js";
import { adapterNumber } from "./format/manifest.js";
import type { Sources } from "./format/sizes.js";
import { conversation, type MessagePart, type PromptTemplate } from "./preprocess/conversation.js";
import type { Inputs } from "./preprocess/inputs.js";
import type { Value } from "./preprocess/values.js";

const PREFILL_CHUNK_TOKENS = 256; // of one step

/** The options of a call that generates. signal: ends it with an AbortedError. */
export type CallOptions = GenerationOptions & { readonly signal?: AbortSignal };

/**
 * The cache of a prompt prefix of a decoder-only model, for any number of requests.
 *
 * The memory is freed by `release`, and not when the object is lost.
 */
export class CachedPrefix {
  /** Use `Model.cachePrefix`. */
  private constructor(
    private readonly engine: Engine,
    private readonly state: State,
    private readonly ids: Int32Array,
  ) {}

  /** Read ids. sources: the images of the prefix, and the input that chooses the adapter. */
  static async read(engine: Engine, ids: Int32Array, sources: Sources, signal?: AbortSignal): Promise<CachedPrefix> {
    const { maxLength } = engine.manifest;
    if (ids.length >= maxLength) {
      throw new InputError(`the prefix is ${ids.length} tokens long and the model holds ${maxLength}: shorten it`);
    }
    const requests = new Map([...sources].map(([name, one]) => [name, [one]]));
    const state = await engine.start(requests, { rows: 1, maxTokens: ids.length });
    try {
      await prefill(engine, state, ids, signal);
    } catch (error) {
      state.release();
      throw error;
    }
    return new CachedPrefix(engine, state, ids);
  }

  /** Return the prefix for a request of an engine. Throw UnsupportedCallError after `release`, InputError for another. */
  promptPrefix(engine: Engine): PromptPrefix {
    if (engine !== this.engine) {
      throw new InputError("the prefix was read by another model: read it with this one's cachePrefix()");
    }
    if (this.state.released) throw releasedPrefixError();
    return { state: this.state, tokenIds: this.ids };
  }

  /** Free the memory. Later requests cannot use the prefix. */
  release(): void {
    this.state.release();
  }
}

/** A text, or ids in a file without a chat template; for a model that reads images also parts. */
export type ChatMessage = Value | readonly MessagePart[];

/** A message and its answer. ids: of the conversation up to the end of the answer. */
export interface Turn {
  readonly message: ChatMessage;
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
 *
 * A model that reads images takes messages of several parts in a file with a chat template. A turn with images reads the
 * conversation again, because the images are encoded together.
 */
export class Chat {
  readonly turns: Turn[] = [];
  private state: State | undefined;
  private sources: Sources = new Map(); // the images that the state has read
  private cachedIds = new Int32Array(0); // a prefix of the ids in the cache
  private readonly answers = new Answers(() => this.state?.release());

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
   * Generate the answer to a message: a text, ids in a file without a chat template, or the parts of a message with
   * images.
   *
   * An error leaves the conversation unchanged. Throw InputError also for a conversation that is too long.
   */
  async send(message: ChatMessage, options: CallOptions = {}): Promise<Result> {
    const { signal, ...generation } = options;
    const settings = this.parts.settings(generation, false);
    const answer = this.answers.begin();
    try {
      const { request, ids } = await this.request(message, settings, signal);
      const [result] = await this.parts.generator.generateAll([request], settings, signal);
      this.addTurn(message, ids, result);
      return result;
    } finally {
      this.answers.end(answer);
    }
  }

  /**
   * Yield the text of the answer of `send` in pieces. The turn is added to the conversation after the last piece.
   *
   * The next message ends a stream that waits to be read on; `rewind` and `release` do, too. The stream then throws
   * UnsupportedCallError.
   */
  stream(message: ChatMessage, options: CallOptions = {}): AsyncGenerator<string, Result> {
    return this.answers.stream((answer) => this.streamed(message, options, answer));
  }

  private async *streamed(
    message: ChatMessage,
    { signal, ...generation }: CallOptions,
    answer: PendingAnswer,
  ): AsyncGenerator<string, Result> {
    const settings = this.parts.settings(generation, true);
    this.answers.begin(answer);
    try {
      const { request, ids } = await this.request(message, settings, signal);
      const result = yield* generateStream(this.parts.generator, request, settings, signal);
      this.addTurn(message, ids, result);
      return result;
    } finally {
      this.answers.end(answer);
    }
  }

  /** Remove the last turns. The cache of their common prefix with the next turn is reused. */
  rewind(turns = 1): void {
    this.answers.mustBeEnded();
    removeLast(this.turns, turns);
  }

  /** Free the memory, after the message that is being answered. The conversation cannot continue. */
  release(): void {
    this.answers.release();
  }

  /** Cache the conversation up to its last id. Return the request for the answer, and the ids up to the answer. */
  private async request(
    message: ChatMessage,
    settings: Settings,
    signal: AbortSignal | undefined,
  ): Promise<{ request: Request; ids: Int32Array }> {
    const { generator, inputs } = this.parts;
    const { engine } = generator;
    const { manifest } = engine;
    const { sources, ids } = this.prompt(message);
    if (ids.length >= manifest.maxLength) {
      throw new InputError(
        `the conversation is ${ids.length} tokens long and the model holds ${manifest.maxLength}: rewind it, or begin ` +
          "another",
      );
    }
    const state = await this.stateFor(sources, settings);
    state.rewind(Math.min(commonLength(this.cachedIds, ids), ids.length - 1));
    const read = state.lengths[0];
    this.cachedIds = ids.slice(0, read);
    await prefill(engine, state, ids.subarray(read, ids.length - 1), signal);
    this.cachedIds = ids.slice(0, -1);
    const prefix = { state, tokenIds: this.cachedIds };
    const request = makeRequest(manifest, inputs, ids.subarray(ids.length - 1), 0, settings, prefix);
    return { request, ids };
  }

  /**
   * Return the state of the conversation, which begins again if the adapter or the images change: its keys are other
   * numbers, and images are encoded together.
   */
  private async stateFor(sources: Sources, settings: Settings): Promise<State> {
    const { engine } = this.parts.generator;
    const number = adapterNumber(engine.manifest, settings.adapter);
    const hasAdapter = !this.state?.adapters || this.state.adapters[0] === number;
    if (this.state && hasAdapter && haveSameItems(sources, this.sources)) return this.state;
    const all = [...sources, ...adapterInput(engine.manifest, settings.adapter)];
    const state = await engine.start(new Map(all.map(([name, one]) => [name, [one]])), { rows: 1 });
    this.sources = sources;
    this.state?.release();
    this.cachedIds = new Int32Array(0);
    this.state = state;
    return state;
  }

  private addTurn(message: ChatMessage, ids: Int32Array, result: Result): void {
    this.turns.push({ message, result, ids: Int32Array.from([...ids, ...result.tokenIds]) });
  }

  /** Return the images and the ids of the conversation up to the answer. */
  private prompt(message: ChatMessage): { sources: Sources; ids: Int32Array } {
    const { inputs, template, system } = this.parts;
    if (!template) {
      const before = this.turns[this.turns.length - 1]?.ids ?? [];
      const { sources, prompt } = inputs.generationInputs(message as Value, !this.turns.length);
      if ([...sources.values()].some(({ shape }) => shape[0])) {
        throw new InputError("the file has no chat template, which images in a conversation need: use generate()");
      }
      return { sources: new Map(), ids: Int32Array.from([...before, ...prompt]) };
    }
    if (typeof message !== "string" && !this.parts.generator.engine.manifest.placeholders.size) {
      throw new InputError("a chat template takes text");
    }
    const messages: unknown[] = this.turns.flatMap((turn) => [
      { role: "user", content: turn.message },
      { role: "assistant", content: turn.result.text },
    ]);
    const all = conversation([...messages, { role: "user", content: message }], system);
    const { sources, prompt } = inputs.generationInputs(inputs.conversationInput(template, all));
    return { sources, ids: prompt };
  }
}

/** An answer that is being generated. control: of its stream. */
export interface PendingAnswer {
  control?: StreamControl;
}

/** The answers of a conversation. One is generated at a time. */
export class Answers {
  private current: PendingAnswer | undefined;
  private released = false;

  /** free: frees the memory of the conversation, which an answer uses until its end. */
  constructor(private readonly free: () => void) {}

  /** Return the stream of an answer. values: yields its pieces. It begins and ends the answer. */
  stream<T, R>(values: (answer: PendingAnswer) => AsyncGenerator<T, R>): AsyncGenerator<T, R> {
    const answer: PendingAnswer = {};
    const control = new StreamControl(values(answer));
    answer.control = control;
    return readerOf(control);
  }

  /** Begin an answer. Throw UnsupportedCallError for a conversation that cannot take a message. */
  begin(answer: PendingAnswer = {}): PendingAnswer {
    if (this.released) {
      throw new UnsupportedCallError("the conversation has been released and cannot be continued: begin another");
    }
    this.mustBeEnded();
    return (this.current = answer);
  }

  end(answer: PendingAnswer): void {
    if (this.current !== answer) return; // another one has taken its place
    this.current = undefined;
    if (this.released) this.free();
  }

  /** End a stream that nobody reads. Throw UnsupportedCallError for an answer that is being computed. */
  mustBeEnded(): void {
    this.closeUnread();
    if (this.current) throw new UnsupportedCallError("the conversation is answering a message: await its end first");
  }

  /** Free the memory, after the answer that is being computed. */
  release(): void {
    if (this.released) return;
    this.released = true;
    this.closeUnread();
    if (!this.current) this.free();
  }

  private closeUnread(): void {
    const control = this.current?.control;
    if (!control || control.isRead) return;
    this.current = undefined;
    control.close(
      new UnsupportedCallError("the answer was not read to its end, and the conversation went on without it"),
    );
  }
}

/** Add ids to the cache of a state with one row, a chunk per step. Throw AbortedError. */
async function prefill(engine: Engine, state: State, ids: Int32Array, signal?: AbortSignal): Promise<void> {
  for (let begin = 0; begin < ids.length; begin += PREFILL_CHUNK_TOKENS) {
    await takeTurn(signal);
    await engine.step(state, ids.subarray(begin, begin + PREFILL_CHUNK_TOKENS));
  }
}

/** Remove the last turns of a conversation. Throw OptionError if there are fewer. */
export function removeLast(turns: Turn[], count: number): void {
  if (!Number.isInteger(count) || count < 0 || count > turns.length) {
    throw new OptionError(`there are ${turns.length} turns, and ${count} cannot be taken back`, "turns");
  }
  turns.length -= count;
}

/** Return whether the images are the same. Inputs without images equal missing inputs. */
function haveSameItems(one: Sources, other: Sources): boolean {
  return [...new Set([...one.keys(), ...other.keys()])].every((name) => {
    const [first, second] = [one, other].map((sources) => sources.get(name)?.data ?? NOTHING);
    return first.length === second.length && first.every((value, i) => value === second[i]);
  });
}

const NOTHING = new Float32Array(0);

/** Return the length of the common prefix of two sequences. */
function commonLength(one: Int32Array, other: Int32Array): number {
  const count = Math.min(one.length, other.length);
  for (let i = 0; i < count; i++) if (one[i] !== other[i]) return i;
  return count;
}
