/**
 * Key/value caches: buffers that grow with the need, and rows that move.
 *
 * A cache tensor has its batch on axis 0 and its slots on an axis that the manifest names. Slot j of a row holds the row's
 * token j, so a row of length n uses slots 0 … n-1, and later slots are never read. A run reads and writes the buffers
 * directly: past and present are one tensor.
 *
 * A cache without slots is a carry: a value of fixed size after the row's last token. A step reads it from one side and
 * writes it to the other. So the carries before the latest step are still there, and a row can go back to them.
 *
 * Rows that move are copied from their first difference on. Every slot has the id of the write that filled it, so that
 * beams, which share most of their past, copy little.
 */

import type { Backend, PartsCopy, Tensor } from "../backend/session.js";
import { sizeOf } from "../base/arrays.js";
import { allOrNothing, disposeAll, type Keep } from "../base/disposal.js";
import { isCarry, SLOT_AXIS, type CacheSpec } from "../format/manifest.js";
import type { MemoryUse } from "./memoryUse.js";
import { moveRows, planMoves } from "./rowMoves.js";

const FIRST_BUFFER_SLOTS = 32; // larger buffers have twice, four times, … as many
const MAX_BUFFER_RATIO = 4; // buffers of at most this multiple of the need are allocated at once
const GROWTH_DIVISOR = 8; // buffers get 1/8 more slots than needed if rows will grow

/** Return FIRST_BUFFER_SLOTS, doubled until they suffice, but at most the greater of `maxSlots` and `required`. */
function bufferSlots(required: number, maxSlots: number): number {
  let slots = FIRST_BUFFER_SLOTS;
  while (slots < required) slots *= 2;
  return Math.max(required, Math.min(slots, maxSlots));
}

/**
 * One cached tensor.
 *
 * outer, inner: the number of values of the axes between batch and slots, and after the slots; of a carry, 1 and all.
 * buffers: one for each side, past and present, or one for both.
 * views: the rows of the buffers that are in use.
 */
interface CachedTensor {
  readonly spec: CacheSpec;
  readonly carry: boolean;
  readonly outer: number;
  readonly inner: number;
  buffers: Tensor[];
  views: Tensor[];
}

export class KVCache {
  readonly sides: 1 | 2;
  readonly hasCarries: boolean;
  /** The side that the next step reads as past. */
  side = 0;
  private slotCapacity = 0;
  private rowCapacity = 0;
  private readonly tensors: CachedTensor[];
  private writeIds = new Int32Array(0); // (rowCapacity, slotCapacity): slots with equal ids have equal contents
  private lastWriteId = 0;
  private bytes = 0;

  /**
   * Create a cache without slots.
   *
   * rows: the rows that are in use. roomForRows: the rows for which buffers are allocated.
   * maxTokens: the expected maximum of tokens of a row; 0 if it is not known.
   */
  constructor(
    private readonly backend: Backend,
    private readonly specs: readonly CacheSpec[],
    private readonly maxLength: number,
    private rows: number,
    private readonly roomForRows: number,
    private readonly maxTokens: number,
    private readonly use: MemoryUse,
  ) {
    this.sides = specs.every((spec) => spec.inPlace) ? 1 : 2;
    this.hasCarries = specs.some(isCarry);
    this.tensors = specs.map((spec) => {
      const slots = spec.shape.indexOf(SLOT_AXIS);
      const carry = slots < 0;
      const sizes = spec.shape.map((size) => (typeof size === "number" ? size : 1));
      const outer = carry ? 1 : sizeOf(sizes.slice(1, slots));
      return { spec, carry, outer, inner: sizeOf(sizes) / outer, buffers: [], views: [] };
    });
  }

  /** Return the tensors to bind as past, in the order of the manifest's caches. */
  past(side = this.side): Tensor[] {
    return this.tensors.map(({ views }) => views[side % views.length]);
  }

  /** Return the tensors to bind as present. side: of the past. */
  present(side = this.side): Tensor[] {
    return this.past(side + 1);
  }

  /** Record that a step wrote `newTokens` slots of each row. lengths: the cached tokens of each row before it. */
  recordWrites(lengths: Int32Array, newTokens: number): void {
    for (let row = 0; row < lengths.length; row++) {
      const begin = row * this.slotCapacity + lengths[row];
      const end = Math.min(begin + newTokens, (row + 1) * this.slotCapacity);
      this.writeIds.fill(++this.lastWriteId, begin, end);
    }
    this.side = (this.side + 1) % this.sides;
  }

  /** Grow the buffers to `slots` slots and keep the first `used`. Return whether there are new tensors to bind. */
  reserve(slots: number, used: number): boolean {
    if (slots <= this.slotCapacity && this.rows <= this.rowCapacity) return false;
    this.reallocate(identity(this.rows), Math.max(this.slotCapacity, this.newSlots(slots)), used);
    return true;
  }

  /**
   * Replace row i by row rows[i]. Return whether there are new tensors to bind. Rows may repeat, and be fewer or more.
   *
   * lengths: the used slots of each row before the call.
   */
  reorder(rows: Int32Array, lengths: Int32Array): boolean {
    const rowsBefore = this.rows;
    if (!this.slotCapacity) {
      this.rows = rows.length;
      return rowsBefore !== rows.length;
    }
    if (rows.length > this.rowCapacity) {
      let used = 0;
      for (const row of rows) used = Math.max(used, lengths[row]);
      this.reallocate(rows, this.slotCapacity, used);
      return true;
    }
    this.moveInPlace(rows, lengths);
    if (rowsBefore === rows.length) return false;
    const buffers = this.tensors.map((tensor) => tensor.buffers);
    const views = allOrNothing((keep) => viewsOf(buffers, rows.length, keep));
    this.rows = rows.length;
    this.tensors.forEach((tensor, k) => {
      disposeAll(tensor.views);
      tensor.views = views[k];
    });
    return true;
  }

  private moveInPlace(rows: Int32Array, lengths: Int32Array): void {
    const plan = planMoves(rows);
    const { saved, copies } = plan;
    if (!copies.length) return;
    const slots = this.slotCapacity;
    const savedIds = new Map(saved.map((row) => [row, this.writeIds.slice(row * slots, (row + 1) * slots)]));
    const begins = new Map(
      copies.map(({ target, source }) => [
        target,
        firstDifference(this.writeIds, target * slots, source * slots, lengths[source]),
      ]),
    );
    const tensorOf = new Map(this.tensors.map((tensor) => [tensor.buffers[this.side % tensor.buffers.length], tensor]));
    moveRows(this.backend, [...tensorOf.keys()], plan, (buffer, from, row, { target, source }) =>
      slotsCopy(tensorOf.get(buffer)!, from, row, slots, buffer, target, slots, begins.get(target)!, lengths[source]),
    );
    for (const { target, source, fromSaved } of copies) {
      const ids = fromSaved ? savedIds.get(source)! : this.writeIds.subarray(source * slots, (source + 1) * slots);
      this.writeIds.set(ids, target * slots);
    }
  }

  /** Return a new cache whose row i is a copy of row rows[i], in its first `used` slots. */
  copy(rows: Int32Array, used: number, roomForRows: number, maxTokens: number): KVCache {
    const other = new KVCache(this.backend, this.specs, this.maxLength, rows.length, roomForRows, maxTokens, this.use);
    if (!used) return other;
    other.reallocate(rows, other.newSlots(used), used, this);
    return other;
  }

  /** Go back to the side that the latest step read. No row may have moved since. */
  swapSides(): void {
    this.side = (this.side + this.sides - 1) % this.sides;
  }

  /** Set all caches to zeros, as for rows without tokens. */
  clear(): void {
    for (const { buffers } of this.tensors) for (const buffer of buffers) buffer.clear();
    this.writeIds.fill(0);
  }

  release(): void {
    for (const tensor of this.tensors) {
      disposeAll([...tensor.views, ...tensor.buffers]);
      tensor.views = tensor.buffers = [];
    }
    this.use.add(-this.bytes);
    this.bytes = this.slotCapacity = this.rowCapacity = 0;
  }

  /**
   * Return the slots of new buffers: at most the expected maximum of the rows, unless they need more.
   *
   * If the maximum is small, the buffers have all these slots at once, because growing takes time.
   */
  private newSlots(required: number): number {
    const maximum = this.maxTokens;
    if (required > maximum) return bufferSlots(required, this.maxLength);
    // A cache with two sides is copied at each step, so that unused slots would cost time.
    if (maximum <= MAX_BUFFER_RATIO * Math.max(required, FIRST_BUFFER_SLOTS) && this.sides === 1) return maximum;
    return bufferSlots(Math.min(required + Math.floor(required / GROWTH_DIVISOR), maximum), maximum);
  }

  /** Allocate new buffers and copy row rows[i] to row i, in its first `used` slots. source: the cache to copy from. */
  private reallocate(rows: Int32Array, slots: number, used: number, source: KVCache = this): void {
    const rowCapacity = Math.max(rows.length, this.roomForRows);
    const writeIds = new Int32Array(rowCapacity * slots);
    const [buffers, views] = allOrNothing((keep) => {
      const made = this.tensors.map(({ spec }) => {
        const dims = spec.shape.map((size) => (size === SLOT_AXIS ? slots : Number(size)));
        dims[0] = rowCapacity;
        const sides = spec.inPlace ? 1 : 2;
        return Array.from({ length: sides }, () => keep(this.backend.deviceTensor(spec.dtype, dims)));
      });
      if (used && source.slotCapacity) this.backend.copyParts(this.copiesOf(source, rows, slots, used, made));
      return [made, viewsOf(made, rows.length, keep)] as const;
    });
    if (used && source.slotCapacity) {
      rows.forEach((from, to) => {
        const begin = from * source.slotCapacity;
        writeIds.set(source.writeIds.subarray(begin, begin + used), to * slots);
      });
    }
    for (const [k, tensor] of this.tensors.entries()) {
      disposeAll([...tensor.views, ...tensor.buffers]);
      tensor.views = views[k];
      tensor.buffers = buffers[k];
    }
    this.rows = rows.length;
    this.lastWriteId = source.lastWriteId;
    this.writeIds = writeIds;
    this.slotCapacity = slots;
    this.rowCapacity = rowCapacity;
    const bytes = buffers.flat().reduce((sum, buffer) => sum + buffer.byteLength, 0);
    this.use.add(bytes - this.bytes);
    this.bytes = bytes;
  }

  /** Return the copies of the first `used` slots of rows of a cache to new buffers, with `slots` slots. */
  private copiesOf(
    source: KVCache,
    rows: Int32Array,
    slots: number,
    used: number,
    buffers: readonly (readonly Tensor[])[],
  ): PartsCopy[] {
    const copies: PartsCopy[] = [];
    this.tensors.forEach((tensor, k) => {
      const sources = source.tensors[k].buffers;
      // Of carries, both sides are kept: rows can go back to those before the latest step.
      for (let offset = 0; offset < (tensor.carry ? sources.length : 1); offset++) {
        const from = sources[(source.side + offset) % sources.length];
        const to = buffers[k][(this.side + offset) % buffers[k].length];
        rows.forEach((row, i) => {
          copies.push(slotsCopy(tensor, from, row, source.slotCapacity, to, i, slots, 0, used));
        });
      }
    });
    return copies;
  }
}

/** Return the first rows of buffers, for each tensor and side. */
function viewsOf(buffers: readonly (readonly Tensor[])[], rows: number, keep: Keep): Tensor[][] {
  return buffers.map((sides) => sides.map((buffer) => keep(buffer.rows(rows))));
}

/** Return the copy of slots begin … end - 1 of a row, or of all of it for a carry. */
function slotsCopy(
  tensor: CachedTensor,
  from: Tensor,
  sourceRow: number,
  sourceSlots: number,
  to: Tensor,
  targetRow: number,
  targetSlots: number,
  begin: number,
  end: number,
): PartsCopy {
  const { outer, inner, carry } = tensor;
  const [first, size] = carry ? [0, inner] : [begin * inner, Math.max(0, end - begin) * inner];
  const [fromStride, toStride] = carry ? [inner, inner] : [sourceSlots * inner, targetSlots * inner];
  return {
    from,
    fromStart: sourceRow * outer * fromStride + first,
    fromStride,
    to,
    toStart: targetRow * outer * toStride + first,
    toStride,
    size,
    parts: outer,
  };
}

/** Return the first slot in which two rows differ; `end` if none of the first `end` does. */
function firstDifference(ids: Int32Array, one: number, other: number, end: number): number {
  for (let slot = 0; slot < end; slot++) if (ids[one + slot] !== ids[other + slot]) return slot;
  return end;
}

function identity(count: number): Int32Array {
  return Int32Array.from({ length: count }, (_, i) => i);
}
