/** Texts and pairs in windows, with the place of each token in its text, for tasks whose results are parts of a text. */

import { Tokenizer } from "@huggingface/tokenizers";
import { append, numberArray } from "../base/arrays.js";
import { InputError, ModelFileError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";
import { AlignedText } from "./alignedText.js";
import { normalized, preTokenized, type Compiled, type StepJson } from "./alignedSteps.js";
import type { Pair } from "./textReader.js";
import {
  checkText,
  readingTokenizer,
  SPACE,
  WORD,
  type AddedTokenJson,
  type Parts,
  type TokenizerParts,
} from "./tokenizer.js";

/** A token: its id, the characters from `start` to `end` of its text, and the number of its word in the text. */
interface PlacedToken {
  readonly token: string;
  readonly id: number;
  readonly start: number;
  readonly end: number;
  readonly word: number;
}

/**
 * A window of a text or a pair. All arrays have a value for each token.
 *
 * starts, ends: the characters of a token in its text. Both are 0 for a special token.
 * words: the number of a token's word in its text; −1 without one.
 * texts: the number of a token's text in a pair; −1 for a special token.
 */
export interface TextWindow {
  readonly ids: Int32Array;
  readonly types: Int32Array;
  readonly starts: Int32Array;
  readonly ends: Int32Array;
  readonly words: Int32Array;
  readonly texts: Int32Array;
}

const LEADING_SPACES = new RegExp(`^[Ġ${SPACE}]*`, "u");
const TRAILING_SPACES = new RegExp(`[Ġ${SPACE}]*$`, "u");

/** Reads texts in windows, with a tokenizer of the file. */
export class WindowReader {
  /** Whether tokens inside a word have a prefix, such as ## of WordPiece. */
  readonly marksSubwords: boolean;
  private readonly compiled = new Map<unknown, Compiled>();
  private readonly raw: readonly AddedTokenJson[];
  private readonly added: readonly AddedTokenJson[];
  private readonly trims: readonly { readonly prefixSpace: boolean }[];
  private readonly model: (pieces: string[]) => string[];

  /** Throw ModelFileError for a tokenizer whose steps cannot tell places. */
  constructor(private readonly parts: TokenizerParts) {
    const { json, patched } = parts;
    this.marksSubwords = Boolean(json.model.continuing_subword_prefix);
    this.collectPatterns(json.normalizer, parts.parts.normalizer);
    this.collectPatterns(patched.pre_tokenizer, parts.parts.pre_tokenizer);
    const tokens = json.added_tokens ?? [];
    this.raw = tokens.filter((one) => one.content && !(one.normalized ?? !one.special));
    const normalized = tokens.filter((one) => one.content && (one.normalized ?? !one.special));
    this.added = parts.opening(() =>
      normalized.map((one) => ({ ...one, content: this.normal(AlignedText.of(one.content)).text })),
    );
    this.trims = trimsOf(json.post_processor);
    this.model = modelWithoutAdded(parts);
    parts.opening(() => this.tokens("a")); // refuses steps that are unknown before the first input
  }

  /**
   * Tokenize in windows. Of a pair, each window has the whole first text and a part of the second.
   *
   * maxTokens: of a window, special tokens included; undefined for one window of any length.
   * stride: tokens of the previous window that are repeated, half of the room for the text if that is less; undefined to
   *     leave out what does not fit.
   * Throw InputError if special tokens and the first text leave no room.
   */
  windows(text: string | Pair, maxTokens?: number, stride?: number): TextWindow[] {
    const texts = typeof text === "string" ? [text] : text;
    texts.forEach(checkText);
    const tokens = this.parts.reading(texts.join(""), () => texts.map((one) => this.tokens(one)));
    const fixed = tokens.slice(0, -1);
    const last = tokens[tokens.length - 1];
    if (tokens.some((all) => all.some(({ id }) => id < 0))) {
      throw new InputError("the tokenizer cannot read the input: it has no unknown token");
    }
    if (maxTokens === undefined) return [this.window(tokens)];
    const room = this.room(maxTokens, fixed);
    if (room < 1) {
      if (stride === undefined) {
        throw new InputError(`nothing is left of a text that is cut to ${maxTokens} tokens: special tokens fill them`);
      }
      const around = fixed.length ? "first text and the tokens around both" : "tokens around a text";
      throw new InputError(
        `the ${around} leave no room in a window of ${maxTokens} tokens: shorten the text, or allow longer windows`,
      );
    }
    if (stride === undefined) return [this.window([...fixed, last.slice(0, room)])];
    const step = room - (stride < room ? stride : Math.floor(room / 2));
    const windows: TextWindow[] = [];
    for (let first = 0; ; first += step) {
      windows.push(this.window([...fixed, last.slice(first, first + room)]));
      if (first + room >= last.length) return windows;
    }
  }

  /** Return the tokens that a window has for a text, without special tokens and the texts that every window has. */
  room(maxTokens: number, repeated: readonly (readonly PlacedToken[])[] = []): number {
    return maxTokens - this.window([...repeated, []]).ids.length;
  }

  private window(tokens: readonly (readonly PlacedToken[])[]): TextWindow {
    // Markers tell which tokens the post-processor has added.
    const markers = tokens.map((all, text) => all.map((_, i) => `${text} ${i}`));
    const second = markers.length > 1 ? markers[1] : null;
    const { tokens: found, types } = this.parts.process(markers[0], second);
    const places = new Map(markers.flatMap((all, text) => all.map((marker, i) => [marker, [text, i] as const])));
    const trimmed = tokens.map((all) => this.trims.reduce((one, { prefixSpace }) => trim(one, prefixSpace), all));
    const length = found.length;
    const [ids, starts, ends] = [0, 1, 2].map(() => new Int32Array(length));
    const [words, texts] = [0, 1].map(() => new Int32Array(length).fill(-1));
    found.forEach((token, i) => {
      const place = places.get(token);
      if (!place) {
        ids[i] = this.parts.id(token);
        return;
      }
      const one = trimmed[place[0]][place[1]];
      [ids[i], starts[i], ends[i], words[i], texts[i]] = [one.id, one.start, one.end, one.word, place[0]];
    });
    return { ids, types: Int32Array.from(types), starts, ends, words, texts };
  }

  /** Return the tokens of a text, without special tokens around it. */
  private tokens(text: string): PlacedToken[] {
    const whole = AlignedText.of(text);
    let word = 0;
    const tokens: PlacedToken[] = [];
    const addedToken = (part: AlignedText, added: AddedTokenJson) => {
      const [start, end] = part.place(0, part.length);
      tokens.push({ token: part.text, id: added.id, start, end, word: word++ });
    };
    for (const [part, added] of splitOff(whole, this.raw)) {
      if (added) addedToken(part, added);
      else {
        const normal = this.normal(part);
        // A part of a text begins where its first character does, also if the normalizer has left out some before it.
        for (const [inner, innerAdded] of splitOff(normal.slice(0, normal.length), this.added)) {
          if (innerAdded) addedToken(inner, innerAdded);
          else for (const piece of this.pieces(inner)) append(tokens, this.pieceTokens(piece, word++));
        }
      }
    }
    return tokens;
  }

  private normal(text: AlignedText): AlignedText {
    const { normalizer } = this.parts.json;
    return normalizer ? normalized(text, normalizer as StepJson, (step) => this.compiled.get(step)) : text;
  }

  private pieces(text: AlignedText): readonly AlignedText[] {
    const { pre_tokenizer } = this.parts.patched;
    const step = pre_tokenizer as StepJson | null | undefined;
    const pieces = step ? preTokenized(text, step, (inner) => this.compiled.get(inner)) : [text];
    return pieces.filter((piece) => piece.length);
  }

  /** Return the tokens of a word. */
  private pieceTokens(piece: AlignedText, word: number): PlacedToken[] {
    const names = this.model([piece.text]);
    const borders = this.borders(piece.characters, names);
    return names.map((token, i) => {
      const [start, end] = piece.place(borders[i][0], borders[i][1]);
      return { token, id: this.parts.id(token), start, end, word };
    });
  }

  /** Return the first character and the last + 1 of each token in its word. */
  private borders(characters: readonly string[], tokens: readonly string[]): [number, number][] {
    if (tokens.length === 1) return [[0, characters.length]];
    const { model } = this.parts.json;
    const { continuing_subword_prefix: prefix, end_of_word_suffix: suffix, unk_token: unknown } = model;
    const borders: [number, number][] = [];
    let place = 0;
    let bytes = 0; // of the character at `place` that tokens stood for
    tokens.forEach((token, i) => {
      let text = token;
      if (i && prefix && model.type === "WordPiece" && text.startsWith(prefix)) text = text.slice(prefix.length);
      if (suffix && i === tokens.length - 1 && text.endsWith(suffix)) text = text.slice(0, -suffix.length);
      const count = [...text].length;
      const first = place;
      if (characters.slice(place, place + count).join("") === text) place += count;
      else if (/^<0x[0-9A-F]{2}>$/.test(token) && place < characters.length) {
        bytes++;
        borders.push([place, place + 1]);
        if (bytes === new TextEncoder().encode(characters[place]).length) [place, bytes] = [place + 1, 0];
        return;
      } else if (token === unknown) {
        const isUnknown = (at: number) => {
          const end = at === characters.length - 1 ? (suffix ?? "") : "";
          return at < characters.length && this.parts.tokenizer.token_to_id(characters[at] + end) === undefined;
        };
        place++;
        if (model.fuse_unk) while (isUnknown(place)) place++;
      }
      borders.push([first, place]);
    });
    if (place !== characters.length || borders.some(([first, end]) => first >= end)) {
      throw new ModelFileError(
        "the JavaScript runtime cannot tell the places of the tokens of this file: run the model with the Python runtime",
      );
    }
    return borders;
  }

  /** Collect the patterns that the package has compiled for the steps of a part. */
  private collectPatterns(step: unknown, compiled: unknown): void {
    if (typeof step !== "object" || step === null) return;
    this.compiled.set(step, compiled as Compiled);
    const { normalizers, pretokenizers } = step as Record<string, unknown>;
    const inner = compiled as { normalizers?: unknown[]; tokenizers?: unknown[] } | null;
    const steps = (normalizers ?? pretokenizers ?? []) as unknown[];
    steps.forEach((one, i) => this.collectPatterns(one, (inner?.normalizers ?? inner?.tokenizers)?.[i]));
  }
}

/** Return the arrays of the inputs of a model for a window. name: of the input that reads the text. */
export function windowArrays({ encode }: Manifest, name: string, { ids, types }: TextWindow): Sources {
  const arrays = new Map([[name, numberArray(ids, [ids.length])]]);
  for (const spec of encode!.inputs) {
    if (spec.role === "types") arrays.set(spec.name, numberArray(types, [types.length]));
  }
  return arrays;
}

/** Return the function from pieces to tokens of a vocabulary without added tokens, which stand alone in a text. */
function modelWithoutAdded({ parts, json, patched }: TokenizerParts): (pieces: string[]) => string[] {
  if (json.model.type !== "WordPiece" || !json.added_tokens?.length) return parts.model;
  // The package finds added tokens in words.
  const alone = readingTokenizer(() => new Tokenizer({ ...patched, added_tokens: [] }, {}));
  return (alone as unknown as Parts).model;
}

/** Split a text at added tokens, of several the longest. Each part is with the added token that it is. */
function splitOff(
  text: AlignedText,
  tokens: readonly AddedTokenJson[],
): (readonly [AlignedText, AddedTokenJson | undefined])[] {
  if (!tokens.length || !text.length) return text.length ? [[text, undefined]] : [];
  const byContent = new Map(tokens.map((one) => [one.content, one]));
  const longestFirst = [...byContent.keys()].filter(Boolean).sort((one, other) => other.length - one.length);
  if (!longestFirst.length) return [[text, undefined]];
  const pattern = new RegExp(longestFirst.map((one) => one.replace(/[.*+?^${}()|[\]\\/-]/g, escaped)).join("|"), "gu");
  const isWord = (place: number) => new RegExp(`[${WORD}]`, "u").test(text.characters[place] ?? "");
  const isSpace = (place: number) => new RegExp(`[${SPACE}]`, "u").test(text.characters[place] ?? "");
  const parts: (readonly [AlignedText, AddedTokenJson | undefined])[] = [];
  let done = 0;
  for (let [first, end] of text.matches(pattern)) {
    const added = byContent.get(text.characters.slice(first, end).join(""))!;
    if (added.single_word && (isWord(first - 1) || isWord(end))) continue;
    if (added.lstrip) while (first > done && isSpace(first - 1)) first--;
    if (added.rstrip) while (isSpace(end)) end++;
    if (first < done) continue;
    if (first > done) parts.push([text.slice(done, first), undefined]);
    parts.push([text.slice(first, end), added]);
    done = end;
  }
  if (done < text.length) parts.push([text.slice(done, text.length), undefined]);
  return parts;
}

function escaped(character: string): string {
  return `\\u{${character.codePointAt(0)!.toString(16)}}`;
}

/** Return the steps of a post-processor that leave spaces out of the places of tokens. */
function trimsOf(step: unknown): { prefixSpace: boolean }[] {
  const { type, processors, trim_offsets, add_prefix_space } = (step ?? {}) as Record<string, unknown>;
  if (type === "Sequence") return ((processors ?? []) as unknown[]).flatMap(trimsOf);
  const trims = (type === "ByteLevel" || type === "RobertaProcessing") && trim_offsets !== false;
  return trims ? [{ prefixSpace: add_prefix_space !== false }] : [];
}

/** Return tokens whose places have no spaces at their ends. A space that the tokenizer has added has no place. */
function trim(tokens: readonly PlacedToken[], prefixSpace: boolean): readonly PlacedToken[] {
  return tokens.map((one, i) => {
    let leading = LEADING_SPACES.exec(one.token)![0].length;
    const trailing = TRAILING_SPACES.exec(one.token)![0].length;
    let { start, end } = one;
    if (leading === 1 && prefixSpace && (i === 0 || start === 0)) leading = 0;
    start = Math.min(start + leading, end);
    if (end >= trailing) end = Math.max(end - trailing, start);
    return { ...one, start, end };
  });
}
