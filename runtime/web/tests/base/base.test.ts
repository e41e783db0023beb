import { describe, expect, test } from "vitest";
import { asNumbers, itemBytes, sizeOf, writeNumbers } from "../../src/base/arrays.js";
import {
  checkAborted,
  errorSummary,
  InputError,
  OptionError,
  OutOfMemoryError,
  quotable,
  TformerError,
  withInputNumber,
} from "../../src/base/errors.js";
import { checkInt, checkNames, shown, surrogateIn } from "../../src/base/validation.js";

describe("errors", () => {
  test("have their names, their tree and the numbers of their inputs", () => {
    const error = withInputNumber(new OutOfMemoryError("it is too long"), 3);
    expect([error.name, error.message, error.reason, error.inputNumber]).toEqual([
      "OutOfMemoryError",
      "input 3: it is too long",
      "it is too long",
      3,
    ]);
    expect([error instanceof InputError, error instanceof TformerError, error instanceof OptionError]).toEqual([
      true,
      true,
      false,
    ]);
    const option = withInputNumber(new OptionError("topK is wrong", "topK"), 2) as OptionError;
    expect([option.option, option.message]).toEqual(["topK", "input 2: topK is wrong"]);
  });

  test("are sentences, however long an input is", () => {
    expect(new InputError("x".repeat(100_000)).message.length).toBeLessThan(20_000);
    expect(quotable("x".repeat(500)).length).toBe(202);
    expect(errorSummary(new TypeError("a\nb"))).toBe("TypeError: a");
    expect(errorSummary("text")).toBe("string: text");
  });

  test("of a signal have its reason", () => {
    const controller = new AbortController();
    checkAborted(controller.signal);
    controller.abort("enough");
    expect(() => checkAborted(controller.signal)).toThrow("the call was aborted by its signal");
    for (const wrong of [controller, "stop", { aborted: false }])
      expect(() => checkAborted(wrong as AbortSignal)).toThrow("signal must be an AbortSignal");
  });
});

test("checks of values", () => {
  expect(checkInt("n", 3)).toBe(3);
  for (const wrong of [0, 1.5, "3", true, NaN, Infinity, null, 2 ** 31])
    expect(() => checkInt("n", wrong)).toThrow(OptionError);
  expect(() => checkNames(["topK", "topk"], ["topK"])).toThrow('there is no option "topk": did you mean topK?');
  expect(() => checkNames(["a"], [])).toThrow("there are none here");
  expect(surrogateIn("a😀b")).toBeUndefined();
  expect(surrogateIn("😀\ud83d")).toContain("(character 2)");
  expect([shown("a"), shown([1, "b"]), shown({}), shown(() => 1)]).toEqual([
    '"a"',
    '[1, "b"]',
    "an object",
    "a function",
  ]);
});

test("arrays of each type", () => {
  const ids = new BigInt64Array(3);
  writeNumbers(ids, [7, -1], 1);
  expect([...ids]).toEqual([0n, 7n, -1n]);
  expect([...asNumbers(ids, "int64")]).toEqual([0, 7, -1]);
  expect([...asNumbers(Uint16Array.of(0x3f80, 0xc000), "bfloat16")]).toEqual([1, -2]);
  expect([...asNumbers(Uint16Array.of(0x3c00, 0xc000, 0x7c00, 0x0001), "float16")]).toEqual([
    1,
    -2,
    Infinity,
    2 ** -24,
  ]);
  expect([itemBytes("int64"), itemBytes("bool"), sizeOf([2, 3]), sizeOf([])]).toEqual([8, 1, 6, 1]);
});
