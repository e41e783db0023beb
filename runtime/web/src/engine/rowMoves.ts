/** Moves of the rows of a batch, as if all copies happened at once. */

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

/** Return whether rows are all of `count` rows in their order. */
export function isIdentity(rows: ArrayLike<number>, count: number): boolean {
  if (rows.length !== count) return false;
  for (let i = 0; i < count; i++) if (rows[i] !== i) return false;
  return true;
}
