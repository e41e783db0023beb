/** The calls of a model over messages: of a real MessageChannel, whose other side is in this thread. */

import { afterAll, beforeAll, describe, expect, test, vi } from "vitest";
import {
  AbortedError,
  InputError,
  Model,
  ModelFileError,
  OptionError,
  UnsupportedCallError,
  type LoadOptions,
  type ModelAddress,
  type Progress,
} from "../../src/index.js";
import { RemoteModel } from "../../src/remoteModel.js";
import { Connection, type Port } from "../../src/worker/connection.js";
import { serveModel } from "../../src/worker/host.js";
import { FileServer } from "../support/fileServer.js";
import { modelBytes, modelPath } from "../support/models.js";
import { MemoryStore } from "../support/stores.js";

let ended = 0;

/** A port whose messages wait while they are held, as those of a worker that computes. */
class HeldPort implements Port {
  onmessage: Port["onmessage"] = null;
  private held: MessageEvent[] | undefined;

  constructor(private readonly port: MessagePort) {
    port.onmessage = (event) => (this.held ? void this.held.push(event) : this.onmessage?.(event));
  }

  postMessage(message: unknown): void {
    this.port.postMessage(message);
  }

  hold(): void {
    this.held = [];
  }

  deliver(): void {
    const { held = [] } = this;
    this.held = undefined;
    for (const event of held) this.onmessage?.(event);
  }

  /** Wait until a message is held. */
  async arrival(): Promise<void> {
    await vi.waitFor(() => expect(this.held!.length).toBeGreaterThan(0), { timeout: 10_000 });
  }
}

async function remote(address: ModelAddress, options: LoadOptions = {}): Promise<Model> {
  return (await heldRemote(address, options)).model;
}

/** Load a model, and return the port of the page too. */
async function heldRemote(address: ModelAddress, options: LoadOptions = {}): Promise<{ model: Model; port: HeldPort }> {
  const { port1, port2 } = new MessageChannel();
  serveModel(port2 as unknown as Port, Model.load.bind(Model));
  const end = () => {
    ended++;
    port1.close();
  };
  const port = new HeldPort(port1);
  const model = await new RemoteModel({ port, end }).load(address, { device: "wasm", ...options });
  return { model, port };
}

async function all<T, R>(values: AsyncGenerator<T, R>): Promise<[T[], R]> {
  const list: T[] = [];
  for (;;) {
    const { done, value } = await values.next();
    if (done) return [list, value];
    list.push(value);
  }
}

/** Wait until the worker has freed all caches. */
async function untilFreed(model: Model): Promise<void> {
  await vi.waitFor(async () => {
    await model.prompt("a"); // an answer says how much memory is used
    expect(model.memory().usedBytes).toBe(0);
  });
}

const withoutTiming = (result: object) => ({ ...result, timing: undefined, alternatives: undefined });

describe("g2p", () => {
  let model: Model;
  let local: Model;
  beforeAll(async () => {
    model = await remote(modelPath("g2p"));
    local = await Model.load(modelPath("g2p"), { device: "wasm" });
  });
  afterAll(async () => {
    await model.dispose();
    await local.dispose();
  });

  test("facts of the file", () => {
    expect(model.info()).toEqual(local.info());
    expect(model.manifest).toEqual(local.manifest);
    expect(model.device).toBe("wasm");
  });

  test("results, streams, batches and scores are those of the model itself", async () => {
    const options = { numBeams: 4, numReturnSequences: 3, topLogprobs: 2 };
    const [found, expected] = [await model.generate("hello", options), await local.generate("hello", options)];
    expect(withoutTiming(found)).toEqual(withoutTiming(expected));
    expect(found.alternatives.map(withoutTiming)).toEqual(expected.alternatives.map(withoutTiming));
    const [pieces, result] = await all(model.stream("transformer"));
    const [localPieces, localResult] = await all(local.stream("transformer"));
    expect(pieces).toEqual(localPieces);
    expect(withoutTiming(result)).toEqual(withoutTiming(localResult));
    expect(await model.score("hello", "HH EH")).toEqual(await local.score("hello", "HH EH"));
    const samples = { temperature: 1, seed: 7n };
    expect((await model.generate("be", samples)).text).toBe((await local.generate("be", samples)).text);
    expect(model.memory()).toEqual({ ...local.memory(), peakBytes: model.memory().peakBytes });
    expect(model.memory().peakBytes).toBeGreaterThan(0);
  });

  test("inputs of a batch are read lazily, from lists and from iterators", async () => {
    const words = ["hello", "be", "a", "transformer", "un"];
    let read = 0;
    let closed = false;
    async function* lazily() {
      try {
        for (;;) yield words[read++ % words.length];
      } finally {
        closed = true;
      }
    }
    const found: string[] = [];
    for await (const { text } of model.generateBatch(lazily(), { batchSize: 1 })) {
      found.push(text);
      if (found.length === 5) break;
    }
    expect(found).toEqual((await all(local.generateBatch(words)))[0].map(({ text }) => text));
    expect(read).toBeLessThan(100);
    await vi.waitFor(() => expect(closed).toBe(true));
    expect((await all(model.generateBatch(new Set(words))))[0].map(({ text }) => text)).toEqual(found);
    expect((await all(model.generateBatch(words)))[0].map(({ text }) => text)).toEqual(found);
    expect(model.memory().usedBytes).toBe(0);
  });

  test("errors keep their class, their sentence and their fields", async () => {
    const calls: ((one: Model) => Promise<unknown>)[] = [
      (one) => one.generate("é"),
      (one) => one.generate("a", { numBeams: 0 }),
      (one) => one.generate("a", { numBeam: 2 } as object),
      (one) => all(one.generateBatch(["a", "é"])),
      (one) => one.classify(["a"]),
      (one) => one.prompt("a"),
      async (one) => one.chat().send("a"),
      async (one) => all(one.stream("a", { numReturnSequences: 2 })),
      async (one) => all(one.generateBatch("abc" as unknown as string[])),
    ];
    for (const call of calls) {
      const [found, expected] = await Promise.all(
        [model, local].map((one) =>
          call(one).then(
            () => expect.fail(String(call)),
            (error: OptionError) => error,
          ),
        ),
      );
      expect(found.constructor).toBe(expected.constructor);
      expect(found.message).toBe(expected.message);
      expect([found.reason, found.option, found.inputNumber]).toEqual([
        expected.reason,
        expected.option,
        expected.inputNumber,
      ]);
    }
    const own = new RangeError("the list of the caller");
    async function* broken() {
      yield "a";
      throw own;
    }
    await expect(all(model.generateBatch(broken()))).rejects.toBe(own);
    const logitsProcessor = () => new Float32Array(1);
    await expect(model.generate("a", { logitsProcessor })).rejects.toThrow(
      "logitsProcessor is a function, which cannot be sent to the worker of the model: load the model with worker: false",
    );
    await expect(model.generate({ src: (() => 1) as never })).rejects.toThrow(InputError);
    expect((await model.generate("hello")).text).toBe("HH EH L OW");
  });

  test("a signal ends a call, a stream and a batch, and frees the memory", async () => {
    const controller = new AbortController();
    const { signal } = controller;
    const generating = model.generate("transformer", { signal, minNewTokens: 40, numBeams: 8 });
    const streaming = (async () => {
      for await (const piece of model.stream("transformer", { signal })) if (piece) controller.abort();
    })();
    const [one, other] = await Promise.allSettled([generating, streaming]);
    expect([one, other].map(({ status }) => status)).toEqual(["rejected", "rejected"]);
    expect((one as PromiseRejectedResult).reason).toBeInstanceOf(AbortedError);
    expect((other as PromiseRejectedResult).reason).toBeInstanceOf(AbortedError);
    await expect(model.generate("a", { signal })).rejects.toThrow(AbortedError);
    for await (const piece of model.stream("transformer")) if (piece) break;
    await model.generate("a");
    expect(model.memory().usedBytes).toBe(0);
  });

  test("calls at the same time do not mix", async () => {
    const words = ["hello", "transformer", "a", "be"];
    const found = await Promise.all(words.map((word) => model.generate(word)));
    for (const [i, word] of words.entries()) expect(found[i].text).toBe((await local.generate(word)).text);
  });
});

test("a conversation", async () => {
  const [model, local] = [await remote(modelPath("words")), await Model.load(modelPath("words"), { device: "wasm" })];
  const [chat, other] = [model.chat(), local.chat()];
  for (const message of ["hello", "world"]) {
    expect(withoutTiming(await chat.send(message))).toEqual(withoutTiming(await other.send(message)));
  }
  expect(chat.turns.map(({ message, ids }) => [message, ids])).toEqual(
    other.turns.map(({ message, ids }) => [message, ids]),
  );
  chat.rewind();
  other.rewind();
  const [[pieces], [expected]] = [await all(chat.stream("again")), await all(other.stream("again"))];
  expect(pieces).toEqual(expected);
  expect(chat.turns.length).toBe(2);
  expect(() => chat.rewind(3)).toThrow("there are 2 turns, and 3 cannot be taken back");
  chat.release();
  await expect(chat.send("a")).rejects.toThrow("has been released");
  expect(await model.prompt("hello")).toEqual(await local.prompt("hello"));
  expect(model.memory().usedBytes).toBe(0);
  await model.dispose();
  await expect(chat.send("a")).rejects.toThrow("the model is closed");
  await local.dispose();
});

test("images, recordings and series", async () => {
  const history = Array.from({ length: 60 }, (_, i) => Math.sin(i / 5));
  const model = await remote(modelPath("elnino"));
  const local = await Model.load(modelPath("elnino"), { device: "wasm" });
  const expected = await local.forecast(history);
  expect(await model.forecast(history)).toEqual(expected);
  expect(await all(model.forecastBatch([history]))).toEqual([[expected], undefined]);
  await model.dispose();
  await local.dispose();
});

test("images in prompts and cached prefixes", async () => {
  const model = await remote(modelPath("tiny-llava"));
  const local = await Model.load(modelPath("tiny-llava"), { device: "wasm" });
  const images = [20, 33].map((size) => {
    const data = Uint8Array.from({ length: 3 * size * size }, (_, i) => (i * i) % 251);
    return { data, width: size, height: size };
  });
  const options = { maxNewTokens: 9 };
  const text = "a <image> b <image>?";
  const expected = await local.generate(text, { ...options, images });
  expect(withoutTiming(await model.generate(text, { ...options, images }))).toEqual(withoutTiming(expected));
  const inputs = [model.imagePrompt(text, images), "no image"];
  const [batch] = await all(model.generateBatch(inputs, options));
  expect(batch[0].tokenIds).toEqual(expected.tokenIds);
  const prefix = await model.cachePrefix(model.imagePrompt("a <image> b", images.slice(0, 1)));
  const own = await local.cachePrefix(local.imagePrompt("a <image> b", images.slice(0, 1)));
  const continued = await local.generate(" c", { ...options, prefix: own });
  expect((await model.generate(" c", { ...options, prefix })).tokenIds).toEqual(continued.tokenIds);
  expect((await all(model.generateBatch([" c"], { ...options, prefix })))[0][0].text).toBe(continued.text);
  expect((await all(model.stream(" c", { ...options, prefix })))[0].join("")).toBe(continued.text);
  const other = await remote(modelPath("tiny-llava"));
  await expect(other.generate(" c", { prefix })).rejects.toThrow("was read by another model");
  await other.dispose();
  prefix.release();
  await expect(model.generate(" c", { prefix })).rejects.toThrow("the prefix has been released");
  const message = [
    { type: "image" as const, image: images[0] },
    { type: "text" as const, text: "what?" },
  ];
  const [chat, ownChat] = [model.chat(), local.chat()];
  const answer = await ownChat.send(message, options);
  expect((await chat.send(message, options)).tokenIds).toEqual(answer.tokenIds);
  const prompt = await model.prompt([{ role: "user", content: message }]);
  expect((await model.generate(prompt, options)).tokenIds).toEqual(answer.tokenIds);
  await model.dispose();
  await local.dispose();
});

test("attention weights and transcriptions", async () => {
  const model = await remote(modelPath("g2p-extras"));
  const local = await Model.load(modelPath("g2p-extras"), { device: "wasm" });
  expect(await model.align("hello", "HH AH")).toEqual(await local.align("hello", "HH AH"));
  expect(await model.hiddenStates("hello", "HH AH")).toEqual(await local.hiddenStates("hello", "HH AH"));
  const result = await model.generate("hello", { crossAttentions: true });
  expect(await model.labels("hello", result)).toEqual(await local.labels("hello", result));
  await expect(model.attentions("a")).rejects.toThrow(UnsupportedCallError);
  await model.dispose();
  await local.dispose();
  const speech = await remote(modelPath("tiny-whisper"));
  const ownSpeech = await Model.load(modelPath("tiny-whisper"), { device: "wasm" });
  const recording = { samples: Float32Array.from({ length: 20000 }, (_, i) => Math.sin(i * i)), samplingRate: 16000 };
  const expected = await ownSpeech.transcribe(recording, { language: "de" });
  expect(expected.segments.length).toBeGreaterThan(0);
  expect(await speech.transcribe(recording, { language: "de" })).toEqual(expected);
  expect((await all(speech.transcribeBatch([recording], { language: "de" })))[0]).toEqual([expected]);
  await speech.dispose();
  await ownSpeech.dispose();
});

test("loading: progress, the store of the page, a signal and errors", async () => {
  const server = new FileServer();
  await server.start();
  const bytes = modelBytes("elnino");
  server.files.set("/elnino.onnx", { bytes, tag: '"a"', ranges: true });
  const store = new MemoryStore();
  for (const sent of [bytes.length, 0]) {
    const seen: Progress[] = [];
    server.sentBytes = 0;
    const model = await remote(server.address("/elnino.onnx"), {
      cache: store,
      onProgress: (one) => void seen.push(one),
    });
    expect(seen[seen.length - 1]).toEqual({ loaded: bytes.length, total: bytes.length });
    expect(server.sentBytes).toBe(sent);
    await model.dispose();
  }
  ended = 0;
  server.files.set("/elnino.onnx", { bytes, tag: '"b"', ranges: true, breakAfter: 1000 });
  const controller = new AbortController();
  const options = { signal: controller.signal, onProgress: () => controller.abort() };
  await expect(remote(server.address("/elnino.onnx"), options)).rejects.toThrow(AbortedError);
  await expect(remote(server.address("/other"))).rejects.toThrow(ModelFileError);
  await expect(remote(modelPath("elnino"), { gpu: true } as object)).rejects.toThrow('there is no option "gpu"');
  expect(ended).toBe(3);
  const copied = await remote(bytes);
  expect(bytes.length).toBeGreaterThan(0); // it is not taken from the caller
  await copied.dispose();
  await server.stop();
});

test("a stream that is not read to its end ends with the next message, or with the conversation", async () => {
  const [model, local] = [await remote(modelPath("words")), await Model.load(modelPath("words"), { device: "wasm" })];
  const [chat, other] = [model.chat(), local.chat()];
  for (const [i, message] of ["world", "window"].entries()) {
    const unread = chat.stream("hello");
    expect((await unread.next()).done).toBe(false);
    if (i) chat.rewind(0);
    expect(withoutTiming(await chat.send(message))).toEqual(withoutTiming(await other.send(message)));
    await expect(unread.next()).rejects.toThrow("the answer was not read to its end");
  }
  const unread = chat.stream("hello");
  await unread.next();
  chat.release();
  await expect(unread.next()).rejects.toThrow(UnsupportedCallError);
  await untilFreed(model);
  await model.dispose();
  await local.dispose();
});

test("dispose ends all calls and the worker", async () => {
  const model = await remote(modelPath("g2p"));
  ended = 0;
  const generating = model.generate("transformer", { minNewTokens: 40 });
  const stream = model.stream("hello");
  const next = stream.next();
  const disposing = model.dispose();
  await expect(generating).rejects.toThrow("the model is closed: load the file again with Model.load()");
  await disposing;
  await expect(next).rejects.toThrow("the model is closed");
  await expect(model.predict("a")).rejects.toThrow("the model is closed");
  await expect(model.generate("a")).rejects.toThrow(UnsupportedCallError);
  await model.dispose();
  expect(model.disposed).toBe(true);
  expect(ended).toBeGreaterThan(0);
});

test("workers are for pages", async () => {
  await expect(Model.load(modelPath("g2p"), { worker: true })).rejects.toThrow("worker must be false outside a page");
  await expect(Model.load(modelPath("g2p"), { worker: 1 } as object)).rejects.toThrow(OptionError);
});

describe("a worker that answers late", () => {
  test("has added a turn that the page does not know: the next message follows those that it knows", async () => {
    const { model, port } = await heldRemote(modelPath("words"));
    const local = await Model.load(modelPath("words"), { device: "wasm" });
    const [chat, other] = [model.chat(), local.chat()];
    await chat.send("hello");
    await other.send("hello");
    const controller = new AbortController();
    port.hold();
    const late = chat.send("window", { signal: controller.signal });
    await expect(chat.send("window")).rejects.toThrow("the conversation is answering a message");
    await port.arrival();
    controller.abort();
    await expect(late).rejects.toThrow("the worker of the model still computes");
    port.deliver();
    expect(chat.turns.length).toBe(1);
    expect(withoutTiming(await chat.send("world"))).toEqual(withoutTiming(await other.send("world")));
    const [[pieces], [expected]] = [await all(chat.stream("again")), await all(other.stream("again"))];
    expect(pieces).toEqual(expected);
    const ids = (one: typeof chat) => one.turns.map((turn) => [...turn.ids]);
    expect(ids(chat)).toEqual(ids(other));
    chat.release();
    await untilFreed(model);
    await model.dispose();
    await local.dispose();
  });

  test("frees a prefix and an iterator for which the page has not waited", async () => {
    const { model, port } = await heldRemote(modelPath("words"));
    const calls: ((signal: AbortSignal) => Promise<unknown>)[] = [
      (signal) => model.cachePrefix("hello", { signal }),
      (signal) => model.stream("hello", { signal }).next(),
      (signal) => model.generateBatch(new Set(["hello"]), { signal }).next(),
    ];
    for (const call of calls) {
      const controller = new AbortController();
      port.hold();
      const late = call(controller.signal);
      await port.arrival();
      controller.abort();
      await expect(late).rejects.toThrow("the worker of the model still computes");
      port.deliver();
      await model.generate("a");
      expect(model.memory().usedBytes).toBe(0);
    }
    await expect(model.generateBatch(new Set(["hello"]), { numBeams: 0 }).next()).rejects.toThrow(OptionError);
    const { connection } = model as unknown as {
      connection: { shared: Map<number, unknown>; waiting: Map<number, unknown> };
    };
    expect([connection.shared.size, connection.waiting.size]).toEqual([0, 0]); // nothing waits for late answers
    await model.dispose();
  });

  test("does not keep a message from its signal before the conversation has begun", async () => {
    const { model, port } = await heldRemote(modelPath("words"));
    port.hold();
    const chat = model.chat();
    const controller = new AbortController();
    const { signal } = controller;
    const sending = chat.send("hello", { signal });
    setTimeout(() => controller.abort());
    const begin = performance.now();
    await expect(sending).rejects.toThrow("the call was aborted by its signal");
    await expect(chat.stream("hello", { signal }).next()).rejects.toThrow(AbortedError);
    expect(performance.now() - begin).toBeLessThan(1000); // the worker has 2 s for other calls
    port.deliver();
    expect((await chat.send("hello")).text).not.toBe("");
    await model.dispose();
  });
});

describe("what a worker keeps", () => {
  test("a conversation keeps its number when an earlier one is released", async () => {
    const model = await remote(modelPath("words"));
    const [first, second] = [model.chat(), model.chat()];
    await first.send("hello");
    const { ids } = (await second.send("world"), second.turns[0]);
    first.release();
    first.release();
    const third = model.chat();
    await third.send("window");
    await second.send("again");
    expect([...second.turns[1].ids.subarray(0, ids.length)]).toEqual([...ids]);
    expect([...third.turns[0].ids.subarray(0, ids.length)]).not.toEqual([...ids]);
    for (const chat of [second, third]) chat.release();
    await untilFreed(model);
    await model.dispose();
  });

  test("a conversation that is released while it answers is freed after its answer", async () => {
    const model = await remote(modelPath("words"));
    const chat = model.chat();
    const sending = chat.send("hello");
    chat.release();
    expect((await sending).text).not.toBe("");
    await expect(chat.send("a")).rejects.toThrow("the conversation has been released");
    await untilFreed(model);
    await model.dispose();
  });

  test("a prefix whose call was aborted is released, and another one is forgotten with its release", async () => {
    const { port1, port2 } = new MessageChannel();
    let finish = (_: unknown) => {};
    const release = vi.fn();
    const model = {
      manifest: {},
      device: "wasm",
      info: () => ({}),
      memory: () => ({}),
      cachePrefix: () => new Promise((resolve) => (finish = resolve)),
    };
    serveModel(port2 as unknown as Port, async () => model);
    const connection = new Connection(port1 as unknown as Port, {});
    await connection.call("load", [{ address: "", options: {} }]);
    const controller = new AbortController();
    const reading = connection.call("call", [0, "cachePrefix", ["a"], {}], controller.signal);
    setTimeout(() => controller.abort(), 5);
    setTimeout(() => finish({ release }), 30);
    await expect(reading).rejects.toThrow(AbortedError);
    expect(release).toHaveBeenCalledTimes(1);
    const kept = connection.call("call", [0, "cachePrefix", ["a"], {}]);
    setTimeout(() => finish({ release }), 5);
    const call = ["call", [await kept, "release", []]] as const;
    await connection.call(...call);
    await expect(connection.call(...call)).rejects.toThrow("Cannot read properties of undefined"); // no page does that
    expect(release).toHaveBeenCalledTimes(2);
    port1.close();
  });
});

test("a signal ends scores, alignments and other readings of given tokens", async () => {
  const model = await remote(modelPath("g2p-extras"));
  const local = await Model.load(modelPath("g2p-extras"), { device: "wasm" });
  const attending = await Model.load(modelPath("languages-attentions"), { device: "wasm" });
  const signal = AbortSignal.abort();
  for (const one of [model, local]) {
    await expect(one.score("hello", "HH", { signal })).rejects.toThrow(AbortedError);
    await expect(one.align("hello", "HH", { signal })).rejects.toThrow(AbortedError);
    await expect(one.hiddenStates("hello", "HH", { signal })).rejects.toThrow(AbortedError);
    await expect(one.score("hello", "HH", { batchSize: 1 } as object)).rejects.toThrow(
      'there is no option "batchSize"',
    );
  }
  await expect(attending.attentions("hallo", { signal })).rejects.toThrow(AbortedError);
  const long = { signal: AbortSignal.timeout(60_000) };
  expect(await model.align("hello", "HH AH", long)).toEqual(await local.align("hello", "HH AH"));
  expect(local.memory().usedBytes).toBe(0);
  for (const one of [model, local, attending]) await one.dispose();
});
