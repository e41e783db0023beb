/** The steps of a decoder, from the pieces of ids to their text. They decode whole and growing sequences of pieces. */

import { ModelFileError } from "../base/errors.js";
import { readingTime, slowText, withinTime } from "../base/timeLimit.js";

const BROKEN = "\ufffd";

/** A step of a decoder: pieces in, and pieces out as soon as no later piece can change them. */
export interface DecodeStep {
  push(piece: string): string[];
  finish(): string[];
}

/** A decoder in the JSON format of the tokenizers library. */
export interface DecoderJson {
  readonly type: string;
  readonly [field: string]: unknown;
}

/** Return the text of all pieces. */
export function runSteps(steps: readonly DecodeStep[], pieces: readonly string[]): string {
  let text = "";
  for (const piece of pieces) {
    let parts = [piece];
    for (const step of steps) parts = parts.flatMap((one) => step.push(one));
    text += parts.join("");
  }
  return text + finishSteps(steps).join("");
}

/** Return the rest of the text of steps, after the last piece. */
export function finishSteps(steps: readonly DecodeStep[]): string[] {
  let pieces: string[] = [];
  for (const step of steps) pieces = [...pieces.flatMap((one) => step.push(one)), ...step.finish()];
  return pieces;
}

/**
 * Return the steps of a decoder. decoder: undefined for joining by spaces.
 *
 * A step that needs the whole text waits for the end, with all steps after it. Throw ModelFileError for an unknown step.
 */
export function decodeSteps(decoder: DecoderJson | undefined): DecodeStep[] {
  if (!decoder) return [new PieceStep((pieces) => pieces.join(" "), [""])];
  const made: DecodeStep[] = [];
  const steps = flatten(decoder);
  let fused = false; // whether the pieces so far are parts of one piece
  for (const [number, step] of steps.entries()) {
    const decode = (pieces: readonly string[]) => decodeChain(step, pieces).join("");
    if (step.type === "Fuse") {
      fused = true;
    } else if (step.type === "ByteLevel" && !fused) {
      made.push(new ByteLevelStep());
      fused = true;
    } else if (step.type === "ByteFallback" && !fused) {
      made.push(new ByteFallbackStep());
    } else if ((step.type === "Replace" || step.type === "Strip") && !fused) {
      made.push(new PieceStep(decode));
    } else if ((step.type === "Metaspace" || step.type === "WordPiece") && !fused) {
      made.push(new PieceStep(decode, [""]));
    } else if (step.type === "BPEDecoder" && !fused) {
      made.push(new LastDiffersStep(decode));
    } else if (step.type === "Metaspace" || (step.type === "Replace" && [...patternText(step)].length === 1)) {
      made.push(new PieceStep(decode)); // rewrites single characters
    } else if (step.type === "Strip") {
      made.push(new StripStep(String(step["content"]), Number(step["start"]), Number(step["stop"])));
    } else {
      const rest = steps.slice(number);
      made.push(
        new AtEndStep((pieces) => {
          let all = pieces;
          for (const one of rest) all = decodeChain(one, all);
          return all.join("");
        }, fused),
      );
      break;
    }
  }
  return made;
}

function flatten(decoder: DecoderJson): DecoderJson[] {
  if (decoder.type !== "Sequence") return [decoder];
  return (decoder["decoders"] as readonly DecoderJson[]).flatMap(flatten);
}

function patternText(step: DecoderJson): string {
  return String((step["pattern"] as { String?: string } | undefined)?.String ?? "");
}

/** Return what a step of a decoder makes of the pieces of a whole text, as the tokenizers library does. */
function decodeChain(step: DecoderJson, pieces: readonly string[]): readonly string[] {
  switch (step.type) {
    case "Replace": {
      const content = String(step["content"]);
      const pattern = step["pattern"] as { String?: string; Regex?: string };
      if (pattern.String !== undefined) return pieces.map((piece) => piece.replaceAll(pattern.String!, () => content));
      const expression = new RegExp(pattern.Regex!, "gu");
      const length = pieces.reduce((sum, piece) => sum + piece.length, 0);
      const replaced = () => pieces.map((piece) => piece.replace(expression, () => content));
      return withinTime(readingTime(length), replaced, slowText);
    }
    case "Strip":
      return pieces.map((piece) =>
        stripped(piece, String(step["content"]), Number(step["start"]), Number(step["stop"])),
      );
    case "Metaspace": {
      const replacement = String(step["replacement"] ?? "\u2581");
      const prepends = step["prepend_scheme"] !== "never";
      return pieces.map((piece, i) => piece.replaceAll(replacement, i === 0 && prepends ? "" : " "));
    }
    case "WordPiece": {
      const prefix = String(step["prefix"] ?? "##");
      return pieces.map((piece, i) => {
        const joined = i === 0 ? piece : piece.startsWith(prefix) ? piece.slice(prefix.length) : ` ${piece}`;
        return step["cleanup"] ? cleanedUp(joined) : joined;
      });
    }
    case "BPEDecoder": {
      const suffix = String(step["suffix"] ?? "</w>");
      return pieces.map((piece, i) => piece.replaceAll(suffix, i === pieces.length - 1 ? "" : " "));
    }
    case "ByteLevel":
      return [runSteps([new ByteLevelStep()], pieces)];
    case "ByteFallback": {
      const bytes = new ByteFallbackStep();
      return [...pieces.flatMap((piece) => bytes.push(piece)), ...bytes.finish()];
    }
    case "Fuse":
      return [pieces.join("")];
    case "CTC": {
      const pad = String(step["pad_token"] ?? "<pad>");
      const delimiter = String(step["word_delimiter_token"] ?? "|");
      return pieces
        .filter((piece, i) => piece !== pieces[i - 1])
        .map((piece) => {
          const text = piece.replaceAll(pad, "");
          return step["cleanup"] ? cleanedUp(text).replaceAll(delimiter, " ") : text;
        })
        .filter((piece) => piece);
    }
    default:
      throw new ModelFileError(
        `the file's tokenizer cannot be read (its decoder ${String(step.type).slice(0, 40)} is unknown to this runtime): ` +
          "export the model again",
      );
  }
}

function stripped(piece: string, content: string, start: number, stop: number): string {
  let [begin, end] = [0, piece.length];
  while (begin < end && start > 0 && piece.startsWith(content, begin))
    [begin, start] = [begin + content.length, start - 1];
  while (end > begin && stop > 0 && piece.slice(begin, end).endsWith(content))
    [end, stop] = [end - content.length, stop - 1];
  return piece.slice(begin, end);
}

const CLEANED: readonly (readonly [string, string])[] = [
  [" .", "."],
  [" ?", "?"],
  [" !", "!"],
  [" ,", ","],
  [" ' ", "'"],
  [" n't", "n't"],
  [" 'm", "'m"],
  [" do not", " don't"],
  [" 's", "'s"],
  [" 've", "'ve"],
  [" 're", "'re"],
];

function cleanedUp(text: string): string {
  for (const [found, replacement] of CLEANED) text = text.replaceAll(found, replacement);
  return text;
}

type DecodeFunction = (pieces: readonly string[]) => string;

/** A step that rewrites every piece independently, the first in another way than later ones. */
class PieceStep implements DecodeStep {
  private context: readonly string[] = [];

  /** laterContext: pieces that `decode` needs before a piece that is not the first. */
  constructor(
    private readonly decode: DecodeFunction,
    private readonly laterContext: readonly string[] = [],
  ) {}

  push(piece: string): string[] {
    const pieces = [...this.context, piece];
    this.context = this.laterContext;
    return [this.decode(pieces)];
  }

  finish(): string[] {
    return [];
  }
}

/** A step that rewrites every piece independently, the last in another way than earlier ones. */
class LastDiffersStep implements DecodeStep {
  private previous: string[] = []; // the latest piece, if there is one

  constructor(private readonly decode: DecodeFunction) {}

  push(piece: string): string[] {
    const before = this.previous;
    this.previous = [piece];
    return before.length ? [this.decode([...before, ""])] : [];
  }

  finish(): string[] {
    return this.previous.length ? [this.decode(this.previous)] : [];
  }
}

/**
 * A step that joins pieces like <0xE6>, which are bytes, to characters.
 *
 * A run of bytes that is not UTF-8 becomes one � per byte, also for its valid bytes.
 */
class ByteFallbackStep implements DecodeStep {
  private run: number[] = [];
  private utf8 = newUtf8(true);
  private broken = false; // whether the run is not UTF-8

  push(piece: string): string[] {
    const byte = /^<0x([0-9A-Fa-f+][0-9A-Fa-f])>$/.exec(piece); // the number parser of Rust accepts a plus sign
    if (!byte) return [...this.finish(), piece];
    const value = parseInt(byte[1].replace("+", "0"), 16);
    this.run.push(value);
    if (!this.broken) {
      try {
        this.utf8.decode(Uint8Array.of(value), { stream: true });
      } catch {
        this.broken = true;
      }
    }
    return this.broken ? this.allBroken() : [];
  }

  finish(): string[] {
    this.utf8 = newUtf8(true);
    this.broken = false;
    try {
      const text = newUtf8(true).decode(Uint8Array.from(this.run));
      this.run = [];
      return text ? [text] : [];
    } catch {
      return this.allBroken();
    }
  }

  private allBroken(): string[] {
    const broken = this.run.map(() => BROKEN);
    this.run = [];
    return broken;
  }
}

function newUtf8(fatal: boolean): TextDecoder {
  return new TextDecoder("utf-8", { fatal, ignoreBOM: true });
}

/** The alphabet of GPT-2: printable Latin-1 characters are their bytes. Characters from U+0100 on are other bytes. */
const BYTE_OF: ReadonlyMap<string, number> = (() => {
  const bytes = new Map<string, number>();
  let others = 0;
  for (let byte = 0; byte < 256; byte++) {
    const isPrintable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
    bytes.set(String.fromCharCode(isPrintable ? byte : 0x100 + others++), byte);
  }
  return bytes;
})();

/** A step from characters of GPT-2's alphabet, one per byte, to UTF-8 text. Invalid bytes become �. */
class ByteLevelStep implements DecodeStep {
  private readonly utf8 = newUtf8(false);

  push(piece: string): string[] {
    const bytes = Array.from(piece, (character) => BYTE_OF.get(character));
    const isWhole = bytes.every((byte) => byte !== undefined);
    // An added token is not in the alphabet.
    const data = isWhole ? Uint8Array.from(bytes as number[]) : new TextEncoder().encode(piece);
    return [this.utf8.decode(data, { stream: true })];
  }

  finish(): string[] {
    return [this.utf8.decode()];
  }
}

/** A step that removes up to `start` characters `content` from the start of the text, and `stop` from the end. */
class StripStep implements DecodeStep {
  private tail = ""; // to be removed if the text ends here

  constructor(
    private readonly content: string,
    private start: number,
    private readonly stop: number,
  ) {}

  push(piece: string): string[] {
    const whole = this.tail + piece;
    const text = stripped(whole, this.content, this.start, 0);
    this.start = text ? 0 : this.start - (whole.length - text.length) / Math.max(1, this.content.length);
    const kept = stripped(text, this.content, 0, this.stop);
    this.tail = text.slice(kept.length);
    return [kept];
  }

  finish(): string[] {
    return [];
  }
}

/** Any steps, run once on all pieces. fused: whether the pieces are parts of one piece. */
class AtEndStep implements DecodeStep {
  private readonly pieces: string[] = [];

  constructor(
    private readonly decode: DecodeFunction,
    private readonly fused: boolean,
  ) {}

  push(piece: string): string[] {
    this.pieces.push(piece);
    return [];
  }

  finish(): string[] {
    return [this.decode(this.fused ? [this.pieces.join("")] : this.pieces)];
  }
}
