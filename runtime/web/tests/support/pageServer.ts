/** A server of static files for tests of pages, with the headers of a careful site. */

import { createServer, type Server } from "node:http";
import { readFile } from "node:fs/promises";
import type { AddressInfo } from "node:net";
import { extname } from "node:path";

/** No inline scripts, no eval, nothing of other servers; WebAssembly alone may be compiled. */
export const POLICY = [
  "default-src 'none'",
  "script-src 'self' 'wasm-unsafe-eval'",
  "worker-src 'self'",
  "connect-src 'self'",
].join("; ");
const ISOLATION = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };
const TYPES: Readonly<Record<string, string>> = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".json": "application/json",
  ".wasm": "application/wasm",
};

/** Return the content type of the file of an address. */
export function contentType(path: string): string {
  return TYPES[extname(path)] ?? "application/octet-stream";
}

export class PageServer {
  readonly missing: string[] = []; // addresses that were asked for and are not there

  private constructor(private readonly server: Server) {}

  /**
   * Start a server.
   *
   * files: beginning of an address → the folder or the file that it stands for.
   * isolated: whether pages may use threads (cross-origin isolation).
   */
  static async start(files: Readonly<Record<string, string>>, isolated: boolean): Promise<PageServer> {
    const server = createServer();
    const pages = new PageServer(server);
    server.on("request", async (request, response) => {
      const path = decodeURIComponent(new URL(request.url!, "http://localhost").pathname);
      const [start] = Object.keys(files).filter((one) => path.startsWith(one));
      const name = start === undefined ? undefined : files[start] + path.slice(start.length);
      if (path === "/favicon.ico") return void response.writeHead(204).end(); // browsers ask for one
      try {
        if (name === undefined || name.includes("..")) throw new Error("there is no such file");
        const bytes = await readFile(name);
        const headers = {
          "Content-Type": contentType(name),
          "Content-Security-Policy": POLICY,
          ...(isolated ? ISOLATION : {}),
        };
        response.writeHead(200, { ...headers, "Content-Length": bytes.length }).end(bytes);
      } catch {
        pages.missing.push(path);
        response.writeHead(404).end();
      }
    });
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    return pages;
  }

  get address(): string {
    return `http://127.0.0.1:${(this.server.address() as AddressInfo).port}`;
  }

  async stop(): Promise<void> {
    this.server.closeAllConnections();
    await new Promise((resolve) => this.server.close(resolve));
  }
}
