/**
 * From an input of a caller to checked arrays.
 *
 * A text for generation must be in the vocabulary of the model; an unknown character throws InputError. Single-pass models
 * read a text or a pair of texts as their tokenizer does, with unknown tokens (`textReader`).
 */

import { numberArray, type NumberArray } from "../base/arrays.js";
import { InputError, quotable, UnsupportedCallError } from "../base/errors.js";
import { AUDIO, logitCount, takesPrompt, type Manifest, type RequestInput } from "../format/manifest.js";
import { checkRow, inputAndOutputSizes, type Sources } from "../format/sizes.js";
import { imagesOf, withoutImages, type Message, type PromptTemplate, type Tools } from "./conversation.js";
import type { PromptItems } from "./promptItems.js";
import type { Pair, TextCode, TextReader } from "./textReader.js";
import type { TextWindow, WindowReader } from "./textWindows.js";
import type { Codec } from "./tokenizer.js";
import { arrayOf, isMapping, isText, type Input, type Mapping, type Value } from "./values.js";

const MIN_TEXT_CHARACTERS = 1 << 19; // that are read of any text
const MAX_WINDOWED_CHARACTERS = 1 << 21; // of a text that is read in windows
const CHARACTERS_PER_TOKEN = 8; // of a text that just fits into a model; words have four or five

export interface IdsOptions {
  /** Add the special tokens that the tokenizer puts around a text. */
  readonly addSpecialTokens: boolean;
  readonly mayBeEmpty?: boolean;
  /** Keep the special tokens before the text, and those after it. */
  readonly startsPrompt?: boolean;
  readonly endsPrompt?: boolean;
}

/** Turns a caller's value for an input of data, such as an image or samples, into an array. */
export type DataReader = (value: Value) => Value | Promise<Value>;

/** Return whether an input is one number for each row, such as the id of a speaker. */
function isNumber(spec: RequestInput): boolean {
  return spec.shape.length === 2 && spec.shape[1] === 1;
}

/** Return whether an input is a text or a sequence of ids, and not a number or a map of ids for each row. */
function isSequence(spec: RequestInput): boolean {
  return spec.role === "ids" && spec.shape.length === 2 && !isNumber(spec);
}

/** The inputs of a model: tokenizers and checks. Methods throw InputError for a wrong input. */
export class Inputs {
  /** The name of the autoregressive input; empty for a single-pass model. */
  readonly step: string;

  /**
   * dataReaders: input → the function that reads a raw value for it, such as an image.
   * textCodes: the tokenizers of the file. promptItems: for a model that reads images in its prompt.
   */
  constructor(
    private readonly manifest: Manifest,
    private readonly dataReaders: ReadonlyMap<string, DataReader> = new Map(),
    private readonly textCodes: readonly TextCode[] = [],
    private readonly promptItems?: PromptItems,
  ) {
    this.step = manifest.decode?.step.name ?? "";
  }

  /** The tokenizer of generated ids. */
  get outputCodec(): Codec | undefined {
    return this.codec(this.step);
  }

  /** Return the tokens of the ids of an input; the ids if it has no tokenizer. */
  tokenLabels(name: string, ids: ArrayLike<number>): string[] {
    const codec = this.codec(name);
    return Array.from(ids, (id) => codec?.token(id) ?? String(id));
  }

  /**
   * Return a label for each position of the source that has `length` positions: its token, an id without a tokenizer, the
   * start of a frame of a recording in seconds, or the number of the position.
   *
   * sources: the arrays of the input.
   */
  positionLabels(sources: Sources, length: number): string[] {
    for (const [name, { data, shape }] of sources) {
      if (shape.length === 1 && shape[0] === length && data instanceof Int32Array) return this.tokenLabels(name, data);
    }
    const { encode } = this.manifest;
    const rate = [...this.manifest.preprocessing.values()]
      .find(({ kind }) => kind === AUDIO)
      ?.numbers.get("sampling_rate");
    if (encode && typeof rate === "number") {
      const sizes = inputAndOutputSizes(encode, sources);
      for (const [name, { stride }] of encode.derivedLengths) {
        if (sizes.get(name) !== length) continue;
        return Array.from({ length }, (_, i) => ((i * stride) / rate).toFixed(3));
      }
    }
    return Array.from({ length }, (_, i) => String(i));
  }

  /**
   * Return the arrays of the request inputs, the prompt ids, and how many of these are start tokens.
   *
   * The prompt of a model with an encoder is its start tokens. The prompt of a decoder-only model is the start tokens and
   * a text, or the ids of the caller without start tokens unless there are none. A model that reads images in its prompt
   * takes an object with both (`promptItems`).
   *
   * startsPrompt: whether start tokens, and the special tokens that the tokenizer puts before a text, go before it.
   * endsPrompt: whether the special tokens that the tokenizer puts after a text follow.
   */
  generationInputs(
    input: Input,
    startsPrompt = true,
    endsPrompt = true,
  ): { sources: Sources; prompt: Int32Array; startCount: number } {
    const { encode, specialTokens } = this.manifest;
    const start = Int32Array.from(specialTokens.bosTokenIds);
    if (encode && !takesPrompt(this.manifest)) {
      return { sources: this.sources(encode.inputs, input), prompt: start, startCount: start.length };
    }
    let value = input;
    let sources: Sources = new Map();
    if (this.promptItems) {
      ({ prompt: value, sources } = this.promptItems.read(input, this.step));
    } else if (isMapping(input)) {
      this.checkNames([this.step], input);
      value = (input as Mapping)[this.step];
    }
    const before = startsPrompt ? start : start.subarray(0, 0);
    const ids = this.ids(this.step, value as Value, {
      addSpecialTokens: true,
      mayBeEmpty: before.length > 0,
      startsPrompt,
      endsPrompt,
    });
    if (startsPrompt) this.promptItems?.check(ids, sources);
    if (typeof value !== "string" && ids.length) return { sources, prompt: ids, startCount: 0 };
    return { sources, prompt: Int32Array.from([...before, ...ids]), startCount: before.length };
  }

  /** Return the prompt of a conversation: its ids, with the pixels of its images if the model reads images. */
  conversationInput(template: PromptTemplate, messages: readonly Message[], tools?: Tools): Input {
    if (!this.promptItems && messages.some(({ content }) => typeof content !== "string")) {
      throw new InputError('the model reads no images: the "content" of each message is a text');
    }
    const text = template(withoutImages(messages), tools);
    if (!this.promptItems) return this.ids(this.step, text, { addSpecialTokens: false });
    const { name } = this.promptItems.spec;
    const both = { [this.step]: text, [name]: imagesOf(messages) };
    const { prompt, sources } = this.promptItems.read(both, this.step);
    return { [this.step]: this.ids(this.step, prompt, { addSpecialTokens: false }), [name]: sources.get(name)! };
  }

  /** Return the ids of a text, or check a sequence of ids. name: of the input. */
  ids(name: string, value: Value, options: IdsOptions): Int32Array {
    let ids: Int32Array;
    if (typeof value === "string") {
      const codec = this.codec(name);
      if (!codec) throw new InputError(`the file has no tokenizer for ${name}: give ids`);
      this.checkTextLength(value, this.maxCharacters(name));
      const { addSpecialTokens, startsPrompt, endsPrompt } = options;
      // An empty text gets no special tokens.
      ids = Int32Array.from(
        value ? codec.encode(value, addSpecialTokens, this.vocabularySize(name), startsPrompt, endsPrompt) : [],
      );
    } else {
      const array = arrayOf(value);
      if (array?.shape.length !== 1 || array.data.some((id) => !Number.isInteger(id))) {
        throw new InputError(`input ${name} takes text or a sequence of whole numbers`);
      }
      this.checkIds(name, array.data);
      ids = Int32Array.from(array.data);
    }
    this.refusePadding(name, ids);
    if (!ids.length && !options.mayBeEmpty) throw new InputError("the input is empty");
    return ids;
  }

  /** Return the arrays of the inputs of a single-pass model. truncate: cut a text that is too long. */
  async singlePassArrays(input: Input, truncate = false): Promise<Sources> {
    const specs = this.manifest.encode!.inputs;
    const typeInputs = new Map(specs.filter((spec) => spec.role === "types").map((spec) => [spec.of, spec]));
    const values = this.byName(
      specs,
      input,
      [...typeInputs.values()].map((spec) => spec.name),
    );
    const arrays = new Map<string, NumberArray>();
    for (const spec of specs) {
      if (spec.role === "data" || (spec.role === "ids" && !isSequence(spec))) {
        const reader = this.dataReaders.get(spec.name);
        const value = reader ? await reader(values[spec.name]) : values[spec.name];
        arrays.set(spec.name, this.source(spec, value));
      } else if (spec.role === "ids") {
        const { ids, types } = this.read(spec, values[spec.name], truncate);
        arrays.set(spec.name, numberArray(ids, [ids.length]));
        const ofIds = typeInputs.get(spec.name);
        if (ofIds === undefined) continue;
        const { name, required } = ofIds;
        const isGiven = Object.hasOwn(values, name);
        if (required && !isGiven && !isText(values[spec.name])) {
          throw new InputError(
            `the model reads ${name} next to the ids of ${spec.name}, and computes something else without them: give ` +
              "a number for each id",
          );
        }
        const own = isGiven ? this.types(name, values[name], spec, ids, truncate) : types;
        arrays.set(name, numberArray(own, [own.length]));
      }
    }
    return arrays;
  }

  /** Check the token types of the caller, one per id. */
  private types(name: string, value: Value, spec: RequestInput, ids: Int32Array, truncate: boolean): Int32Array {
    const array = typeof value === "string" ? undefined : arrayOf(value);
    if (array?.shape.length !== 1 || array.data.some((type) => !Number.isInteger(type))) {
      throw new InputError(`input ${name} takes a sequence of whole numbers`);
    }
    const types = Int32Array.from(truncate ? array.data.subarray(0, spec.maxLength) : array.data);
    if (types.length !== ids.length) {
      throw new InputError(
        `input ${name} has ${types.length} numbers and ${spec.name} ${ids.length}: give one for each`,
      );
    }
    return types;
  }

  /** The only input of the model, and its tokenizer. Throw UnsupportedCallError for other models. */
  get textInput(): { spec: RequestInput; reader: TextReader } {
    const specs = this.manifest.encode!.inputs.filter((spec) => spec.role === "ids" || spec.role === "data");
    const index = specs.length === 1 ? this.manifest.tokenizerOf.get(specs[0].name) : undefined;
    if (index === undefined) {
      throw new UnsupportedCallError(
        `this model's task (${this.manifest.task}) is done on texts, and the file has no tokenizer for ` +
          `${specs.map((spec) => spec.name).join(", ")}: export it with one (--tokenizer, tokenizer=)`,
      );
    }
    return { spec: specs[0], reader: this.textCodes[index].reader };
  }

  /**
   * Tokenize a text or a pair, with the place of each token.
   *
   * truncate: cut a text that is too long.
   * maxTokens: of a window; by default the limit of the model.
   * stride: tokens of the previous window that each window repeats; undefined for a single window.
   */
  windows(
    text: string | Pair,
    reader: WindowReader,
    options: { readonly truncate?: boolean; readonly maxTokens?: number; readonly stride?: number },
  ): TextWindow[] {
    const { spec } = this.textInput;
    const { truncate = false, maxTokens = spec.maxLength, stride } = options;
    const isWindowed = stride !== undefined && maxTokens !== undefined;
    const longest = isWindowed ? MAX_WINDOWED_CHARACTERS : undefined;
    const checked = (one: string) => this.readable(spec.name, one, truncate, longest);
    const checkedText = typeof text === "string" ? checked(text) : ([checked(text[0]), checked(text[1])] as const);
    const limit = isWindowed || truncate ? maxTokens : undefined;
    const windows = reader.windows(checkedText, limit, isWindowed ? stride : undefined);
    windows.forEach(({ ids }) => this.checkLengthAndIds(spec, ids));
    return windows;
  }

  private read(spec: RequestInput, value: Value, truncate: boolean): { ids: Int32Array; types: Int32Array } {
    const maxTokens = truncate ? spec.maxLength : undefined;
    let ids: Int32Array;
    let types: Int32Array;
    if (isText(value)) {
      const index = this.manifest.tokenizerOf.get(spec.name);
      if (index === undefined) throw new InputError(`the file has no tokenizer for ${spec.name}: give ids`);
      const cut = (text: string) => this.readable(spec.name, text, maxTokens !== undefined);
      const text = typeof value === "string" ? cut(value) : ([cut(value[0]), cut(value[1])] as const);
      ({ ids, types } = this.textCodes[index].reader.read(text, maxTokens));
    } else {
      ids = this.ids(spec.name, value, { addSpecialTokens: true }).subarray(0, maxTokens);
      types = new Int32Array(ids.length);
    }
    this.checkLengthAndIds(spec, ids);
    return { ids, types };
  }

  /** Return a text, cut to what a tokenizer reads at once. cut: whether its ids will be cut. */
  private readable(name: string, text: string, cut: boolean, limit = this.maxCharacters(name)): string {
    if (cut && text.length > limit) text = text.slice(0, limit).replace(/[\ud800-\udbff]$/, "");
    this.checkTextLength(text, limit);
    return text;
  }

  private checkTextLength(text: string, limit: number): void {
    if (text.length > limit) {
      throw new InputError(
        `the input is ${text.length.toLocaleString("en-US")} characters long and at most ` +
          `${limit.toLocaleString("en-US")} are read at once: cut it into parts`,
      );
    }
  }

  /** Return the characters of a text that is read at once. */
  private maxCharacters(name: string): number {
    const specs = this.manifest.encode?.inputs.filter((spec) => spec.name === name) ?? [];
    const longest = Math.max(this.manifest.maxLength, ...specs.map((spec) => spec.maxLength ?? 0));
    return Math.max(MIN_TEXT_CHARACTERS, CHARACTERS_PER_TOKEN * longest);
  }

  private checkLengthAndIds(spec: RequestInput, ids: Int32Array): void {
    if (!ids.length) throw new InputError("the input is empty");
    const { vocabulary, maxLength } = spec;
    const beyond = vocabulary === undefined ? undefined : ids.find((id) => id >= vocabulary);
    if (beyond !== undefined) {
      throw new InputError(`the tokenizer gives the id ${beyond}, and the model's end at ${vocabulary! - 1}`);
    }
    if (maxLength !== undefined && ids.length > maxLength) {
      throw new InputError(
        `the input is ${ids.length} tokens long and the model takes at most ${maxLength}: shorten it, or have it cut ` +
          "with truncate: true",
      );
    }
  }

  private sources(specs: readonly RequestInput[], input: Input): Sources {
    const values = this.byName(specs, input, []);
    const needed = specs.filter((spec) => spec.role !== "mask");
    const sources = new Map(needed.map((spec) => [spec.name, this.source(spec, values[spec.name])]));
    this.checkRow(sources);
    return sources;
  }

  /** Throw InputError for a row that is too short, or whose inputs have lengths that the model does not take. */
  checkRow(sources: Sources): void {
    if (this.manifest.encode) checkRow(this.manifest.encode, sources);
  }

  /** Return the values of the inputs by name. Throw InputError for missing and unknown names. */
  private byName(
    specs: readonly RequestInput[],
    input: Input,
    optional: readonly string[],
  ): { readonly [name: string]: Value } {
    const required = specs
      .filter((spec) => spec.role !== "mask" && !optional.includes(spec.name))
      .map((spec) => spec.name);
    if (!isMapping(input)) {
      if (required.length !== 1) {
        throw new InputError(`the model reads several inputs: give an object with ${required.join(", ")}`);
      }
      return { [required[0]]: input as Value };
    }
    this.checkNames([...required, ...optional.filter((name) => Object.hasOwn(input, name))], input);
    return input;
  }

  /** Return the array of an input. */
  private source(spec: RequestInput, value: Value): NumberArray {
    if (isSequence(spec)) {
      const ids = this.ids(spec.name, value, { addSpecialTokens: true });
      if (spec.maxLength !== undefined && ids.length > spec.maxLength) {
        throw new InputError(`the input is ${ids.length} tokens long and the model takes at most ${spec.maxLength}`);
      }
      return numberArray(ids, [ids.length]);
    }
    if (typeof value === "string") throw new InputError(`input ${spec.name} takes an array of ${spec.dtype}, not text`);
    const array = typeof value === "number" ? numberArray(Float64Array.of(value), []) : arrayOf(value);
    if (!array) throw new InputError(`input ${spec.name} takes an array of ${spec.dtype}`);
    if (spec.role === "ids") {
      if (array.data.some((id) => !Number.isInteger(id)))
        throw new InputError(`input ${spec.name} takes whole numbers`);
      this.checkIds(spec.name, array.data);
    }
    const data = spec.dtype === "float32" ? Float32Array.from(array.data) : array.data;
    const wrong = data.findIndex((number) => !Number.isFinite(number));
    if (wrong >= 0) {
      throw new InputError(
        `input ${spec.name} takes finite numbers of ${spec.dtype}, not ${data[wrong]} at (${placeOf(wrong, array.shape)})`,
      );
    }
    return numberArray(data, isNumber(spec) && !array.shape.length ? [1] : array.shape);
  }

  private checkNames(expected: readonly string[], values: object): void {
    const given = Object.keys(values);
    if (given.length !== expected.length || !expected.every((name) => given.includes(name))) {
      throw new InputError(`the model reads ${expected.join(", ")}, not ${quotable(given.join(", ") || "nothing")}`);
    }
  }

  private checkIds(name: string, ids: Float32Array | Float64Array | Int32Array): void {
    const size = this.vocabularySize(name) ?? Infinity;
    const index = ids.findIndex((id) => id < 0 || id >= size || id > 2 ** 31 - 1);
    if (index < 0) return;
    const ends = size === Infinity ? "" : `, which ends at ${size - 1}`;
    throw new InputError(`id ${ids[index]} (number ${index + 1} of the input) is not in the model's vocabulary${ends}`);
  }

  /** Throw InputError for ids of the step input with padding inside, which the source would hide. */
  private refusePadding(name: string, ids: Int32Array): void {
    const { decode } = this.manifest;
    if (decode?.hiddenId === undefined || name !== decode.step.name) return;
    const found = ids.indexOf(decode.hiddenId);
    if (found < 0) return;
    throw new InputError(
      `id ${decode.hiddenId} (number ${found + 1} of the input) is the model's padding, which the model hides: leave it out`,
    );
  }

  /** Return the number of ids that an input can have; undefined if unknown, and then onnxruntime refuses larger ids. */
  private vocabularySize(name: string): number | undefined {
    const { encode, decode } = this.manifest;
    if (decode && name === decode.step.name) return decode.vocabulary ?? logitCount(decode);
    const spec = encode?.inputs.find((input) => input.name === name && input.vocabulary !== undefined);
    return spec?.vocabulary ?? this.codec(name)?.size;
  }

  private codec(name: string): Codec | undefined {
    const index = this.manifest.tokenizerOf.get(name);
    return index === undefined ? undefined : this.textCodes[index].codec;
  }
}

/** Return the index of a value along each axis, as text. */
function placeOf(index: number, shape: readonly number[]): string {
  const place: number[] = [];
  for (const size of [...shape].reverse()) {
    place.unshift(index % size);
    index = Math.floor(index / size);
  }
  return place.join(", ");
}
