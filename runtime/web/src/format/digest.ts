/**
 * The digest of a model file: whether its bytes are those that the exporter wrote.
 *
 * A damaged weight gives other numbers and no error. So the exporter ends a file with the digest of all bytes before it, as
 * an entry of the metadata. A digest finds damage. An attacker can write a digest that matches.
 *
 * The digest of bytes: cut them into chunks of 1 MiB. The last may be shorter. Hash each chunk with SHA-256. Append
 * the hashes, of 32 bytes each, in the order of the chunks. The digest is the SHA-256 hash of that list, in hexadecimal
 * digits. `tformer_runtime/format/digest.py` is the same in Python.
 */

import { checkAborted, ModelFileError } from "../base/errors.js";
import { hexOf, sha256 } from "../base/sha256.js";
import { ENTRY_KEY, ENTRY_VALUE, MODEL_METADATA_PROPS } from "./onnxFields.js";
import { bytesField, concatBytes } from "./onnxWire.js";

const DIGEST_KEY = "tformer.sha256_chunks"; // the last entry of the metadata
export const WEIGHTS_DIGEST_KEY = "tformer.weights_sha256_chunks"; // the digest and the name of a second file
const DIGEST_CHARS = 64;
const HASH_BYTES = 32;
const CHUNK_BYTES = 1 << 20;
const CHUNKS_AT_ONCE = 4; // the native code hashes them in parallel, each in a copy

/** Return the field of a ModelProto that holds a digest. */
function digestEntry(digest: string): Uint8Array {
  return concatBytes(
    bytesField(MODEL_METADATA_PROPS, [...bytesField(ENTRY_KEY, DIGEST_KEY), ...bytesField(ENTRY_VALUE, digest)]),
  );
}

const ENTRY_BYTES = digestEntry("0".repeat(DIGEST_CHARS)).length;

/** Return the digest that ends a file; undefined for a file without one. */
export function digestOf(file: Uint8Array): string | undefined {
  const entry = file.subarray(Math.max(0, file.length - ENTRY_BYTES));
  const digest = new TextDecoder().decode(entry.subarray(Math.max(0, entry.length - DIGEST_CHARS)));
  const expected = digestEntry(digest);
  return entry.length === expected.length && entry.every((byte, i) => byte === expected[i]) ? digest : undefined;
}

/**
 * Compare a file with its digest, and return it; undefined for a file without one. name: of the file, for errors.
 * Throw ModelFileError for another digest. Cost: reads the file once.
 */
export async function checkDigest(file: Uint8Array, name: string, signal?: AbortSignal): Promise<string | undefined> {
  const expected = digestOf(file);
  if (expected === undefined) return undefined;
  await compare(file.subarray(0, file.length - ENTRY_BYTES), expected, name, signal);
  return expected;
}

/** The second file of a model, which holds its weights. */
export interface WeightsFile {
  readonly name: string;
  readonly digest: string;
}

/** Return the second file that the metadata name; undefined if there is none. Throw ModelFileError for a wrong name. */
export function weightsFileOf(metadata: ReadonlyMap<string, string>): WeightsFile | undefined {
  const entry = metadata.get(WEIGHTS_DIGEST_KEY);
  if (entry === undefined) return undefined;
  const [digest, ...words] = entry.split(" ");
  const name = words.join(" ");
  if (!name || name.startsWith(".") || /[/\\]/.test(name)) {
    throw new ModelFileError(`the file is damaged: ${JSON.stringify(name)} is not a name of a file with weights`);
  }
  return { name, digest };
}

/** Compare the second file of a model with its digest. name: of the file, for errors. Throw ModelFileError. */
export async function checkWeights(
  bytes: Uint8Array,
  file: WeightsFile,
  name: string,
  signal?: AbortSignal,
): Promise<void> {
  await compare(bytes, file.digest, name, signal);
}

async function compare(
  bytes: Uint8Array,
  expected: string,
  name: string,
  signal: AbortSignal | undefined,
): Promise<void> {
  const digest = await digestOfBytes(bytes, signal);
  if (digest !== expected) {
    throw new ModelFileError(
      `${name} is damaged, or was changed after its export: its digest does not match. Copy it again or export the ` +
        "model again; verify: false opens it as it is",
    );
  }
}

async function digestOfBytes(bytes: Uint8Array, signal: AbortSignal | undefined): Promise<string> {
  const chunks = Math.ceil(bytes.length / CHUNK_BYTES);
  const hashes = new Uint8Array(chunks * HASH_BYTES);
  let next = 0;
  const hashChunks = async () => {
    while (next < chunks) {
      checkAborted(signal);
      const number = next++;
      const begin = number * CHUNK_BYTES;
      hashes.set(await sha256(bytes.subarray(begin, begin + CHUNK_BYTES)), number * HASH_BYTES);
    }
  };
  await Promise.all(Array.from({ length: CHUNKS_AT_ONCE }, hashChunks));
  return hexOf(await sha256(hashes));
}
