/**
 * Forms of integer weights that products read, made from the forms that a file stores.
 *
 * A product reads int8 columns (inner, columns), whole numbers times the scale of a column. A row takes `stride` numbers, so
 * that zeros may follow its columns. `tformer_runtime/format/weight_forms.py` has the same in Python. Each function writes
 * strips of columns, so that both sides of the transposition stay in the cache; its time grows with the number of weights,
 * about a second for a billion.
 */

const STRIP_COLUMNS = 64;

/** The sizes of weights. */
export interface ColumnSizes {
  readonly inner: number;
  readonly columns: number;
  readonly stride: number;
}

/** Blocks of `block` rows. hasWholeZeros: whether z / 2 is a whole number, without the half of an odd z. */
export interface Blocks {
  readonly block: number;
  readonly hasWholeZeros: boolean;
}

/**
 * Return the columns m · q − ⌊m · z / 2⌋ of weights of 4 bits.
 *
 * packed: the q, 0 … 15, (columns, blocks, block / 2). Byte i of a block holds its rows 2i and 2i + 1, the first in the lower
 *     half.
 * codes: (columns, blocks), m − 1 in the lower 3 bits and z in the upper 5.
 */
export function columnsOf4Bits(
  packed: Uint8Array,
  codes: Uint8Array,
  { block, hasWholeZeros }: Blocks,
  sizes: ColumnSizes,
): Int8Array {
  const { inner, columns, stride } = sizes;
  const out = new Int8Array(inner * stride);
  const blocks = Math.ceil(inner / block);
  const half = block / 2;
  const mask = hasWholeZeros ? ~1 : ~0;
  for (let first = 0; first < columns; first += STRIP_COLUMNS) {
    const last = Math.min(first + STRIP_COLUMNS, columns);
    for (let i = 0; i < blocks; i++) {
      for (let pair = 0; pair < half && i * block + 2 * pair < inner; pair++) {
        const row = i * block + 2 * pair;
        const place = row * stride;
        const hasSecond = row + 1 < inner;
        for (let column = first; column < last; column++) {
          const code = codes[column * blocks + i];
          const byte = packed[(column * blocks + i) * half + pair];
          const m = (code & 7) + 1;
          const shift = (m * ((code >> 3) & mask)) >> 1;
          out[place + column] = m * (byte & 15) - shift;
          if (hasSecond) out[place + stride + column] = m * (byte >> 4) - shift;
        }
      }
    }
  }
  return out;
}

/**
 * Return the columns of weights of 6 bits, 32 less than stored.
 *
 * upper, lower: (columns, 2 · groups) and (columns, groups) of 4 rows. A byte has the upper 4 bits of two rows or the lower 2
 *     bits of four, the first in the lowest bits.
 */
export function columnsOf6Bits(upper: Uint8Array, lower: Uint8Array, sizes: ColumnSizes): Int8Array {
  const { inner, columns, stride } = sizes;
  const out = new Int8Array(inner * stride);
  const groups = Math.ceil(inner / 4);
  for (let first = 0; first < columns; first += STRIP_COLUMNS) {
    const last = Math.min(first + STRIP_COLUMNS, columns);
    for (let row = 0; row < inner; row++) {
      const place = row * stride;
      const [pair, group] = [row >> 1, row >> 2];
      const [upperShift, lowerShift] = [4 * (row & 1), 2 * (row & 3)];
      for (let column = first; column < last; column++) {
        const high = (upper[column * 2 * groups + pair] >> upperShift) & 15;
        out[place + column] = ((high << 2) | ((lower[column * groups + group] >> lowerShift) & 3)) - 32;
      }
    }
  }
  return out;
}

/** Return the columns of weights (columns, at least `inner`) of 8 bits. rowBytes: of a column there. middle: stored for 0. */
export function transposedColumns(values: Uint8Array, rowBytes: number, middle: number, sizes: ColumnSizes): Int8Array {
  const { inner, columns, stride } = sizes;
  const out = new Int8Array(inner * stride);
  for (let first = 0; first < columns; first += STRIP_COLUMNS) {
    const last = Math.min(first + STRIP_COLUMNS, columns);
    for (let row = 0; row < inner; row++) {
      const place = row * stride;
      for (let column = first; column < last; column++) out[place + column] = values[column * rowBytes + row] - middle;
    }
  }
  return out;
}

/** Return the columns of weights that are stored as such. */
export function spacedColumns(values: Uint8Array, { inner, columns, stride }: ColumnSizes): Int8Array {
  const out = new Int8Array(inner * stride);
  const bytes = new Uint8Array(out.buffer);
  for (let row = 0; row < inner; row++) {
    bytes.set(values.subarray(row * columns, (row + 1) * columns), row * stride);
  }
  return out;
}
