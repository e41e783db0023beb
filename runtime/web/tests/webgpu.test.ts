/**
 * Device webgpu in Chromium, on its software adapter: results of golden files, the worker, and what is refused.
 *
 * Without Chromium, or without an adapter in it, the tests are skipped. The software adapter compiles shaders slowly.
 */

import { copyFileSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { build } from "esbuild";
import puppeteer, { type Browser, type Page } from "puppeteer-core";
import { afterAll, afterEach, beforeEach, describe, expect, test } from "vitest";
import type * as tformer from "../src/index.js";
import { CHROMIUM, SOFTWARE_WEBGPU } from "./support/browsers.js";
import { modelPath } from "./support/models.js";
import { PageServer } from "./support/pageServer.js";

const PACKAGE = resolve(import.meta.dirname, "..");
const SLOW_MS = 600_000;
// The software adapter takes more than a minute for a model that generates. THOROUGH=1 runs a decoder, too.
const MODELS = ["g2p-web-int4", "languages-web", "elnino-web", ...(process.env["THOROUGH"] ? ["words-web-int8"] : [])];

/** A page of a server, in a browser. */
class Site {
  private constructor(
    readonly browser: Browser,
    readonly server: PageServer,
    private readonly scripts: string,
  ) {}

  static async open(executablePath: string): Promise<Site> {
    const scripts = mkdtempSync(join(tmpdir(), "tformer-webgpu-"));
    const entryPoints = [join(PACKAGE, "tests/page/page.ts")];
    await build({ entryPoints, bundle: true, format: "esm", target: "es2022", outfile: join(scripts, "page.js") });
    copyFileSync(join(PACKAGE, "tests/page/index.html"), join(scripts, "index.html"));
    const files = {
      "/page/": `${scripts}/`,
      "/bundle/": join(PACKAGE, "dist/bundle/"),
      "/models/": `${dirname(modelPath("g2p"))}/`,
    };
    const server = await PageServer.start(files, false);
    const browser = await puppeteer.launch({ executablePath, args: SOFTWARE_WEBGPU, protocolTimeout: SLOW_MS });
    return new Site(browser, server, scripts);
  }

  async page(): Promise<Page> {
    const page = await this.browser.newPage();
    await page.goto(`${this.server.address}/page/index.html`);
    await page.waitForFunction(() => document.title === "ready");
    return page;
  }

  async close(): Promise<void> {
    await this.browser.close();
    await this.server.stop();
    rmSync(this.scripts, { recursive: true });
  }
}

/** Return why there is no WebGPU here; undefined if there is. */
async function whyNot(site: Site | undefined): Promise<string | undefined> {
  if (!site) return "no Chromium is installed";
  const page = await site.page();
  const found = await page.evaluate(async () => Boolean(await navigator.gpu?.requestAdapter()));
  await page.close();
  return found ? undefined : "Chromium has no WebGPU adapter";
}

const site = CHROMIUM ? await Site.open(CHROMIUM) : undefined;
const reason = await whyNot(site);
if (reason) console.warn(`${reason}: the tests of device webgpu are skipped`);

afterAll(async () => site?.close());

describe.skipIf(reason)("on the software adapter", { timeout: SLOW_MS }, () => {
  let page: Page;
  const problems: string[] = [];

  beforeEach(async () => {
    problems.length = 0;
    page = await site!.page();
    page.on("pageerror", (error) => problems.push(String(error)));
    page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  });

  afterEach(async () => page.close());

  test.each(MODELS)("%s gives the results of its golden file", async (name) => {
    const found = await page.evaluate((model) => window.replay(model, { device: "webgpu" }), name);
    expect(found).toMatchObject({ differences: [], device: "webgpu", usedBytes: 0 });
    expect(problems).toEqual([]); // also of the page's policy, which forbids eval
    expect(site!.server.missing).toEqual([]);
  });

  test("models in a worker and in the page take turns, and free their buffers", async () => {
    const found = await page.evaluate(async () => {
      const { Model } = await window.loadTformer();
      const load = (worker: boolean) => Model.load("/models/g2p-web.onnx", { device: "webgpu", worker });
      const [remote, one, other] = await Promise.all([load(true), load(false), load(false)]);
      const results = await Promise.all([
        remote.generate("quantization", { numBeams: 4 }),
        one.generate("transformer"),
        other.generate("quantization"),
        one.generate("two"),
      ]);
      const memory = [remote, one, other].map((model) => model.memory());
      const running = one.generate("transformer").catch((error: Error) => error.name);
      await one.dispose();
      const after = [await running, (await other.generate("two")).text, other.memory().usedBytes];
      const devices = [remote, one, other].map(({ device }) => device);
      await Promise.all([remote, other].map((model) => model.dispose()));
      return { texts: results.map(({ text }) => text), devices, memory, after };
    });
    expect(found.texts).toEqual([
      "K W AA N T IH Z EY SH AH N",
      "T R AE N S F AO R M ER",
      "K W AA N T IH Z EY SH AH N",
      "T UW",
    ]);
    expect(found.devices).toEqual(["webgpu", "webgpu", "webgpu"]);
    expect(found.after).toEqual(["UnsupportedCallError", "T UW", 0]); // a model is disposed while it computes
    for (const { usedBytes, peakBytes } of found.memory) {
      expect(usedBytes).toBe(0);
      expect(peakBytes).toBeGreaterThan(10_000); // caches and the context are counted
    }
  });

  test("auto chooses WebAssembly where the adapter computes on the CPU", async () => {
    expect(await devicesOf(page, [["g2p-web", {}]])).toEqual(["wasm"]);
  });

  test("auto chooses the GPU for files that suit it", async () => {
    await page.evaluate(() => {
      const hardware = { isFallbackAdapter: false, architecture: "turing", vendor: "nvidia" };
      Object.defineProperty(GPUAdapter.prototype, "info", { get: () => hardware });
    });
    const loads: [string, tformer.LoadOptions][] = [
      ["g2p-web", {}],
      ["g2p", {}],
      ["g2p-web", { wasmUrl: "/bundle/ort-wasm-simd-threaded.wasm" }],
    ];
    expect(await devicesOf(page, loads)).toEqual(["webgpu", "wasm", "wasm"]);
    // A file with a weight that no buffer can hold does not suit it.
    await limitBuffers(page, 4096);
    expect(await devicesOf(page, [["g2p-web", {}]])).toEqual(["wasm"]);
  });

  test("a file that does not suit the GPU is refused", async () => {
    const refusal = await refusalOf(page, "g2p");
    expect(refusal).toMatch(/^DeviceError: .*g2p\.onnx has operators without WebGPU kernels .*--target web/);
    await limitBuffers(page, 4096);
    expect(await refusalOf(page, "g2p-web")).toMatch(
      /^DeviceError: .*has a weight of [\d,]+ bytes, and this GPU's buffers have at most 4,096/,
    );
  });

  test("a browser without an adapter is refused before the download", async () => {
    const requests: string[] = [];
    page.on("request", (request) => requests.push(request.url()));
    await page.evaluate(() => (GPU.prototype.requestAdapter = async () => null));
    expect(await refusalOf(page, "g2p-web")).toMatch(/^DeviceError: device webgpu is not available: .*no GPU/);
    expect(requests.filter((url) => url.endsWith(".onnx") || url.endsWith(".wasm"))).toEqual([]);
  });

  test("caches that no buffer can hold are refused, and the model goes on", async () => {
    const found = await page.evaluate(async () => {
      const { Model } = await window.loadTformer();
      const model = await Model.load("/models/g2p-web.onnx", { device: "webgpu", worker: false });
      const { prototype } = GPUSupportedLimits;
      const limit = Object.getOwnPropertyDescriptor(prototype, "maxBufferSize")!;
      Object.defineProperty(prototype, "maxBufferSize", { get: () => 4096, configurable: true });
      const error = await model.generate("two", { numBeams: 8 }).catch((one: Error) => `${one.name}: ${one.message}`);
      Object.defineProperty(prototype, "maxBufferSize", limit);
      return [error, (await model.generate("two")).text, model.memory().usedBytes];
    });
    expect(found[0]).toMatch(/^OutOfMemoryError: [\d,]+ bytes are needed at once, and this GPU's buffers have at most/);
    expect(found.slice(1)).toEqual(["T UW", 0]);
  });

  test("a lost GPU ends calls with an error, and models that are loaded later get another one", async () => {
    const found = await page.evaluate(async () => {
      const { Model } = await window.loadTformer();
      const devices: GPUDevice[] = [];
      const request = GPUAdapter.prototype.requestDevice;
      GPUAdapter.prototype.requestDevice = async function (...args) {
        const device = await request.apply(this, args);
        devices.push(device);
        return device;
      };
      const load = () => Model.load("/models/g2p-web.onnx", { device: "webgpu", worker: false });
      const model = await load();
      const first = model.generate("transformer");
      setTimeout(() => devices[0].destroy(), 20);
      const errors = [];
      for (const call of [() => first, () => model.generate("two")]) {
        errors.push(await call().catch((one: Error) => `${one.name}: ${one.message}`));
      }
      await model.dispose();
      return { errors, text: (await (await load()).generate("two")).text, devices: devices.length };
    });
    for (const error of found.errors) expect(error).toMatch(/^DeviceError: the GPU was lost .*: load the model again$/);
    expect(found).toMatchObject({ text: "T UW", devices: 2 });
  });
});

/** Let adapters and devices of a page have small buffers. */
async function limitBuffers(page: Page, bytes: number): Promise<void> {
  await page.evaluate((limit) => {
    Object.defineProperty(GPUSupportedLimits.prototype, "maxBufferSize", { get: () => limit });
  }, bytes);
}

/** Return the devices that `auto` chooses. */
async function devicesOf(page: Page, loads: readonly [string, tformer.LoadOptions][]): Promise<string[]> {
  return page.evaluate(async (all) => {
    const { Model } = await window.loadTformer();
    const devices = [];
    for (const [name, options] of all) {
      const model = await Model.load(`/models/${name}.onnx`, { worker: false, ...options });
      devices.push(model.device);
      await model.dispose();
    }
    return devices;
  }, loads);
}

async function refusalOf(page: Page, name: string): Promise<string> {
  return page.evaluate(async (model) => {
    const { Model } = await window.loadTformer();
    const load = Model.load(`/models/${model}.onnx`, { device: "webgpu", worker: false });
    return load.then(
      () => "none",
      (error: Error) => `${error.name}: ${error.message}`,
    );
  }, name);
}
