/**
 * The normalizers and pre-tokenizers of the tokenizers library, with the places of characters.
 *
 * The package for JavaScript has these steps without places, and some of its steps differ from those of the library.
 */

import { ModelFileError, quotable } from "../base/errors.js";
import { AlignedText, type Change } from "./alignedText.js";
import { SPACE, WORD } from "./tokenizer.js";
import { inForm, type Form } from "./unicodeForms.js";

/** A step as the JSON of a tokenizer has it. */
export type StepJson = Readonly<Record<string, unknown>>;
/** The pattern of a step, as the package for JavaScript has compiled it. */
export type Compiled = { readonly pattern?: RegExp | null } | undefined;

const SPACES = new RegExp(`[${SPACE}]`, "u");
const SPACES_TO_SPLIT = new RegExp(`[${SPACE}]+`, "gu");
const CONTROL = /[\p{Cc}\p{Cf}\p{Co}]/u;
const MARK = /\p{Mn}/u;
const ANY_MARK = /\p{M}/u;
const PUNCTUATION = /[\p{P}!-/:-@[-`{-~]/gu;
const WORDS = new RegExp(`[${WORD}]+|[^${WORD}${SPACE}]+`, "gu");
const BYTE_LEVEL = new RegExp(
  `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+|[${SPACE}]+(?![^${SPACE}])|[${SPACE}]+`,
  "gu",
);
const CHINESE = [
  [0x4e00, 0x9fff],
  [0x3400, 0x4dbf],
  [0x20000, 0x2a6df],
  [0x2a700, 0x2b73f],
  [0x2b740, 0x2b81f],
  [0x2b920, 0x2ceaf],
  [0xf900, 0xfaff],
  [0x2f800, 0x2fa1f],
];

/** Return the error for a step whose places are unknown here. part: "normalizer" or "pre-tokenizer". */
function unknownStep(part: string, name: unknown): ModelFileError {
  return new ModelFileError(
    `the JavaScript runtime cannot tell the places of tokens of a tokenizer with the ${part} ${quotable(String(name))}: ` +
      "run the model with the Python runtime",
  );
}

/** Return a normalized text. Throw ModelFileError for a normalizer that cannot tell places. */
export function normalized(text: AlignedText, step: StepJson, compiled: (step: StepJson) => Compiled): AlignedText {
  switch (step["type"]) {
    case "Sequence":
      return (step["normalizers"] as StepJson[]).reduce((one, inner) => normalized(one, inner, compiled), text);
    case "BertNormalizer":
      return bertNormalized(text, step);
    case "NFC":
    case "NFD":
    case "NFKC":
    case "NFKD":
      return inForm(text, step["type"] as Form);
    case "Lowercase":
      return lowercased(text);
    case "StripAccents":
      return text.filtered((character) => !ANY_MARK.test(character));
    case "Strip":
      return stripped(text, Boolean(step["strip_left"]), Boolean(step["strip_right"]));
    case "Prepend":
      return text.prepended(String(step["prepend"]));
    case "Replace": {
      const pattern = compiled(step)?.pattern;
      if (!pattern) throw unknownStep("normalizer", step["type"]);
      return text.replaced(pattern, String(step["content"]));
    }
    default:
      throw unknownStep("normalizer", step["type"]);
  }
}

/** Characters are lowered one by one: a last sigma is not another letter. */
function lowercased(text: AlignedText): AlignedText {
  return text.mapped((character) => character.toLowerCase());
}

function stripped(text: AlignedText, left: boolean, right: boolean): AlignedText {
  let [first, end] = [0, text.length];
  while (left && first < end && SPACES.test(text.characters[first])) first++;
  while (right && first < end && SPACES.test(text.characters[end - 1])) end--;
  return text.slice(first, end);
}

function bertNormalized(text: AlignedText, step: StepJson): AlignedText {
  if (step["clean_text"]) {
    text = text
      .filtered((one) => /[\t\n\r]/.test(one) || (one !== "\0" && one !== "\ufffd" && !CONTROL.test(one)))
      .mapped((one) => (SPACES.test(one) ? " " : one));
  }
  if (step["handle_chinese_chars"]) {
    text = text.changed(
      text.characters.flatMap((one): Change[] => {
        const code = one.codePointAt(0)!;
        const isChinese = CHINESE.some(([first, last]) => first <= code && code <= last);
        return isChinese
          ? [
              [" ", 0],
              [one, 1],
              [" ", 1],
            ]
          : [[one, 0]];
      }),
    );
  }
  if (step["strip_accents"] ?? step["lowercase"]) text = inForm(text, "NFD").filtered((one) => !MARK.test(one));
  return step["lowercase"] ? lowercased(text) : text;
}

/** Return the words of a text. Throw ModelFileError for a pre-tokenizer that cannot tell places. */
export function preTokenized(
  text: AlignedText,
  step: StepJson,
  compiled: (step: StepJson) => Compiled,
): readonly AlignedText[] {
  switch (step["type"]) {
    case "Sequence":
      return (step["pretokenizers"] as StepJson[]).reduce<readonly AlignedText[]>(
        (parts, inner) => parts.flatMap((part) => preTokenized(part, inner, compiled)),
        [text],
      );
    case "BertPreTokenizer":
      return text
        .split(text.matches(SPACES_TO_SPLIT), true, false)
        .flatMap((part) => part.split(part.matches(PUNCTUATION), true, true));
    case "Whitespace":
      return text.split(text.matches(WORDS), false, true);
    case "WhitespaceSplit":
      return text.split(text.matches(SPACES_TO_SPLIT), true, false);
    case "Punctuation":
      if ((step["behavior"] ?? "Isolated") !== "Isolated") throw unknownStep("pre-tokenizer", step["type"]);
      return text.split(text.matches(PUNCTUATION), true, true);
    case "Digits":
      return text.split(text.matches(step["individual_digits"] ? /\p{N}/gu : /\p{N}+/gu), true, true);
    case "Metaspace":
      return metaspaced(text, step);
    case "ByteLevel":
      return byteLevel(text, step);
    case "Split": {
      const pattern = compiled(step)?.pattern;
      if (!pattern) throw unknownStep("pre-tokenizer", step["type"]);
      const isolated = step["behavior"] === "Isolated";
      const inverted = Boolean(step["invert"]);
      return text.split(text.matches(pattern), isolated || !inverted, isolated || inverted);
    }
    default:
      throw unknownStep("pre-tokenizer", step["type"]);
  }
}

function metaspaced(text: AlignedText, step: StepJson): readonly AlignedText[] {
  const mark = String(step["replacement"] ?? "▁");
  const scheme = step["prepend_scheme"] ?? "always";
  let spaced = text.replaced(/ /gu, mark);
  const prepends = scheme === "always" || (scheme === "first" && text.start === 0);
  if (prepends && spaced.characters[0] !== mark) spaced = spaced.prepended(mark);
  if (step["split"] === false) return [spaced];
  // Each mark belongs to the word after it.
  const marks = [...spaced.characters.keys()].filter((i) => spaced.characters[i] === mark);
  const borders = [...new Set([0, ...marks, spaced.length])];
  return borders.slice(1).map((end, i) => spaced.slice(borders[i], end));
}

function byteLevel(text: AlignedText, step: StepJson): readonly AlignedText[] {
  if (step["add_prefix_space"] && text.characters[0] !== " ") text = text.prepended(" ");
  const parts = step["use_regex"] === false ? [text] : text.split(text.matches(BYTE_LEVEL), true, true);
  const encoder = new TextEncoder();
  return parts.map((part) => part.mapped((character) => Array.from(encoder.encode(character), byteCharacter)));
}

/** Return the character that stands for a byte: itself if it can be seen, else one from U+0100. */
function byteCharacter(byte: number): string {
  if ((byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad)) return String.fromCharCode(byte);
  const place = byte <= 0x20 ? byte : byte < 0xa1 ? byte - 0x7f + 0x21 : 0x43;
  return String.fromCharCode(0x100 + place);
}
