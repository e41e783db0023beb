import { describe, expect, test } from "vitest";
import { InputError, ModelFileError } from "../../src/base/errors.js";
import { Detokenizer } from "../../src/preprocess/detokenizer.js";
import { TextCode } from "../../src/preprocess/textReader.js";
import { errorOf, Golden } from "../golden/golden.js";

interface Case {
  name: string;
  definition: string;
  size: number;
  encoded: [string, { ids: number[]; plain: number[] } | { error: string }][];
  read: [string, number[], number[]][];
  pairs: [string, string, number, number[], number[]][];
  decoded: [number[], string, string[], string[]][];
}

const golden = new Golden<Case>("preprocess/text_codecs.py");

describe.each(golden.cases)("$name", ({ definition, size, encoded, read, pairs, decoded }) => {
  const { codec, reader } = new TextCode(definition);

  test("its size", () => {
    expect([codec.size, reader.size]).toEqual([size, size]);
  });

  test.each(encoded)("the ids of %j, or the character that is unknown", (text, expected) => {
    if ("error" in expected) {
      const error = errorOf(() => codec.encode(text, true));
      expect(error).toBeInstanceOf(InputError);
      expect(error.message).toMatch(/is not in the model's vocabulary$|outside the model's vocabulary$/);
    } else {
      expect(codec.encode(text, false)).toEqual(expected.plain);
      expect(codec.encode(text, true)).toEqual(expected.ids);
    }
  });

  test("texts and pairs with special tokens, and cut", () => {
    for (const [text, ids, types] of read) {
      const found = reader.read(text);
      expect([...found.ids], text).toEqual(ids);
      expect([...found.types], text).toEqual(types);
    }
    for (const [first, second, limit, ids, types] of pairs) {
      const found = reader.read([first, second], limit);
      expect([...found.ids], `${first} / ${second}`).toEqual(ids);
      expect([...found.types]).toEqual(types);
    }
  });

  test("texts of ids, whole and in pieces", () => {
    for (const [ids, text, pieces, stopped] of decoded) {
      expect(codec.decode(ids), `${ids}`).toBe(text);
      for (const [stop, expected] of [
        [[], pieces],
        [["e", " th"], stopped],
      ] as const) {
        const detokenizer = new Detokenizer(codec, stop);
        const found = [...ids.map((id) => detokenizer.push(id)), detokenizer.finish()];
        expect(found.join(""), `${ids}`).toBe(expected.join(""));
        expect(found, `${ids}`).toEqual(expected);
      }
    }
  });
});

test("tokenizers that cannot be read", () => {
  for (const definition of ["", "{}", '{"model": {}}', "[]", "null"]) {
    const error = errorOf(() => new TextCode(definition));
    expect(error).toBeInstanceOf(ModelFileError);
    expect(error.message).toContain("the file's tokenizer cannot be read");
  }
  const step = { type: "Replace", pattern: { String: "a" }, content: "aaaaaaaaaa" };
  const json = JSON.parse(golden.cases[0].definition) as Record<string, unknown>;
  json["normalizer"] = { type: "Sequence", normalizers: Array(9).fill(step) };
  expect(errorOf(() => new TextCode(JSON.stringify(json))).message).toContain(
    "more than 1024 times as long (normalizer)",
  );
});

test("a tokenizer that splits as this runtime cannot is refused", () => {
  const json = JSON.parse(golden.cases[0].definition) as Record<string, unknown>;
  json["pre_tokenizer"] = { type: "Split", pattern: { String: "-" }, behavior: "MergedWithNext", invert: false };
  const error = errorOf(() => new TextCode(JSON.stringify(json)));
  expect(error).toBeInstanceOf(ModelFileError);
  expect(error.message).toContain("(MergedWithNext) that the JavaScript runtime does not have");
});

test("half a character is not text", () => {
  const { codec } = new TextCode(golden.cases[0].definition);
  expect(errorOf(() => codec.encode("a\ud83d", true)).message).toContain("(character 2), which is half of a character");
});
