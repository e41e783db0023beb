/** The page of `make web-demo` in Chromium and Firefox: each form, offline the second time, under the policy of its server. */

import { execFileSync, spawn, spawnSync, type ChildProcess } from "node:child_process";
import {
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { gzipSync } from "node:zlib";
import puppeteer, { type Browser, type Page } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { Model } from "../src/index.js";
import { BROWSERS } from "./support/browsers.js";
import { modelPath } from "./support/models.js";

const DEMO = resolve(import.meta.dirname, "../demo");
const FILES = { g2p: "g2p-extras", words: "words", languages: "languages", elnino: "elnino" }; // name in the page → file
const HANG_MS = 60_000;
const TEST_MS = 4 * HANG_MS; // of a test with all forms, on a machine that does other work
const MAX_GZIP_BYTES = 70_000; // before a model is loaded; 60,000 are those of the library

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

/** The first line of the service worker as builds wrote it before they listed the models. */
const EARLIER_LIST = 'const FILES = ["./","old.js"], VERSION = "0123456789abcdef";\n';

test("a build replaces the files of an earlier one, and no others", () => {
  const folder = mkdtempSync(join(tmpdir(), "tformer-demo-"));
  const dist = join(folder, "dist");
  const run = (...models: string[]) =>
    spawnSync(process.execPath, [join(DEMO, "build.mjs"), dist, ...models], { encoding: "utf8" });
  const write = (name: string, text: string) => writeFileSync(join(folder, name), text);
  const files = () => readdirSync(dist, { recursive: true, encoding: "utf8" }).sort();
  try {
    for (const name of ["one.onnx", "two.onnx"]) write(name, name);
    expect(run(join(folder, "one.onnx"), join(folder, "two.onnx")).status).toBe(0);
    const built = files();
    expect(built).toContain("models/two.onnx");

    // An earlier build had another part of the script. Somebody has put files next to it.
    const worker = readFileSync(join(dist, "service-worker.js"), "utf8");
    write("dist/service-worker.js", worker.replace('["./",', '["./","old-part.js","../one.onnx",'));
    for (const name of ["old-part.js", "notes.txt", "models/mine.onnx"]) write(`dist/${name}`, "");
    write("one.onnx", "newer");
    expect(run(join(folder, "one.onnx")).status).toBe(0);
    const expected = [...built.filter((name) => name !== "models/two.onnx"), "notes.txt", "models/mine.onnx"];
    expect(files()).toEqual(expected.sort());
    expect(readFileSync(join(dist, "models/one.onnx"), "utf8")).toBe("newer");
    expect(readFileSync(join(folder, "one.onnx"), "utf8")).toBe("newer"); // the list names no file outside of the folder
    expect(readFileSync(join(dist, "service-worker.js"), "utf8")).toMatch(/^const FILES = .*"main.js".*;$/m);

    // A link in the place of a file is replaced, and what it leads to stays.
    write("large.onnx", "large");
    rmSync(join(dist, "models/one.onnx"));
    symlinkSync(join(folder, "large.onnx"), join(dist, "models/one.onnx"));
    expect(run(join(folder, "one.onnx")).status).toBe(0);
    expect(readFileSync(join(folder, "large.onnx"), "utf8")).toBe("large");
    expect(readFileSync(join(dist, "models/one.onnx"), "utf8")).toBe("newer");

    // A file of somebody else is not replaced.
    write("mine.onnx", "another");
    const refused = run(join(folder, "mine.onnx"));
    expect(refused.status).toBe(1);
    expect(refused.stderr).toMatch(/mine\.onnx is of something else: remove it, or choose another folder/);
    expect(files()).toEqual(expected);
    expect(run(join(folder, "none.onnx")).stderr).toMatch(/none\.onnx does not exist/);
    expect(run(folder).stderr).toMatch(/^\S+ is not a file$/m);
    expect(run(join(folder, "one.onnx"), join(dist, "models/one.onnx")).stderr).toMatch(/have the same name$/m);
    expect(spawnSync(process.execPath, [join(DEMO, "build.mjs"), join(folder, "one.onnx")]).status).toBe(1);
    expect(readFileSync(join(folder, "one.onnx"), "utf8")).toBe("newer");

    // Builds did not always list the models.
    for (const name of readdirSync(dist)) rmSync(join(dist, name), { recursive: true });
    mkdirSync(join(dist, "models"));
    for (const name of ["old.js", "models/one.onnx"]) write(`dist/${name}`, "old");
    write("dist/service-worker.js", EARLIER_LIST);
    expect(run(join(folder, "one.onnx")).status).toBe(0);
    expect(readFileSync(join(dist, "models/one.onnx"), "utf8")).toBe("newer");
    expect(files()).not.toContain("old.js");

    for (const name of readdirSync(dist)) rmSync(join(dist, name), { recursive: true });
    write("dist/thesis.txt", "");
    const { status, stderr } = run();
    expect(status).toBe(1);
    expect(stderr).toMatch(/has files of something else: choose an empty folder/);
    expect(files()).toEqual(["thesis.txt"]);
  } finally {
    rmSync(folder, { recursive: true });
  }
});

describe.each(BROWSERS.filter(([, , path]) => path))("the page of the demo in %s", (_, kind, path) => {
  const models: Partial<Record<keyof typeof FILES, Model>> = {}; // the same files in Node: their results are expected
  const problems: string[] = [];
  let folder: string;
  let dist: string;
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
    dist = join(folder, "dist");
    execFileSync(process.execPath, [join(DEMO, "build.mjs"), dist, ...copies]);
    ({ server, address } = await serve(dist));
    for (const name of Object.keys(FILES) as (keyof typeof FILES)[]) {
      models[name] = await Model.load(join(folder, `${name}.onnx`), { device: "wasm", threads: 1 });
    }
    browser = await puppeteer.launch({
      browser: kind,
      executablePath: path!,
      args: ["--no-sandbox"],
      extraPrefsFirefox: { "ui.systemUsesDarkTheme": 1 }, // it has no command for it
    });
    page = await browser.newPage();
    page.setDefaultNavigationTimeout(HANG_MS);
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

  /** Wait for the status that screen readers say. */
  async function isDone(): Promise<void> {
    const status = () => textOf('#form [role="status"]');
    await expect.poll(status, { timeout: HANG_MS }).toEqual([expect.stringMatching(/^Done in [\d.]+ m?s$/)]);
  }

  async function type(text: string): Promise<void> {
    const box = (await page.$("#form input"))!;
    await box.evaluate((input) => (input as HTMLInputElement).select());
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
    const weights = await models.g2p!.align("quantization", greedy.text);
    const opacities = await page.$$eval("#form table.heat rect", (boxes) =>
      boxes.map((box) => Number(box.getAttribute("fill-opacity"))),
    );
    expect(opacities).toHaveLength(weights.data.length);
    opacities.forEach((opacity, i) => expect(opacity).toBeCloseTo(weights.data[i], 4));
    expect(await textOf("#form table.heat tbody th")).toEqual(greedy.text.split(" "));
    expect(await textOf("#form table.heat thead th")).toEqual([..."quantization", "end"]);
    await isDone();

    await choose("words");
    const chat = models.words!.chat();
    const answers: string[] = [];
    for (const word of ["browser", "window"]) {
      answers.push(word, (await chat.send(word)).text);
      await type(word);
      await page.click("#form form button");
      const messages = () => textOf("#form .message span");
      await expect.poll(messages, { timeout: HANG_MS }).toEqual(answers);
      await isDone();
    }
    chat.release();
    const long = "q".repeat(500);
    await page.$eval("#form input", (input, text) => void ((input as HTMLInputElement).value = text), long);
    await page.click("#form form button");
    await page.waitForSelector('#form [role="alert"] .error', { timeout: HANG_MS });
    expect((await textOf('#form [role="alert"]'))[0]).toMatch(/tokens long/);
    expect(await page.$eval("#form input", (input) => (input as HTMLInputElement).value)).toBe(long);
    expect(await textOf("#form .message span")).toEqual(answers); // without the message that has no answer
    await page.click("#form ::-p-aria(New conversation)");
    expect(await textOf("#form .message")).toEqual([]);
    expect(await textOf("#form .error")).toEqual([]);

    // A message right after another conversation was begun, while the answer of the last one is still computed.
    await page.$eval("#form", (form) => {
      const input = form.querySelector("input")!;
      const [send] = form.querySelectorAll("button");
      const another = [...form.querySelectorAll("button")].find((one) => one.textContent === "New conversation")!;
      input.value = "browser";
      send.click();
      another.click();
      if (send.disabled) throw new Error("no message can be sent");
      input.value = "window";
      send.click();
    });
    const begun = models.words!.chat();
    const { text: answer } = await begun.send("window");
    begun.release();
    await expect.poll(() => textOf("#form .message span"), { timeout: HANG_MS }).toEqual(["window", answer]);
    await isDone();

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
          range.dispatchEvent(new Event("input", { bubbles: true }));
        },
        horizon,
      );
      const { data } = await models.elnino!.forecast(history, { horizon });
      const expected = Array.from(data, (value) => String(Number(value.toPrecision(5))));
      await expect.poll(months, { timeout: HANG_MS }).toEqual(expected);
      const label = await page.$eval('#form svg[role="img"]', (plot) => plot.getAttribute("aria-label"));
      const ends = `from ${expected[0]} to ${expected[horizon - 1]}`;
      expect(label).toContain(`60 steps of history, then a forecast of ${horizon} steps ${ends}`);
      if (horizon === 12) await page.click("#form summary");
    }
    expect(await page.$eval("#form details", (table) => (table as HTMLDetailsElement).open)).toBe(true); // it stays open
    expect(await textOf('#form [role="alert"] .error')).toEqual([]);
  }

  test(
    "each form gives the results of its model",
    async () => {
      const response = (await page.goto(address))!;
      const policy = response.headers()["content-security-policy"];
      expect(policy).toContain("default-src 'none'");
      expect(policy).not.toMatch(/unsafe-inline|unsafe-eval(?<!wasm-unsafe-eval)|\*|data:|https?:/);
      expect(await page.evaluate(() => crossOriginIsolated)).toBe(true);
      await useForms();
      expect(problems).toEqual([]);
    },
    TEST_MS,
  );

  test(
    "a narrow page in the dark scheme is used with the keyboard",
    async () => {
      const heights = (selector: string) =>
        page.$$eval(selector, (found) => found.map((one) => one.getBoundingClientRect().height));
      await page.setViewport({ width: 360, height: 640 });
      if (kind === "chrome") await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
      try {
        await page.focus('button[data-model="g2p"]');
        await page.keyboard.press("Enter");
        await page.waitForSelector("#form table.heat", { timeout: HANG_MS });
        await isDone();
        expect(Math.max(...(await heights("#form table.heat th")))).toBeLessThan(40); // one line

        await page.focus('button[data-model="elnino"]');
        await page.keyboard.press("Enter");
        await page.waitForSelector("#form svg.plot text", { timeout: HANG_MS });
        expect(Math.min(...(await heights("#form svg.plot text")))).toBeGreaterThan(9);
        expect(await page.evaluate(() => document.activeElement!.id)).toBe("form");
        await page.keyboard.press("Tab");
        await page.keyboard.press("ArrowLeft");
        const months = () => textOf("#form details tbody td");
        await expect.poll(months, { timeout: HANG_MS }).toHaveLength(11);
        expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(360);
        const back = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
        for (const part of back.match(/\d+/g)!) expect(Number(part)).toBeLessThan(64);
      } finally {
        await page.setViewport({ width: 800, height: 600 });
        if (kind === "chrome") await page.emulateMediaFeatures([]);
      }
      expect(problems).toEqual([]);
    },
    TEST_MS,
  );

  test("the page loads little at once", () => {
    const loaded = new Set(["index.html", "style.css", "icon.svg", "main.js"]);
    for (const name of loaded) {
      const text = readFileSync(join(dist, name), "utf8");
      for (const [, part] of text.matchAll(/(?:from|import)\s*"\.\/([^"]+)"/g)) loaded.add(part);
    }
    expect(loaded.size).toBeGreaterThan(5);
    const sizes = [...loaded].map((name) => gzipSync(readFileSync(join(dist, name))).length);
    expect(sizes.reduce((sum, size) => sum + size)).toBeLessThanOrEqual(MAX_GZIP_BYTES);
  });

  test(
    "without its server the page works the second time",
    async () => {
      await page.waitForFunction(() => document.querySelector("#network")!.textContent!.includes("works offline"));
      await end(server);
      await expect(fetch(address)).rejects.toThrow();
      problems.length = 0;
      await page.reload();
      await useForms();
      // The library asks for another version of a model, and finds no network: the browser notes that itself.
      expect(problems.filter((one) => !one.includes("net::ERR_CONNECTION_REFUSED"))).toEqual([]);
    },
    TEST_MS,
  );
});
