/** The examples of docs/web.md. */

import { readFileSync } from "node:fs";
import { resolve } from "node:path";

const PAGE = readFileSync(resolve(import.meta.dirname, "../../../../docs/web.md"), "utf8");
const BLOCK = /^```\w*(?: title="([^"]+)")?\n(.*?)^```$/gms;

/** Return the block of a title. */
export function example(title: string): string {
  for (const [, name, text] of PAGE.matchAll(BLOCK)) if (name === title) return text;
  throw new Error(`docs/web.md has no block ${title}`);
}

/** Return the block after a line of text. */
export function blockAfter(line: string): string {
  const begin = PAGE.indexOf(`${line}\n`);
  if (begin < 0) throw new Error(`docs/web.md has no line ${line}`);
  return [...PAGE.slice(begin).matchAll(BLOCK)][0][2];
}
