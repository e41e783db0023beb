/** The state of decoding: context, caches and lengths of the rows of a batch. */

import { UnsupportedCallError } from "../base/errors.js";
import type { NumberArray } from "../base/arrays.js";
import type { EncoderContext } from "./encoderContext.js";
import type { KVCache } from "./kvCache.js";
import type { Candidates } from "./shortlist.js";

export type LogitPositions = "last" | "all"; // which new tokens get logits: the last one of each row, or all

/** A run of the decode stage for one shape of tokens, with all inputs and outputs bound. */
export interface DecodeCall {
  /**
   * Run as `Engine.step` does. Return the logits, which the next run overwrites.
   *
   * totalSlots: cached tokens of the longest row after the call.
   */
  run(
    state: State,
    tokens: ArrayLike<number>,
    counts: Int32Array | undefined,
    totalSlots: number,
  ): Promise<Float32Array>;
  dispose(): void;
}

export class State {
  /** The cached tokens of each row. Read-only for callers. */
  lengths: Int32Array;
  maxRowLength = 0;
  /** `lengths` before the latest step, while the carries of that time still exist; else undefined. */
  lengthsBefore: Int32Array | undefined;
  /** Calls with their bound tensors, by their shapes. */
  readonly calls = new Map<string, DecodeCall>();
  /** Extra outputs of each row at its latest token, or at all new tokens, by name. The next step replaces them. */
  extras: ReadonlyMap<string, NumberArray> = new Map();
  released = false;

  /**
   * encoded: the requested extra outputs of encode, for each request.
   * stepExtras: names of the extra outputs of each step.
   * candidates: of each row; undefined if every row may have any id.
   * adapters: the number of each row's adapter; undefined for a file without adapters.
   */
  constructor(
    readonly context: EncoderContext,
    readonly cache: KVCache,
    rows: number,
    readonly encoded: ReadonlyMap<string, NumberArray>,
    readonly stepExtras: readonly string[],
    readonly candidates?: Candidates,
    public adapters?: Int32Array,
  ) {
    this.lengths = new Int32Array(rows);
  }

  get rows(): number {
    return this.lengths.length;
  }

  /** Throw UnsupportedCallError if the state has been released. */
  check(): void {
    if (this.released) {
      throw new UnsupportedCallError("the state has been released and cannot be continued: read its inputs again");
    }
  }

  /**
   * Drop the cached tokens of each row beyond the first `length`.
   *
   * With carries, rows may lose more: a carry exists for the time after the latest step and before it, and for no other.
   * So rows go back to the time before the step, or to no tokens at all. Read `lengths` for the tokens that are left.
   */
  rewind(length: number): void {
    let kept: Int32Array = this.lengths.map((own) => Math.min(own, length));
    if (this.cache.hasCarries && kept.some((own, row) => own < this.lengths[row])) {
      const before = this.lengthsBefore;
      if (before && before.every((own, row) => own <= kept[row])) {
        this.cache.swapSides();
        kept = before;
      } else {
        this.cache.clear();
        kept = new Int32Array(kept.length);
      }
      this.lengthsBefore = undefined;
    }
    this.setLengths(kept);
  }

  setLengths(lengths: Int32Array): void {
    this.lengths = lengths;
    this.maxRowLength = lengths.reduce((most, length) => Math.max(most, length), 0);
  }

  /** Dispose the bound calls, after a change of the tensors to which they are bound. */
  dropCalls(): void {
    for (const call of this.calls.values()) call.dispose();
    this.calls.clear();
  }

  /** Free the memory; the state cannot be used any more. */
  release(): void {
    if (this.released) return;
    this.released = true;
    this.dropCalls();
    this.candidates?.release();
    this.cache.release();
    this.context.release();
  }
}
