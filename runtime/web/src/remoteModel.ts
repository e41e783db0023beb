/** A model in a worker, with the calls of `Model`: the page stays free while it computes. */

import type { NumberArray } from "./base/arrays.js";
import { abortedError, checkAborted, DeviceError, InputError, UnsupportedCallError } from "./base/errors.js";
import { ownedStream } from "./base/ownedStream.js";
import { closedError } from "./backend/session.js";
import {
  Answers,
  removeLast,
  type CachedPrefix,
  type CallOptions,
  type Chat,
  type ChatMessage,
  type PendingAnswer,
  type Turn,
} from "./chat.js";
import { releasedPrefixError, type Result } from "./decoding/request.js";
import type { Manifest } from "./format/manifest.js";
import { absoluteAddress, type ModelAddress } from "./loading/source.js";
import type { ModelStore } from "./loading/store.js";
import type { Model } from "./model.js";
import type {
  AttentionLabels,
  BatchOptions,
  GenerateOptions,
  LoadOptions,
  PredictOptions,
  Public,
  ReadOptions,
} from "./modelTypes.js";
import type { AudioInput } from "./preprocess/audio.js";
import type { Message, Tools } from "./preprocess/conversation.js";
import type { ImageInput } from "./preprocess/images.js";
import { imagePrompt, type Input, type Value } from "./preprocess/values.js";
import type { History } from "./preprocess/series.js";
import type { Transcription } from "./tasks/speech.js";
import type { Classification } from "./tasks/classification.js";
import type { Filled } from "./tasks/fillMask.js";
import type { Answer } from "./tasks/questionAnswering.js";
import type { ForecastOptions } from "./tasks/forecasting.js";
import type { Span } from "./tasks/tokenClassification.js";
import { Connection, type OnLate, type Port } from "./worker/connection.js";
import type { LoadCall, SentPrefix, SentTurn, SharedIterator } from "./worker/host.js";

type Memory = ReturnType<Model["memory"]>;
type AnyOptions = { readonly signal?: AbortSignal } & object;
type Inputs<T> = Iterable<T> | AsyncIterable<T>;

interface Loaded {
  readonly manifest: Manifest;
  readonly device: string;
  readonly info: ReturnType<Model["info"]>;
}

/** A thread. end: stops it at once. */
export interface Thread {
  readonly port: Port;
  end(): void;
}

/** Load a model in a worker, which is a file next to this one. Errors: see `Model.load`. */
export async function loadInWorker(address: ModelAddress, options: LoadOptions): Promise<RemoteModel> {
  let worker: Worker;
  try {
    worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "tformer" });
  } catch (error) {
    throw noWorker(error);
  }
  let onFailure = (_: unknown) => {};
  worker.onerror = (event) => {
    event.preventDefault();
    onFailure(noWorker(event.message || "its script cannot be loaded"));
  };
  const model = new RemoteModel({ port: worker as unknown as Port, end: () => worker.terminate() });
  onFailure = (error) => model.fail(error);
  return model.load(address, options);
}

function noWorker(reason: unknown): DeviceError {
  const text = reason instanceof Error ? reason.message : String(reason);
  return new DeviceError(
    `the worker of the model failed (${text}): serve worker.js beside the library, or load the model with worker: false`,
    undefined,
    reason,
  );
}

/** The methods of `Model`. Use `Model.load` with worker: true. */
export class RemoteModel implements Public<Model> {
  private readonly connection: Connection;
  private loaded: Loaded | undefined;
  private used: Memory = { usedBytes: 0, peakBytes: 0, heapBytes: undefined };
  private closed = false;
  private onProgress: LoadOptions["onProgress"];
  private store: ModelStore | undefined;

  constructor(private readonly thread: Thread) {
    this.connection = new Connection(
      thread.port,
      {
        progress: ([progress]) => this.onProgress?.(progress as never),
        store: ([method, ...args]) =>
          (this.store as unknown as Record<string, (...args: unknown[]) => unknown>)[method as string](...args),
      },
      { onNews: (news) => news && (this.used = news as Memory) },
    );
  }

  /** Load the model. An error ends the thread. */
  async load(address: ModelAddress, options: LoadOptions): Promise<RemoteModel> {
    const { signal, onProgress, cache, ...rest } = options;
    this.onProgress = onProgress;
    const hasStore = typeof cache === "object" && cache !== null;
    if (hasStore) this.store = cache;
    const sent: Record<string, unknown> = { ...rest };
    if (cache !== undefined && !hasStore) sent["cache"] = cache;
    if (rest.wasmUrl !== undefined) sent["wasmUrl"] = absoluteAddress(String(rest.wasmUrl));
    const isText = typeof address === "string" || address instanceof URL;
    const call: LoadCall = {
      address: isText ? absoluteAddress(String(address)) : address,
      options: sent,
      hasProgress: onProgress !== undefined,
      hasStore,
    };
    try {
      this.loaded = (await this.connection.call("load", [call], signal)) as Loaded;
    } catch (error) {
      this.end(error);
      throw error;
    }
    return this;
  }

  /** End all calls with an error. */
  fail(error: unknown): void {
    this.closed = true;
    this.end(error);
  }

  get manifest(): Manifest {
    return this.loaded!.manifest;
  }

  get device(): string {
    return this.loaded!.device;
  }

  get disposed(): boolean {
    return this.closed;
  }

  /** End the worker, with all that it computes. */
  async dispose(): Promise<void> {
    this.closed = true;
    this.end(closedError());
  }

  /** Return the memory at the end of the latest call. */
  memory(): Memory {
    return this.used;
  }

  info(): ReturnType<Model["info"]> {
    return this.loaded!.info;
  }

  async generate(input: Input, options: GenerateOptions = {}): Promise<Result> {
    return (await this.call("generate", [sendable(input)], options)) as Result;
  }

  stream(input: Input, options: GenerateOptions = {}): AsyncGenerator<string, Result> {
    return ownedStream(this.iterate("stream", [sendable(input)], options) as AsyncGenerator<string, Result>);
  }

  generateBatch(inputs: Inputs<Input>, options: BatchOptions = {}): AsyncGenerator<Result> {
    return this.iterate("generateBatch", [inputs], options) as AsyncGenerator<Result>;
  }

  async score(source: Input, target?: Value, options: ReadOptions = {}): Promise<Float32Array> {
    return (await this.call("score", [sendable(source), target], options)) as Float32Array;
  }

  async align(source: Input, target: Value, options: ReadOptions = {}): Promise<NumberArray> {
    return (await this.call("align", [sendable(source), target], options)) as NumberArray;
  }

  async labels(source: Input, result: Pick<Result, "tokenIds" | "crossAttentions">): Promise<AttentionLabels> {
    const { tokenIds, crossAttentions } = result;
    return (await this.plainCall("labels", [sendable(source), { tokenIds, crossAttentions }])) as AttentionLabels;
  }

  async hiddenStates(source: Input, target?: Value, options: ReadOptions = {}): Promise<Map<string, NumberArray>> {
    const values = await this.call("hiddenStates", [sendable(source), target], options);
    return values as Map<string, NumberArray>;
  }

  async attentions(
    input: Input,
    options: Omit<PredictOptions, "batchSize"> = {},
  ): Promise<{ weights: NumberArray; labels: string[] }> {
    const found = await this.call("attentions", [sendable(input)], options);
    return found as { weights: NumberArray; labels: string[] };
  }

  async prompt(
    messages: string | readonly Message[],
    options: { readonly system?: string; readonly tools?: Tools } = {},
  ): Promise<Input> {
    return (await this.plainCall("prompt", [messages, options])) as Input;
  }

  async cachePrefix(input: Input, options: ReadOptions = {}): Promise<CachedPrefix> {
    const release = (number: unknown) => this.release(number as number);
    const number = (await this.call("cachePrefix", [sendable(input)], options, {}, release)) as number;
    return new RemotePrefix(this, number) as unknown as CachedPrefix;
  }

  imagePrompt(prompt: Input, images: readonly ImageInput[]): Input {
    if (this.closed) throw closedError();
    return imagePrompt(this.manifest, prompt, images);
  }

  chat(options: { readonly system?: string } = {}): Chat {
    const number = this.plainCall("chat", [options]) as Promise<number>;
    number.catch(() => {}); // the first message throws it
    return new RemoteChat(this, number) as unknown as Chat;
  }

  async predict(input: Input, options: PredictOptions = {}): Promise<unknown> {
    return this.call("predict", [sendable(input)], options);
  }

  predictBatch(inputs: Inputs<Input>, options: PredictOptions = {}): AsyncGenerator<unknown> {
    return this.iterate("predictBatch", [inputs], options);
  }

  async classify(inputs: Iterable<Input>, options: PredictOptions = {}): Promise<Classification[]> {
    return (await this.call("classify", [listOf(inputs)], options)) as Classification[];
  }

  async embed(inputs: Iterable<Input>, options: PredictOptions = {}): Promise<Float32Array[]> {
    return (await this.call("embed", [listOf(inputs)], options)) as Float32Array[];
  }

  async entities(texts: Iterable<string>, options: PredictOptions = {}): Promise<Span[][]> {
    return (await this.call("entities", [listOf(texts)], options)) as Span[][];
  }

  async answer(pairs: Iterable<Input>, options: PredictOptions = {}): Promise<Answer[]> {
    return (await this.call("answer", [listOf(pairs)], options)) as Answer[];
  }

  async fill(inputs: Iterable<Input>, options: PredictOptions = {}): Promise<Filled[]> {
    return (await this.call("fill", [listOf(inputs)], options)) as Filled[];
  }

  async transcribe(audio: AudioInput, options: PredictOptions = {}): Promise<Transcription> {
    return (await this.call("transcribe", [sendable(audio)], options)) as Transcription;
  }

  transcribeBatch(recordings: Inputs<AudioInput>, options: PredictOptions = {}): AsyncGenerator<Transcription> {
    return this.iterate("transcribeBatch", [recordings], options) as AsyncGenerator<Transcription>;
  }

  async forecast(history: History, options: ForecastOptions = {}): Promise<NumberArray> {
    return (await this.call("forecast", [history], options)) as NumberArray;
  }

  forecastBatch(histories: Inputs<History>, options: ForecastOptions = {}): AsyncGenerator<NumberArray> {
    return this.iterate("forecastBatch", [histories], options) as AsyncGenerator<NumberArray>;
  }

  /** Call a method of the model, or of a conversation, whose last argument is options with a signal. */
  async call(
    method: string,
    args: readonly unknown[],
    options: AnyOptions,
    { number = 0, turns }: Partial<KnownChat> = {},
    onLate?: OnLate,
  ): Promise<unknown> {
    const { signal, ...rest } = options;
    const own = this.sentOptions(rest);
    const target = typeof number === "number" ? number : await unlessAborted(number, signal);
    return this.connection.call("call", [target, method, args, own, turns], signal, onLate);
  }

  async plainCall(method: string, args: readonly unknown[], target = 0): Promise<unknown> {
    return this.connection.call("call", [target, method, args]);
  }

  /** Free a conversation or a prefix of the worker. A closed model has nothing to free. */
  release(number: number): void {
    this.plainCall("release", [], number).catch(() => {});
  }

  /** Yield the values of an iterator of the model, or of a conversation. It begins with the first value. */
  async *iterate(
    method: string,
    args: readonly unknown[],
    options: AnyOptions,
    { number = 0, turns }: Partial<KnownChat> = {},
  ): AsyncGenerator<unknown, unknown> {
    const { signal, ...rest } = options;
    const own = this.sentOptions(rest);
    const target = typeof number === "number" ? number : await unlessAborted(number, signal);
    const sent = args.map((one) => this.shared(one));
    const end = (late: unknown) => void this.connection.call("iterator.return", [late]).catch(() => {});
    let iterator: unknown;
    try {
      iterator = await this.connection.call("iterate", [target, method, sent, own, turns], signal, end);
    } catch (error) {
      for (const one of sent) {
        const shared = (one as Partial<SharedIterator> | null | undefined)?.sharedIterator;
        if (shared !== undefined) this.connection.unshare(shared);
      }
      throw error;
    }
    return yield* this.connection.values(iterator as number, signal);
  }

  /** Return options as they are sent: a cached prefix is the number of that in the worker. */
  private sentOptions(options: object): object {
    checkSendable(options);
    const { prefix } = options as { prefix?: unknown };
    return prefix instanceof RemotePrefix ? { ...options, prefix: prefix.sent(this) } : options;
  }

  /** Return a list of inputs as it is sent, or the number of an iterator, which stays here. */
  private shared(inputs: unknown): unknown {
    if (Array.isArray(inputs)) return inputs.map(sendable);
    const iterable = inputs as Partial<AsyncIterable<unknown> & Iterable<unknown>> | null;
    if (typeof inputs !== "object" || ArrayBuffer.isView(inputs)) return inputs;
    const iterator = iterable?.[Symbol.asyncIterator]?.() ?? iterable?.[Symbol.iterator]?.();
    if (!iterator) return inputs;
    return { sharedIterator: this.connection.share(sendableValues(iterator)) } satisfies SharedIterator;
  }

  private end(error: unknown): void {
    this.connection.end(error);
    this.thread.end();
  }
}

/** A conversation of the worker: its number, and the turns that the page knows. */
interface KnownChat {
  readonly number: number | Promise<number>;
  readonly turns: number;
}

/** Return the value of a promise. Throw AbortedError if the signal is aborted before it comes. */
async function unlessAborted<T>(value: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  checkAborted(signal);
  if (!signal) return value;
  let abort = () => {};
  const aborted = new Promise<never>((_, reject) => {
    abort = () => reject(abortedError(signal));
    signal.addEventListener("abort", abort);
  });
  try {
    return await Promise.race([value, aborted]);
  } finally {
    signal.removeEventListener("abort", abort);
  }
}

/** A cached prefix of a model in a worker. */
class RemotePrefix implements Pick<CachedPrefix, "release"> {
  private released = false;

  constructor(
    private readonly model: RemoteModel,
    private readonly number: number,
  ) {}

  /** Return what stands for the prefix in a message of a model. */
  sent(model: RemoteModel): SentPrefix {
    if (model !== this.model) {
      throw new InputError("the prefix was read by another model: read it with this one's cachePrefix()");
    }
    if (this.released) throw releasedPrefixError();
    return { cachedPrefix: this.number };
  }

  release(): void {
    if (!this.released) this.model.release(this.number);
    this.released = true;
  }
}

/** A conversation with a model in a worker. */
class RemoteChat implements Public<Chat> {
  readonly turns: Turn[] = [];
  /** See `Chat`. The worker may have an answer that this side does not know yet. */
  private readonly answers = new Answers(() => {
    this.number.then((number) => this.model.release(number)).catch(() => {}); // it may never have begun
  });

  constructor(
    private readonly model: RemoteModel,
    private readonly number: Promise<number>,
  ) {}

  async send(message: ChatMessage, options: CallOptions = {}): Promise<Result> {
    const answer = this.begin();
    try {
      return this.added(message, (await this.model.call("send", [message], options, this.known)) as SentTurn);
    } finally {
      this.answers.end(answer);
    }
  }

  stream(message: ChatMessage, options: CallOptions = {}): AsyncGenerator<string, Result> {
    return this.answers.stream((answer) => this.streamed(message, options, answer));
  }

  private async *streamed(
    message: ChatMessage,
    options: CallOptions,
    answer: PendingAnswer,
  ): AsyncGenerator<string, Result> {
    this.begin(answer);
    try {
      const pieces = this.model.iterate("stream", [message], options, this.known) as AsyncGenerator<string, SentTurn>;
      return this.added(message, yield* pieces);
    } finally {
      this.answers.end(answer);
    }
  }

  private begin(answer: PendingAnswer = {}): PendingAnswer {
    return this.model.disposed ? answer : this.answers.begin(answer); // calls of a closed model have an error of their own
  }

  private get known(): KnownChat {
    return { number: this.number, turns: this.turns.length };
  }

  rewind(turns = 1): void {
    this.answers.mustBeEnded();
    removeLast(this.turns, turns); // the next message says how many are left
  }

  release(): void {
    this.answers.release();
  }

  private added(message: ChatMessage, { result, ids }: SentTurn): Result {
    this.turns.push({ message, result: result as Result, ids });
    return result as Result;
  }
}

/** Throw UnsupportedCallError for an option that no message can hold. */
function checkSendable(options: object): void {
  for (const [name, value] of Object.entries(options)) {
    if (typeof value !== "function") continue;
    throw new UnsupportedCallError(
      `${name} is a function, which cannot be sent to the worker of the model: load the model with worker: false`,
    );
  }
}

/** Return an input as a message can hold it: an AudioBuffer as its samples, also within an object of inputs. */
function sendable(input: unknown): unknown {
  if (typeof input !== "object" || input === null || ArrayBuffer.isView(input)) return input;
  const buffer = input as Partial<AudioBuffer>;
  if (typeof buffer.getChannelData === "function") {
    const channels = Array.from({ length: buffer.numberOfChannels! }, (_, i) => buffer.getChannelData!(i));
    return { samples: channels, samplingRate: buffer.sampleRate };
  }
  if (Object.getPrototypeOf(input) !== Object.prototype) return input;
  return Object.fromEntries(Object.entries(input).map(([name, value]) => [name, sendable(value)]));
}

async function* sendableValues(iterator: AsyncIterator<unknown> | Iterator<unknown>): AsyncGenerator<unknown> {
  try {
    for (;;) {
      const { done, value } = await iterator.next();
      if (done) return;
      yield sendable(value);
    }
  } finally {
    await iterator.return?.();
  }
}

/** Return all inputs of a short list; anything else as it is, which the model refuses. */
function listOf(inputs: Iterable<Input>): unknown {
  const isList = typeof inputs === "object" && inputs !== null && !ArrayBuffer.isView(inputs);
  return isList && Symbol.iterator in inputs ? [...inputs].map(sendable) : inputs;
}
