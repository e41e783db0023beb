/** The parts of device webgpu that need no GPU: what suits it, and copies between buffers. */

import { describe, expect, test } from "vitest";
import { backendOf, chooseDevice, openOnGpuOrWasm } from "../../src/backend/devices.js";
import { checkSuits, Gpu, isSoftware } from "../../src/backend/gpuDevice.js";
import { WebGpuBackend } from "../../src/backend/webgpuSession.js";
import type { Tensor } from "../../src/backend/session.js";
import { EncoderContext } from "../../src/engine/encoderContext.js";
import { KVCache } from "../../src/engine/kvCache.js";
import { MemoryUse } from "../../src/engine/memoryUse.js";
import type { CacheSpec, Manifest } from "../../src/format/manifest.js";
import * as fields from "../../src/format/onnxFields.js";
import { largestWeight } from "../../src/format/onnxGraph.js";
import { bytesField, concatBytes } from "../../src/format/onnxWire.js";
import { DeviceError, ModelFileError, OutOfMemoryError } from "../../src/index.js";
import { FakeGpuDevice, type FakeGpuBuffer } from "../support/fakeGpu.js";
import { modelBytes } from "../support/models.js";

const KEYS: CacheSpec = {
  past: "past.0",
  present: "present.0",
  dtype: "float32",
  shape: ["batch", 2, "slot", 3],
  inPlace: true,
};
const CARRY: CacheSpec = { ...KEYS, past: "past.1", present: "present.1", shape: ["batch", 4], inPlace: false };

function backendOn(fake: FakeGpuDevice): WebGpuBackend {
  return new WebGpuBackend({ gpu: new Gpu(fake.asDevice()), sessions: new Set([1]) } as never);
}

/** Return the values of a tensor on the fake GPU. */
function valuesOf(tensor: Tensor): Float32Array {
  const { buffer } = (tensor as unknown as { shared: { buffer: FakeGpuBuffer } }).shared;
  return new Float32Array(buffer.bytes.buffer);
}

/** Return a model whose only weight is in a branch. */
function modelWithBranch(weight: Uint8Array[]): Uint8Array {
  const branch = bytesField(fields.GRAPH_INITIALIZER, [...bytesField(fields.TENSOR_NAME, "w"), ...weight]);
  const attribute = [...bytesField(fields.ATTRIBUTE_NAME, "then_branch"), ...bytesField(fields.ATTRIBUTE_G, branch)];
  const node = [...bytesField(fields.NODE_OP_TYPE, "If"), ...bytesField(fields.NODE_ATTRIBUTE, attribute)];
  return concatBytes(bytesField(fields.MODEL_GRAPH, bytesField(fields.GRAPH_NODE, node)));
}

function adapter(facts: { max?: number; features?: string[]; info?: object }): GPUAdapter {
  const max = facts.max ?? 1 << 30;
  const limits = { maxBufferSize: max * 2, maxStorageBufferBindingSize: max };
  return { limits, features: new Set(facts.features), info: facts.info ?? {} } as unknown as GPUAdapter;
}

const needs = (devices: readonly string[], precision = "fp32", weight = 1000) => ({
  name: "m.onnx",
  manifest: { devices, precision } as unknown as Manifest,
  largestWeight: weight,
});

describe("a file", () => {
  test("suits a GPU if its devices include webgpu and its weights fit", () => {
    expect(() => checkSuits(adapter({}), needs(["webgpu", "wasm"]))).not.toThrow();
    expect(() => checkSuits(adapter({ max: 1000 }), needs(["webgpu"]))).not.toThrow();
    expect(() => checkSuits(adapter({ features: ["shader-f16"] }), needs(["webgpu"], "fp16"))).not.toThrow();
  });

  test.each([
    ["other devices", adapter({}), needs(["cpu", "wasm"]), /suits cpu, wasm\): export the model with --target web/],
    ["a large weight", adapter({ max: 999 }), needs(["webgpu"]), /a weight of 1,000 bytes, .* at most 999/],
    ["half precision", adapter({}), needs(["webgpu"], "fp16"), /half precision.*no shader-f16/],
  ])("with %s is refused", (_, gpu, file, sentence) => {
    expect(() => checkSuits(gpu, file)).toThrow(DeviceError);
    expect(() => checkSuits(gpu, file)).toThrow(sentence);
  });

  test("with a cache whose tokens are not whole words is refused", () => {
    const halves: CacheSpec = { ...KEYS, dtype: "float16" };
    const file = needs(["webgpu"]);
    const withCache = (cache: CacheSpec) => ({ ...file, manifest: { ...file.manifest, decode: { caches: [cache] } } });
    expect(() => checkSuits(adapter({}), withCache(KEYS) as never)).not.toThrow();
    expect(() => checkSuits(adapter({}), withCache(halves) as never)).toThrow(DeviceError);
    expect(() => checkSuits(adapter({}), withCache(halves) as never)).toThrow("its cache past.0 has 6 bytes");
  });

  test("has the largest of its weights, also in the branches of its stages", () => {
    expect(largestWeight(modelBytes("g2p-web"))).toBe(128 * 512 * 4); // of a feed-forward layer
    const values = bytesField(fields.TENSOR_RAW_DATA, new Uint8Array(5000));
    expect(largestWeight(modelWithBranch(values))).toBe(5000);
    const entry = [...bytesField(fields.ENTRY_KEY, "length"), ...bytesField(fields.ENTRY_VALUE, "7000")];
    expect(largestWeight(modelWithBranch(bytesField(fields.TENSOR_EXTERNAL_DATA, entry)))).toBe(7000);
  });
});

test("adapters that compute on the CPU are known by their facts", () => {
  expect(isSoftware(adapter({ info: { isFallbackAdapter: true } }))).toBe(true);
  expect(isSoftware(adapter({ info: { vendor: "google", architecture: "swiftshader" } }))).toBe(true);
  expect(isSoftware({ ...adapter({}), isFallbackAdapter: true } as unknown as GPUAdapter)).toBe(true);
  expect(isSoftware(adapter({ info: { isFallbackAdapter: false, vendor: "apple" } }))).toBe(false);
});

test("auto opens a file in WebAssembly that the GPU refuses, or has no memory for", async () => {
  const file = { name: "g2p-web.onnx", bytes: modelBytes("g2p-web") };
  const gpu = { device: "webgpu" } as unknown as WebGpuBackend;
  const found = { backendFor: async () => gpu };
  const refusing = { backendFor: () => Promise.reject(new DeviceError("it does not suit")) };
  const openOn = (choice: typeof found, error?: Error) =>
    openOnGpuOrWasm(choice, file, { threads: 1 }, async ({ device }) => {
      if (error && device === "webgpu") throw error;
      return device;
    });
  expect(await openOn(found)).toBe("webgpu");
  expect(await openOn(refusing)).toBe("wasm");
  expect(await openOn(found, new OutOfMemoryError("the GPU's memory is full"))).toBe("wasm");
  expect(await openOn(found, new DeviceError("the GPU was lost"))).toBe("wasm");
  await expect(openOn(found, new ModelFileError("it is damaged"))).rejects.toThrow("it is damaged");
});

test("Node refuses the device by its name", async () => {
  await expect(chooseDevice("webgpu", {})).rejects.toThrow(DeviceError);
  await expect(chooseDevice("webgpu", {})).rejects.toThrow("device webgpu is for browsers");
});

test("rows in GPU buffers move, repeat, leave and grow as the rows of a list", () => {
  const fake = new FakeGpuDevice();
  const use = new MemoryUse();
  const cache = new KVCache(backendOn(fake), [KEYS, CARRY], 400, 3, 4, 0, use);
  let histories: number[][] = [[], [], []];
  let random = 7;
  const next = (below: number) => (random = (random * 48271) % 2147483647) % below;
  let cycles = 0;
  for (let turn = 1; turn <= 200; turn++) {
    const lengths = Int32Array.from(histories, ({ length }) => length);
    cache.reserve(Math.max(...lengths) + 1, Math.max(...lengths));
    const [keys, carry] = cache.present();
    const slots = keys.dims[2];
    histories.forEach((history, row) => {
      for (const head of [0, 1]) {
        const begin = ((row * 2 + head) * slots + history.length) * 3;
        valuesOf(keys).fill(turn + row / 10 + head / 100, begin, begin + 3);
      }
      valuesOf(carry).fill(turn + row / 10, row * 4, row * 4 + 4);
      history.push(turn + row / 10);
    });
    cache.recordWrites(lengths, 1);
    const rows = Int32Array.from({ length: 1 + next(5) }, () => next(histories.length));
    if (rows.length > 1 && rows[0] === 1 && rows[1] === 0) cycles++;
    cache.reorder(
      rows,
      Int32Array.from(histories, ({ length }) => length),
    );
    histories = [...rows].map((row) => [...histories[row]]);
    const [moved, movedCarry] = cache.past();
    histories.forEach((history, row) => {
      for (const head of [0, 1]) {
        const begin = (row * 2 + head) * moved.dims[2] * 3;
        const found = [...valuesOf(moved).subarray(begin, begin + 3 * history.length)];
        const expected = history.flatMap((one) => Array<number>(3).fill(Math.fround(one + head / 100)));
        expect(found).toEqual(expected);
      }
      const last = Math.fround(history[history.length - 1]);
      expect([...valuesOf(movedCarry).subarray(row * 4, row * 4 + 4)]).toEqual(Array(4).fill(last));
    });
  }
  expect(cycles).toBeGreaterThan(5); // rows that swap are saved meanwhile
  expect(use.usedBytes).toBeGreaterThan(0);
  cache.clear();
  expect(valuesOf(cache.past()[0]).every((value) => value === 0)).toBe(true);
  cache.release();
  expect(fake.buffers.filter(({ destroyed }) => !destroyed)).toEqual([]);
  expect(use.usedBytes).toBe(0);
});

test("parts that follow each other are one copy, and all copies one submit", () => {
  const fake = new FakeGpuDevice();
  const backend = backendOn(fake);
  const [from, to] = [backend.deviceTensor("float32", [2, 8]), backend.deviceTensor("float32", [2, 16])];
  const copy = { from, fromStart: 0, fromStride: 4, to, toStart: 4, toStride: 4, size: 4, parts: 4 };
  backend.copyParts([copy, { ...copy, toStride: 8, parts: 2 }, { ...copy, size: 0 }]);
  expect([fake.copies, fake.submits]).toEqual([3, 1]);
});

test("masks of an encoder stay in memory, and move with the rows that are on the GPU", async () => {
  const fake = new FakeGpuDevice();
  const memory = await backendOf("node", {});
  const backend = Object.assign(backendOn(fake), { tensor: memory.tensor.bind(memory) });
  const [keys, mask] = [backend.deviceTensor("float32", [3, 2]), backend.tensor("bool", [3, 5])];
  for (let row = 0; row < 3; row++) {
    valuesOf(keys).fill(row, row * 2, row * 2 + 2);
    (mask.data() as Uint8Array).fill(row, row * 5, row * 5 + 5);
  }
  const context = new EncoderContext(backend, [keys, mask], 3, false, new MemoryUse());
  const rows = () => {
    const [moved, movedMask] = context.values();
    const count = movedMask.dims[0];
    return [
      Array.from({ length: count }, (_, row) => valuesOf(moved)[row * 2 + 1]),
      Array.from({ length: count }, (_, row) => movedMask.data()[row * 5 + 4]),
    ];
  };
  for (const [moves, expected] of [
    [
      [1, 0, 2],
      [1, 0, 2],
    ], // in place, with a saved row
    [
      [2, 2, 1, 0],
      [2, 2, 0, 1],
    ], // to new buffers
    [
      [3, 0],
      [1, 2],
    ],
  ]) {
    context.reorder(Int32Array.from(moves));
    expect(rows()).toEqual([expected, expected]);
  }
  context.release();
  expect(fake.buffers.filter(({ destroyed }) => !destroyed)).toEqual([]);
});

test("a buffer beyond the limit of the GPU is not a memory", () => {
  const backend = backendOn(new FakeGpuDevice(1024));
  expect(backend.deviceTensor("float32", [256]).byteLength).toBe(1024);
  expect(() => backend.deviceTensor("float32", [257])).toThrow(OutOfMemoryError);
  expect(() => backend.deviceTensor("float32", [257])).toThrow("1,028 bytes are needed at once");
});

test("errors that no call throws, and the loss of a device, become errors of the next call", async () => {
  const fake = new FakeGpuDevice();
  const gpu = new Gpu(fake.asDevice());
  gpu.check();
  fake.report("the buffer is invalid\nand more");
  fake.report("a later one");
  expect(() => gpu.check()).toThrow("the GPU refused a computation: the buffer is invalid");
  gpu.check(); // an error is thrown once
  fake.lose("unplugged");
  await expect(gpu.lost).rejects.toThrow("the GPU was lost (unplugged): load the model again");
  expect(gpu.isLost).toBe(true);
});
