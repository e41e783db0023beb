import { createHash, randomBytes } from "node:crypto";
import { afterEach, describe, expect, test, vi } from "vitest";
import { AbortedError, ModelFileError } from "../../src/base/errors.js";
import { checkDigest, checkWeights, weightsFileOf } from "../../src/format/digest.js";
import { readMetadata } from "../../src/format/modelFile.js";
import { bytesField, concatBytes } from "../../src/format/onnxWire.js";
import { Model } from "../../src/index.js";
import { modelBytes } from "../support/models.js";

const g2p = modelBytes("g2p");
const CHUNK_BYTES = 1 << 20;

/** Return the digest of bytes as the documentation defines it. */
function digestAsDocumented(bytes: Uint8Array): string {
  const list = createHash("sha256");
  for (let begin = 0; begin < bytes.length; begin += CHUNK_BYTES) {
    list.update(
      createHash("sha256")
        .update(bytes.subarray(begin, begin + CHUNK_BYTES))
        .digest(),
    );
  }
  return list.digest("hex");
}

/** Return bytes with an entry of their digest. */
function withDigest(bytes: Uint8Array, digest: string): Uint8Array {
  const entry = [...bytesField(1, "tformer.sha256_chunks"), ...bytesField(2, digest)];
  return concatBytes([bytes, ...bytesField(14, entry)]);
}

afterEach(() => vi.unstubAllGlobals());

describe.each([
  ["by WebCrypto", true],
  ["in a page without WebCrypto", false],
])("%s", (_, hasCrypto) => {
  test.each([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 6 * CHUNK_BYTES + 7])(
    "the digest of %d bytes",
    async (size) => {
      if (!hasCrypto) vi.stubGlobal("crypto", {});
      const bytes = randomBytes(size);
      const digest = digestAsDocumented(bytes);
      await expect(checkDigest(withDigest(bytes, digest), "a.onnx")).resolves.toBe(digest);
      const shared = new Uint8Array(new SharedArrayBuffer(size));
      shared.set(bytes);
      await checkWeights(shared, { name: "a.onnx.data", digest }, "a.onnx.data");
      if (!size) return;
      const moved = concatBytes([bytes.subarray(CHUNK_BYTES), bytes.subarray(0, CHUNK_BYTES)]);
      const changed = bytes.slice();
      changed[size - 1] ^= 1;
      for (const other of size > CHUNK_BYTES ? [changed, moved] : [changed]) {
        await expect(checkDigest(withDigest(other, digest), "a.onnx")).rejects.toThrow(
          "a.onnx is damaged, or was changed",
        );
      }
    },
  );

  test("a signal ends the check", async () => {
    if (!hasCrypto) vi.stubGlobal("crypto", {});
    const controller = new AbortController();
    const weights = { name: "a.onnx.data", digest: "" };
    const check = checkWeights(new Uint8Array(100 * CHUNK_BYTES), weights, "a.onnx.data", controller.signal);
    setTimeout(() => controller.abort());
    await expect(check).rejects.toThrow(AbortedError);
  });
});

test("WebCrypto hashes every chunk where it exists", async () => {
  const native = vi.spyOn(crypto.subtle, "digest");
  await checkDigest(g2p, "g2p.onnx");
  expect(native).toHaveBeenCalledTimes(Math.ceil(g2p.length / CHUNK_BYTES) + 1);
  native.mockRestore();
});

test("the digest of the exporter is found, and a change of any kind is an error", async () => {
  await expect(checkDigest(g2p, "g2p.onnx")).resolves.toMatch(/^[0-9a-f]{64}$/);
  const changed = g2p.slice();
  changed[3_000_000] ^= 1;
  await expect(checkDigest(changed, "g2p.onnx")).rejects.toThrow(
    "g2p.onnx is damaged, or was changed after its export",
  );
  await expect(checkDigest(g2p.subarray(0, 1000), "g2p.onnx")).resolves.toBeUndefined();
  await expect(Model.load(changed)).rejects.toThrow(ModelFileError);
});

test("a file of an earlier version is refused, and not taken for damaged", async () => {
  const text = Buffer.from(g2p).toString("latin1");
  const earlier = text
    .replace('"version":11}', '"version": 9}')
    .replace("tformer.sha256_chunks", "tformer.another_hash_");
  expect(earlier.length).toBe(text.length);
  const load = Model.load(new Uint8Array(Buffer.from(earlier, "latin1")));
  await expect(load).rejects.toThrow("an earlier tformer (its manifest has version 9, this runtime reads version 11)");
});

test("the second file of weights has a name without folders", () => {
  const named = (name: string) => weightsFileOf(new Map([["tformer.weights_sha256_chunks", `0a${name}`]]));
  expect(named(" my model.onnx.data")).toEqual({ digest: "0a", name: "my model.onnx.data" });
  for (const name of ["", " ", " a/b", " ..", " a\\b"]) {
    expect(() => named(name), name).toThrow("is not a name of a file with weights");
  }
  expect(weightsFileOf(readMetadata(g2p))).toBeUndefined();
});
