/** The package as npm gets it, and its bundle, which tests of pages and of the documentation load. */

import { execFileSync } from "node:child_process";
import { resolve } from "node:path";

const PACKAGE = resolve(import.meta.dirname, "../..");

/** Build both, and print and check the size of the bundle. Vitest runs it once: test files that run side by side read them. */
export default function setup(): void {
  for (const args of [
    ["node_modules/typescript/bin/tsc", "--project", "tsconfig.build.json"],
    ["scripts/bundle.mjs"],
  ]) {
    execFileSync(process.execPath, args, { cwd: PACKAGE, stdio: ["ignore", "inherit", "inherit"] });
  }
}
