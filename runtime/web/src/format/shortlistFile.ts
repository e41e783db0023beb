/**
 * The arrays of a shortlist: numpy's archive (.npz) as base64 text in the metadata of the file.
 *
 * It is a stranger's text: the archive and its arrays have limits, and each is as `engine/shortlist` needs it, or refused.
 */

import { ModelFileError } from "../base/errors.js";

export const SHORTLIST_KEY = "tformer.shortlist";

const MAX_BYTES = 2 ** 29; // that are read of all entries and made of them; a small archive could fill the memory
const [END_OF_ARCHIVE, ENTRY, FILE] = [0x06054b50, 0x02014b50, 0x04034b50]; // signatures of a zip file
const [STORED, DEFLATED] = [0, 8];
const END_BYTES = 22;
const MAGIC = "\x93NUMPY";
const ITEMS = { "<i8": BigInt64Array, "<i4": Int32Array, "<i2": Int16Array, "|i1": Int8Array } as const;

/** Ids of the candidates of each source id, one after the other. */
export interface StoredTable {
  readonly starts: Int32Array;
  readonly ids: Int32Array;
}

export interface StoredShortlist {
  readonly vocabulary: number;
  readonly common: Int32Array;
  readonly tables: ReadonlyMap<string, StoredTable>;
}

/** Read the arrays of a shortlist. Throw ModelFileError if they are damaged. */
export async function readShortlist(text: string | undefined): Promise<StoredShortlist> {
  try {
    if (text === undefined) throw new Damage("it is missing");
    const arrays = await readArchive(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
    const taken = (name: string): Int32Array => {
      const array = arrays.get(name);
      if (!array) throw new Damage(`it has no ${name}`);
      return array;
    };
    const names = [...arrays.keys()].filter((name) => name.startsWith("ids/")).map((name) => name.slice(4));
    const tables = new Map(names.map((name) => [name, { starts: taken(`starts/${name}`), ids: taken(`ids/${name}`) }]));
    const shortlist = { vocabulary: taken("vocabulary")[0], common: taken("common"), tables };
    check(shortlist);
    return shortlist;
  } catch (error) {
    // Damage, or an error of atob, of typed arrays, or of decompression.
    const reason = error instanceof Error ? error.message : String(error);
    throw new ModelFileError(`the file's shortlist is damaged (${reason}): export the model again`, undefined, error);
  }
}

class Damage extends Error {}

function check({ vocabulary, common, tables }: StoredShortlist): void {
  for (const ids of [common, ...[...tables.values()].map((table) => table.ids)]) {
    if (ids.some((id) => id < 0 || id >= vocabulary)) throw new Damage("its tables hold ids outside the vocabulary");
  }
  for (const { starts, ids } of tables.values()) {
    const follows = starts.every((start, i) => start >= (i ? starts[i - 1] : 0));
    if (!starts.length || !follows || starts[starts.length - 1] > ids.length) {
      throw new Damage("its tables do not follow each other");
    }
  }
}

/** Return the arrays of an archive by name. */
async function readArchive(bytes: Uint8Array<ArrayBuffer>): Promise<Map<string, Int32Array>> {
  const view = new DataView(bytes.buffer);
  let end = bytes.length - END_BYTES;
  while (end >= 0 && view.getUint32(end, true) !== END_OF_ARCHIVE) end--;
  if (end < 0) throw new Damage("it is not an archive");
  const arrays = new Map<string, Int32Array>();
  let room = MAX_BYTES;
  const take = (size: number) => {
    room -= size;
    if (room < 0) throw new Damage("its tables are too large");
  };
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left--) {
    if (view.getUint32(at, true) !== ENTRY) throw new Damage("its archive is not whole");
    const method = view.getUint16(at + 10, true);
    const packedSize = view.getUint32(at + 20, true);
    const [nameSize, extraSize, commentSize] = [28, 30, 32].map((place) => view.getUint16(at + place, true));
    const file = view.getUint32(at + 42, true);
    const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameSize));
    if (view.getUint32(file, true) !== FILE) throw new Damage("its archive is not whole");
    const begin = file + 30 + view.getUint16(file + 26, true) + view.getUint16(file + 28, true);
    take(packedSize); // also of data that an earlier entry had
    const packed = bytes.slice(begin, begin + packedSize);
    if (packed.length !== packedSize || (method !== STORED && method !== DEFLATED)) {
      throw new Damage("its archive is not whole");
    }
    const content = method === STORED ? packed : await inflated(packed, room);
    if (content !== packed) take(content.length);
    arrays.set(name.replace(/\.npy$/, ""), arrayOf(content, take));
    at += 46 + nameSize + extraSize + commentSize;
  }
  return arrays;
}

/** Return inflated bytes, at most `limit`. */
async function inflated(packed: Uint8Array<ArrayBuffer>, limit: number): Promise<Uint8Array<ArrayBuffer>> {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const parts: Uint8Array[] = [];
  let size = 0;
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > limit) {
      await reader.cancel();
      throw new Damage("its tables are too large");
    }
    parts.push(value);
  }
  const all = new Uint8Array(size);
  let place = 0;
  for (const part of parts) {
    all.set(part, place);
    place += part.length;
  }
  return all;
}

/** Return the whole numbers of a .npy file with one axis or none. take: called with their bytes before they are copied. */
function arrayOf(content: Uint8Array<ArrayBuffer>, take: (size: number) => void): Int32Array {
  const header = new TextDecoder("latin1").decode(content.subarray(0, 1 << 10));
  const size = new DataView(content.buffer).getUint16(8, true);
  const [, type, shape] = /'descr': '([^']+)'.*'shape': \(([^)]*)\)/.exec(header.slice(0, 10 + size)) ?? [];
  const axes = (shape ?? "").split(",").filter((axis) => axis.trim());
  if (!header.startsWith(MAGIC) || content[6] !== 1 || !Object.hasOwn(ITEMS, type ?? "") || axes.length > 1) {
    throw new Damage("its tables are not lists of ids");
  }
  const Items = ITEMS[type as keyof typeof ITEMS];
  const length = axes.length ? Number(axes[0]) : 1;
  const values = new Items(content.slice(10 + size, 10 + size + length * Items.BYTES_PER_ELEMENT).buffer);
  if (values.length !== length) throw new Damage("its tables are not whole");
  take(length * Int32Array.BYTES_PER_ELEMENT);
  return Int32Array.from(values as ArrayLike<number | bigint> as ArrayLike<number>, Number);
}
