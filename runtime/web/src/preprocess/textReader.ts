/**
 * From a text, or a pair of texts, to ids and token types, for single-pass models.
 *
 * Results are those of transformers' tokenizers: unknown text becomes the unknown token, and truncation cuts the longer
 * text of a pair first.
 */

import { InputError } from "../base/errors.js";
import { runSteps, decodeSteps } from "./decoderSteps.js";
import { checkText, Codec, TokenizerParts } from "./tokenizer.js";

export type Pair = readonly [string, string];

export interface EncodedText {
  readonly ids: Int32Array;
  readonly types: Int32Array;
}

/** A tokenizer of the file, which reads unknown text and can truncate. */
export class TextReader {
  constructor(readonly parts: TokenizerParts) {}

  /** The id of the unknown token; undefined without one. */
  get unknown(): number | undefined {
    return this.parts.unknown;
  }

  /** The number of ids in the vocabulary. */
  get size(): number {
    return this.parts.tokenizer.get_vocab().size;
  }

  /** Return the id of a token of the vocabulary; undefined for an unknown one. */
  idOf(token: string): number | undefined {
    return this.parts.tokenizer.token_to_id(token);
  }

  /** Return the token of an id in the vocabulary; empty for an unknown id. */
  token(id: number): string {
    return this.parts.tokenizer.id_to_token(id) ?? "";
  }

  /** Return the ids of a text, without special tokens around it. */
  ids(text: string): number[] {
    return this.parts.reading(text, () => this.parts.tokens(text).map((token) => this.parts.id(token)));
  }

  /** Return the text of ids. special: whether it includes special tokens. */
  text(ids: ArrayLike<number>, special: boolean): string {
    const hidden = new Set(
      (this.parts.json.added_tokens ?? []).filter((token) => token.special).map((token) => token.id),
    );
    const pieces: string[] = [];
    for (let i = 0; i < ids.length; i++) {
      const piece = this.parts.tokenizer.id_to_token(ids[i]);
      if (piece !== undefined && (special || !hidden.has(ids[i]))) pieces.push(piece);
    }
    return runSteps(decodeSteps(this.parts.json.decoder ?? undefined), pieces);
  }

  /**
   * Tokenize a text or a pair, with special tokens.
   *
   * maxTokens: truncate to this length, special tokens included; undefined for no limit.
   * Throw InputError for a text that the tokenizer cannot read, and if special tokens leave no room for a text.
   */
  read(text: string | Pair, maxTokens?: number): EncodedText {
    const [first, second] = typeof text === "string" ? [text, null] : text;
    checkText(first);
    checkText(second ?? "");
    const { ids, types } = this.parts.reading(first + (second ?? ""), () => {
      let one = this.parts.tokens(first);
      let other = second === null ? null : this.parts.tokens(second);
      if (maxTokens !== undefined) [one, other] = this.truncated(one, other, maxTokens);
      return this.parts.withSpecialTokens(one, other);
    });
    if (ids.some((id) => id < 0)) throw new InputError("the tokenizer cannot read the input: it has no unknown token");
    return { ids: Int32Array.from(ids), types: Int32Array.from(types) };
  }

  /** Return the tokens of a text or a pair, cut so that they and the special tokens have at most this number. */
  private truncated(first: string[], second: string[] | null, maxTokens: number): [string[], string[] | null] {
    const added = this.parts.withSpecialTokens([], second === null ? null : []).ids.length;
    const room = maxTokens - added;
    if (room < 1) {
      throw new InputError(`nothing is left of a text that is cut to ${maxTokens} tokens: special tokens fill them`);
    }
    const total = first.length + (second?.length ?? 0);
    if (total <= room) return [first, second];
    if (second === null) return [first.slice(0, room), null];
    // The longer text is cut to the length of the shorter one, and then both, the first with the odd token.
    let [one, other] = [first.length, second.length];
    const swapped = one > other;
    if (swapped) [one, other] = [other, one];
    other = one > room ? one : Math.max(one, room - one);
    if (one + other > room) {
      one = Math.floor(room / 2);
      other = one + (room % 2);
    }
    if (swapped) [one, other] = [other, one];
    return [first.slice(0, one), second.slice(0, other)];
  }
}

/** A tokenizer of a file: as generation uses it, and as single-pass models do. Both share its vocabulary. */
export class TextCode {
  readonly codec: Codec;
  readonly reader: TextReader;

  /** definition: see `TokenizerParts`. Throw ModelFileError if it cannot be read. */
  constructor(definition: string) {
    const parts = new TokenizerParts(definition);
    this.codec = new Codec(parts);
    this.reader = new TextReader(parts);
  }
}
