/**
 * Places for downloaded files: the Cache API, the origin private file system, or a store of the user.
 *
 * A file is kept as pieces and one record, which is written after each piece and names the pieces that are whole. So a
 * download that broke off continues later, and nothing half-written is read.
 */

import { errorSummary, OptionError } from "../base/errors.js";
import { hexOf, sha256 } from "../base/sha256.js";
import { shown } from "../base/validation.js";

/** A place for bytes by key. `put` replaces all bytes of a key at once: another call never reads a part of them. */
export interface ModelStore {
  get(key: string): Promise<Uint8Array | undefined>;
  put(key: string, bytes: Uint8Array): Promise<void>;
  delete(key: string): Promise<void>;
}

/** How a version of a file is told from others. */
export interface Version {
  /** The ETag of the server, or else the date of the last change. */
  readonly validator: string;
  /** Bytes of the whole file. */
  readonly total: number;
}

/** The part of a file in a store: `bytes` from the beginning. */
export interface Kept {
  readonly version: Version;
  readonly bytes: number;
}

interface Record extends Version {
  readonly format: typeof FORMAT;
  readonly sizes: readonly number[]; // of the pieces that are whole
}

const NAME = "tformer-models";
const FORMAT = 1;
export const PIECE_BYTES = 1 << 23;

/** The pieces and the record of the file of one address. */
export class StoredFile {
  private readonly prefix: Promise<string>; // of the keys

  constructor(
    private readonly store: ModelStore,
    address: string,
  ) {
    this.prefix = shortHash(address, 16); // names of files are short and have no separators
  }

  /** Return the version that is kept, and its bytes so far; undefined if there is none. */
  async kept(): Promise<Kept | undefined> {
    const record = await this.record();
    if (!record) return undefined;
    const { validator, total, sizes } = record;
    return { version: { validator, total }, bytes: sizes.reduce((a, b) => a + b, 0) };
  }

  /** Copy the kept bytes of a version to the beginning of `target`. Return their number; 0 if a piece is not whole. */
  async read(version: Version, target: Uint8Array): Promise<number> {
    const record = await this.record();
    if (!record || !isSame(record, version)) return 0;
    let place = 0;
    for (const [i, size] of record.sizes.entries()) {
      const piece = await this.store.get(await this.pieceKey(version, i));
      if (piece?.length !== size || place + size > target.length) return 0;
      target.set(piece, place);
      place += size;
    }
    return place;
  }

  /** Keep the bytes from the end of the kept ones on as a piece. kept: the sizes of the pieces so far. */
  async append(version: Version, kept: readonly number[], piece: Uint8Array): Promise<void> {
    await this.store.put(await this.pieceKey(version, kept.length), piece);
    const record: Record = { format: FORMAT, ...version, sizes: [...kept, piece.length] };
    await this.store.put(await this.prefix, new TextEncoder().encode(JSON.stringify(record)));
  }

  async sizes(version: Version): Promise<readonly number[]> {
    const record = await this.record();
    return record && isSame(record, version) ? record.sizes : [];
  }

  /** Remove the file. */
  async drop(): Promise<void> {
    const record = await this.record();
    await this.store.delete(await this.prefix); // first: pieces without a record are never read
    for (let i = 0; i <= (record?.sizes.length ?? -1); i++) await this.store.delete(await this.pieceKey(record!, i));
  }

  private async record(): Promise<Record | undefined> {
    const bytes = await this.store.get(await this.prefix);
    if (!bytes) return undefined;
    try {
      const record = JSON.parse(new TextDecoder().decode(bytes)) as Record;
      const sizes = record.sizes.every((size) => Number.isInteger(size) && size > 0);
      const whole = sizes && Number.isInteger(record.total) && typeof record.validator === "string";
      return record.format === FORMAT && whole ? record : undefined;
    } catch {
      return undefined; // another program wrote it
    }
  }

  /** Return the key of a piece. Versions have keys of their own, so that pieces of two never mix. */
  private async pieceKey({ validator, total }: Version, number: number): Promise<string> {
    return `${await this.prefix}-${await shortHash(`${validator} ${total}`, 8)}-${number}`;
  }
}

export function isSame(one: Version, other: Version): boolean {
  return one.validator === other.validator && one.total === other.total;
}

/** Return the first bytes of the hash of a text, in hexadecimal digits. */
async function shortHash(text: string, bytes: number): Promise<string> {
  return hexOf((await sha256(new TextEncoder().encode(text))).subarray(0, bytes));
}

/**
 * Return the store that the option `cache` names; undefined if nothing is kept.
 *
 * By default it is the Cache API where there is one, as in pages. Throw OptionError for a store that is not available.
 */
export async function storeOf(cache: unknown): Promise<ModelStore | undefined> {
  if (cache === undefined) return typeof caches === "undefined" ? undefined : cacheStore();
  if (cache === false) return undefined;
  if (cache === "cache-api") {
    if (typeof caches === "undefined") throw unavailable(cache, "the Cache API, which pages with https have");
    return cacheStore();
  }
  if (cache === "opfs") {
    if (typeof globalThis.navigator?.storage?.getDirectory !== "function") {
      throw unavailable(cache, "the origin private file system, which pages with https have");
    }
    return fileStore(await navigator.storage.getDirectory());
  }
  const store = cache as Partial<ModelStore> | null;
  if ([store?.get, store?.put, store?.delete].every((call) => typeof call === "function")) return cache as ModelStore;
  throw new OptionError(
    `cache must be "opfs", "cache-api", false, or an object with get, put and delete, not ${shown(cache)}`,
    "cache",
  );
}

function unavailable(cache: string, what: string): OptionError {
  return new OptionError(`cache ${shown(cache)} needs ${what}: choose false, or give a store of your own`, "cache");
}

/** Keep files in the Cache API. */
export function cacheStore(storage: CacheStorage = caches): ModelStore {
  const address = (key: string) => `https://tformer.invalid/${key}`;
  const opened = () => storage.open(NAME);
  return {
    async get(key) {
      const response = await (await opened()).match(address(key));
      return response && new Uint8Array(await response.arrayBuffer());
    },
    async put(key, bytes) {
      await (await opened()).put(address(key), new Response(bytes as Uint8Array<ArrayBuffer>));
    },
    async delete(key) {
      await (await opened()).delete(address(key));
    },
  };
}

/** Keep files in a folder of the origin private file system. */
export function fileStore(root: FileSystemDirectoryHandle): ModelStore {
  const folder = () => root.getDirectoryHandle(NAME, { create: true });
  const orMissing = (error: unknown) => {
    if ((error as { name?: string }).name === "NotFoundError") return undefined;
    throw error;
  };
  return {
    async get(key) {
      const handle = await (await folder()).getFileHandle(key).catch(orMissing);
      return handle && new Uint8Array(await (await handle.getFile()).arrayBuffer());
    },
    async put(key, bytes) {
      const handle = await (await folder()).getFileHandle(key, { create: true });
      const file = await handle.createWritable(); // another file until it is closed
      try {
        await file.write(bytes as Uint8Array<ArrayBuffer>);
      } catch (error) {
        await file.abort();
        throw error;
      }
      await file.close();
    },
    async delete(key) {
      await (await folder()).removeEntry(key).catch(orMissing);
    },
  };
}

/** Run a call of a store. A store that fails costs a download, and no more: the user is told once. */
export class CarefulStore implements ModelStore {
  private hasFailed = false;

  constructor(private readonly inner: ModelStore) {}

  get failed(): boolean {
    return this.hasFailed;
  }

  get(key: string): Promise<Uint8Array | undefined> {
    return this.tried(() => this.inner.get(key));
  }

  async put(key: string, bytes: Uint8Array): Promise<void> {
    await this.tried(() => this.inner.put(key, bytes));
  }

  async delete(key: string): Promise<void> {
    await this.tried(() => this.inner.delete(key));
  }

  private async tried<T>(call: () => Promise<T>): Promise<T | undefined> {
    if (this.hasFailed) return undefined;
    try {
      return await call();
    } catch (error) {
      this.hasFailed = true;
      console.warn(`tformer keeps no copy of the model, because the store fails (${errorSummary(error)})`);
      return undefined;
    }
  }
}
