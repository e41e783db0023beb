import { afterAll, beforeAll, beforeEach, describe, expect, test, vi } from "vitest";
import { AbortedError, ModelFileError, OptionError } from "../../src/base/errors.js";
import { download, type Progress } from "../../src/loading/download.js";
import { cacheStore, fileStore, PIECE_BYTES, storeOf, type ModelStore } from "../../src/loading/store.js";
import { FileServer } from "../support/fileServer.js";
import { MemoryStore, memoryCaches, memoryFolder } from "../support/stores.js";

const server = new FileServer();
const PATH = "/model.onnx";
const url = () => server.address(PATH);

/** Bytes with no period of the length of a piece. */
function someBytes(length: number, seed = 1): Uint8Array {
  let state = seed;
  return Uint8Array.from({ length }, () => (state = (state * 1103515245 + 12345) & 0x7fffffff) >> 16);
}

const small = someBytes(200_000);
const large = someBytes(PIECE_BYTES * 2 + 1000, 2);

beforeAll(() => server.start());
afterAll(() => server.stop());
beforeEach(() => server.reset());

test("totals are those of the server, and unknown ones are 0", async () => {
  for (const chunked of [false, true]) {
    server.files.set(PATH, { bytes: small, chunked });
    const seen: Progress[] = [];
    const { bytes } = await download(url(), { onProgress: (one) => seen.push(one) });
    expect(Buffer.compare(bytes, small)).toBe(0);
    expect(seen[seen.length - 1]).toEqual({ loaded: small.length, total: chunked ? 0 : small.length });
    seen.forEach(({ loaded }, i) => expect(loaded).toBeGreaterThan(seen[i - 1]?.loaded ?? 0));
  }
});

test.each(['"one"', undefined])("a download continues where it broke off (ETag %s)", async (tag) => {
  server.files.set(PATH, {
    bytes: small,
    tag,
    modified: "Thu, 01 Jan 2026 00:00:00 GMT",
    ranges: true,
    breakAfter: 70_000,
  });
  const { bytes } = await download(url(), {});
  expect(Buffer.compare(bytes, small)).toBe(0);
  expect(server.requests.length).toBeGreaterThan(2);
  for (const headers of server.requests.slice(1)) {
    expect(Number(/^bytes=(\d+)-$/.exec(headers["range"]!)![1])).toBeGreaterThan(0);
    expect(headers["if-range"]).toBe(tag ?? "Thu, 01 Jan 2026 00:00:00 GMT");
  }
});

test("a file that changes during a download is loaded from its beginning", async () => {
  server.files.set(PATH, { bytes: small, tag: '"one"', ranges: true, breakAfter: 70_000 });
  const changed = small.map((byte) => byte ^ 255).subarray(1);
  const options = {
    onProgress: () => void server.files.set(PATH, { bytes: changed, tag: '"two"', ranges: true }),
  };
  const { bytes } = await download(url(), options);
  expect(Buffer.compare(bytes, changed)).toBe(0);
});

test("without ranges or versions a download begins again", async () => {
  for (const file of [{ tag: '"one"', ranges: false }, { ranges: true }]) {
    server.files.set(PATH, { bytes: small, ...file, breakAfter: 150_000 });
    const options = { onProgress: () => void server.files.set(PATH, { bytes: small, ...file }) };
    const { bytes } = await download(url(), options);
    expect(Buffer.compare(bytes, small)).toBe(0);
  }
});

test("a connection that breaks again and again ends the download with the place", async () => {
  server.files.set(PATH, { bytes: small, tag: '"one"', breakAfter: 70_000 });
  await expect(download(url(), {})).rejects.toThrow(
    /broke off after \S+ of 200,000 bytes .*: load it again to continue/,
  );
  server.files.set(PATH, { bytes: small, tag: '"one"', length: 300_000 });
  await expect(download(url(), {})).rejects.toThrow(ModelFileError);
  server.files.set(PATH, { bytes: small, status: 403 });
  await expect(download(url(), {})).rejects.toThrow(`${url()} cannot be loaded: the server answers 403`);
});

test("a file that cannot fit is refused before its bytes", async () => {
  server.files.set(PATH, { bytes: small, tag: '"one"' });
  const seen: Progress[] = [];
  const options = { maxBytes: 199_999, onProgress: (one: Progress) => seen.push(one) };
  await expect(download(url(), options)).rejects.toThrow("it has 200,000 bytes, and at most 199,999 are left");
  expect(seen).toEqual([]);
  server.files.set(PATH, { bytes: small, chunked: true });
  await expect(download(url(), { maxBytes: 100_000 })).rejects.toThrow("it has at least");
});

test("a signal ends a download at once, also between two attempts", async () => {
  server.files.set(PATH, { bytes: small, tag: '"one"', breakAfter: 0 });
  const controller = new AbortController();
  const loading = download(url(), { signal: controller.signal });
  await vi.waitFor(() => expect(server.requests.length).toBeGreaterThan(0));
  controller.abort();
  await expect(loading).rejects.toThrow(AbortedError);
  await expect(download(url(), { signal: controller.signal })).rejects.toThrow(AbortedError);
});

const KINDS: [string, () => ModelStore][] = [
  ["a store of the user", () => new MemoryStore()],
  ["the Cache API", () => cacheStore(memoryCaches())],
  ["the origin private file system", () => fileStore(memoryFolder())],
];

describe.each(KINDS)("with %s", (_, make) => {
  test("a file is downloaded once, and again if it has changed", async () => {
    const store = make();
    for (const ranges of [true, false]) {
      server.reset();
      server.files.set(PATH, { bytes: large, tag: `"one ${ranges}"`, ranges });
      expect((await download(url(), { store })).wasKept).toBe(false);
      server.sentBytes = 0;
      const again = await download(url(), { store });
      expect(again.wasKept).toBe(true);
      expect(Buffer.compare(again.bytes, large)).toBe(0);
      if (ranges) expect(server.sentBytes).toBe(0);
    }
    const changed = someBytes(PIECE_BYTES + 5, 3);
    server.files.set(PATH, { bytes: changed, tag: '"two"', ranges: true });
    for (const wasKept of [false, true]) {
      const found = await download(url(), { store });
      expect(found.wasKept).toBe(wasKept);
      expect(Buffer.compare(found.bytes, changed)).toBe(0);
    }
  });

  test("a download that broke off continues in the next call", async () => {
    const store = make();
    server.files.set(PATH, { bytes: large, tag: '"one"', ranges: true });
    const controller = new AbortController();
    const onProgress = ({ loaded }: Progress) => {
      if (loaded > PIECE_BYTES * 1.5) controller.abort();
    };
    await expect(download(url(), { store, signal: controller.signal, onProgress })).rejects.toThrow(AbortedError);
    server.requests.length = 0;
    const { bytes, wasKept } = await download(url(), { store });
    expect(wasKept).toBe(true);
    expect(server.requests[0]["range"]).toBe(`bytes=${PIECE_BYTES}-`);
    expect(Buffer.compare(bytes, large)).toBe(0);
  });

  test("without a network the kept file is used, and half a file is not", async () => {
    const store = make();
    server.files.set(PATH, { bytes: small, tag: '"one"', ranges: true });
    await download(url(), { store });
    await server.stop();
    try {
      expect(Buffer.compare((await download(url(), { store })).bytes, small)).toBe(0);
      await expect(download(`${url()}?other`, { store })).rejects.toThrow("cannot be loaded");
    } finally {
      await server.listen();
    }
  });
});

test("pieces that are damaged or missing are loaded again", async () => {
  const store = new MemoryStore();
  server.files.set(PATH, { bytes: large, tag: '"one"', ranges: true });
  await download(url(), { store });
  const pieces = [...store.entries.keys()].filter((key) => key.includes("-")).sort();
  const record = [...store.entries.keys()].find((key) => !key.includes("-"))!;
  expect(pieces.length).toBe(3);
  const damages = [
    () => store.entries.delete(pieces[1]),
    () => store.entries.set(pieces[2], store.entries.get(pieces[2])!.subarray(1)),
    () => store.entries.set(record, new TextEncoder().encode("{")),
    () => store.entries.set(record, new TextEncoder().encode('{"format": 1, "sizes": [-1], "total": 1}')),
  ];
  for (const damage of damages) {
    damage();
    const found = await download(url(), { store });
    expect(found.wasKept).toBe(false);
    expect(Buffer.compare(found.bytes, large)).toBe(0);
    expect((await download(url(), { store })).wasKept).toBe(true);
  }
});

test("a store that fails costs a download, and the user is told", async () => {
  const warn = vi.spyOn(console, "warn").mockImplementation(() => {});
  server.files.set(PATH, { bytes: small, tag: '"one"' });
  const store = new MemoryStore();
  store.put = async () => {
    throw new DOMException("the disk is full", "QuotaExceededError");
  };
  const { bytes } = await download(url(), { store });
  expect(Buffer.compare(bytes, small)).toBe(0);
  expect(warn.mock.calls).toEqual([
    ["tformer keeps no copy of the model, because the store fails (QuotaExceededError: the disk is full)"],
  ]);
  warn.mockRestore();
});

test("stores are chosen by name", async () => {
  const store = new MemoryStore();
  expect(await storeOf(store)).toBe(store);
  expect(await storeOf(false)).toBeUndefined();
  expect(await storeOf(undefined)).toBeUndefined(); // Node has none
  await expect(storeOf("opfs")).rejects.toThrow('cache "opfs" needs the origin private file system');
  await expect(storeOf("disk")).rejects.toThrow(OptionError);
  await expect(storeOf({ get: 1 })).rejects.toThrow('cache must be "opfs", "cache-api", false');
});
