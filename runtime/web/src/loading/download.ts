/**
 * Downloads: in pieces, with true totals, continued after a break, and kept in a store.
 *
 * A version of a file is its ETag, or the date of its last change, and its length. A download continues only with bytes
 * of the same version.
 */

import {
  AbortedError,
  checkAborted,
  errorSummary,
  ModelFileError,
  OutOfMemoryError,
  TformerError,
} from "../base/errors.js";
import { CarefulStore, isSame, PIECE_BYTES, StoredFile, type ModelStore, type Version } from "./store.js";

/** How far a download is, in bytes of all files of the model. total: 0 if the server does not tell. */
export interface Progress {
  readonly loaded: number;
  readonly total: number;
}

export interface DownloadOptions {
  readonly signal?: AbortSignal;
  readonly onProgress?: (progress: Progress) => void;
  readonly store?: ModelStore;
  /** Refuse a longer file, before it is downloaded. */
  readonly maxBytes?: number;
}

/** A downloaded file. */
export interface Downloaded {
  readonly bytes: Uint8Array;
  /** Whether bytes of it came from the store. */
  readonly wasKept: boolean;
  /** Remove it from the store. */
  forget(): Promise<void>;
}

const MAX_BREAKS = 5; // one after another, with no new bytes between them
const FIRST_PAUSE_MS = 100; // before the second attempt; twice as long before each later one
const MAX_UNKNOWN_ROOM = 1 << 24; // first room for a file of an unknown length

/** Download a file. Throw ModelFileError, AbortedError or OutOfMemoryError. */
export async function download(address: string, options: DownloadOptions): Promise<Downloaded> {
  const store = options.store && new CarefulStore(options.store);
  const one = new Download(address, options, store && new StoredFile(store, address));
  const bytes = await one.run();
  return { bytes, wasKept: one.wasKept, forget: async () => one.file?.drop() };
}

/** A connection that ended, or a server that could not be reached. */
class Break extends Error {}

class Download {
  wasKept = false;
  private wasReached = false; // the server has answered
  private bytes = new Uint8Array(0);
  private loaded = 0;
  private total = 0; // 0 is unknown
  private version: Version | undefined;
  private pieces: number[] = []; // sizes of those in the store

  constructor(
    private readonly address: string,
    private readonly options: DownloadOptions,
    readonly file: StoredFile | undefined,
  ) {}

  async run(): Promise<Uint8Array> {
    await this.takeKept();
    let furthest = this.loaded;
    for (let breaks = 0; ; breaks++) {
      const isWhole = this.loaded > 0 && this.loaded === this.total;
      try {
        checkAborted(this.options.signal);
        await this.attempt(isWhole);
        await this.keep(true);
        return this.bytes.subarray(0, this.loaded);
      } catch (error) {
        if (this.options.signal?.aborted) throw aborted(error);
        if (!(error instanceof Break)) throw error;
        if (isWhole && this.loaded === this.total) return this.bytes; // without a network the kept file is used
        await this.keep(true);
        if (this.loaded > furthest) {
          furthest = this.loaded;
          breaks = 0;
        }
        if (breaks + 1 >= MAX_BREAKS || !this.wasReached) throw this.broken(error);
        if (!this.version) this.restart(); // other bytes may be of another version
        await pause(FIRST_PAUSE_MS * 2 ** breaks, this.options.signal);
      }
    }
  }

  /** Begin with the bytes that the store has. */
  private async takeKept(): Promise<void> {
    const kept = await this.file?.kept();
    if (!kept) return;
    this.prepare(kept.version.total);
    this.version = kept.version;
    this.loaded = await this.file!.read(kept.version, this.bytes);
    if (!this.loaded) {
      await this.file!.drop();
      this.restart();
      return;
    }
    this.wasKept = true;
    this.pieces = [...(await this.file!.sizes(kept.version))];
    this.progress();
  }

  /** Read the file from `loaded` to its end. Throw Break if the connection ends before. isWhole: only ask for changes. */
  private async attempt(isWhole: boolean): Promise<void> {
    const controller = new AbortController();
    const abort = () => controller.abort(this.options.signal?.reason);
    this.options.signal?.addEventListener("abort", abort);
    try {
      const response = await this.request(controller.signal, isWhole);
      this.wasReached = true;
      if (response.status === 304) return;
      if (response.status === 416) {
        this.restart(); // the file has become shorter
        return await this.attempt(false);
      }
      if (response.status >= 500 && this.loaded > 0) throw new Break(`the server answers ${response.status}`);
      if (!response.ok || !response.body) {
        throw new ModelFileError(`${this.address} cannot be loaded: the server answers ${response.status}`);
      }
      if (!this.continues(response)) {
        const found = versionOf(response);
        if (isWhole && this.version && found && isSame(found, this.version)) return;
        await this.begin(response, found);
      }
      await this.receive(response.body.getReader());
    } finally {
      controller.abort(); // ends the connection at once, whatever is left of it
      this.options.signal?.removeEventListener("abort", abort);
    }
  }

  private async request(signal: AbortSignal, isWhole: boolean): Promise<Response> {
    const headers: Record<string, string> = {};
    const validator = this.version?.validator;
    const isOwn = isSameOrigin(this.address); // other origins have to permit these headers first
    if (isWhole && validator !== undefined && isOwn) {
      headers[validator.endsWith('"') ? "if-none-match" : "if-modified-since"] = validator;
    } else if (!isWhole && this.loaded > 0) {
      headers["range"] = `bytes=${this.loaded}-`;
      if (validator !== undefined && isOwn) headers["if-range"] = validator;
    }
    try {
      // Node asks for compressed bytes otherwise. A part of them cannot continue a file.
      if (!isPage()) headers["accept-encoding"] = "identity";
      return await fetch(this.address, { headers, signal, cache: "no-cache" });
    } catch (error) {
      throw new Break(errorSummary((error as { cause?: unknown }).cause ?? error));
    }
  }

  /** Return whether a response has the bytes after those that are there. */
  private continues(response: Response): boolean {
    if (response.status !== 206) return false;
    const range = /^bytes (\d+)-\d+\/(\d+)$/.exec(response.headers.get("content-range") ?? "");
    const validator = validatorOf(response);
    const fits =
      range !== null && Number(range[1]) === this.loaded && Number(range[2]) === this.total && this.loaded < this.total;
    if (fits && this.version !== undefined && validator === this.version.validator) return true;
    this.restart();
    throw new Break("the server sends another part of the file");
  }

  /** Prepare for a whole file. */
  private async begin(response: Response, version: Version | undefined): Promise<void> {
    const had = this.loaded > 0 || this.version !== undefined;
    this.restart();
    if (had) await this.file?.drop();
    this.version = version;
    this.prepare(version?.total ?? totalOf(response));
  }

  private restart(): void {
    this.loaded = this.total = 0;
    this.bytes = new Uint8Array(0);
    this.version = undefined;
    this.pieces = [];
    this.wasKept = false;
  }

  /** Make room for a file. Throw ModelFileError if it is too long. total: 0 if it is not known. */
  private prepare(total: number): void {
    this.mustFit(total);
    this.total = total;
    this.bytes = this.room(total);
  }

  private room(bytes: number): Uint8Array<ArrayBuffer> {
    try {
      return new Uint8Array(bytes);
    } catch (error) {
      throw new OutOfMemoryError(
        `${this.address} has ${count(bytes)} bytes, for which there is not enough memory: export a smaller or quantised ` +
          "model",
        undefined,
        error,
      );
    }
  }

  private mustFit(bytes: number): void {
    const { maxBytes = Infinity } = this.options;
    if (bytes <= maxBytes) return;
    throw new ModelFileError(
      `${this.address} is too large: it has ${this.loaded ? "at least " : ""}${count(bytes)} bytes, and at most ` +
        `${count(maxBytes)} are left for it here: export a smaller or quantised model`,
    );
  }

  private async receive(reader: ReadableStreamDefaultReader<Uint8Array>): Promise<void> {
    for (;;) {
      let part: Uint8Array | undefined;
      try {
        const { done, value } = await reader.read();
        if (!done) part = value;
      } catch (error) {
        throw new Break(errorSummary((error as { cause?: unknown }).cause ?? error));
      }
      if (!part) break;
      const end = this.loaded + part.length;
      if (this.total && end > this.total) {
        throw new ModelFileError(
          `${this.address} has more bytes than the ${count(this.total)} that its server announced`,
        );
      }
      this.mustFit(end);
      if (end > this.bytes.length) {
        const larger = this.room(Math.max(end, this.bytes.length * 2, Math.min(MAX_UNKNOWN_ROOM, 4 * end)));
        larger.set(this.bytes.subarray(0, this.loaded));
        this.bytes = larger;
      }
      this.bytes.set(part, this.loaded);
      this.loaded = end;
      this.progress();
      checkAborted(this.options.signal);
      await this.keep(false);
    }
    if (this.loaded < this.total) throw new Break("the connection ended");
  }

  /** Put the bytes that fill a piece into the store; at the end all others, too. */
  private async keep(isEnd: boolean): Promise<void> {
    if (!this.file || !this.version) return;
    for (;;) {
      const begin = this.pieces.reduce((a, b) => a + b, 0);
      const size = Math.min(PIECE_BYTES, this.loaded - begin);
      if (size <= 0 || (size < PIECE_BYTES && !isEnd)) return;
      await this.file.append(this.version, this.pieces, this.bytes.subarray(begin, begin + size));
      this.pieces.push(size);
    }
  }

  private progress(): void {
    this.options.onProgress?.({ loaded: this.loaded, total: this.total });
  }

  private broken(error: Break): ModelFileError {
    if (!this.loaded) return new ModelFileError(`${this.address} cannot be loaded: ${error.message}`, undefined, error);
    const all = this.total ? `${count(this.loaded)} of ${count(this.total)}` : count(this.loaded);
    return new ModelFileError(
      `${this.address} broke off after ${all} bytes (${error.message}): load it again to continue`,
      undefined,
      error,
    );
  }
}

/** Return the version of a whole response; undefined if its server does not tell, or sends it compressed. */
function versionOf(response: Response): Version | undefined {
  const validator = validatorOf(response);
  const total = totalOf(response);
  return validator === undefined || !total ? undefined : { validator, total };
}

/** Return the ETag of a response, or else the date of the last change. A weak ETag is shared by different bytes. */
function validatorOf(response: Response): string | undefined {
  const tag = response.headers.get("etag");
  return (tag?.startsWith('"') ? tag : response.headers.get("last-modified")) ?? undefined;
}

/** Return the length of a file; 0 if it is not known: a compressed response has another length than its content. */
function totalOf(response: Response): number {
  const isEncoded = !["", "identity"].includes(response.headers.get("content-encoding") ?? "");
  const length = Number(response.headers.get("content-length") ?? 0);
  return isEncoded || !Number.isSafeInteger(length) ? 0 : length;
}

function isPage(): boolean {
  return typeof location !== "undefined" && typeof location.origin === "string";
}

function isSameOrigin(address: string): boolean {
  return !isPage() || new URL(address, location.href).origin === location.origin;
}

function aborted(error: unknown): TformerError {
  return error instanceof AbortedError
    ? error
    : new AbortedError("the call was aborted by its signal", undefined, error);
}

async function pause(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
  await new Promise<void>((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

function count(number: number): string {
  return number.toLocaleString("en-US");
}
