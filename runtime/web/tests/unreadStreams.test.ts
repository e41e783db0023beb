/** Streams that are neither read to their end nor closed. */

import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { Model, UnsupportedCallError } from "../src/index.js";
import { modelPath } from "./support/models.js";

async function all<T>(values: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const value of values) list.push(value);
  return list;
}

describe("a stream that is not read to its end", () => {
  let model: Model;
  beforeAll(async () => void (model = await Model.load(modelPath("words"), { device: "wasm" })));
  afterAll(() => model.dispose());

  test.each(["send", "stream", "rewind"] as const)("ends with the next %s of its conversation", async (next) => {
    const [chat, other] = [model.chat(), model.chat()];
    await chat.send("hello");
    const unread = chat.stream("transformer");
    expect((await unread.next()).done).toBe(false);
    if (next === "rewind") chat.rewind(0);
    const answer = next === "stream" ? (await all(chat.stream("world"))).join("") : (await chat.send("world")).text;
    await expect(unread.next()).rejects.toThrow("the answer was not read to its end, and the conversation went on");
    await expect(unread.next()).rejects.toThrow(UnsupportedCallError);
    expect(await unread.return(undefined as never)).toEqual({ done: true, value: undefined });
    await other.send("hello");
    expect(answer).toBe((await other.send("world")).text);
    expect(chat.turns.map(({ message }) => message)).toEqual(["hello", "world"]);
    chat.release();
    other.release();
    expect(model.memory().usedBytes).toBe(0);
  });

  test("is freed with its conversation", async () => {
    const chat = model.chat();
    const unread = chat.stream("hello");
    await unread.next();
    chat.release();
    await expect(unread.next()).rejects.toThrow(UnsupportedCallError);
    expect(model.memory().usedBytes).toBe(0);
    await expect(chat.send("hello")).rejects.toThrow("has been released");
  });

  test("keeps its conversation while a piece is computed", async () => {
    const chat = model.chat();
    const stream = chat.stream("hello");
    const piece = stream.next();
    await expect(chat.send("world")).rejects.toThrow("the conversation is answering a message");
    expect(() => chat.rewind(0)).toThrow("the conversation is answering a message");
    expect((await piece).done).toBe(false);
    await all(stream);
    expect(chat.turns.length).toBe(1);
    chat.release();
  });

  test("that was never begun keeps nothing", async () => {
    const chat = model.chat();
    const [first, second] = [chat.stream("hello"), chat.stream("world")];
    expect((await all(second)).join("")).not.toBe("");
    expect((await all(first)).join("")).not.toBe("");
    expect(chat.turns.map(({ message }) => message)).toEqual(["world", "hello"]);
    chat.release();
    expect(model.memory().usedBytes).toBe(0);
  });

  test("is freed when it is lost", async () => {
    setFlagsFromString("--expose-gc");
    const collect = runInNewContext("gc") as () => void;
    const chat = model.chat();
    const begin = async () => {
      for (const stream of [model.stream("hello"), chat.stream("hello")])
        expect((await stream.next()).done).toBe(false);
    };
    await begin();
    expect(model.memory().usedBytes).toBeGreaterThan(0);
    const isFree = async () => {
      collect();
      return chat.send("world").then(
        () => true,
        () => false,
      );
    };
    await expect.poll(isFree).toBe(true);
    chat.release();
    await expect.poll(() => (collect(), model.memory().usedBytes)).toBe(0);
  });
});
