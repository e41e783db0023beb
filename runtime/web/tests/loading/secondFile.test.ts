import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { afterAll, beforeAll, beforeEach, expect, test } from "vitest";
import { ModelFileError } from "../../src/base/errors.js";
import { Model, type Progress } from "../../src/index.js";
import { FileServer } from "../support/fileServer.js";
import { modelBytes, modelPath } from "../support/models.js";
import { MemoryStore } from "../support/stores.js";

const REPOSITORY = resolve(import.meta.dirname, "../../../..");
const HISTORY = Array.from({ length: 60 }, (_, i) => Math.sin(i / 5));
const server = new FileServer();
let folder: string;
let model: string;
let expected: number[];

// The exporter writes a second file for more than 2 GB of weights. The limit is lowered for a small model.
const SCRIPT = `
import sys
from tformer_export.common import onnx_writer
onnx_writer.MAX_FILE_BYTES = 1000
from tformer_export.cli import main
main()
`;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), "tformer-"));
  model = join(folder, "elnino.onnx");
  const path = ["", "runtime", "models"].map((name) => resolve(REPOSITORY, name)).join(":");
  const python = process.env["PYTHON"] ?? resolve(REPOSITORY, ".venv/bin/python");
  execFileSync(python, ["-c", SCRIPT, "models/elnino/model.pt", "--output", model], {
    cwd: REPOSITORY,
    env: { ...process.env, PYTHONPATH: path, PYTHONDONTWRITEBYTECODE: "1" },
    stdio: ["ignore", "ignore", "inherit"],
  });
  expect(existsSync(`${model}.data`)).toBe(true);
  await server.start();
  expected = await forecast(modelPath("elnino"));
});

afterAll(async () => {
  await server.stop();
  rmSync(folder, { recursive: true });
});

beforeEach(() => {
  server.reset();
  server.files.set("/elnino.onnx", { bytes: readFileSync(model), tag: '"a"', ranges: true });
  server.files.set("/elnino.onnx.data", { bytes: readFileSync(`${model}.data`), tag: '"b"', ranges: true });
});

async function forecast(address: string, options: object = { device: "wasm" }): Promise<number[]> {
  const loaded = await Model.load(address, options);
  const { data } = await loaded.forecast(HISTORY);
  await loaded.dispose();
  return [...data] as number[];
}

test("weights in a second file are found beside the first, on disk and on a server", async () => {
  expect(await forecast(model)).toEqual(expected);
  expect(await forecast(model, { device: "node" })).toEqual(await forecast(modelPath("elnino"), { device: "node" }));
  const seen: Progress[] = [];
  const options = { device: "wasm", onProgress: (one: Progress) => seen.push(one) };
  expect(await forecast(server.address("/elnino.onnx"), options)).toEqual(expected);
  const all = readFileSync(model).length + readFileSync(`${model}.data`).length;
  expect(seen[seen.length - 1]).toEqual({ loaded: all, total: all });
});

test("both files are kept, and a damaged one is loaded again", async () => {
  const store = new MemoryStore();
  const options = { device: "wasm", cache: store };
  expect(await forecast(server.address("/elnino.onnx"), options)).toEqual(expected);
  const pieces = [...store.entries.keys()].filter((key) => key.includes("-"));
  expect(pieces.length).toBe(2);
  for (const piece of pieces) {
    store.entries.get(piece)![1000] ^= 1;
    server.sentBytes = 0;
    expect(await forecast(server.address("/elnino.onnx"), options)).toEqual(expected);
    expect(server.sentBytes).toBe(store.entries.get(piece)!.length);
  }
  server.sentBytes = 0;
  expect(await forecast(server.address("/elnino.onnx"), options)).toEqual(expected);
  expect(server.sentBytes).toBe(0);
  // A store that cannot delete is left alone.
  store.delete = async () => {};
  store.put = async () => {};
  store.entries.get(pieces[0])![1000] ^= 1;
  expect(await forecast(server.address("/elnino.onnx"), options)).toEqual(expected);
});

test("a second file that is missing, damaged, too large or unreachable is named", async () => {
  const address = server.address("/elnino.onnx");
  const damaged = readFileSync(`${model}.data`);
  damaged[5000] ^= 1;
  server.files.get("/elnino.onnx.data")!.bytes = damaged;
  const store = new MemoryStore();
  await expect(Model.load(address, { device: "wasm", cache: store })).rejects.toThrow(
    `${address}.data is damaged, or was changed after its export`,
  );
  expect([...store.entries.keys()].length).toBe(2); // the first file
  const maxBytes = readFileSync(model).length + 1;
  await expect(Model.load(address, { device: "wasm", maxBytes })).rejects.toThrow(`${address}.data is too large`);
  await expect(Model.load(model, { device: "wasm", maxBytes })).rejects.toThrow(`${model}.data is too large`);
  await expect(Model.load(address, { device: "node" })).rejects.toThrow("device node reads from the disk alone");
  server.files.delete("/elnino.onnx.data");
  await expect(Model.load(address, { device: "wasm" })).rejects.toThrow(
    "elnino.onnx.data cannot be loaded: the server",
  );
  await expect(Model.load(readFileSync(model))).rejects.toThrow("in a second file, elnino.onnx.data: load it by");
  const alone = join(folder, "alone.onnx");
  writeFileSync(alone, readFileSync(model));
  rmSync(`${model}.data`);
  await expect(Model.load(alone, { device: "wasm" })).rejects.toThrow(ModelFileError);
  await expect(Model.load(alone, { device: "node" })).rejects.toThrow("elnino.onnx.data does not exist");
  await expect(Model.load(modelBytes("elnino"), { maxBytes: 100 })).rejects.toThrow("the file is too large");
});
