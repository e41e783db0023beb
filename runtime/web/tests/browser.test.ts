/**
 * The bundle in Chromium, in pages with a strict content security policy, with threads and without.
 *
 * Debian's Chromium is driven (`apt-get install chromium`), or that of the variable CHROMIUM. Without one it is skipped.
 */

import { execFileSync } from "node:child_process";
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { build } from "esbuild";
import { chromium, type Browser, type Page } from "playwright-core";
import { build as viteBuild } from "vite";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { example } from "./support/docs.js";
import { modelPath } from "./support/models.js";
import { PageServer } from "./support/pageServer.js";

const PACKAGE = resolve(import.meta.dirname, "..");
const NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"];
const FOLDERS = ["/usr/bin", "/usr/local/bin", "/snap/bin"];
const CHROMIUM =
  process.env["CHROMIUM"] ?? FOLDERS.flatMap((folder) => NAMES.map((name) => join(folder, name))).find(existsSync);

if (!CHROMIUM) console.warn("no Chromium is installed (apt-get install chromium): the tests of pages are skipped");

describe.skipIf(!CHROMIUM)("in Chromium", () => {
  let browser: Browser;
  let scripts: string;

  beforeAll(async () => {
    scripts = mkdtempSync(join(tmpdir(), "tformer-page-"));
    const run = (...args: string[]) =>
      execFileSync(process.execPath, args, { cwd: PACKAGE, stdio: ["ignore", "ignore", "inherit"] });
    run("node_modules/typescript/bin/tsc", "--project", "tsconfig.build.json");
    run("scripts/bundle.mjs");
    const entryPoints = [join(PACKAGE, "tests/page/page.ts")];
    await build({ entryPoints, bundle: true, format: "esm", target: "es2022", outfile: join(scripts, "page.js") });
    copyFileSync(join(PACKAGE, "tests/page/index.html"), join(scripts, "index.html"));
    browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
  });

  afterAll(async () => {
    await browser?.close();
    rmSync(scripts, { recursive: true });
  });

  test("the page of docs/web.md pronounces words", async () => {
    const folder = join(scripts, "docs");
    mkdirSync(folder);
    for (const name of ["index.html", "pronounce.js"]) writeFileSync(join(folder, name), example(name));
    const files = {
      "/tformer/": join(PACKAGE, "dist/bundle/"),
      "/models/": `${dirname(modelPath("g2p"))}/`,
      "/": `${folder}/`,
    };
    const server = await PageServer.start(files, false);
    const page = await browser.newPage();
    try {
      await page.goto(`${server.address}/index.html`);
      await page.getByRole("button").click({ timeout: 60_000 }); // it is disabled until the model is loaded
      const output = page.locator("output");
      await expect.poll(() => output.textContent(), { timeout: 60_000 }).toBe("T R AE N S F AO R M ER");
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
    for (const name of ["vite/index.html", "vite/main.js"]) writeFileSync(join(scripts, name), example(name));
    await viteBuild({ root: folder, configFile: false, logLevel: "error" });
    const files = { "/models/": `${dirname(modelPath("g2p"))}/`, "/": `${folder}/dist/` };
    const server = await PageServer.start(files, true);
    const page = await browser.newPage();
    try {
      await page.goto(`${server.address}/index.html`);
      const output = page.locator("output");
      await expect.poll(() => output.textContent(), { timeout: 60_000 }).toBe("T R AE N S F AO R M ER");
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
      page.on("pageerror", (error) => problems.push(String(error)));
      page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
      page.on("request", (request) => {
        if (!request.url().startsWith(server.address)) problems.push(`a request to ${request.url()}`);
      });
      await page.goto(`${server.address}/page/index.html`);
      await page.waitForFunction(() => document.title === "ready");
    });

    afterAll(async () => {
      await page?.close();
      await server?.stop();
    });

    test.each(["g2p-web-int4", "g2p", "words", "languages-web", "elnino"])(
      "%s gives the results of its golden file",
      async (name) => {
        const threads = isolated ? 2 : undefined;
        const found = await page.evaluate(([model, count]) => window.replay(model, count), [name, threads] as const);
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
      const load = page.evaluate(() => window.replay("elnino", 2));
      await expect(load).rejects.toThrow("DeviceError: threads: 2 needs a page that is isolated from other sites");
    });

    test("nothing breaks the policy of the page, is missing, or comes from another server", () => {
      expect(problems).toEqual([]);
      expect(server.missing).toEqual([]);
    });
  });
});
