/**
 * A vocabulary shortlist: the candidate ids of a request, so that a step computes only their logits.
 *
 * The file has tables, learned from data: the ids that are common in all targets, and for each source id the target ids
 * that occur with it. The candidates of a request are the common ids, the ids of its source ids, and the ids that its
 * options name. A row has logits for its candidates and -Infinity for all other ids. So its result does not depend on the
 * other rows of the batch.
 *
 * If the candidates of all rows together are few enough, their columns of the output projection are gathered once, when the
 * rows start, and each step multiplies with these columns. Otherwise each step computes all columns.
 */

import type { Tensor } from "../backend/session.js";
import type { Sources } from "../format/sizes.js";
import type { MemoryUse } from "./memoryUse.js";

const MAX_CANDIDATE_SHARE = 1 / 8; // of all columns; if the candidates are more, gathering them saves no time
const MIN_CANDIDATE_COLUMNS = 256; // this number of columns is gathered even if its share is greater

/** Candidates of each source id: source id i has ids[starts[i]] … ids[starts[i + 1] - 1]. */
export interface CandidateTable {
  readonly starts: Int32Array;
  readonly ids: Int32Array;
}

/** The tables of a shortlist. */
export class Shortlist {
  /**
   * vocabulary: the number of ids.
   * common: ids that are candidates of every request.
   * tables: name of a request input → candidates of each of its ids.
   */
  constructor(
    readonly vocabulary: number,
    readonly common: Int32Array,
    readonly tables: ReadonlyMap<string, CandidateTable>,
  ) {}

  /**
   * Return the candidates of one request, in order.
   *
   * sources: its inputs. named: further ids that its options name.
   * Cost: one pass over the vocabulary, and over the candidates of each source id.
   */
  candidates(sources: Sources, named: Iterable<number>): Int32Array {
    const chosen = new Uint8Array(this.vocabulary);
    for (const id of this.common) chosen[id] = 1;
    for (const [name, { starts, ids }] of this.tables) {
      for (const source of new Set<number>(sources.get(name)!.data)) {
        if (source < 0 || source >= starts.length - 1) continue;
        for (let i = starts[source]; i < starts[source + 1]; i++) chosen[ids[i]] = 1;
      }
    }
    for (const id of named) if (id >= 0 && id < this.vocabulary) chosen[id] = 1;
    return placesOf(chosen);
  }
}

/** The candidates of the rows of a state, and the columns of the projection that are gathered for them. */
export class Candidates {
  /** The ids of the gathered columns, in order; empty while steps compute all columns. */
  readonly ids: Int32Array;
  private columns: Tensor | undefined;

  /** rows: the candidates of each row, the same array for rows of one request; undefined for a row with all ids. */
  constructor(
    public rows: readonly (Int32Array | undefined)[],
    readonly vocabulary: number,
    private readonly use: MemoryUse,
  ) {
    const ids = unionOf(rows, vocabulary);
    this.ids = ids && ids.length <= maxColumns(vocabulary) ? ids : NO_IDS;
  }

  /** The gathered columns; undefined while steps compute all columns. */
  get weight(): Tensor | undefined {
    return this.columns;
  }

  /** Keep the gathered columns, which this object disposes. */
  setColumns(columns: Tensor): void {
    this.columns = columns;
    this.use.add(columns.byteLength);
  }

  /** Replace row i by row rows[i]. */
  reorder(rows: Int32Array): void {
    this.rows = Array.from(rows, (row) => this.rows[row]);
  }

  release(): void {
    if (!this.columns) return;
    this.use.add(-this.columns.byteLength);
    this.columns.dispose();
    this.columns = undefined;
  }
}

/** Scatters the computed columns to logits of the whole vocabulary, with -Infinity for all ids but the candidates. */
export class LogitScatter {
  private readonly logits: Float32Array;
  private rows: readonly (Int32Array | undefined)[] = [];
  private columns: readonly (Int32Array | undefined)[] = []; // of each row's candidates

  constructor(
    numRows: number,
    private readonly positions: number,
    private readonly candidates: Candidates,
  ) {
    this.logits = new Float32Array(numRows * positions * candidates.vocabulary);
  }

  /** Return (rows, positions, vocabulary), which the next call overwrites. computed: (rows, positions, columns). */
  scatter(computed: Float32Array): Float32Array {
    const { positions, logits } = this;
    const { ids, rows, vocabulary } = this.candidates;
    const width = ids.length || vocabulary;
    if (rows.length !== this.rows.length || rows.some((row, i) => row !== this.rows[i])) {
      logits.fill(-Infinity);
      this.rows = rows;
      const known = new Map<Int32Array, Int32Array>();
      this.columns = rows.map((row) => {
        if (!row || !ids.length) return row;
        if (!known.has(row)) known.set(row, columnsOf(row, ids));
        return known.get(row);
      });
    }
    this.rows.forEach((row, r) => {
      for (let position = r * positions; position < (r + 1) * positions; position++) {
        const [to, from] = [position * vocabulary, position * width];
        if (!row) {
          logits.set(computed.subarray(from, from + width), to);
          continue;
        }
        const columns = this.columns[r]!;
        for (let i = 0; i < row.length; i++) logits[to + row[i]] = computed[from + columns[i]];
      }
    });
    return logits;
  }
}

/** Return the upper limit of gathered columns. With more candidates, computing all columns is as fast. */
export function maxColumns(vocabulary: number): number {
  return Math.trunc(Math.max(MAX_CANDIDATE_SHARE * vocabulary, Math.min(MIN_CANDIDATE_COLUMNS, vocabulary / 4)));
}

const NO_IDS = new Int32Array(0);

/** Return the candidates of all rows together, in order; undefined if a row may have any id. */
function unionOf(rows: readonly (Int32Array | undefined)[], vocabulary: number): Int32Array | undefined {
  const chosen = new Uint8Array(vocabulary);
  for (const ids of new Set(rows)) {
    if (!ids) return undefined;
    for (const id of ids) chosen[id] = 1;
  }
  return placesOf(chosen);
}

function placesOf(chosen: Uint8Array): Int32Array {
  const places: number[] = [];
  chosen.forEach((isChosen, place) => isChosen && places.push(place));
  return Int32Array.from(places);
}

/** Return the place of each id of a row in `all`; both are in order. */
function columnsOf(row: Int32Array, all: Int32Array): Int32Array {
  let place = 0;
  return row.map((id) => {
    while (all[place] !== id) place++;
    return place;
  });
}
