import { expect, test } from "vitest";
import { ModelFileError } from "../../src/base/errors.js";
import { checkRow, crop, inputAndOutputSizes } from "../../src/format/sizes.js";
import type { EncodeStage } from "../../src/format/manifest.js";
import {
  bytesField,
  concatBytes,
  iterFields,
  textOf,
  varint,
  varintField,
  varintsOf,
  WireError,
} from "../../src/format/onnxWire.js";
import {
  camelCase,
  count,
  either,
  list,
  mapping,
  name,
  nullable,
  object,
  readTyped,
  snakeCase,
} from "../../src/format/typedJson.js";

test("fields that are written are read", () => {
  const numbers = [0, 1, 127, 128, 300, 2 ** 31, 2 ** 53 - 1];
  const packed = concatBytes(numbers.map(varint));
  const data = concatBytes([...bytesField(1, "ä"), ...varintField(2, 2 ** 40), ...bytesField(300, packed)]);
  const [text, number, list] = [...iterFields(data)];
  expect([text.number, textOf(data, text)]).toEqual([1, "ä"]);
  expect([number.number, number.varint]).toEqual([2, 2 ** 40]);
  expect([list.number, varintsOf(data, list)]).toEqual([300, numbers]);
  expect(varintsOf(data, number)).toEqual([2 ** 40]);
});

test("bytes that are not a message", () => {
  for (const bytes of [[0x0a], [0x0a, 5, 1], [0x0b], [0x00], [0x80], Array(11).fill(0x80), [0x08], [0x0d, 1]]) {
    expect(() => [...iterFields(Uint8Array.from(bytes))], `${bytes}`).toThrow(WireError);
  }
  const broken = concatBytes(bytesField(1, Uint8Array.of(0xff)));
  expect(() => textOf(broken, [...iterFields(broken)][0])).toThrow(WireError);
});

test("values of JSON are checked wholly", () => {
  const reader = object({ someName: name, sizes: list(either(count, name)), more: nullable(mapping(count)) });
  const good = { some_name: "a", sizes: [1, "b"], more: { x_y: 2 } };
  const read = readTyped(reader, good, "it is damaged");
  expect(read).toEqual({ someName: "a", sizes: [1, "b"], more: new Map([["x_y", 2]]) });
  expect(readTyped(reader, { ...good, more: null }, "it is damaged").more).toBeUndefined();
  const cases: [object, string][] = [
    [{ ...good, some_name: "" }, "expected a text that is not empty - at `$.some_name`"],
    [{ ...good, sizes: [1, 0] }, "at `$.sizes[1]`"],
    [{ ...good, more: { x_y: "2" } }, "at `$.more.x_y`"],
    [{ ...good, other: 1 }, "unknown field `other` - at `$`"],
    [{ some_name: "a", sizes: [] }, "missing field `more` - at `$`"],
    [[], "expected an object - at `$`"],
  ];
  for (const [value, sentence] of cases) {
    expect(() => readTyped(reader, value, "it is damaged")).toThrow(ModelFileError);
    expect(() => readTyped(reader, value, "it is damaged")).toThrow(sentence);
  }
  expect([snakeCase("maxNewTokens"), camelCase("max_new_tokens"), camelCase("top_k")]).toEqual([
    "max_new_tokens",
    "maxNewTokens",
    "topK",
  ]);
});

test("rows are cut to their own sizes", () => {
  const data = Float32Array.from({ length: 24 }, (_, i) => i);
  const sizes = new Map([
    ["a", 2],
    ["b", 1],
  ]);
  expect(crop(sizes, ["a", "b", 2], data, 0, [3, 4, 2])).toEqual({
    data: Float32Array.of(0, 1, 8, 9),
    shape: [2, 1, 2],
  });
  expect(crop(sizes, ["a", 4], data, 12, [3, 4]).data).toEqual(Float32Array.of(12, 13, 14, 15, 16, 17, 18, 19));
  const encode = {
    inputs: [{ name: "x", shape: ["batch", "time"] }],
    derivedLengths: new Map([["frames", { of: "time", minimum: 400, stride: 320 }]]),
  } as unknown as EncodeStage;
  const found = inputAndOutputSizes(encode, new Map([["x", { data: new Float32Array(0), shape: [16000] }]]));
  expect(Object.fromEntries(found)).toEqual({ time: 16000, frames: 49 });
});

test("rows that are too short or of unequal lengths are refused", () => {
  const encode = {
    inputs: [
      { name: "x", shape: ["batch", "time", 2] },
      { name: "y", shape: ["batch", "time"] },
      { name: "z", shape: ["batch", "others"] },
    ],
    minLengths: new Map([["time", 3]]),
    noLongerThan: new Map([["others", ["time"]]]),
  } as unknown as EncodeStage;
  const row = (x: number, y: number, z = 1) =>
    new Map([
      ["x", { data: new Float32Array(2 * x), shape: [x, 2] }],
      ["y", { data: new Float32Array(y), shape: [y] }],
      ["z", { data: new Float32Array(z), shape: [z] }],
    ]);
  checkRow(encode, row(3, 3));
  expect(() => checkRow(encode, row(2, 2))).toThrow("input x is 2 long and the model needs at least 3");
  expect(() => checkRow(encode, row(3, 4))).toThrow("the inputs x and y are 3 and 4 long");
  expect(() => checkRow(encode, row(3, 3, 4))).toThrow("the model needs z to be no longer than x");
});
