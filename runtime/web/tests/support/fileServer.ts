/** A server of one file that can break off, change and count. */

import { createServer, type IncomingHttpHeaders, type Server } from "node:http";
import type { AddressInfo } from "node:net";

export interface Served {
  bytes: Uint8Array;
  /** undefined: the server tells no version. */
  tag?: string;
  modified?: string;
  /** Answer ranges and conditions. */
  ranges?: boolean;
  /** Break each connection after this many bytes. */
  breakAfter?: number;
  /** Announce this length instead. */
  length?: number;
  /** Compress nothing, but say so. */
  status?: number;
  chunked?: boolean;
}

export class FileServer {
  readonly files = new Map<string, Served>();
  /** The headers of all requests. */
  readonly requests: IncomingHttpHeaders[] = [];
  sentBytes = 0;
  private server: Server | undefined;
  private port = 0;

  async start(): Promise<void> {
    this.server = createServer((request, response) => {
      this.requests.push(request.headers);
      const file = this.files.get(request.url!);
      if (!file) {
        response.writeHead(404).end();
        return;
      }
      if (file.status) {
        response.writeHead(file.status).end();
        return;
      }
      const headers: Record<string, string | number> = {};
      if (file.tag !== undefined) headers["etag"] = file.tag;
      if (file.modified !== undefined) headers["last-modified"] = file.modified;
      const { headers: asked } = request;
      const isKnown =
        (file.tag !== undefined && asked["if-none-match"] === file.tag) ||
        (file.modified !== undefined && asked["if-modified-since"] === file.modified);
      if (isKnown && file.ranges) {
        response.writeHead(304, headers).end();
        return;
      }
      const range = /^bytes=(\d+)-$/.exec(asked["range"] ?? "");
      const condition = asked["if-range"];
      const holds = condition === undefined || condition === (file.tag ?? file.modified);
      const begin = range && file.ranges && holds ? Number(range[1]) : 0;
      if (begin >= file.bytes.length && begin > 0) {
        response.writeHead(416, headers).end();
        return;
      }
      if (begin) headers["content-range"] = `bytes ${begin}-${file.bytes.length - 1}/${file.bytes.length}`;
      if (!file.chunked) headers["content-length"] = file.length ?? file.bytes.length - begin;
      response.writeHead(begin ? 206 : 200, headers);
      const end = Math.min(file.bytes.length, begin + (file.breakAfter ?? Infinity));
      this.sentBytes += end - begin;
      response.write(file.bytes.subarray(begin, end), () => {
        if (file.breakAfter !== undefined && end < file.bytes.length) response.destroy();
        else if (file.length !== undefined && file.length > end) response.destroy();
        else response.end();
      });
    });
    await this.listen();
  }

  address(path: string): string {
    return `http://127.0.0.1:${this.port}${path}`;
  }

  /** Forget what was asked. */
  reset(): void {
    this.files.clear();
    this.requests.length = 0;
    this.sentBytes = 0;
  }

  /** Close all connections and the port. */
  async stop(): Promise<void> {
    this.server!.closeAllConnections();
    await new Promise((resolve) => this.server!.close(resolve));
  }

  /** Open the same port, the first time any. */
  async listen(): Promise<void> {
    await new Promise<void>((resolve) => this.server!.listen(this.port, "127.0.0.1", resolve));
    this.port = (this.server!.address() as AddressInfo).port;
  }
}
