/** The archive of `npm pack`, of a copy of the package that was never built. */

import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { afterAll, beforeAll, expect, test } from "vitest";
import { modelPath } from "./support/models.js";

const PACKAGE = resolve(import.meta.dirname, "..");
const SOURCES = ["src", "scripts", "README.md", "package.json", "tsconfig.json", "tsconfig.build.json"];

let folder: string;
let installed: string; // the content of the archive, in node_modules of a project

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "tformer-package-"));
  const checkout = join(folder, "checkout");
  for (const name of SOURCES) cpSync(join(PACKAGE, name), join(checkout, name), { recursive: true });
  symlinkSync(join(PACKAGE, "node_modules"), join(checkout, "node_modules"));
  mkdirSync(join(checkout, "dist/removed"), { recursive: true });
  writeFileSync(join(checkout, "dist/removed/old.js"), ""); // of an earlier build
  execFileSync("npm", ["pack", "--silent", "--pack-destination", folder], { cwd: checkout, stdio: "pipe" });
  const [archive] = readdirSync(folder).filter((name) => name.endsWith(".tgz"));
  expect(archive).toBe("tformer-0.1.0.tgz");
  installed = join(folder, "project/node_modules/tformer");
  mkdirSync(installed, { recursive: true });
  execFileSync("tar", ["-xzf", join(folder, archive), "--strip-components", "1", "-C", installed]);
  for (const name of ["@huggingface", "@noble", "onnxruntime-common", "onnxruntime-node", "onnxruntime-web"]) {
    symlinkSync(join(PACKAGE, "node_modules", name), join(folder, "project/node_modules", name));
  }
});

afterAll(() => rmSync(folder, { recursive: true }));

test("has the library, its types, the bundle and WebAssembly, and no files of other builds", () => {
  const files = readdirSync(installed, { recursive: true, encoding: "utf8" });
  for (const name of [
    "package.json",
    "README.md",
    "dist/index.js",
    "dist/index.d.ts",
    "dist/worker.js",
    "dist/bundle/tformer.js",
    "dist/bundle/worker.js",
    "dist/bundle/ort-wasm-simd-threaded.wasm",
    "dist/bundle/ort-wasm-simd-threaded.asyncify.wasm",
  ]) {
    expect(files).toContain(name);
  }
  expect(files.filter((name) => /^(src|tests)|removed/.test(name))).toEqual([]);
});

test("runs a model in a project of its own", () => {
  writeFileSync(
    join(folder, "project/run.mjs"),
    `import { Model } from "tformer";
     const model = await Model.load(${JSON.stringify(modelPath("g2p"))});
     console.log((await model.generate("transformer")).text);
     await model.dispose();`,
  );
  const printed = execFileSync(process.execPath, ["run.mjs"], { cwd: join(folder, "project"), encoding: "utf8" });
  expect(printed).toBe("T R AE N S F AO R M ER\n");
});
