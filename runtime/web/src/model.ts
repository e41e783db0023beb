/** `Model`: a loaded model file, and the calls of all tasks. `Model.load` of `load.ts` makes it. */

import { numberArray, type NumberArray } from "./base/arrays.js";
import { InputError, OptionError, UnsupportedCallError } from "./base/errors.js";
import { ownedStream } from "./base/ownedStream.js";
import { checkBoolean, checkInt, checkNames } from "./base/validation.js";
import { closedError } from "./backend/session.js";
import { CachedPrefix, Chat } from "./chat.js";
import { Generator } from "./decoding/generator.js";
import { settingsOf, type GenerationOptions, type Settings } from "./decoding/options.js";
import { inOrder, WINDOW_BATCHES, type Item } from "./decoding/ordered.js";
import { adapterInput, makeRequest, type Request, type Result } from "./decoding/request.js";
import { MAX_PREFILL_POSITIONS } from "./decoding/scheduler.js";
import type { SequenceTask } from "./decoding/sequence.js";
import { generateStream } from "./decoding/streaming.js";
import type { Engine } from "./engine/engine.js";
import {
  adapterNumber,
  ATTENTIONS,
  CROSS_ATTENTIONS,
  extraOutputs,
  HIDDEN_STATES,
  moduleOf,
  takesPrompt,
  type ExtraOutput,
  type Manifest,
} from "./format/manifest.js";
import type { ModelParts } from "./modelParts.js";
import type { AttentionLabels, BatchOptions, GenerateOptions, PredictOptions, ReadOptions } from "./modelTypes.js";
import { conversation, type Message, type PromptTemplate, type Tools } from "./preprocess/conversation.js";
import type { AudioInput } from "./preprocess/audio.js";
import type { ImageInput } from "./preprocess/images.js";
import { Inputs } from "./preprocess/inputs.js";
import { imagePrompt, type Input, type Value } from "./preprocess/values.js";
import type { History } from "./preprocess/series.js";
import type { Task } from "./tasks/base.js";
import type { Classification } from "./tasks/classification.js";
import type { Answer } from "./tasks/questionAnswering.js";
import type { Span } from "./tasks/tokenClassification.js";
import type { Features } from "./tasks/features.js";
import type { SpeechToText } from "./tasks/speechToText.js";
import type { Transcription } from "./tasks/speech.js";
import type { Filled } from "./tasks/fillMask.js";
import type { ForecastOptions } from "./tasks/forecasting.js";
import { runSinglePass } from "./tasks/singlePass.js";

/** Kind of extra outputs → its name, and the option of the export that writes them. */
const EXTRAS = {
  [CROSS_ATTENTIONS]: ["cross-attention weights", "--cross-attentions"],
  [ATTENTIONS]: ["attention weights", "--attentions"],
  [HIDDEN_STATES]: ["hidden states", "--hidden-states NAME"],
} as const;

const READ_OPTIONS = ["adapter", "signal"];

interface GenerationItem extends Item<Result> {
  readonly request: Request;
}

/**
 * An exported model.
 *
 * An input is a text, or a sequence of ids, to which no tokens are added. For a model with several inputs it is an object
 * with the names of the inputs.
 */
export class Model {
  readonly manifest: Manifest;
  private readonly inputs: Inputs;
  private readonly generator: Generator;
  private template: PromptTemplate | undefined;

  /** Use `Model.load`. */
  constructor(
    private readonly engine: Engine,
    private readonly parts: ModelParts,
  ) {
    this.manifest = engine.manifest;
    this.inputs = new Inputs(engine.manifest, parts.dataReaders, parts.textCodes, parts.promptItems);
    this.generator = new Generator(engine, this.inputs.outputCodec);
  }

  /** The device of the model: "node", "wasm" or "webgpu". */
  get device(): string {
    return this.engine.backend.device;
  }

  /** Whether `dispose` was called. */
  get disposed(): boolean {
    return this.engine.isClosed;
  }

  /** Free the weights. Later calls throw UnsupportedCallError. Conversations keep their caches until their release. */
  async dispose(): Promise<void> {
    this.engine.close();
  }

  /** Return bytes of caches and encoder outputs: in use now, and their peak; and of WebAssembly's memory. */
  memory(): { usedBytes: number; peakBytes: number; heapBytes: number | undefined } {
    const { usedBytes, peakBytes } = this.engine.memory;
    const { heapBytes } = this.engine.backend as { heapBytes?: number };
    return { usedBytes, peakBytes, heapBytes };
  }

  /** Return facts about the file and the device. */
  info(): Readonly<Record<string, unknown>> {
    const { task, maxLength, target, precision, quantization, optimizedFor, producer, parity, version } = this.manifest;
    const weightBits = Object.fromEntries(this.manifest.weightBits);
    const facts = { task, maxLength, target, precision, quantization, weightBits, optimizedFor, version };
    return {
      ...facts,
      producer: Object.fromEntries(producer),
      parity: Object.fromEntries(parity),
      device: this.device,
    };
  }

  /**
   * Generate for one input.
   *
   * Throw InputError, OptionError, AbortedError, or UnsupportedCallError for a model that does not generate.
   */
  async generate(input: Input, options: GenerateOptions = {}): Promise<Result> {
    const { signal, prefix, images, ...generation } = options;
    const settings = this.settings(generation);
    const request = this.request(0, input, settings, prefix, images);
    return (await this.generator.generateAll([request], settings, signal))[0];
  }

  /**
   * Generate for one input. Yield the text in pieces, without waiting for the last token.
   *
   * Errors: see `generate`. Throw OptionError also for several results, crossAttentions and hiddenStates.
   */
  stream(input: Input, options: GenerateOptions = {}): AsyncGenerator<string, Result> {
    const { signal, prefix, images, ...generation } = options;
    const settings = this.settings(generation, true);
    const request = this.request(0, input, settings, prefix, images);
    return ownedStream(generateStream(this.generator, request, settings, signal));
  }

  /**
   * Generate for any number of inputs. Yield the results in the order of the inputs.
   *
   * inputs: read lazily. Inputs of similar length are batched together.
   * Errors: see `generate`. An InputError has the number of its input, from 1.
   */
  generateBatch(inputs: Iterable<Input> | AsyncIterable<Input>, options: BatchOptions = {}): AsyncGenerator<Result> {
    const { signal, prefix, batchSize = 32, ...generation } = options;
    checkInt("batchSize", batchSize);
    const settings = this.settings(generation);
    const { generator } = this;
    // Rows with a past read one token at a time, unless the file can read more.
    const rows = prefix && !this.engine.decode.chunkedPrefill ? 1 : batchSize;
    return inOrder<Input, GenerationItem, Result>(severalInputs(inputs), {
      windowSize: WINDOW_BATCHES * batchSize,
      read: (input, index) => ({ request: this.request(index, input, settings, prefix) }),
      batches: (items) => generationBatches(items, rows),
      run: async (batch) => {
        const tasks = batch.map(({ request }) => generator.makeTask(request, settings));
        await generator.run(tasks, settings, signal);
        batch.forEach((item, i) => (item.outcome = outcomeOf(generator, tasks[i])));
      },
    });
  }

  private request(
    index: number,
    input: Input,
    settings: Settings,
    prefix: CachedPrefix | undefined,
    images?: readonly ImageInput[],
  ): Request {
    if (prefix !== undefined && !(prefix instanceof CachedPrefix)) {
      throw new OptionError("prefix must be a cached prefix, of cachePrefix()", "prefix");
    }
    const own = images === undefined ? input : this.imagePrompt(input, images);
    return makeRequest(this.manifest, this.inputs, own, index, settings, prefix?.promptPrefix(this.engine));
  }

  /**
   * Compute the cache of an input once, as the prefix of many requests: `generate(…, { prefix })`.
   *
   * The result of such a request is the result of the concatenated ids. Both texts are tokenized separately; the special tokens of
   * the tokenizer occur once, before the prefix and after the input. `release` frees the memory of the prefix.
   *
   * adapter: the adapter with which the prefix is read. Its requests must have the same one.
   * Throw UnsupportedCallError for a model with an encoder, which reads a source as a whole.
   */
  async cachePrefix(input: Input, options: ReadOptions = {}): Promise<CachedPrefix> {
    checkNames(Object.keys(options), READ_OPTIONS);
    this.mustBeDecoderOnly("prefix");
    const { sources, prompt } = this.inputs.generationInputs(input, true, false);
    const all = new Map([...sources, ...this.adapterInput(options.adapter)]);
    return CachedPrefix.read(this.engine, prompt, all, options.signal);
  }

  /**
   * Return a prompt with images as an input of `generateBatch` and `cachePrefix`.
   *
   * prompt: a text with a marker for each image, such as "<image>", or ids with their placeholders.
   * images: decoded images in the order of their markers.
   * Throw UnsupportedCallError for a model that reads no images in its prompt.
   */
  imagePrompt(prompt: Input, images: readonly ImageInput[]): Input {
    if (this.disposed) throw closedError();
    return imagePrompt(this.manifest, prompt, images);
  }

  /**
   * Return the natural logarithm of the probability of each token of `target`, given the tokens before it.
   *
   * source: the source of an encoder, or the prompt of a decoder-only model.
   * target: text or ids. Without it a decoder-only model scores `source`; a first token with no start token before it is
   *     left out.
   */
  async score(source: Input, target?: Value, options: ReadOptions = {}): Promise<Float32Array> {
    checkNames(Object.keys(options), READ_OPTIONS);
    this.mustGenerate("score");
    if (!takesPrompt(this.manifest) && target === undefined) {
      throw new InputError("score needs a source and a target for a model with an encoder");
    }
    const { sources, prompt, startCount } = this.inputs.generationInputs(source);
    const known = target === undefined ? startCount : prompt.length;
    const ids = target === undefined ? [] : this.inputs.ids(this.inputs.step, target, { addSpecialTokens: false });
    const all = new Map([...sources, ...this.adapterInput(options.adapter)]);
    const { scoreTokens } = await import("./tasks/givenTokens.js");
    const scores = await scoreTokens(this.engine, all, Int32Array.from([...prompt, ...ids]), options.signal);
    return scores.slice(Math.max(known, 1) - 1);
  }

  /**
   * Return cross-attention weights (target tokens, source positions) of the step that predicts each token.
   *
   * Throw UnsupportedCallError for a file that was exported without cross-attention weights.
   */
  async align(source: Input, target: Value, options: ReadOptions = {}): Promise<NumberArray> {
    checkNames(Object.keys(options), READ_OPTIONS);
    this.extras(CROSS_ATTENTIONS);
    const { sources, prompt } = this.inputs.generationInputs(source);
    const ids = this.inputs.ids(this.inputs.step, target, { addSpecialTokens: false });
    const all = new Map([...sources, ...this.adapterInput(options.adapter)]);
    const { extraValues } = await import("./tasks/givenTokens.js");
    const read = Int32Array.from([...prompt, ...ids]).subarray(0, -1);
    const values = await extraValues(this.engine, all, read, [CROSS_ATTENTIONS], options.signal);
    const { data, shape } = values.get(CROSS_ATTENTIONS)!;
    const first = Math.max(prompt.length, 1) - 1;
    return numberArray(data.slice(first * shape[1]), [shape[0] - first, shape[1]]);
  }

  /** Return labels for the crossAttentions of a result: the source token of each column, and the token of each row. */
  async labels(source: Input, result: Pick<Result, "tokenIds" | "crossAttentions">): Promise<AttentionLabels> {
    this.mustGenerate("label attention weights");
    const { sources } = this.inputs.generationInputs(source);
    const columns = this.inputs.positionLabels(sources, result.crossAttentions?.shape[1] ?? 0);
    return { source: columns, tokens: this.inputs.tokenLabels(this.inputs.step, result.tokenIds) };
  }

  /**
   * Return the outputs of the exported submodules, by their names in the source model.
   *
   * A submodule of an encoder has (source positions, …). A submodule of a decoder has (tokens, …) for `source` or the start
   * tokens, and then `target`. In a model with an encoder it has values only if there is a target.
   * Throw UnsupportedCallError for a file that was exported without hidden states.
   */
  async hiddenStates(source: Input, target?: Value, options: ReadOptions = {}): Promise<Map<string, NumberArray>> {
    checkNames(Object.keys(options), READ_OPTIONS);
    const extras = this.extras(HIDDEN_STATES);
    const { decode } = this.manifest;
    if (target !== undefined && !decode) this.mustGenerate("read a target");
    const { sources, prompt } = decode
      ? this.inputs.generationInputs(source)
      : { sources: await this.inputs.singlePassArrays(source), prompt: new Int32Array(0) };
    const ids = target === undefined ? [] : this.inputs.ids(this.inputs.step, target, { addSpecialTokens: false });
    const read = target === undefined && sources.size ? new Int32Array(0) : Int32Array.from([...prompt, ...ids]);
    const all = new Map([...sources, ...this.adapterInput(options.adapter)]);
    const { extraValues } = await import("./tasks/givenTokens.js");
    const values = await extraValues(
      this.engine,
      all,
      read,
      extras.map(({ name }) => name),
      options.signal,
    );
    const moduleNames = new Map(extras.map((extra) => [extra.name, moduleOf(extra)]));
    return new Map([...values].map(([name, value]) => [moduleNames.get(name)!, value]));
  }

  /**
   * Return the attention weights of a single-pass model, and a label for each position.
   *
   * Weights are (layers, heads, query positions, key positions); rows sum to 1. Layers and heads are in the order in which
   * the model computes them. Labels are tokens, ids without a tokenizer, or numbers. Options: see `predict`.
   * Throw InputError also for an input that is read in windows, UnsupportedCallError for a file that was exported without
   * attention weights.
   */
  async attentions(
    input: Input,
    options: Omit<PredictOptions, "batchSize"> = {},
  ): Promise<{ weights: NumberArray; labels: string[] }> {
    const task = this.task("give attention");
    this.extras(ATTENTIONS);
    const { truncate = false, adapter, signal, ...settings } = options as PredictOptions;
    const checked = task.settings(settings);
    const sources = await task.singleRequest(input, this.inputs, task.truncates(truncate, checked), checked);
    const all = new Map([...sources, ...this.adapterInput(adapter)]);
    const { extraValues } = await import("./tasks/givenTokens.js");
    const values = await extraValues(this.engine, all, new Int32Array(0), [ATTENTIONS], signal);
    const weights = values.get(ATTENTIONS)!;
    return { weights, labels: this.inputs.positionLabels(sources, weights.shape[weights.shape.length - 1]) };
  }

  /** Return the file's extra outputs of a kind. Throw UnsupportedCallError if it has none. */
  private extras(kind: keyof typeof EXTRAS): ExtraOutput[] {
    this.mustNotForecast(`give ${kind}`);
    const extras = extraOutputs(this.manifest).filter((extra) => extra.kind === kind);
    if (extras.length) return extras;
    const [missing, flag] = EXTRAS[kind];
    throw new UnsupportedCallError(`${this.engine.name} holds no ${missing}: export the model with ${flag}`);
  }

  /**
   * Return a conversation up to the answer, as an input of `generate`, by the file's chat template: its ids; for a model
   * that reads images, an object of the ids and the pixels.
   */
  async prompt(
    messages: string | readonly Message[],
    options: { readonly system?: string; readonly tools?: Tools } = {},
  ): Promise<Input> {
    checkNames(Object.keys(options), ["system", "tools"]);
    this.mustBeDecoderOnly("chat");
    return this.inputs.conversationInput(this.chatTemplate(), conversation(messages, options.system), options.tools);
  }

  /** Start a conversation, whose cache is kept from turn to turn. system: a message, for a file with a chat template. */
  chat(options: { readonly system?: string } = {}): Chat {
    checkNames(Object.keys(options), ["system"]);
    this.mustBeDecoderOnly("chat");
    return new Chat({
      generator: this.generator,
      inputs: this.inputs,
      settings: (generation, streams) => this.settings(generation, streams),
      template: this.parts.templateOf && this.chatTemplate(),
      system: options.system,
    });
  }

  private chatTemplate(): PromptTemplate {
    if (!this.parts.templateOf) {
      throw new UnsupportedCallError(
        "the file has no chat template: export the model from a folder whose tokenizer has one, or with --chat-template",
      );
    }
    return (this.template ??= this.parts.templateOf(this.manifest));
  }

  /**
   * Run a single-pass model on one input. The type of the result depends on the task of the file, such as
   * `Classification` or an array of features.
   */
  async predict(input: Input, options: PredictOptions = {}): Promise<unknown> {
    const { value } = await this.predictBatch([input], options).next();
    return value;
  }

  /**
   * Run `predict` for any number of inputs, read lazily. Yield the results in the order of the inputs.
   *
   * A speech recognizer yields the results of `transcribe`, also if it generates.
   */
  predictBatch(inputs: Iterable<Input> | AsyncIterable<Input>, options: PredictOptions = {}): AsyncGenerator<unknown> {
    const { speechToText } = this.parts;
    if (speechToText && !this.disposed) return this.transcribeAll(speechToText, severalInputs(inputs), options);
    const task = this.task("predict");
    const { truncate = false, batchSize = task.batchSize, adapter, signal, ...settings } = options;
    checkInt("batchSize", batchSize);
    const checked = task.settings(settings);
    return runSinglePass(this.engine, this.inputs, task, checked, severalInputs(inputs), {
      batchSize,
      truncate: task.truncates(truncate, checked),
      adapter: this.adapterInput(adapter),
      signal,
    });
  }

  /** Return the labels of each input and their probabilities. Options: those of `predict`, and topK. */
  async classify(inputs: Iterable<Input>, options: PredictOptions = {}): Promise<Classification[]> {
    return this.resultsOf<Classification>("classify", "classify()", inputs, options);
  }

  /** Return a vector for each input. Options: see `predict`. */
  async embed(inputs: Iterable<Input>, options: PredictOptions = {}): Promise<Float32Array[]> {
    const task = this.task("embed");
    if (task.call !== "embed()") throw this.otherTask("embed");
    (task as Features).mustPool("embed()");
    const vectors = (await collected(this.predictBatch(severalInputs(inputs), options))) as NumberArray[];
    return vectors.map(({ data }) => Float32Array.from(data));
  }

  /**
   * Return the labelled spans of each text.
   *
   * Options: those of `predict`, and aggregation ("none", "simple", "first", "average" or "max"), ignoreLabels and docStride
   * (see `tasks/tokenClassification`).
   */
  async entities(texts: Iterable<string>, options: PredictOptions = {}): Promise<Span[][]> {
    return this.resultsOf<Span[]>("label spans", "entities()", texts, options);
  }

  /**
   * Return the answer to each question in its context. pairs: [question, context], or objects with these names.
   *
   * Options: those of `predict`, and topK, allowNoAnswer, maxAnswerTokens, maxSeqLen and docStride (see
   * `tasks/questionAnswering`).
   */
  async answer(pairs: Iterable<Input>, options: PredictOptions = {}): Promise<Answer[]> {
    return this.resultsOf<Answer>("answer", "answer()", pairs, options);
  }

  /** Return the most probable tokens for each mask of each text. Options: those of `predict`, topK and candidateTokens. */
  async fill(inputs: Iterable<Input>, options: PredictOptions = {}): Promise<Filled[]> {
    return this.resultsOf<Filled>("fill", "fill()", inputs, options);
  }

  /** Return the results of a task with this call. verb: of the caller, for the error of another task. */
  private async resultsOf<T>(
    verb: string,
    call: string,
    inputs: Iterable<Input>,
    options: PredictOptions,
  ): Promise<T[]> {
    if (this.task(verb).call !== call) throw this.otherTask(verb);
    return (await collected(this.predictBatch(severalInputs(inputs), options))) as T[];
  }

  private transcribeAll(
    speechToText: SpeechToText,
    recordings: Iterable<Input> | AsyncIterable<Input>,
    options: PredictOptions,
  ): AsyncGenerator<Transcription> {
    const { truncate = false, batchSize = speechToText.batchSize, adapter, signal, ...settings } = options;
    checkInt("batchSize", batchSize);
    if (checkBoolean("truncate", truncate)) {
      throw new OptionError(
        "truncate is not for a model that transcribes speech: it reads recordings of any length",
        "truncate",
      );
    }
    const checked = speechToText.settings(settings);
    const run = { batchSize, signal, adapter: this.adapterInput(adapter) };
    return speechToText.transcribeAll(this.generator, recordings as Iterable<AudioInput>, checked, run);
  }

  /**
   * Return the transcription of a recording.
   *
   * Options: those of `predict`; of a model that scores each frame (CTC): timestamps (true or "word", "char"), numBeams,
   * chunkLengthS and strideLengthS; of a model that generates: timestamps (true or false), numBeams, language (by default
   * detected) and task ("transcribe", or "translate" to English).
   */
  async transcribe(audio: AudioInput, options: PredictOptions = {}): Promise<Transcription> {
    const { value } = await this.transcribeBatch([audio], options).next();
    return value as Transcription;
  }

  /** Run `transcribe` for any number of recordings, read lazily. Yield the results in the order of the recordings. */
  transcribeBatch(
    recordings: Iterable<AudioInput> | AsyncIterable<AudioInput>,
    options: PredictOptions = {},
  ): AsyncGenerator<Transcription> {
    if (!this.parts.speechToText && this.task("transcribe").call !== "transcribe()") throw this.otherTask("transcribe");
    return this.predictBatch(recordings as Iterable<Input>, options) as AsyncGenerator<Transcription>;
  }

  /**
   * Return the forecast (horizon, targets) of a history (time, columns), both in the units of the data.
   *
   * Throw InputError, OptionError, or UnsupportedCallError for a model that does not forecast.
   */
  async forecast(history: History, options: ForecastOptions = {}): Promise<NumberArray> {
    const { value } = await this.forecastBatch([history], options).next();
    return value as NumberArray;
  }

  /** Run `forecast` for any number of histories, of any lengths. Yield the results in the order of the histories. */
  forecastBatch(
    histories: Iterable<History> | AsyncIterable<History>,
    options: ForecastOptions = {},
  ): AsyncGenerator<NumberArray> {
    if (this.disposed) throw closedError();
    checkNames(Object.keys(options), ["horizon", "truncate", "batchSize", "signal"]);
    if (options.batchSize !== undefined) checkInt("batchSize", options.batchSize);
    if (options.truncate !== undefined) checkBoolean("truncate", options.truncate);
    if (!this.parts.forecaster) {
      throw new UnsupportedCallError(
        `this model (${this.manifest.task}) was not exported to forecast: export it with series={…}`,
      );
    }
    return this.parts.forecaster.forecastAll(histories, options);
  }

  /** Return the settings of a request. Throw OptionError or UnsupportedCallError for those that the model lacks. */
  private settings(options: GenerationOptions, streams = false): Settings {
    this.mustGenerate("generate");
    const settings = settingsOf(options, this.manifest.generationDefaults);
    const { outputCodec } = this.inputs;
    if (settings.stopStrings.length && !outputCodec) {
      throw new OptionError("stopStrings needs text and the file has no tokenizer", "stopStrings");
    }
    if (options.shortlist && !this.engine.shortlist) {
      throw new UnsupportedCallError(`${this.engine.name} holds no shortlist: export the model with --shortlist FILE`);
    }
    if (settings.crossAttentions) this.extras(CROSS_ATTENTIONS);
    if (settings.hiddenStates) this.extras(HIDDEN_STATES);
    adapterNumber(this.manifest, settings.adapter);
    if (!streams) return settings;
    if (!outputCodec) {
      throw new UnsupportedCallError("stream gives text and the file has no tokenizer: generate() gives tokenIds");
    }
    if (settings.numReturnSequences > 1) {
      throw new OptionError("numReturnSequences must be 1 for a stream", "numReturnSequences");
    }
    if (settings.crossAttentions || settings.hiddenStates) {
      throw new OptionError("a stream gives text alone: generate() gives crossAttentions and hiddenStates");
    }
    return settings;
  }

  /** Return the input that chooses an adapter. name: undefined is the default of the file. */
  private adapterInput(name: unknown) {
    const adapter = name ?? this.manifest.generationDefaults.get("adapter");
    if (adapter !== undefined && typeof adapter !== "string") {
      throw new OptionError("adapter must be the name of an adapter", "adapter");
    }
    return adapterInput(this.manifest, adapter);
  }

  private mustBeDecoderOnly(call: string): void {
    this.mustGenerate(call);
    if (!takesPrompt(this.manifest)) {
      throw new UnsupportedCallError(`this model reads its input in an encoder, all at once: it cannot ${call}`);
    }
  }

  /** Throw UnsupportedCallError for a model that does not generate text. call: the verb of the caller. */
  private mustGenerate(call: string): void {
    this.mustNotForecast(call);
    if (!this.manifest.decode) {
      throw new UnsupportedCallError(
        `this model (${this.manifest.task}) is a single-pass model: it cannot ${call}; call ${this.parts.task!.call}, or ` +
          "export it with the step_input that it decodes",
      );
    }
    const { speechToText } = this.parts;
    if (speechToText) {
      throw new UnsupportedCallError(
        `this model (${this.manifest.task}) ${speechToText.does}: it cannot ${call}; call ${speechToText.call}`,
      );
    }
  }

  /** Return the task of a single-pass model. Throw UnsupportedCallError for other models. call: the verb of the caller. */
  private task(call: string): Task {
    this.mustNotForecast(call);
    if (this.manifest.decode) {
      const { does, call: instead } = this.parts.speechToText ?? { does: "generates", call: "generate()" };
      throw new UnsupportedCallError(`this model (${this.manifest.task}) ${does}: it cannot ${call}; call ${instead}`);
    }
    return this.parts.task!;
  }

  private otherTask(call: string): UnsupportedCallError {
    const task = this.parts.task!;
    return new UnsupportedCallError(
      `this model (${this.manifest.task}) ${task.does}: it cannot ${call}; call ${task.call} or predict()`,
    );
  }

  /** Throw UnsupportedCallError for a forecaster, as for a closed model: all other calls begin here. */
  private mustNotForecast(call: string): void {
    if (this.disposed) throw closedError();
    if (this.parts.forecaster) {
      throw new UnsupportedCallError(
        `this model (${this.manifest.task}) continues series of numbers: it cannot ${call}; call forecast()`,
      );
    }
  }
}

function outcomeOf(generator: Generator, task: SequenceTask): Item<Result>["outcome"] {
  try {
    return { value: generator.makeResult(task) };
  } catch (error) {
    return { error };
  }
}

/** Yield batches of requests, the longest first. */
function* generationBatches(items: readonly GenerationItem[], batchSize: number): Iterable<GenerationItem[]> {
  const positions = ({ request }: GenerationItem) => {
    let count = request.prompt.length;
    for (const source of request.sources.values()) count += source.shape[0] ?? 0;
    return count;
  };
  const sorted = [...items].sort((one, other) => positions(other) - positions(one));
  for (let begin = 0; begin < sorted.length;) {
    const fitting = Math.max(1, Math.floor(MAX_PREFILL_POSITIONS / Math.max(1, positions(sorted[begin]))));
    const end = Math.min(sorted.length, begin + Math.min(batchSize, fitting));
    yield sorted.slice(begin, end);
    begin = end;
  }
}

/** Throw InputError for a single text or image, whose parts would be taken for inputs. */
function severalInputs<T extends Iterable<Input> | AsyncIterable<Input>>(inputs: T): T {
  const isIterable =
    typeof inputs === "object" && inputs !== null && (Symbol.iterator in inputs || Symbol.asyncIterator in inputs);
  if (!isIterable || ArrayBuffer.isView(inputs)) {
    throw new InputError("give a list of inputs; a single input is a list of one: [input]");
  }
  return inputs;
}

async function collected<T>(values: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const value of values) all.push(value);
  return all;
}
