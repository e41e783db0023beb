import { expect, test } from "vitest";
import { InputError } from "../../src/base/errors.js";
import { manifestOf, readMetadata } from "../../src/format/modelFile.js";
import type { Manifest, RequestInput } from "../../src/format/manifest.js";
import { Inputs } from "../../src/preprocess/inputs.js";
import { arrayOf, type Input } from "../../src/preprocess/values.js";
import { TextCode } from "../../src/preprocess/textReader.js";
import { errorOf } from "../golden/golden.js";
import { modelBytes } from "../support/models.js";

const g2p = manifestOf(readMetadata(modelBytes("g2p")));
const words = manifestOf(readMetadata(modelBytes("words")));
const languages = manifestOf(readMetadata(modelBytes("languages")));

function inputsOf(manifest: Manifest): Inputs {
  return new Inputs(
    manifest,
    new Map(),
    manifest.tokenizers.map((one) => new TextCode(one)),
  );
}

test("sources of an encoder are texts or ids, by name or alone", () => {
  const inputs = inputsOf(g2p);
  const ids = [12, 9, 2];
  for (const input of [
    "he",
    ids,
    Int32Array.from(ids),
    BigInt64Array.from(ids, BigInt),
    { src: "he" },
    { src: ids },
  ] as Input[]) {
    const { sources, prompt, startCount } = inputs.generationInputs(input);
    expect([...sources.get("src")!.data]).toEqual(ids);
    expect([[...prompt], startCount]).toEqual([[1], 1]);
  }
  const cases: [unknown, string][] = [
    [{ text: "he" }, "the model reads src, not text"],
    [{}, "the model reads src, not nothing"],
    [[], "the input is empty"],
    [[1.5], "input src takes text or a sequence of whole numbers"],
    [[[1]], "input src takes text or a sequence of whole numbers"],
    [["a"], "input src takes text or a sequence of whole numbers"],
    [5, "input src takes text or a sequence of whole numbers"],
    [null, "input src takes text or a sequence of whole numbers"],
    [[5, 31], "id 31 (number 2 of the input) is not in the model's vocabulary, which ends at 30"],
    [[-1], "id -1 (number 1 of the input)"],
    [Array(65).fill(5), "the input is 65 tokens long and the model takes at most 64"],
    ["x".repeat(600_000), "the input is 600,000 characters long and at most 524,288 are read at once"],
    ["\ude00", "which is half of a character"],
  ];
  for (const [input, sentence] of cases) {
    const error = errorOf(() => inputs.generationInputs(input as Input));
    expect(error, sentence).toBeInstanceOf(InputError);
    expect(error.message).toContain(sentence);
  }
});

test("prompts of a decoder-only model", () => {
  const inputs = inputsOf(words);
  const { sources, prompt, startCount } = inputs.generationInputs("he");
  expect([sources.size, startCount]).toEqual([0, 0]);
  expect([...inputs.generationInputs({ ids: prompt }).prompt]).toEqual([...prompt]);
  expect(errorOf(() => inputs.generationInputs("")).message).toBe("the input is empty");
  expect(errorOf(() => inputs.generationInputs([5, 0])).message).toContain(
    "id 0 (number 2 of the input) is the model's padding, which the model hides",
  );
  expect(inputs.tokenLabels("ids", prompt)).toEqual(inputs.tokenLabels("ids", [...prompt]));
});

test("start tokens go before a text, and not before the caller's ids", () => {
  const manifest: Manifest = { ...words, specialTokens: { ...words.specialTokens, bosTokenIds: [7, 8] } };
  const inputs = inputsOf(manifest);
  const text = inputs.generationInputs("he");
  expect([text.startCount, [...text.prompt.subarray(0, 2)]]).toEqual([2, [7, 8]]);
  expect([...inputs.generationInputs([9]).prompt]).toEqual([9]);
  expect([...inputs.generationInputs([]).prompt]).toEqual([7, 8]);
  expect([...inputs.generationInputs("he", false).prompt]).toEqual([...text.prompt.subarray(2)]);
});

test("single-pass models read texts, pairs and ids, and cut them if they are asked to", async () => {
  const inputs = inputsOf(languages);
  const long = "word ".repeat(500);
  await expect(inputs.singlePassArrays(long)).rejects.toThrow("and the model takes at most 128: shorten it");
  expect((await inputs.singlePassArrays(long, true)).get("ids")!.shape).toEqual([128]);
  expect((await inputs.singlePassArrays([5, 6])).get("ids")!.shape).toEqual([2]);
  await expect(inputs.singlePassArrays("")).rejects.toThrow("the input is empty");
  await expect(inputs.singlePassArrays([16000])).rejects.toThrow("which ends at 15999");
});

test("inputs of data are numbers of the right kind", async () => {
  const spec = {
    ...languages.encode!.inputs[0],
    name: "x",
    dtype: "float32",
    shape: ["batch", "time", 2],
    role: "data",
  } as RequestInput;
  const other = { ...spec, name: "y", shape: ["batch", 1] } as RequestInput;
  const manifest: Manifest = {
    ...languages,
    encode: { ...languages.encode!, inputs: [spec, other] },
    tokenizerOf: new Map(),
  };
  const inputs = inputsOf(manifest);
  const arrays = await inputs.singlePassArrays({
    x: [
      [1, 2],
      [3, 4],
    ],
    y: 7,
  });
  expect(arrays.get("x")).toEqual({ data: Float32Array.of(1, 2, 3, 4), shape: [2, 2] });
  expect(arrays.get("y")).toEqual({ data: Float32Array.of(7), shape: [1] });
  const cases: [Input, string][] = [
    [[1], "the model reads several inputs: give an object with x, y"],
    [{ x: "text", y: 1 }, "input x takes an array of float32, not text"],
    [{ x: [[1, 2], [3]], y: 1 } as Input, "input x takes an array of float32"],
    [{ x: [[1, NaN]], y: 1 }, "input x takes finite numbers of float32, not NaN at (0, 1)"],
    [{ x: [[1, 1e39]], y: 1 }, "not Infinity at (0, 1)"],
  ];
  for (const [input, sentence] of cases) await expect(inputs.singlePassArrays(input)).rejects.toThrow(sentence);
});

test("arrays of all forms", () => {
  expect(
    arrayOf([
      [1, 2],
      [3, 4],
    ]),
  ).toEqual({ data: Float64Array.of(1, 2, 3, 4), shape: [2, 2] });
  expect(arrayOf(Uint8Array.of(1, 2))).toEqual({ data: Float64Array.of(1, 2), shape: [2] });
  expect(arrayOf({ data: Float32Array.of(1, 2), shape: [1, 2] })!.shape).toEqual([1, 2]);
  for (const wrong of [[[1], [1, 2]], ["a"], [[1], 2], { data: Float32Array.of(1), shape: [2] }, "text", null, 3]) {
    expect(arrayOf(wrong)).toBeUndefined();
  }
});
