/** Runs that are suspended while the GPU computes: what ends, fails or is freed meanwhile. onnxruntime and the GPU are fakes. */

import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import type { GpuNeeds } from "../../src/backend/gpuDevice.js";
import type { Backend, Tensor } from "../../src/backend/session.js";
import { Heap, WasmBackend } from "../../src/backend/wasmSession.js";
import { GpuChoice } from "../../src/backend/webgpuSession.js";
import { numberArray } from "../../src/base/arrays.js";
import { Chat } from "../../src/chat.js";
import { Generator } from "../../src/decoding/generator.js";
import { settingsOf } from "../../src/decoding/options.js";
import { Engine } from "../../src/engine/engine.js";
import type { State } from "../../src/engine/state.js";
import type { Manifest, TensorSpec } from "../../src/format/manifest.js";
import { DATA_TYPES } from "../../src/format/onnxFields.js";
import { DeviceError, ModelFileError, OutOfMemoryError, UnsupportedCallError } from "../../src/index.js";
import { Inputs } from "../../src/preprocess/inputs.js";
import { TextCode } from "../../src/preprocess/textReader.js";
import { FakeGpuDevice } from "../support/fakeGpu.js";
import { FakeOrt } from "../support/fakeOrt.js";
import { modelBytes } from "../support/models.js";

let makeModule: () => FakeOrt;
vi.mock("onnxruntime-web/ort-wasm-simd-threaded.asyncify.mjs", () => ({ default: async () => makeModule() }));

const NEEDS: GpuNeeds = {
  name: "m.onnx",
  manifest: { devices: ["webgpu"] } as unknown as Manifest,
  largestWeight: 1,
};
const POSITIONS = 3; // of the source of an encoder

let devices: FakeGpuDevice[];
let modules: FakeOrt[];

beforeEach(async () => {
  devices = [];
  modules = [];
  makeModule = () => {
    const module = new FakeOrt(devices[devices.length - 1]);
    modules.push(module);
    return module;
  };
  const requestDevice = async () => {
    devices.push(new FakeGpuDevice());
    return devices[devices.length - 1].asDevice();
  };
  const limits = { maxBufferSize: 1 << 28, maxStorageBufferBindingSize: 1 << 28 };
  const adapter = { limits, features: new Set(), info: {}, requestDevice };
  vi.stubGlobal("navigator", { gpu: { requestAdapter: async () => adapter } });
});

afterEach(async () => {
  for (const device of devices) device.destroy(); // so that the next test gets a runtime of its own
  await new Promise((resolve) => setTimeout(resolve));
  vi.unstubAllGlobals();
});

async function gpuBackend(): Promise<Backend> {
  return (await GpuChoice.find({})).backendFor(NEEDS);
}

async function open(name: string, backend: Backend): Promise<Engine> {
  return Engine.open({ name: `${name}.onnx`, bytes: modelBytes(name) }, backend);
}

function chatWith(engine: Engine): Chat {
  const textCodes = engine.manifest.tokenizers.map((definition) => new TextCode(definition));
  const inputs = new Inputs(engine.manifest, new Map(), textCodes);
  return new Chat({
    generator: new Generator(engine, inputs.outputCodec),
    inputs,
    settings: (options) => settingsOf(options, engine.manifest.generationDefaults),
    template: undefined,
    system: undefined,
  });
}

const IDS = [5, 6, 7, 8];
const OPTIONS = { maxNewTokens: 2, minNewTokens: 2 };

async function untilHeld(module: FakeOrt): Promise<void> {
  await vi.waitFor(() => expect(module.held!.length).toBeGreaterThan(0));
}

describe("a conversation that is released", () => {
  test.each(["send", "stream"] as const)(
    "while the GPU computes for its %s frees its memory after it",
    async (call) => {
      const engine = await open("words", await gpuBackend());
      const chat = chatWith(engine);
      const [module] = modules;
      module.held = [];
      const answering = call === "send" ? chat.send(IDS, OPTIONS) : chat.stream(IDS, OPTIONS).next();
      await untilHeld(module);
      chat.release();
      expect(engine.memory.usedBytes).toBeGreaterThan(0);
      expect(() => chat.rewind(0)).toThrow("the conversation is answering a message");
      module.resume();
      const answer = await answering;
      if ("tokenIds" in answer) expect(answer.tokenIds.length).toBe(2);
      else expect(answer.done).toBe(true); // the ids have no text
      if (call === "send") expect(engine.memory.usedBytes).toBe(0);
      expect(module.faults).toEqual([]);
      await expect(chat.send(IDS, OPTIONS)).rejects.toThrow("has been released");
      engine.close();
    },
  );

  test("while its run waits for that of another one", async () => {
    const engine = await open("words", await gpuBackend());
    const [module] = modules;
    const [first, second] = [chatWith(engine), chatWith(engine)];
    module.held = [];
    const sending = first.send(IDS, OPTIONS);
    await untilHeld(module);
    const waiting = second.send(IDS, OPTIONS);
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(module.held.length).toBe(1);
    second.release();
    first.release();
    module.resume();
    await Promise.all([sending, waiting]);
    expect([module.faults, engine.memory.usedBytes]).toEqual([[], 0]);
    engine.close();
  });

  test("before its state exists", async () => {
    const engine = await open("words", await gpuBackend());
    const chat = chatWith(engine);
    const sending = chat.send(IDS, OPTIONS);
    chat.release();
    await sending;
    expect([modules[0].faults, engine.memory.usedBytes]).toEqual([[], 0]);
    engine.close();
  });
});

/** Return the error of a promise. A state is too large for the message of a failed test. */
async function errorOf(promise: Promise<unknown>): Promise<Error | undefined> {
  return promise.then(
    () => undefined,
    (error: Error) => error,
  );
}

/** Let runs make outputs of the shapes of a manifest, for one row. */
function setOutputs(module: FakeOrt, { encode, decode }: Manifest): void {
  const specs = new Map<string, TensorSpec>(
    [...(encode?.outputs ?? []), ...(encode?.extras ?? []), ...(decode?.extras ?? [])].map((spec) => [spec.name, spec]),
  );
  module.outputOf = (name) => {
    const { dtype, shape } = specs.get(name)!;
    return { type: DATA_TYPES[dtype], dims: shape.map((size, i) => (i ? Number(size) || POSITIONS : 1)) };
  };
}

const SOURCE = new Map([["src", [numberArray(Int32Array.of(10, 20, 30), [POSITIONS])]]]);

test("a model that is closed while the GPU computes is freed after the run", async () => {
  const engine = await open("shortlist", await gpuBackend());
  const [module] = modules;
  setOutputs(module, engine.manifest);
  module.held = [];
  const starting = engine.start(SOURCE, { rows: 1 });
  await untilHeld(module);
  engine.close();
  await new Promise((resolve) => setTimeout(resolve, 5));
  expect(module.sessions.size).toBe(2);
  module.resume();
  const state = await starting;
  await vi.waitFor(() => expect(module.sessions.size).toBe(0));
  expect(module.faults).toEqual([]);
  await expect(engine.step(state, [1])).rejects.toThrow(UnsupportedCallError);
  state.release();
  expect(module.tensors.size).toBe(0);
});

describe("a trap in a suspended run", () => {
  test("is an error of the model; waiting calls end, and the next model gets another module and device", async () => {
    const engine = await open("words", await gpuBackend());
    const [module] = modules;
    const [first, second] = [chatWith(engine), chatWith(engine)];
    module.held = [];
    const [sending, waiting] = [first, second].map((chat) => chat.send(IDS, OPTIONS).catch((error: unknown) => error));
    await untilHeld(module);
    module.held[0].trap();
    const error = (await sending) as Error;
    expect(error).toBeInstanceOf(ModelFileError);
    expect(error.message).toBe("onnxruntime cannot run words.onnx: unreachable");
    expect((await waiting) as Error).toBeInstanceOf(DeviceError);
    expect(((await waiting) as Error).message).toContain("the GPU was lost (its WebAssembly has failed)");
    expect(module.held.length).toBe(1); // the other run has never begun
    expect(devices[0].destroyed).toBe(true);
    await gpuBackend();
    expect([devices.length, modules.length]).toEqual([2, 2]);
  });

  test("in WebAssembly alone, too", async () => {
    const module = new FakeOrt();
    const heap = new Heap(module);
    const onTrap = vi.fn();
    heap.onTrap = onTrap;
    const engine = await open("words", new WasmBackend(heap));
    const chat = chatWith(engine);
    module.held = [];
    const sending = chat.send(IDS, OPTIONS);
    await untilHeld(module);
    module.held[0].trap();
    await expect(sending).rejects.toThrow(ModelFileError);
    expect(onTrap).toHaveBeenCalledTimes(1);
    chat.release();
    engine.close();
  });
});

describe.each(["webgpu", "wasm"])("outputs that a run has made on %s", (device) => {
  let engine: Engine;
  let module: FakeOrt;
  let before: number[];

  const counts = () => [module.tensors.size, module.blocks.size];

  beforeEach(async () => {
    if (device === "wasm") modules = [new FakeOrt()];
    engine = await open("shortlist", device === "wasm" ? new WasmBackend(new Heap(modules[0])) : await gpuBackend());
    [module] = modules;
    setOutputs(module, engine.manifest);
    (await engine.start(SOURCE, { rows: 1 })).release(); // texts and placeholders stay
    before = counts();
  });

  afterEach(() => {
    expect(module.faults).toEqual([]);
    expect(counts()).toEqual(before);
    expect(engine.memory.usedBytes).toBe(0);
    engine.close();
  });

  test("are released with the state", async () => {
    const state = await engine.start(SOURCE, { rows: 1 });
    expect(engine.memory.usedBytes).toBeGreaterThan(0);
    state.release();
  });

  test("are released if one of them cannot be read", async () => {
    const { outputs } = engine.manifest.encode!;
    for (const { name } of outputs) {
      module.unreadable = name;
      expect(await errorOf(engine.start(SOURCE, { rows: 1 }))).toBeInstanceOf(ModelFileError);
    }
    expect(outputs.length).toBeGreaterThan(1);
  });

  test("are released if one of them has another shape than the manifest says", async () => {
    const { outputs } = engine.manifest.encode!;
    const { outputOf } = module;
    module.outputOf = (name) => {
      const output = outputOf(name);
      return name === outputs[outputs.length - 1].name ? { ...output, dims: [2, ...output.dims.slice(1)] } : output;
    };
    expect((await errorOf(engine.start(SOURCE, { rows: 1 })))?.message).toContain("is damaged: its graph returns");
  });

  const onGpu = device === "webgpu" ? test : undefined;
  onGpu?.("are released if the GPU reports an error", async () => {
    module.held = [];
    const starting = engine.start(SOURCE, { rows: 1 });
    await untilHeld(module);
    devices[0].report("the buffer is invalid");
    module.resume();
    expect((await errorOf(starting))?.message).toContain("the GPU refused a computation");
  });
});

describe.each(["webgpu", "wasm"])("an allocation that fails on %s", (device) => {
  test.each(["shortlist", "toy-carries"])("leaves nothing behind in %s", async (name) => {
    const backend = device === "wasm" ? new WasmBackend(new Heap(new FakeOrt())) : await gpuBackend();
    const { heap } = backend as unknown as { heap: Heap };
    const module = heap.module as FakeOrt;
    const engine = await open(name, backend);
    setOutputs(module, engine.manifest);
    const sources = engine.manifest.encode ? SOURCE : new Map<string, never>();
    const { names } = heap as unknown as { names: Map<string, number> }; // texts and placeholders stay
    const { placeholders } = engine as unknown as { placeholders: Map<string, Tensor> };
    for (let room = 0, failures = 1; failures; room++) {
      module.room = room;
      let state: State | undefined;
      const reorder = (...rows: number[]) => engine.reorder(state!, Int32Array.from(rows));
      const calls = [
        async () => (state = await engine.start(sources, { rows: 1 })),
        () => engine.step(state!, [1, 2, 3]),
        () => engine.step(state!, [4]),
        () => engine.step(state!, [5, 6], undefined, "all"),
        async () => reorder(0, 0),
        () => engine.step(state!, [7, 8]),
        async () => reorder(1, 0),
        async () => engine.copy(state!, Int32Array.of(1), {}).release(),
        async () => reorder(0),
        () => engine.step(state!, new Array(engine.manifest.maxLength - 7).fill(9)),
      ];
      failures = 0;
      for (const call of calls) {
        const error = await errorOf(call());
        if (!error) continue;
        failures++;
        module.room = Infinity;
        if ([4, 6, 8].includes(calls.indexOf(call))) break; // rows have moved in part: the state is released
        await call(); // what has failed left the state as it was
      }
      state?.release();
      const kept = [placeholders.size, names.size + placeholders.size, 0];
      const found = [module.tensors.size, module.blocks.size, engine.memory.usedBytes];
      expect([room, module.faults, ...found]).toEqual([room, [], ...kept]);
      if (!failures) expect(room).toBeGreaterThan(50);
    }
    engine.close();
    expect(devices.flatMap(({ buffers }) => buffers).every(({ destroyed }) => destroyed)).toBe(true);
  });
});

test("a tensor of more bytes than addresses reach is refused", () => {
  const backend = new WasmBackend(new Heap(new FakeOrt()));
  expect(() => backend.tensor("float32", [2 ** 30 + 4])).toThrow(OutOfMemoryError);
});

describe("a runtime", () => {
  test("whose WebAssembly cannot be loaded leaves no device", async () => {
    makeModule = () => {
      throw new Error("404");
    };
    await expect(gpuBackend()).rejects.toThrow("device webgpu is not available: 404");
    await vi.waitFor(() => expect(devices.map(({ destroyed }) => destroyed)).toEqual([true]));
    makeModule = () => new FakeOrt(devices[devices.length - 1]);
    await gpuBackend();
    expect(devices.map(({ destroyed }) => destroyed)).toEqual([true, false]);
  });

  test("that fails late does not take the place of a newer one", async () => {
    const old = (await gpuBackend()) as unknown as { runtime: { heap: Heap } };
    devices[0].lose("unplugged");
    await new Promise((resolve) => setTimeout(resolve));
    await gpuBackend();
    expect(devices.length).toBe(2);
    old.runtime.heap.onTrap();
    await gpuBackend();
    expect(devices.length).toBe(2);
  });
});
