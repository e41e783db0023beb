/** Moves of the rows of a batch, as if all copies happened at once. */

import { withRows, type Backend, type PartsCopy, type Tensor } from "../backend/session.js";
import { sizeOf } from "../base/arrays.js";

/** A copy of a row to a target, from another row or from a saved copy of it. */
export interface RowCopy {
  readonly target: number;
  readonly source: number;
  readonly fromSaved: boolean;
}

/** The moves in their order, and the rows to save before them. */
export interface RowMoves {
  readonly saved: readonly number[];
  readonly copies: readonly RowCopy[];
}

/**
 * Return the moves that make row i what row sources[i] was, for all i that change.
 *
 * Each target is copied once, after all rows that read it. Of rows that swap in a cycle, one is saved.
 */
export function planMoves(sources: ArrayLike<number>): RowMoves {
  const sourceOf = new Map<number, number>();
  const readers = new Map<number, number>();
  for (let row = 0; row < sources.length; row++) {
    if (sources[row] === row) continue;
    sourceOf.set(row, sources[row]);
    readers.set(sources[row], (readers.get(sources[row]) ?? 0) + 1);
  }
  const ready = [...sourceOf.keys()].filter((row) => !readers.get(row));
  const saved: number[] = [];
  const copies: RowCopy[] = [];
  while (sourceOf.size) {
    if (!ready.length) {
      const [row] = sourceOf.keys();
      saved.push(row);
      ready.push(row);
    }
    const target = ready.pop()!;
    const source = sourceOf.get(target)!;
    sourceOf.delete(target);
    copies.push({ target, source, fromSaved: saved.includes(source) });
    const left = readers.get(source)! - 1;
    readers.set(source, left);
    if (!left && sourceOf.has(source) && !saved.includes(source)) ready.push(source);
  }
  return { saved, copies };
}

/**
 * Move the rows of buffers.
 *
 * plan: `planMoves(sources)`.
 * copyOf: returns the copy of a row of `from` to row `move.target` of a buffer. `from` is the buffer or has saved rows.
 */
export function moveRows(
  backend: Backend,
  buffers: readonly Tensor[],
  { saved, copies }: RowMoves,
  copyOf: (buffer: Tensor, from: Tensor, row: number, move: RowCopy) => PartsCopy,
): void {
  if (!copies.length) return;
  const savedRows: Tensor[] = [];
  try {
    const all: PartsCopy[] = [];
    for (const buffer of buffers) {
      const kept = saved.length ? backend.tensorLike(buffer, withRows(buffer.dims, saved.length)) : buffer;
      if (saved.length) savedRows.push(kept);
      saved.forEach((row, i) => all.push(rowCopy(buffer, row, kept, i)));
      for (const move of copies) {
        const { source, fromSaved } = move;
        all.push(fromSaved ? copyOf(buffer, kept, saved.indexOf(source), move) : copyOf(buffer, buffer, source, move));
      }
    }
    backend.copyParts(all);
  } finally {
    for (const copy of savedRows) copy.dispose();
  }
}

/** Return the copy of a row of one tensor to a row of another. */
export function rowCopy(from: Tensor, source: number, to: Tensor, target: number): PartsCopy {
  const size = sizeOf(from.dims.slice(1));
  const [fromStart, toStart] = [source * size, target * size];
  return { from, fromStart, fromStride: 0, to, toStart, toStride: 0, size, parts: 1 };
}

/** Return whether rows are all of `count` rows in their order. */
export function isIdentity(rows: ArrayLike<number>, count: number): boolean {
  if (rows.length !== count) return false;
  for (let i = 0; i < count; i++) if (rows[i] !== i) return false;
  return true;
}
