/**
 * Forms of integer weights that products read, made from the forms that a file stores.
 *
 * The weights of a column are whole numbers times the scale of the column. `tformer_runtime/format/weight_forms.py` has the
 * same in Python. Each function writes strips of columns, so that both sides of the transposition stay in the cache; its
 * time grows with the number of weights, about a second for a billion.
 */

const STRIP_COLUMNS = 64;

/** The sizes of packed weights: (columns, blocks, bytes of a block). inner: their rows, without those that fill blocks. */
export interface PackedSizes {
  readonly inner: number;
  readonly columns: number;
  readonly block: number;
}

/**
 * Return the columns m · (q − z), int8 (inner, columns), of weights of 4 bits.
 *
 * packed: the q, 0 … 15. Byte i of a block holds its rows 2i and 2i + 1, the first in the lower half.
 * codes: (columns, blocks), m − 1 in the lower 3 bits and z in the upper 4.
 */
export function columnsOf4Bits(packed: Uint8Array, codes: Uint8Array, sizes: PackedSizes): Int8Array {
  const { inner, columns, block } = sizes;
  const out = new Int8Array(inner * columns);
  const blocks = Math.ceil(inner / block);
  const half = block / 2;
  for (let first = 0; first < columns; first += STRIP_COLUMNS) {
    const last = Math.min(first + STRIP_COLUMNS, columns);
    for (let i = 0; i < blocks; i++) {
      for (let pair = 0; pair < half && i * block + 2 * pair < inner; pair++) {
        const row = i * block + 2 * pair;
        const place = row * columns;
        const hasSecond = row + 1 < inner;
        for (let column = first; column < last; column++) {
          const code = codes[column * blocks + i];
          const byte = packed[(column * blocks + i) * half + pair];
          const m = (code & 7) + 1;
          const z = code >> 4;
          out[place + column] = m * ((byte & 15) - z);
          if (hasSecond) out[place + columns + column] = m * ((byte >> 4) - z);
        }
      }
    }
  }
  return out;
}

/** Return the columns, int8 (inner, columns), of weights of 8 bits that are stored plus 128. */
export function columnsOf8Bits(packed: Uint8Array, sizes: PackedSizes): Int8Array {
  const { inner, columns, block } = sizes;
  const out = new Int8Array(inner * columns);
  const stride = Math.ceil(inner / block) * block;
  for (let first = 0; first < columns; first += STRIP_COLUMNS) {
    const last = Math.min(first + STRIP_COLUMNS, columns);
    for (let row = 0; row < inner; row++) {
      const place = row * columns;
      for (let column = first; column < last; column++) out[place + column] = packed[column * stride + row] - 128;
    }
  }
  return out;
}
