import { describe, expect, test } from "vitest";
import { ModelFileError } from "../../src/base/errors.js";
import type { Pair } from "../../src/preprocess/textReader.js";
import { WindowReader, type TextWindow } from "../../src/preprocess/textWindows.js";
import { TokenizerParts } from "../../src/preprocess/tokenizer.js";
import { errorOf, Golden } from "../golden/golden.js";

interface Expected {
  ids: number[];
  types: number[];
  offsets: [number, number][];
  words: number[];
  texts: number[];
  inText: boolean[];
}

interface Case {
  name: string;
  definition: string;
  marksSubwords: boolean;
  whole: [string, Expected][];
  cut: [string, Expected][];
  windows: [string | Pair, number, number, Expected[]][];
}

const golden = new Golden<Case>("preprocess/text_windows.py");

function readerOf(definition: string): WindowReader {
  return new WindowReader(new TokenizerParts(definition));
}

function plain({ ids, types, starts, ends, words, texts }: TextWindow): Expected {
  return {
    ids: [...ids],
    types: [...types],
    offsets: Array.from(starts, (start, i) => [start, ends[i]]),
    words: [...words],
    texts: [...texts],
    inText: Array.from(texts, (text) => text >= 0),
  };
}

describe.each(golden.cases)("$name", ({ definition, marksSubwords, whole, cut, windows }) => {
  const reader = readerOf(definition);

  test("ids, words and places of tokens are those of the tokenizers library", () => {
    expect(reader.marksSubwords).toBe(marksSubwords);
    for (const [text, expected] of whole) {
      const found = reader.windows(text);
      expect(found.map(plain), JSON.stringify(text)).toEqual([expected]);
    }
    for (const [text, expected] of cut) {
      expect(reader.windows(text, 7).map(plain), JSON.stringify(text)).toEqual([expected]);
    }
  });

  test("windows are those of the tokenizers library", () => {
    for (const [text, size, stride, expected] of windows) {
      expect(reader.windows(text, size, stride).map(plain), JSON.stringify([text, size, stride])).toEqual(expected);
    }
  });
});

test("steps that cannot tell places are refused by name", () => {
  const json = JSON.parse(golden.cases[0].definition) as Record<string, unknown>;
  const places = "the JavaScript runtime cannot tell the places of tokens of a tokenizer with the";
  json["normalizer"] = { type: "Sequence", normalizers: [{ type: "Precompiled", precompiled_charsmap: "AAAA" }] };
  let error = errorOf(() => readerOf(JSON.stringify(json)));
  expect(error).toBeInstanceOf(ModelFileError);
  expect(error.message).toContain(`${places} normalizer Precompiled: run the model with the Python runtime`);
  json["normalizer"] = null;
  json["pre_tokenizer"] = { type: "FixedLength", length: 5 };
  error = errorOf(() => readerOf(JSON.stringify(json)));
  expect(error.message).toContain(`${places} pre-tokenizer FixedLength`);
});
