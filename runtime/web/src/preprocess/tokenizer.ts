/**
 * Between text and ids, for generation: the tokenizers of the file.
 *
 * A tokenizer replaces unknown characters by an "unknown" token, or drops them silently. The model would then answer to
 * another text, so an unknown character throws an InputError with its position.
 */

import { Tokenizer } from "@huggingface/tokenizers";
import { errorSummary, InputError, ModelFileError, quotable } from "../base/errors.js";
import { readingTime, slowText, withinTime } from "../base/timeLimit.js";
import { surrogateIn } from "../base/validation.js";
import { decodeSteps, runSteps, type DecodeStep, type DecoderJson } from "./decoderSteps.js";
import { checkGrowth, hasExpressions } from "./tokenizerGrowth.js";

/** The parts of a tokenizer's JSON that are read here. */
interface TokenizerJson {
  readonly model: {
    readonly type?: string;
    readonly unk_token?: string | null;
    readonly unk_id?: number | null;
    readonly continuing_subword_prefix?: string | null;
    readonly end_of_word_suffix?: string | null;
    readonly fuse_unk?: boolean;
  };
  readonly added_tokens?: readonly AddedTokenJson[];
  readonly decoder?: DecoderJson | null;
  readonly pre_tokenizer?: unknown;
  readonly normalizer?: unknown;
  readonly post_processor?: unknown;
}

export interface AddedTokenJson {
  readonly id: number;
  readonly content: string;
  readonly special: boolean;
  readonly normalized?: boolean;
  readonly single_word?: boolean;
  readonly lstrip?: boolean;
  readonly rstrip?: boolean;
}

// What \w and \s are in the tokenizers library; in JavaScript \w is ASCII alone.
export const WORD = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\u200c\u200d";
export const SPACE = "\t-\r \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000";
const WHITESPACE = {
  type: "Split",
  pattern: { Regex: `[${WORD}]+|[^${WORD}${SPACE}]+` },
  behavior: "Removed",
  invert: true,
};

/**
 * Return a pre-tokenizer whose step "Whitespace" knows the letters of all scripts. The step of the package knows ASCII alone.
 *
 * Throw ModelFileError for a step that the package takes for another step.
 */
function withUnicodeWords(part: unknown): unknown {
  if (Array.isArray(part)) return part.map(withUnicodeWords);
  if (typeof part !== "object" || part === null) return part;
  const { type, behavior } = part as { type?: unknown; behavior?: unknown };
  if (type === "Whitespace") return WHITESPACE;
  if ("pattern" in part) checkPattern(part.pattern);
  if (type === "Split" && behavior !== "Removed" && behavior !== "Isolated") {
    throw new ModelFileError(
      `the file's tokenizer splits texts in a way (${quotable(behavior)}) that the JavaScript runtime does not have: run ` +
        "the model with the Python runtime",
    );
  }
  return Object.fromEntries(Object.entries(part).map(([name, value]) => [name, withUnicodeWords(value)]));
}

/** The functions of the package that its types hide. */
export type Parts = {
  readonly normalizer: ((text: string) => string) | null;
  readonly pre_tokenizer: ((text: string) => string[]) | null;
  readonly model: (pieces: string[]) => string[];
  readonly post_processor:
    | ((first: string[], second: string[] | null, special: boolean) => { tokens: string[]; token_type_ids?: number[] })
    | null;
};

/** Throw ModelFileError for a pattern that is neither a text nor a regular expression. The package would ignore it. */
function checkPattern(pattern: unknown): void {
  const { String: text, Regex: expression } = (pattern ?? {}) as { String?: unknown; Regex?: unknown };
  if (typeof text === "string" || typeof expression === "string") return;
  throw new ModelFileError("the file's tokenizer has a pattern that is neither a text nor a regular expression");
}

/** A tokenizer of the file as the package has it, with the facts that it does not give. */
export class TokenizerParts {
  readonly tokenizer: Tokenizer;
  readonly json: TokenizerJson;
  /** The JSON with the steps that the package has been given. */
  readonly patched: TokenizerJson;
  /** The id of the unknown token; undefined without one. */
  readonly unknown: number | undefined;
  private readonly hasExpressions: boolean; // of the file, so that nobody knows how long they take

  /** definition: a tokenizer in the JSON format of the tokenizers library. Throw ModelFileError if it cannot be read. */
  constructor(definition: string) {
    const json = (this.json = readingTokenizer(() => JSON.parse(definition) as TokenizerJson));
    const steps = json as unknown as Record<string, unknown>;
    this.hasExpressions = readingTokenizer(() => hasExpressions(steps));
    [this.tokenizer, this.patched] = this.opening(() => {
      checkGrowth(steps);
      withUnicodeWords(json.normalizer);
      // A vocabulary of whole words has its unknown token in the configuration of another file, for this package.
      const parts = { ...json, pre_tokenizer: withUnicodeWords(json.pre_tokenizer) };
      return [new Tokenizer(parts, { unk_token: json.model.unk_token ?? undefined }), parts] as const;
    });
    const { model } = this.json;
    this.unknown = model.unk_token ? this.tokenizer.token_to_id(model.unk_token) : (model.unk_id ?? undefined);
  }

  /** The functions from text to pieces, and from pieces to tokens. */
  get parts(): Parts {
    return this.tokenizer as unknown as Parts;
  }

  /** Run code that reads the file's own tokens, as `reading` runs code that reads a text. */
  opening<T>(open: () => T): T {
    const limited = () => withinTime(readingTime(0), open, slowTokenizer);
    return readingTokenizer(this.hasExpressions ? limited : open);
  }

  /** Run code that reads a text, within a time if regular expressions of the file read it. Errors: see `readingTokenizer`. */
  reading<T>(text: string, read: () => T): T {
    const limited = () => withinTime(readingTime(text.length), read, slowText);
    return readingTokenizer(this.hasExpressions ? limited : read);
  }

  /** Return the tokens of a text, without special tokens around it. */
  tokens(text: string): string[] {
    return text ? this.tokenizer.tokenize(text, { add_special_tokens: false }) : [];
  }

  /** Return the id of a token; the id of the unknown token if the vocabulary lacks it. */
  id(token: string): number {
    return this.tokenizer.token_to_id(token) ?? this.unknown ?? -1;
  }

  /** Return tokens with the special tokens of the tokenizer around them, and their types. */
  process(first: string[], second: string[] | null): { tokens: string[]; types: number[] } {
    const process = this.parts.post_processor;
    const { tokens, token_type_ids } = process
      ? process(first, second, true)
      : { tokens: [...first, ...(second ?? [])], token_type_ids: undefined };
    if (process && hasOneType(this.json.post_processor)) return { tokens, types: tokens.map(() => 0) };
    return { tokens, types: token_type_ids ?? [...first.map(() => 0), ...(second ?? []).map(() => 1)] };
  }

  /** Return ids with the special tokens of the tokenizer around them, and their types. */
  withSpecialTokens(first: string[], second: string[] | null): { ids: number[]; types: number[] } {
    const { tokens, types } = this.process(first, second);
    return { ids: tokens.map((token) => this.id(token)), types };
  }
}

/** Return whether a post-processor gives both texts of a pair one type, which the package does not. */
function hasOneType(step: unknown): boolean {
  const { type, processors } = (step ?? {}) as { type?: unknown; processors?: unknown };
  return type === "RobertaProcessing" || (Array.isArray(processors) && processors.some(hasOneType));
}

const CONTEXT_CHARACTERS = 24; // around a character that make its tokens

/** A tokenizer of the file, which refuses unknown characters. */
export class Codec {
  private readonly special = new Set<number>();
  private readonly dropped = new Map<string, boolean>();

  constructor(private readonly parts: TokenizerParts) {
    for (const token of this.parts.json.added_tokens ?? []) {
      if (token.special && this.parts.tokenizer.id_to_token(token.id) === token.content) this.special.add(token.id);
    }
  }

  /** The number of ids in the vocabulary. */
  get size(): number {
    return this.parts.tokenizer.get_vocab().size;
  }

  /**
   * Return the ids of a text.
   *
   * addSpecialTokens: add the special tokens that the tokenizer puts around a text.
   * vocabularySize: the number of ids of the model, if the tokenizer may have more.
   * startsPrompt, endsPrompt: keep the special tokens before the text, and those after it.
   * Throw InputError for a character outside the vocabulary.
   */
  encode(
    text: string,
    addSpecialTokens: boolean,
    vocabularySize = Infinity,
    startsPrompt = true,
    endsPrompt = true,
  ): number[] {
    checkText(text);
    return this.parts.reading(text, () =>
      this.encoded(text, addSpecialTokens, vocabularySize, startsPrompt, endsPrompt),
    );
  }

  private encoded(
    text: string,
    addSpecialTokens: boolean,
    vocabularySize: number,
    startsPrompt: boolean,
    endsPrompt: boolean,
  ): number[] {
    const { parts } = this;
    const tokens = parts.tokens(text);
    const ids = tokens.map((token) => parts.id(token));
    if (ids.some((id) => id === parts.unknown || id >= vocabularySize || id < 0)) {
      throw this.outside(text, vocabularySize) ?? unknownSomewhere();
    }
    this.refuseDropped(text);
    if (!ids.length || !addSpecialTokens) return ids;
    const around = parts.withSpecialTokens(tokens, null).ids;
    const first = placeOf(ids, around);
    return around.slice(startsPrompt ? 0 : first, endsPrompt ? undefined : first + ids.length);
  }

  /** Return the text of ids, without special tokens. */
  decode(ids: ArrayLike<number>): string {
    const pieces: string[] = [];
    for (let i = 0; i < ids.length; i++) {
      const piece = this.piece(ids[i]);
      if (piece !== undefined) pieces.push(piece);
    }
    return runSteps(this.decodeSteps(), pieces);
  }

  /** Return the token of an id in the vocabulary; the id if it is unknown. */
  token(id: number): string {
    return this.parts.tokenizer.id_to_token(id) ?? String(id);
  }

  /** Return the input of the decoder for an id; undefined for a special token and an unknown id. */
  piece(id: number): string | undefined {
    return this.special.has(id) ? undefined : this.parts.tokenizer.id_to_token(id);
  }

  /** Return new steps of an incremental decoder. The output of each step is the input of the next. */
  decodeSteps(): DecodeStep[] {
    return decodeSteps(this.parts.json.decoder ?? undefined);
  }

  /** Return the error with the first piece of a text that the vocabulary does not hold; undefined if none is found. */
  private outside(text: string, vocabularySize: number): InputError | undefined {
    const { parts } = this;
    const isOutside = (piece: string, tokens: string[]) =>
      piece !== "" &&
      tokens.some(
        (token) => parts.id(token) === parts.unknown || parts.id(token) >= vocabularySize || parts.id(token) < 0,
      );
    const normal = parts.parts.normalizer ? parts.parts.normalizer(text) : text;
    const pieces = parts.parts.pre_tokenizer ? parts.parts.pre_tokenizer(normal) : [normal];
    const piece = pieces.find((one) => isOutside(one, parts.parts.model([one])));
    const readsWords = parts.json.model.type === "WordLevel" || parts.json.model.type === "WordPiece";
    if (piece !== undefined && readsWords && text.includes(piece)) {
      return outsideError(piece, [...text.slice(0, text.indexOf(piece))].length + 1);
    }
    const characters = [...text];
    const unknown = characters.map((character) => isOutside(character, parts.tokens(character)));
    const first = unknown.indexOf(true);
    if (first < 0) return undefined;
    let end = first + 1;
    while (unknown[end]) end++;
    return outsideError(characters.slice(first, end).join(""), first + 1);
  }

  /**
   * Throw InputError if the tokenizer drops a character of a text because of its vocabulary.
   *
   * A character that makes no token alone may belong to the token after it, as spaces do. It is dropped if the text
   * around it has the same tokens without it.
   */
  private refuseDropped(text: string): void {
    const characters = [...text];
    for (const [index, character] of characters.entries()) {
      if (!this.drops(character)) continue;
      const before = characters.slice(Math.max(0, index - CONTEXT_CHARACTERS), index).join("");
      const after = characters.slice(index + 1, index + 1 + CONTEXT_CHARACTERS).join("");
      const [withIt, without] = [before + character + after, before + after].map((part) => this.parts.tokens(part));
      if (withIt.length === without.length && withIt.every((token, i) => token === without[i])) {
        throw outsideError(character, characters.findIndex((one) => this.drops(one)) + 1);
      }
    }
  }

  /** Return whether the tokenizer drops a character that is alone because of its vocabulary, and not by design. */
  private drops(character: string): boolean {
    let dropped = this.dropped.get(character);
    if (dropped === undefined) {
      const { normalizer, pre_tokenizer } = this.parts.parts;
      dropped =
        !this.parts.tokens(character).length &&
        (() => {
          const normal = normalizer ? normalizer(character) : character;
          return pre_tokenizer ? pre_tokenizer(normal).some((piece) => piece) : normal !== "";
        })();
      if (this.dropped.size < 4096) this.dropped.set(character, dropped);
    }
    return dropped;
  }
}

function slowTokenizer(seconds: number): ModelFileError {
  return new ModelFileError(
    `the file's tokenizer took more than ${seconds} s to open, and was stopped: its regular expressions are slow`,
  );
}

/** Run a function of the package. Its errors become the error of a tokenizer that cannot be read. */
export function readingTokenizer<T>(read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (error instanceof ModelFileError || error instanceof InputError) throw error;
    throw new ModelFileError(
      `the file's tokenizer cannot be read (${errorSummary(error)}): export the model again`,
      undefined,
      error,
    );
  }
}

/** Throw InputError for a text with half a character, which no tokenizer reads. */
export function checkText(text: string): void {
  const found = surrogateIn(text);
  if (found !== undefined) throw new InputError(`the input holds ${found}`);
}

function outsideError(piece: string, number: number): InputError {
  return new InputError(`'${quotable(piece)}' (character ${number} of the input) is not in the model's vocabulary`);
}

function unknownSomewhere(): InputError {
  return new InputError("the input holds something outside the model's vocabulary");
}

/** Return the place of ids in a longer list that contains them. */
function placeOf(ids: readonly number[], whole: readonly number[]): number {
  for (let first = 0; first + ids.length <= whole.length; first++) {
    if (ids.every((id, i) => id === whole[first + i])) return first;
  }
  return 0;
}
