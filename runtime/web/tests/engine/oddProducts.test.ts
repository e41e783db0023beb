/** Products that are rewritten for WebAssembly, in odd graphs and of odd numbers, beside their values in float64. */

import { describe, expect, test } from "vitest";
import { backendOf } from "../../src/backend/devices.js";
import { numberArray } from "../../src/base/arrays.js";
import { Engine } from "../../src/engine/engine.js";
import { withMappedWeights } from "../../src/format/modelFile.js";
import { parseModel, type Graph } from "../../src/format/onnxGraph.js";
import { withIntegerProducts } from "../../src/format/productRewrite.js";
import { Golden, type Place } from "../golden/golden.js";
import { recordsOf } from "../support/models.js";

interface Case {
  name: string;
  /** Operator → how many of it the rewriting leaves. */
  left: Record<string, number>;
  file: Place<"uint8">;
  /** size: the magnitude of what a product sums. */
  runs: { x: Place<"float32">; expected: Place<"float64">; size: Place<"float64"> }[];
}

const golden = new Golden<Case>("odd_products.py");
const FLOAT_ERROR = 1e-6; // of what a product sums
const LONG_ERROR = 1e-3; // of onnxruntime's own sums of 100,000 floats

function operators(graph: Graph): string[] {
  return graph.nodes.flatMap((node) => [node.opType, ...[...node.branches.values()].flatMap(operators)]);
}

/** Throw unless numbers are the expected ones, NaN included. */
function check(found: Float32Array, expected: Float64Array, size: Float64Array, allowed: number): void {
  expect(found.length).toBe(expected.length);
  expect(Array.from(found, Number.isNaN)).toEqual(Array.from(expected, Number.isNaN));
  const errors = Array.from(found, (value, i) => Math.abs(value - expected[i]) / size[i] || 0);
  expect(Math.max(...errors)).toBeLessThan(allowed);
}

/** Return the product of rows, whose length is `inner`. */
async function product(engine: Engine, x: Float32Array, inner: number): Promise<Float32Array> {
  const outputs = await engine.encode(new Map([["x", [numberArray(x, [x.length / inner, inner])]]]), 1);
  const tensor = outputs.get("y")!;
  const values = (tensor.data() as Float32Array).slice();
  for (const output of outputs.values()) output.dispose();
  return values;
}

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each(golden.cases)("$name", async ({ name, left, file, runs }) => {
    const engine = await Engine.open({ name, bytes: golden.array(file) }, await backendOf(device, { threads: 1 }));
    for (const run of runs) {
      const [x, expected, size] = [golden.array(run.x), golden.array(run.expected), golden.array(run.size)];
      const [rows, inner] = run.x.shape;
      const width = expected.length / rows;
      const found = await product(engine, x, inner);
      const isLong = name.includes("sums") && (device === "node" || left["MatMulNBits"] > 0);
      check(found, expected, size, isLong ? LONG_ERROR : FLOAT_ERROR);
      if (device === "node" || name.startsWith("branches")) continue; // rows choose a branch together
      for (let row = 0; row < rows; row++) {
        const alone = await product(engine, x.slice(row * inner, (row + 1) * inner), inner);
        const own = found.slice(row * width, (row + 1) * width);
        expect(new Uint8Array(alone.buffer)).toEqual(new Uint8Array(own.buffer)); // bit for bit
      }
    }
    engine.close();
  });
});

test.each(golden.cases)("$name are rewritten as expected", ({ left, file }) => {
  const bytes = golden.array(file);
  const mapped = withMappedWeights(bytes, "m");
  const { model } = withIntegerProducts(mapped, (name) => (name === "m" ? bytes : undefined), recordsOf(bytes));
  const found = operators(parseModel(model).graph);
  for (const [operator, count] of Object.entries(left)) {
    expect(found.filter((one) => one === operator).length, operator).toBe(count);
  }
});
