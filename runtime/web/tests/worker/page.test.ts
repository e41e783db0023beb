/** A model in a worker of a page in Chromium, under a strict policy, and the stores of a page. Skipped without Chromium. */

import { readFileSync } from "node:fs";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { join, resolve } from "node:path";
import puppeteer, { type Browser, type Page } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type * as tformer from "../../src/index.js";
import { Golden, type Place } from "../golden/golden.js";
import { CHROMIUM } from "../support/browsers.js";
import { modelBytes } from "../support/models.js";
import { contentType, POLICY } from "../support/pageServer.js";

const PACKAGE = resolve(import.meta.dirname, "../..");

declare global {
  interface Window {
    tformer: typeof tformer;
  }
}

describe.skipIf(!CHROMIUM)("in Chromium", () => {
  let browser: Browser;
  let page: Page;
  let server: Server;
  let hasWorker = true;
  let modelRequests: (string | undefined)[] = []; // the versions that they know
  const problems: string[] = [];

  beforeAll(async () => {
    const model = modelBytes("g2p");
    const golden = new Golden<{ file: Place<"uint8"> }>("preprocess/slow_tokenizer.py");
    const slow = golden.array(golden.cases[0].file);
    server = createServer((request, response) => {
      const path = request.url!;
      // The browser's own cache would ask with versions too.
      const headers = {
        "Content-Type": contentType(path),
        "Content-Security-Policy": POLICY,
        "Cache-Control": "no-store",
      };
      if (path === "/g2p.onnx") {
        const known = request.headers["if-none-match"];
        modelRequests.push(known);
        if (known === '"1"') return void response.writeHead(304, { ETag: known }).end();
        response.writeHead(200, { ...headers, ETag: '"1"', "Content-Length": model.length }).end(model);
      } else if (path === "/slow.onnx") {
        response.writeHead(200, headers).end(slow);
      } else if (path === "/index.html") {
        response.writeHead(200, headers).end('<!doctype html><script type="module" src="start.js"></script>');
      } else if (path === "/start.js") {
        response.writeHead(200, headers).end('import * as all from "/bundle/tformer.js"; window.tformer = all;');
      } else if (path.startsWith("/bundle/") && (hasWorker || !path.endsWith("worker.js"))) {
        response.writeHead(200, headers).end(readFileSync(join(PACKAGE, "dist", path)));
      } else {
        response.writeHead(404).end();
      }
    });
    await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
    browser = await puppeteer.launch({ browser: "chrome", executablePath: CHROMIUM!, args: ["--no-sandbox"] });
    page = await browser.newPage();
    page.on("pageerror", (error) => problems.push(String(error)));
    page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
    await page.goto(`http://127.0.0.1:${(server.address() as AddressInfo).port}/index.html`);
    await page.waitForFunction(() => "tformer" in window);
  });

  afterAll(async () => {
    await browser?.close();
    server?.closeAllConnections();
    await new Promise((closed) => server?.close(closed));
  });

  test("a worker is the default, answers requests and streams, and ends with the model", async () => {
    const found = await page.evaluate(async () => {
      const { AbortedError, InputError, Model } = window.tformer;
      const model = await Model.load("g2p.onnx", { cache: false }); // an address beside the page
      const pieces: string[] = [];
      for await (const piece of model.stream("transformer")) pieces.push(piece);
      const controller = new AbortController();
      const aborted = model.generate("transformer", { numBeams: 8, minNewTokens: 40, signal: controller.signal });
      setTimeout(() => controller.abort(), 5);
      const isAborted = await aborted.catch((error: Error) => error instanceof AbortedError);
      const isInput = await model.generate("é").catch((error: Error) => error instanceof InputError);
      const { text } = await model.generate("hello");
      return { pieces, isAborted, isInput, text };
    });
    expect(found.pieces.join("")).toBe("T R AE N S F AO R M ER");
    expect(found.pieces.length).toBeGreaterThan(3);
    expect(found).toMatchObject({ isAborted: true, isInput: true, text: "HH EH L OW" });
    expect(page.workers().length).toBe(1);
    await page.evaluate(async () => {
      const { Model } = window.tformer;
      const model = await Model.load("/g2p.onnx", { worker: false, cache: false });
      await model.dispose();
      await (await Model.load("/g2p.onnx")).dispose();
    });
    await expect.poll(() => page.workers().length).toBe(1); // that of the model above
  });

  test("a regular expression without an end leaves the page alive, and ends with the model", async () => {
    const before = page.workers().length;
    const found = await page.evaluate(async () => {
      const { AbortedError, Model } = window.tformer;
      const model = await Model.load("/slow.onnx", { cache: false });
      const controller = new AbortController();
      const call = model.entities(["a".repeat(60)], { signal: controller.signal });
      let turns = 0;
      const clock = setInterval(() => turns++, 10);
      setTimeout(() => controller.abort(), 300);
      const error = await call.catch((thrown: unknown) => thrown);
      clearInterval(clock);
      const other = model.entities(["abc"]).catch((thrown: Error) => thrown.message);
      await model.dispose();
      return { turns, isAborted: error instanceof AbortedError, other: await other };
    });
    expect(found.isAborted).toBe(true);
    expect(found.turns).toBeGreaterThan(50);
    expect(found.other).toContain("the model is closed");
    // Chromium waits some seconds before it stops a script that does not end.
    await expect.poll(() => page.workers().length, { timeout: 20_000 }).toBe(before);
  });

  test.each(["cache-api", "opfs"] as const)("%s keeps the file", async (cache) => {
    modelRequests = [];
    for (const worker of [true, false]) {
      const text = await page.evaluate(
        async (options) => {
          const { Model } = window.tformer;
          for (const name of await caches.keys()) if (options.worker) await caches.delete(name);
          const model = await Model.load("/g2p.onnx", options);
          const { text } = await model.generate("hello");
          await model.dispose();
          return text;
        },
        { cache, worker } as const,
      );
      expect(text).toBe("HH EH L OW");
    }
    expect(modelRequests).toEqual([undefined, '"1"']);
  });

  test("nothing breaks the policy", () => expect(problems).toEqual([]));

  test("a worker that is missing is named", async () => {
    hasWorker = false;
    const message = await page.evaluate(async () => {
      const { DeviceError, Model } = window.tformer;
      return Model.load("/g2p.onnx").catch((error: Error) => (error instanceof DeviceError ? error.message : error));
    });
    expect(message).toMatch(/^the worker of the model failed \(.*\): serve worker.js beside the library, or load the/);
  });
});
