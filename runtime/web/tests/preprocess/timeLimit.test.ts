/** Regular expressions of a stranger's tokenizer, which may take longer than anybody waits. */

import { expect, test, vi } from "vitest";
import { AbortedError, InputError, Model } from "../../src/index.js";
import { slowText, startTimeLimits, withinTime } from "../../src/base/timeLimit.js";
import { TextCode } from "../../src/preprocess/textReader.js";
import { Connection, type Port } from "../../src/worker/connection.js";
import { Golden, type Place } from "../golden/golden.js";

vi.mock("../../src/base/timeLimit.js", async (original) => ({
  ...(await original<typeof import("../../src/base/timeLimit.js")>()),
  readingTime: () => 300,
}));

const golden = new Golden<{ definition: string; file: Place<"uint8"> }>("preprocess/slow_tokenizer.py");
const SLOW = "a".repeat(40) + "b"; // 2 ** 40 ways to read it

test("a text that takes too long is refused, and the model reads the next one", async () => {
  const model = await Model.load(golden.array(golden.cases[0].file), { threads: 1 });
  for (const truncate of [false, true]) {
    const begin = performance.now();
    const error = await model.entities(["abc", SLOW], { truncate }).catch((thrown: unknown) => thrown);
    expect(error).toBeInstanceOf(InputError);
    expect((error as Error).message).toMatch(/^input 2: the text took more than 1 s, and was stopped/);
    expect(performance.now() - begin).toBeLessThan(20_000);
    expect((await model.entities(["abc"], { aggregation: "none", ignoreLabels: [] }))[0].length).toBe(3);
  }
  await model.dispose();
  const { definition } = golden.cases[0];
  for (const key of ["Regex", "\\u0052egex", "\\u0052\\u0065gex"]) {
    const { codec } = new TextCode(definition.replace('"Regex"', `"${key}"`));
    expect(() => codec.encode(SLOW, false), key).toThrow(/^the text took more than 1 s/);
    expect(codec.encode("aab", false)).toEqual([0, 0, 1]);
  }
});

test("errors and results of code with a limit are its own, also within other code with a limit", async () => {
  await startTimeLimits();
  expect(withinTime(1000, () => withinTime(1000, () => "inner", slowText) + " and outer", slowText)).toBe(
    "inner and outer",
  );
  const fails = () => {
    throw new TypeError("own");
  };
  expect(() => withinTime(1000, fails, slowText)).toThrow(TypeError);
  const inner = () => withinTime(100, () => /^(a+)+$/.test(SLOW), slowText);
  expect(() => withinTime(10_000, inner, slowText)).toThrow("took more than 1 s, and was stopped");
});

test("a call of a worker that reads no messages ends soon after its signal", async () => {
  const { port1, port2 } = new MessageChannel();
  const connection = new Connection(port1 as unknown as Port, {}, { abortTime: 50 });
  const controller = new AbortController();
  const call = connection.call("call", [], controller.signal);
  setTimeout(() => controller.abort(), 10);
  const error = await call.catch((thrown: unknown) => thrown);
  expect(error).toBeInstanceOf(AbortedError);
  expect((error as Error).message).toContain("the worker of the model still computes: dispose() ends it");
  let count = 0;
  const other = new Connection(port2 as unknown as Port, {});
  const never = () => new Promise<never>(() => {});
  const number = other.share({
    next: () => (count++ ? never() : Promise.resolve({ done: false, value: 1 })),
    return: never,
  });
  const second = new AbortController();
  const values = connection.values(number, second.signal);
  expect((await values.next()).value).toBe(1);
  const next = values.next();
  setTimeout(() => second.abort(), 10);
  await expect(next).rejects.toThrow("the worker of the model still computes");
  other.end(new Error("over"));
  port2.close();
});
