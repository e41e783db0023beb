import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { expect, test } from "vitest";
import { blockAfter, example } from "./support/docs.js";
import { modelPath } from "./support/models.js";
import { POLICY } from "./support/pageServer.js";

const PACKAGE = resolve(import.meta.dirname, "..");

test("the script of docs/web.md prints what the page says, with the package as npm installs it", () => {
  const folder = mkdtempSync(join(tmpdir(), "tformer-docs-"));
  try {
    mkdirSync(join(folder, "node_modules"));
    symlinkSync(PACKAGE, join(folder, "node_modules", "tformer"));
    for (const name of ["g2p", "languages"]) symlinkSync(modelPath(name), join(folder, `${name}.onnx`));
    writeFileSync(join(folder, "pronounce.mjs"), example("pronounce.mjs"));
    const printed = execFileSync(process.execPath, ["pronounce.mjs"], { cwd: folder, encoding: "utf8" });
    expect(printed).toBe(blockAfter("`node pronounce.mjs` prints:"));
  } finally {
    rmSync(folder, { recursive: true });
  }
});

test("the tests of pages have the policy of docs/web.md", () => {
  expect(blockAfter("has a source of its own:").trim()).toBe(`Content-Security-Policy: ${POLICY}`);
});
