/** The page of `make web-demo` in Chromium: each form, offline the second time, under the policy of its server. */

import { execFileSync, spawn, spawnSync, type ChildProcess } from "node:child_process";
import { copyFileSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import puppeteer, { type Browser, type Page } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { Model } from "../src/index.js";
import { CHROMIUM } from "./support/browsers.js";
import { modelPath } from "./support/models.js";

const DEMO = resolve(import.meta.dirname, "../demo");
const FILES = { g2p: "g2p-extras", words: "words", languages: "languages", elnino: "elnino" }; // name in the page → file
const HANG_MS = 60_000;

/** Start the server of the page. */
async function serve(folder: string, port = 0): Promise<{ server: ChildProcess; address: string }> {
  const env = { ...process.env, PORT: String(port) };
  const args = [join(DEMO, "serve.mjs"), folder];
  const server = spawn(process.execPath, args, { env, stdio: ["ignore", "pipe", "inherit"] });
  const address = await new Promise<string>((done, fail) => {
    server.stdout.on("data", (data: Buffer) => {
      const [found] = /http:\/\/\S+/.exec(String(data)) ?? [];
      if (found) done(found);
    });
    server.once("exit", () => fail(new Error("the server of the page has ended")));
  });
  return { server, address };
}

async function end(server: ChildProcess): Promise<void> {
  if (server.exitCode !== null || server.signalCode !== null) return;
  const ended = new Promise((done) => server.once("exit", done));
  server.kill();
  await ended;
}

test("a build clears a folder of its own, and refuses one with other files", () => {
  const folder = mkdtempSync(join(tmpdir(), "tformer-demo-"));
  const run = () => spawnSync(process.execPath, [join(DEMO, "build.mjs"), folder], { encoding: "utf8" });
  try {
    expect(run().status).toBe(0);
    writeFileSync(join(folder, "models/old.onnx"), "");
    expect(run().status).toBe(0);
    expect(readdirSync(join(folder, "models"))).toEqual([]);
    expect(readdirSync(folder)).toContain("service-worker.js");
    for (const name of readdirSync(folder)) rmSync(join(folder, name), { recursive: true });
    writeFileSync(join(folder, "thesis.txt"), "");
    const { status, stderr } = run();
    expect(status).toBe(1);
    expect(stderr).toMatch(/has files of something else: choose an empty folder/);
    expect(readdirSync(folder)).toEqual(["thesis.txt"]);
  } finally {
    rmSync(folder, { recursive: true });
  }
});

describe.skipIf(!CHROMIUM)("the page of the demo in Chromium", () => {
  const models: Partial<Record<keyof typeof FILES, Model>> = {}; // the same files in Node: their results are expected
  const problems: string[] = [];
  let folder: string;
  let browser: Browser;
  let page: Page;
  let server: ChildProcess;
  let address: string;

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), "tformer-demo-"));
    const copies = Object.entries(FILES).map(([name, file]) => {
      const copy = join(folder, `${name}.onnx`);
      copyFileSync(modelPath(file), copy);
      return copy;
    });
    const dist = join(folder, "dist");
    execFileSync(process.execPath, [join(DEMO, "build.mjs"), dist, ...copies]);
    ({ server, address } = await serve(dist));
    for (const name of Object.keys(FILES) as (keyof typeof FILES)[]) {
      models[name] = await Model.load(join(folder, `${name}.onnx`), { device: "wasm", threads: 1 });
    }
    browser = await puppeteer.launch({ executablePath: CHROMIUM!, args: ["--no-sandbox"] });
    page = await browser.newPage();
    page.on("pageerror", (error) => problems.push(String(error)));
    page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
    page.on("request", (request) => {
      if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(address)) problems.push(request.url());
    });
    await page.evaluateOnNewDocument(() => {
      document.addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
        console.error(`policy: ${violatedDirective} ${blockedURI}`),
      );
    });
  });

  afterAll(async () => {
    await browser?.close();
    if (server) await end(server);
    for (const model of Object.values(models)) await model.dispose();
    rmSync(folder, { recursive: true });
  });

  const textOf = (selector: string) =>
    page.$$eval(selector, (found) => found.map((one) => one.textContent!.replace(/\s+/g, " ").trim()));

  /** Choose a model and wait for its form. */
  async function choose(name: string): Promise<void> {
    await page.click(`button[data-model="${name}"]`);
    await page.waitForSelector("#form .facts", { timeout: HANG_MS });
  }

  async function type(text: string): Promise<void> {
    const box = (await page.$("#form input"))!;
    await box.click({ clickCount: 3 });
    await box.type(text);
  }

  /** Use the form of each model, and compare it with the model in Node. */
  async function useForms(): Promise<void> {
    await choose("g2p");
    await type("quantization");
    await page.click("#form button");
    const best = await models.g2p!.generate("quantization", { numBeams: 4, numReturnSequences: 3 });
    const sounds = [best, ...best.alternatives];
    const bySounds = () => textOf("#form .result > table:last-child tbody th");
    await expect.poll(bySounds, { timeout: HANG_MS }).toEqual(sounds.map(({ text }) => text));
    const shares = sounds.map(({ score }) => Math.exp(score).toFixed(4));
    expect(await textOf("#form .result > table:last-child td.number")).toEqual(shares);
    const greedy = await models.g2p!.generate("quantization");
    expect(await textOf("#form .result > p.text")).toEqual([greedy.text]);
    const [alignment] = await textOf("#form .result");
    for (const sound of greedy.text.split(" ")) expect(alignment).toContain(sound);

    await choose("words");
    const chat = models.words!.chat();
    const answers: string[] = [];
    for (const word of ["browser", "window"]) {
      answers.push(word, (await chat.send(word)).text);
      await type(word);
      await page.click("#form form button");
      const messages = () => textOf("#form .message span");
      await expect.poll(messages, { timeout: HANG_MS }).toEqual(answers);
    }
    chat.release();
    await page.click("#form button.plain");
    expect(await textOf("#form .message")).toEqual([]);

    await choose("languages");
    const text = "Wo ist der Bahnhof";
    await type(text);
    const [{ top }] = await models.languages!.classify([text], { topK: 5 });
    const byCode = () => textOf("#form .result tbody th");
    const names = top!.map(([code]) => expect.stringContaining(`(${code})`));
    await expect.poll(byCode, { timeout: HANG_MS }).toEqual(names);
    expect(await textOf("#form .result td.number")).toEqual(top!.map(([, share]) => share.toFixed(4)));

    await choose("elnino");
    await page.waitForSelector("#form svg", { timeout: HANG_MS });
    const months = () => textOf("#form details tbody td");
    const history = (await import("../demo/elnino.js" as string)).EL_NINO as number[];
    for (const horizon of [12, 5]) {
      await page.$eval(
        "#form input",
        (range, value) => {
          (range as HTMLInputElement).value = String(value);
          range.dispatchEvent(new Event("input"));
        },
        horizon,
      );
      const { data } = await models.elnino!.forecast(history, { horizon });
      const expected = Array.from(data, (value) => String(Number(value.toPrecision(5))));
      await expect.poll(months, { timeout: HANG_MS }).toEqual(expected);
    }
    expect(await textOf('#form [role="alert"].error')).toEqual([]);
  }

  test("each form gives the results of its model", async () => {
    const response = (await page.goto(address))!;
    const policy = response.headers()["content-security-policy"];
    expect(policy).toContain("default-src 'none'");
    expect(policy).not.toMatch(/unsafe-inline|unsafe-eval(?<!wasm-unsafe-eval)|\*|data:|https?:/);
    expect(await page.evaluate(() => crossOriginIsolated)).toBe(true);
    await useForms();
    expect(problems).toEqual([]);
  });

  test("without its server the page works the second time", async () => {
    await page.waitForFunction(() => document.querySelector("#network")!.textContent!.includes("works offline"));
    await end(server);
    await expect(fetch(address)).rejects.toThrow();
    problems.length = 0;
    await page.reload();
    await useForms();
    // The library asks for another version of a model, and finds no network: the browser notes that itself.
    expect(problems.filter((one) => !one.includes("net::ERR_CONNECTION_REFUSED"))).toEqual([]);
  });
});
