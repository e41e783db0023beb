/** The greatest logits of a row, with their log-probabilities in float32 as in the Python runtime. */

const { fround } = Math;

/** Return the place of the greatest of the logits begin … end - 1, relative to `begin`: the first of equal ones. */
export function argmax(logits: Float32Array, begin: number, end: number): number {
  let best = begin;
  let top = logits[begin];
  for (let i = begin + 1; i < end; i++) {
    if (logits[i] > top) {
      top = logits[i];
      best = i;
    }
  }
  return best - begin;
}

/** The likeliest ids with their log-probabilities, the likeliest first. */
export type Alternatives = readonly (readonly [id: number, logprob: number])[];

/**
 * Return the `count` likeliest tokens of a row with their log-probabilities, without forbidden tokens.
 *
 * norm: of the row; 0 if the values are log-probabilities.
 */
export function topAlternatives(
  logits: Float32Array,
  begin: number,
  end: number,
  norm: number,
  count: number,
): Alternatives {
  const top = new TopValues(Math.min(count, end - begin));
  top.scan(logits, begin, end);
  return Array.from({ length: top.size }, (_, i) => [top.places[i], fround(top.values[i] - norm)] as const).filter(
    ([, logprob]) => logprob > -Infinity,
  );
}

/** The greatest values of a row, the greatest first, and their places. Equal values are in the order of their places. */
export class TopValues {
  readonly values: Float32Array;
  readonly places: Int32Array;
  size = 0;

  constructor(private readonly capacity: number) {
    this.values = new Float32Array(capacity);
    this.places = new Int32Array(capacity);
  }

  /** Take the values begin … end - 1, with their places relative to `begin`. Cost: one pass, and few insertions. */
  scan(row: Float32Array, begin: number, end: number): void {
    for (let i = begin; i < end; i++) {
      const value = row[i];
      if (this.size < this.capacity || value > this.values[this.capacity - 1]) this.insert(value, i - begin);
    }
  }

  insert(value: number, place: number): void {
    if (!this.capacity) return;
    const { values, places, capacity } = this;
    let at = this.size < capacity ? this.size++ : value > values[capacity - 1] ? capacity - 1 : -1;
    if (at < 0) return;
    for (; at > 0 && values[at - 1] < value; at--) {
      values[at] = values[at - 1];
      places[at] = places[at - 1];
    }
    values[at] = value;
    places[at] = place;
  }
}
