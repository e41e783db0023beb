import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { pathToFileURL } from "node:url";
import { afterAll, beforeAll, expect, test } from "vitest";
import { AbortedError, InputError, ModelFileError } from "../../src/base/errors.js";
import type { Progress } from "../../src/loading/download.js";
import { readSource } from "../../src/loading/source.js";
import { modelBytes, modelPath } from "../support/models.js";

const bytes = modelBytes("elnino");
let server: Server;
let address: string;

beforeAll(async () => {
  server = createServer((request, response) => {
    if (request.url === "/model.onnx") {
      response.writeHead(200, { "content-length": bytes.length });
      response.end(bytes);
    } else if (request.url === "/slow") {
      response.writeHead(200);
      response.write("a"); // and never ends
    } else if (request.url === "/short") {
      response.writeHead(200, { "content-length": 100 });
      response.write("a");
      response.destroy();
    } else {
      response.writeHead(404);
      response.end();
    }
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  address = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
});

afterAll(() => {
  server.closeAllConnections();
  server.close();
});

test("files, addresses, bytes and blobs give the same bytes", async () => {
  const progress: Progress[] = [];
  const downloaded = await readSource(`${address}/model.onnx`, { onProgress: (one) => progress.push(one) });
  expect(downloaded.bytes).toEqual(bytes);
  expect(progress[progress.length - 1]).toEqual({ loaded: bytes.length, total: bytes.length });
  for (const source of [
    modelPath("elnino"),
    pathToFileURL(modelPath("elnino")),
    bytes,
    bytes.slice().buffer,
    new Blob([bytes.slice()]),
  ]) {
    expect((await readSource(source, {})).bytes.length).toBe(bytes.length);
  }
  const onDisk = await readSource(modelPath("elnino"), {});
  expect(onDisk.path!.file).toBe("elnino.onnx");
});

test("what cannot be read is named", async () => {
  await expect(readSource(`${address}/other`, {})).rejects.toThrow(
    `${address}/other cannot be loaded: the server answers 404`,
  );
  await expect(readSource(`${address}/short`, {})).rejects.toThrow(ModelFileError);
  await expect(readSource("http://127.0.0.1:1/model.onnx", {})).rejects.toThrow("cannot be loaded: ");
  await expect(readSource("nothing.onnx", {})).rejects.toThrow("nothing.onnx does not exist");
  await expect(readSource(7 as unknown as string, {})).rejects.toThrow(InputError);
});

test("a signal ends a download", async () => {
  const controller = new AbortController();
  const loading = readSource(`${address}/slow`, { signal: controller.signal, onProgress: () => controller.abort() });
  await expect(loading).rejects.toThrow(AbortedError);
});
