/** The bundle in Chromium and Firefox, in pages with a strict content security policy, with threads and without. */

import { copyFileSync, mkdirSync, mkdtempSync, rmSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { build } from "esbuild";
import puppeteer, { type Browser, type Page } from "puppeteer-core";
import { build as viteBuild } from "vite";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { BROWSERS } from "./support/browsers.js";
import { example } from "./support/docs.js";
import { modelPath } from "./support/models.js";
import { PageServer } from "./support/pageServer.js";

const PACKAGE = resolve(import.meta.dirname, "..");
const HANG_MS = 60_000;
const INSECURE_HOST = "tformer.test"; // a page over http that is not from localhost

/** Wait for a text in the output of a page. */
async function waitForOutput(page: Page, text: string): Promise<void> {
  const output = () => page.$eval("output", (element) => element.textContent);
  await expect.poll(output, { timeout: HANG_MS }).toBe(text);
}

for (const [name, , path] of BROWSERS) if (!path) test.skip(`in ${name}, which is not installed`, () => {});

describe.each(BROWSERS.filter(([, , path]) => path))("in %s", (_, kind, path) => {
  let browser: Browser;
  let scripts: string;

  beforeAll(async () => {
    scripts = mkdtempSync(join(tmpdir(), "tformer-page-"));
    const entryPoints = [join(PACKAGE, "tests/page/page.ts")];
    await build({ entryPoints, bundle: true, format: "esm", target: "es2022", outfile: join(scripts, "page.js") });
    copyFileSync(join(PACKAGE, "tests/page/index.html"), join(scripts, "index.html"));
    const hosts = kind === "chrome" ? [`--host-resolver-rules=MAP ${INSECURE_HOST} 127.0.0.1`] : [];
    const args = ["--no-sandbox", ...hosts];
    browser = await puppeteer.launch({ browser: kind, executablePath: path!, args });
  });

  afterAll(async () => {
    await browser?.close();
    rmSync(scripts, { recursive: true });
  });

  const hosts = kind === "chrome" ? ["127.0.0.1", INSECURE_HOST] : ["127.0.0.1"];

  test.each(hosts)("the page of docs/web.md pronounces words, from %s", async (host) => {
    const folder = join(scripts, "docs", host);
    mkdirSync(folder, { recursive: true });
    for (const name of ["index.html", "pronounce.js"]) writeFileSync(join(folder, name), example(name));
    const files = {
      "/tformer/": join(PACKAGE, "dist/bundle/"),
      "/models/": `${dirname(modelPath("g2p"))}/`,
      "/": `${folder}/`,
    };
    const server = await PageServer.start(files, false);
    const page = await browser.newPage();
    try {
      await page.goto(`${server.address.replace("127.0.0.1", host)}/index.html`);
      expect(await page.evaluate(() => "subtle" in crypto)).toBe(host !== INSECURE_HOST);
      await page.waitForSelector("button:enabled", { timeout: HANG_MS }); // once the model is loaded
      await page.click("button");
      await waitForOutput(page, "T R AE N S F AO R M ER");
      expect(server.missing).toEqual([]);
    } finally {
      await page.close();
      await server.stop();
    }
  });

  test("the page with Vite of docs/web.md pronounces a word", async () => {
    const folder = join(scripts, "vite");
    mkdirSync(join(folder, "node_modules"), { recursive: true });
    symlinkSync(PACKAGE, join(folder, "node_modules", "tformer"));
    for (const name of ["vite/index.html", "vite/main.js", "vite/vite.config.js"])
      writeFileSync(join(scripts, name), example(name));
    await viteBuild({ root: folder, configFile: join(folder, "vite.config.js"), logLevel: "error" });
    const files = { "/models/": `${dirname(modelPath("g2p"))}/`, "/": `${folder}/dist/` };
    const server = await PageServer.start(files, true);
    const page = await browser.newPage();
    try {
      await page.goto(`${server.address}/index.html`);
      await waitForOutput(page, "T R AE N S F AO R M ER");
      expect(server.missing).toEqual([]);
    } finally {
      await page.close();
      await server.stop();
    }
  });

  describe.each([
    ["with cross-origin isolation", true],
    ["without cross-origin isolation", false],
  ])("%s", (_, isolated) => {
    let server: PageServer;
    let page: Page;
    const problems: string[] = [];

    beforeAll(async () => {
      const files = {
        "/page/": `${scripts}/`,
        "/bundle/": join(PACKAGE, "dist/bundle/"),
        "/models/": `${dirname(modelPath("g2p"))}/`,
      };
      server = await PageServer.start(files, isolated);
      page = await browser.newPage();
      const note = (problem: string) => !problem.includes("/favicon.ico") && problems.push(problem); // Firefox asks for it
      page.on("pageerror", (error) => note(String(error)));
      page.on("console", (message) => message.type() === "error" && note(message.text()));
      page.on("request", (request) => {
        if (!request.url().startsWith(server.address)) note(`a request to ${request.url()}`);
      });
      await page.goto(`${server.address}/page/index.html`);
      await page.waitForFunction(() => document.title === "ready");
    });

    afterAll(async () => {
      await page?.close();
      await server?.stop();
    });

    test.each(["g2p-web-int4", "g2p", "words", "languages-web", "elnino", "tiny-whisper", "tiny-llava"])(
      "%s gives the results of its golden file",
      async (name) => {
        const options = isolated ? { threads: 2 } : {};
        const found = await page.evaluate((model, given) => window.replay(model, given), name, options);
        const size = statSync(modelPath(name)).size;
        expect(found).toEqual({
          differences: [],
          device: "wasm",
          usedBytes: 0,
          lastProgress: [size, size],
          isolated,
        });
      },
    );

    test("threads run in workers if the page is isolated, and in no other page", () => {
      expect(page.workers().length > 0).toBe(isolated);
    });

    test.skipIf(isolated)("threads are refused in a page that is not isolated", async () => {
      const refusal = await page.evaluate(async () => {
        const load = window.replay("elnino", { threads: 2 });
        return load.then(
          () => "none",
          (error: Error) => `${error.name}: ${error.message}`,
        );
      });
      expect(refusal).toContain("DeviceError: threads: 2 needs a page that is isolated from other sites");
    });

    test("nothing breaks the policy of the page, is missing, or comes from another server", () => {
      expect(problems).toEqual([]);
      expect(server.missing).toEqual([]);
    });
  });
});
