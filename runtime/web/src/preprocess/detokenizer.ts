/**
 * Incremental decoding: the text of a growing sequence of ids, in pieces.
 *
 * The package of tokenizers decodes whole sequences alone. Here each step of a decoder gives its text as soon as no later
 * token can change it.
 */

import { finishSteps, type DecodeStep } from "./decoderSteps.js";
import type { Codec } from "./tokenizer.js";

const MAX_CLUSTER_CHARACTERS = 256; // of a common grapheme cluster, or a common run of byte tokens
const ACCENT = "\u0301"; // a character that extends any cluster, except control characters

/**
 * The pieces of a growing text. Joined they equal the text of all ids, up to the first stop string.
 *
 * A piece waits for the other bytes of a character, for the end of its last grapheme cluster (an accent, the rest of an
 * emoji), and for the rest of a stop string. The cost of a token does not grow with the text.
 */
export class Detokenizer {
  private readonly steps: DecodeStep[];
  private readonly maxExamined: number;
  private waiting = ""; // decoded and examined, from the beginning of a cluster
  private fresh = ""; // decoded after that, and not examined
  private missingCharacters = 0; // of fresh text, before the next examination
  private finished = false;
  /** Whether a stop string was found; no text follows. */
  stopped = false;

  constructor(
    private readonly codec: Codec,
    private readonly stop: readonly string[] = [],
  ) {
    this.steps = codec.decodeSteps();
    this.maxExamined = MAX_CLUSTER_CHARACTERS + Math.max(0, ...stop.map((one) => one.length));
  }

  /** Add a token. Return the text that has become final. */
  push(token: number): string {
    const piece = this.codec.piece(token);
    if (piece === undefined || this.finished) return "";
    let pieces = [piece];
    for (const step of this.steps) pieces = pieces.flatMap((one) => step.push(one));
    return this.emit(pieces);
  }

  /** Return the rest of the text, after the last token. */
  finish(): string {
    if (this.finished) return "";
    this.finished = true;
    return this.emit(finishSteps(this.steps));
  }

  private emit(pieces: readonly string[]): string {
    const decoded = pieces.join("");
    this.fresh += decoded;
    this.missingCharacters -= decoded.length;
    if (!this.finished && (!this.fresh || this.missingCharacters > 0)) return "";
    let text = this.waiting + this.fresh;
    this.fresh = "";
    const before = textBeforeStop(text, this.stop);
    // The next token may complete a stop string that begins before a complete one.
    let end = this.finished ? text.length : text.length - overlap(text, this.stop);
    if (before !== undefined && before.length <= end) {
      end = before.length;
      text = before;
      this.stopped = this.finished = true;
    } else if (!this.finished) {
      end = clusterBoundary(text, end);
    }
    this.waiting = text.slice(end);
    this.missingCharacters = this.waiting.length > this.maxExamined ? this.waiting.length : 0;
    return text.slice(0, end);
  }
}

let segmenter: Intl.Segmenter | undefined;

/** Return the last index, up to `limit`, where a grapheme cluster ends regardless of the following text. */
export function clusterBoundary(text: string, limit: number): number {
  segmenter ??= new Intl.Segmenter(undefined, { granularity: "grapheme" });
  const follower = text.endsWith("\r") ? "\n" : ACCENT;
  let boundary = 0;
  for (const { index } of segmenter.segment(text + follower)) {
    if (index > limit) break;
    boundary = index;
  }
  return boundary;
}

/** Return the length of the longest suffix of the text that is the beginning of a stop string. */
function overlap(text: string, stop: readonly string[]): number {
  let longest = 0;
  for (const one of stop) {
    for (let length = Math.min(one.length - 1, text.length); length > longest; length--) {
      if (text.endsWith(one.slice(0, length))) longest = length;
    }
  }
  return longest;
}

/** Return the text before the first stop string; undefined if it contains none. */
export function textBeforeStop(text: string, stop: readonly string[]): string | undefined {
  const places = stop.map((one) => text.indexOf(one)).filter((place) => place >= 0);
  return places.length ? text.slice(0, Math.min(...places)) : undefined;
}
