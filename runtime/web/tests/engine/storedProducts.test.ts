/** Products of weights as the exporter stores them, on each device. In WebAssembly they are rewritten. */

import { describe, expect, test } from "vitest";
import type { StoredProducts } from "../../src/format/manifest.js";
import { withMappedWeights } from "../../src/format/modelFile.js";
import { parseModel, type Graph } from "../../src/format/onnxGraph.js";
import { withIntegerProducts } from "../../src/format/productRewrite.js";
import { Model, type NumberArray } from "../../src/index.js";
import { Golden, type Place } from "../golden/golden.js";
import { recordsOf } from "../support/models.js";

interface Case {
  name: string;
  columns: number;
  form: "floats" | "rows" | "few" | "encode" | "table" | "selected";
  bits: number;
  file: Place<"uint8">;
  runs: { x: Place<"float32">; expected: Place<"float64"> }[];
}

const golden = new Golden<Case>("stored_products.py");
const FLOAT_ERROR = 2e-6; // of the range of the products: that of sums in float32

/** Return the largest error over the range of the numbers. */
function error(found: ArrayLike<number>, expected: Float64Array): number {
  const [high, low] = [Math.max, Math.min].map((extreme) => expected.reduce((one, other) => extreme(one, other)));
  return expected.reduce((most, value, i) => Math.max(most, Math.abs(value - found[i])), 0) / (high - low || 1);
}

function operators(graph: Graph): string[] {
  return graph.nodes.flatMap((node) => [node.opType, ...[...node.branches.values()].flatMap(operators)]);
}

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each(golden.cases)("$name", async ({ form, file, runs }) => {
    const model = await Model.load(golden.array(file), { device, threads: 1 });
    for (const run of runs) {
      if (device === "node" && form === "few" && run.x.shape[0] < 4) continue; // native kernels round in blocks there
      const { data } = (await model.predict({ data: golden.array(run.x), shape: run.x.shape })) as NumberArray;
      const expected = golden.array(run.expected);
      expect(data.length).toBe(expected.length);
      if (expected.length) expect(error(data, expected)).toBeLessThan(FLOAT_ERROR);
    }
    await model.dispose();
  });
});

test.each(golden.cases)("$name are rewritten", ({ columns, form, file }) => {
  const bytes = golden.array(file);
  const mapped = withMappedWeights(bytes, "model.onnx");
  const read = (name: string) => (name === "model.onnx" ? bytes : undefined);
  const { model, files } = withIntegerProducts(mapped, read, recordsOf(bytes));
  const found = operators(parseModel(model).graph);
  const isWidened = columns % 512 === 0 && form !== "encode"; // which has many rows
  expect(found).not.toContain("MatMulNBits");
  expect(found).not.toContain("If");
  expect(files.size).toBe(["floats", "selected"].includes(form) || isWidened ? (form === "table" ? 1 : 2) : 0);
  const stride = isWidened ? columns + 64 : columns;
  for (const { length } of files.values()) expect(length % stride).toBe(0);
});

test("a product whose file is not there stays as it is", () => {
  const packed = golden.cases.find(({ form, bits }) => form === "floats" && bits === 4)!;
  const bytes = golden.array(packed.file);
  const mapped = withMappedWeights(bytes, "model.onnx");
  const { model, files } = withIntegerProducts(mapped, () => undefined, recordsOf(bytes));
  expect(model).toBe(mapped);
  expect(files.size).toBe(0);
});

test.each([
  ["sizes", { inner: 97 }, {}],
  ["blocks", { block: 64 }, {}],
  ["a form", { form: "int8_blocks" }, {}],
  ["weights", { weights: "missing" }, {}],
  ["codes", { codes: null }, {}],
  ["scales", {}, { scale: "missing" }],
] as const)("products with wrong %s in their records stay as they are", (_, matrixChange, productChange) => {
  const packed = golden.cases.find(({ form, bits }) => form === "floats" && bits === 4)!;
  const bytes = golden.array(packed.file);
  const { matrices, products } = recordsOf(bytes);
  const stored = {
    matrices: matrices.map((matrix) => ({ ...matrix, ...matrixChange })),
    products: new Map([...products].map(([name, product]) => [name, { ...product, ...productChange }])),
  } as StoredProducts;
  const mapped = withMappedWeights(bytes, "model.onnx");
  const read = (name: string) => (name === "model.onnx" ? bytes : undefined);
  expect(withIntegerProducts(mapped, read, recordsOf(bytes)).files.size).toBe(2);
  expect(withIntegerProducts(mapped, read, stored).model).toBe(mapped);
});
