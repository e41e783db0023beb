/** onnxruntime-node writes and sends events about its use by default. The package switches that off before it can begin. */

import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { afterEach, beforeEach, expect, test } from "vitest";
import { modelPath } from "../support/models.js";

const PACKAGE = resolve(import.meta.dirname, "../../dist");
const RUN = `
  const { Model } = await import(${JSON.stringify(join(PACKAGE, "index.js"))});
  const model = await Model.load(${JSON.stringify(modelPath("g2p"))});
  await model.generate("transformer");
  console.log(model.device, process.env.ORT_DISABLE_TELEMETRY);
  await model.dispose();
  await new Promise((resolve) => setTimeout(resolve, 300));
`;

let home: string;

beforeEach(() => {
  home = mkdtempSync(join(tmpdir(), "tformer-home-"));
});

afterEach(() => rmSync(home, { recursive: true }));

/** Return what a script prints in a process with an empty home folder, and none of this process's variables. */
function printed(script: string, variables: Readonly<Record<string, string>> = {}): string {
  const env = { PATH: process.env["PATH"], HOME: home, ...variables };
  return execFileSync(process.execPath, ["--input-type=module", "--eval", script], { env, encoding: "utf8" }).trim();
}

test("a model on device node leaves an empty home folder empty", () => {
  expect(printed(RUN)).toBe("node 1");
  expect(readdirSync(home)).toEqual([]);
});

test("a worker thread, whose variables native code does not see, is refused by name", () => {
  const inThread = (prelude: string) => `
    import { Worker } from "node:worker_threads";
    ${prelude}
    const worker = new Worker(${JSON.stringify(RUN)}, { eval: true, execArgv: ["--input-type=module"] });
    worker.once("error", ({ name, message }) => console.log(name + ": " + message));
  `;
  expect(printed(inThread(""))).toMatch(/^DeviceError: .*set ORT_DISABLE_TELEMETRY to 1 .*or choose device wasm$/);
  expect(printed(inThread('process.env.ORT_DISABLE_TELEMETRY = "1";'))).toBe("node 1");
  expect(readdirSync(home)).toEqual([]);
});

test("a user's decision stands", () => {
  const backend = JSON.stringify(join(PACKAGE, "backend/nodeSession.js"));
  const script = `
    await (await import(${backend})).nodeBackend(); // it makes no session, so that nothing is sent
    console.log(process.env.ORT_DISABLE_TELEMETRY);
  `;
  expect(printed(script, { ORT_DISABLE_TELEMETRY: "0" })).toBe("0");
});
