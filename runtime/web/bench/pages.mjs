// Pages of the benchmarks: each in a browser of its own, with a server of the files that it reads.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join } from "node:path";
import { build } from "esbuild";
import puppeteer from "puppeteer-core";

const HERE = import.meta.dirname;
const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
const TYPES = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".wasm": "application/wasm",
};

/**
 * Open a page of an engine. entry: its script in this folder. files: beginning of an address → the folder that it stands for.
 * folder: for the page. query: of its address.
 */
export async function openPage(engine, entry, files, folder, query = "") {
  mkdirSync(folder, { recursive: true });
  await build({
    entryPoints: [join(HERE, entry)],
    bundle: true,
    format: "esm",
    platform: "browser",
    external: ["/tformer/*"],
    outfile: join(folder, "page.js"),
    logLevel: "error",
  });
  writeFileSync(join(folder, "page.html"), readFileSync(join(HERE, "page.html")));
  const roots = {
    "/tformer/": join(HERE, "../dist/bundle"),
    "/ort/": join(HERE, "node_modules/onnxruntime-web/dist"),
    ...files,
    "/": folder,
  };
  const server = createServer((request, response) => {
    const address = decodeURIComponent(new URL(request.url, "http://localhost").pathname);
    const root = Object.keys(roots).find((one) => address.startsWith(one));
    const file = join(roots[root], address.slice(root.length));
    if (!existsSync(file)) return void response.writeHead(404).end();
    const bytes = readFileSync(file);
    response.writeHead(200, {
      "Content-Type": TYPES[extname(file)] ?? "application/octet-stream",
      "Content-Length": bytes.length,
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Embedder-Policy": "require-corp",
    });
    response.end(bytes);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  const browser = await puppeteer.launch({
    executablePath: CHROMIUM,
    args: ["--no-sandbox"],
    protocolTimeout: 600_000,
  });
  giveShare(browser.process().pid);
  const tab = await browser.newPage();
  tab.on("pageerror", (error) => console.error(engine, error.message));
  await tab.goto(`http://127.0.0.1:${server.address().port}/page.html${query}`);
  const end = async () => {
    await browser.close();
    server.close();
  };
  return { tab, browser, end };
}

/** Give the session of a process the share of processors that this one has, on Linux. */
function giveShare(pid) {
  const own = "/proc/self/autogroup";
  const nice = existsSync(own) ? /nice (-?\d+)/.exec(readFileSync(own, "utf8"))?.[1] : undefined;
  if (Number(nice)) writeFileSync(`/proc/${pid}/autogroup`, nice);
}
