// Serves a folder of demo/build.mjs at http://127.0.0.1:8081, with the headers that threads need and a strict content security
// policy: node demo/serve.mjs [FOLDER]. PORT: another port; 0 for a free one.
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize, resolve } from "node:path";

const DIST = resolve(process.argv[2] ?? join(import.meta.dirname, "dist"));
const PORT = Number(process.env.PORT ?? 8081);
const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".css": "text/css",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
};
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Content-Security-Policy":
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; style-src 'self'; img-src 'self'",
};

const server = createServer(async (request, response) => {
  try {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const name = join(DIST, path.endsWith("/") ? `${path}index.html` : path);
    if (!name.startsWith(DIST)) throw new Error("outside of the folder");
    const bytes = await readFile(name);
    const tag = `"${createHash("sha256").update(bytes).digest("hex").slice(0, 32)}"`;
    const headers = {
      ...HEADERS,
      ETag: tag,
      "Cache-Control": "no-cache",
      "Content-Type": TYPES[extname(name)] ?? "application/octet-stream",
    };
    if (request.headers["if-none-match"] === tag) return void response.writeHead(304, headers).end();
    response.writeHead(200, { ...headers, "Content-Length": bytes.length }).end(bytes);
  } catch {
    response.writeHead(404).end();
  }
});
server.on("error", (error) => {
  console.error(error.code === "EADDRINUSE" ? `port ${PORT} is in use: choose another with PORT=8082` : error.message);
  process.exit(1);
});
server.listen(PORT, "127.0.0.1", () => console.log(`The page is at http://127.0.0.1:${server.address().port}`));
