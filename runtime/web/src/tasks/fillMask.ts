/**
 * Fill-mask: the most probable tokens for each mask of a text, as in transformers' pipeline.
 *
 * p = softmax(z)    over the whole vocabulary, for each mask independently, also if `candidateTokens` are set
 */

import { numberArray } from "../base/arrays.js";
import { InputError, OptionError, UnsupportedCallError } from "../base/errors.js";
import { checkInt, invalidValue, shown } from "../base/validation.js";
import type { Manifest } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";
import type { Inputs } from "../preprocess/inputs.js";
import type { Input } from "../preprocess/values.js";
import type { TextCode, TextReader } from "../preprocess/textReader.js";
import { Task, type Outputs, type SettingValues, type TaskInput } from "./base.js";
import { softmax } from "./classification.js";

/** A token for a mask. */
export interface MaskCandidate {
  /** The text of the token. */
  readonly token: string;
  readonly id: number;
  /** Its probability. */
  readonly score: number;
  /** The whole text with the token in place of the mask. */
  readonly text: string;
}

/** For each mask, the most probable candidate first. */
export type Filled = readonly (readonly MaskCandidate[])[];

interface Settings {
  readonly topK: number;
  readonly candidates: readonly number[] | undefined;
}

const MASK = "mask"; // setting of the manifest: the id of the mask
const DEFAULT_MASK_TOKENS = ["[MASK]", "<mask>"]; // for a file without that setting
const DEFAULT_TOP_K = 5;

export class FillMask extends Task<Filled, Settings> {
  readonly does = "fills in masks";
  readonly call = "fill()";
  override readonly batchSize = 8; // outputs are large: a score per position and token of the vocabulary
  private readonly reader: TextReader;
  private readonly maskOfFile: number | undefined;

  constructor(manifest: Manifest, textCodes: readonly TextCode[]) {
    super(manifest);
    const [index] = manifest.tokenizerOf.values();
    this.reader = textCodes[index].reader;
    this.maskOfFile = this.fileSetting(MASK, "number");
  }

  /** The id of the mask. Throw UnsupportedCallError for a tokenizer without one. */
  private get mask(): number {
    const ids = [this.maskOfFile, ...DEFAULT_MASK_TOKENS.map((token) => this.reader.idOf(token))];
    const id = ids.find((one) => one !== undefined);
    if (id === undefined) {
      const tokens = DEFAULT_MASK_TOKENS.join(" or ");
      throw new UnsupportedCallError(`the file's tokenizer has no mask: none of its tokens is ${tokens}`);
    }
    return id;
  }

  /** topK: candidates of a mask. candidateTokens: the only tokens to choose from, one or several: texts or ids. */
  settings(values: SettingValues): Settings {
    this.checkKnown(values, ["topK", "candidateTokens"]);
    const topK = checkInt("topK", values["topK"] ?? DEFAULT_TOP_K);
    const given = values["candidateTokens"];
    if (given === undefined) return { topK, candidates: undefined };
    const all = typeof given === "string" || typeof given === "number" ? [given] : given;
    if (!Array.isArray(all)) throw invalidValue("candidateTokens", "tokens, as texts or ids", given);
    const candidates = [...new Set(all.map((candidate) => this.candidateId(candidate)))];
    if (!candidates.length) {
      throw new OptionError("candidateTokens names no token: give one, or leave it out", "candidateTokens");
    }
    return { topK, candidates };
  }

  /** Return the id of a candidate. Throw OptionError if it is not exactly one token of the vocabulary. */
  private candidateId(candidate: unknown): number {
    const id = this.idOf(candidate);
    const shape = this.manifest.encode!.outputs[0].shape;
    const last = shape[shape.length - 1];
    const size = typeof last === "number" ? last : this.reader.size;
    if (id < 0 || id >= size) {
      throw new OptionError(`the candidate token ${id} is not in the model's vocabulary, which has ${size} ids`);
    }
    return id;
  }

  private idOf(candidate: unknown): number {
    if (typeof candidate === "number" && Number.isInteger(candidate)) return candidate;
    if (typeof candidate !== "string") throw invalidValue("each of candidateTokens", "a text or an id", candidate);
    const id = this.reader.idOf(candidate);
    if (id !== undefined) return id;
    const ids = this.reader.ids(candidate);
    if (ids.length !== 1 || ids[0] === this.reader.unknown) {
      const parts = ids.map((one) => this.reader.token(one)).join(" ");
      throw new OptionError(
        `the candidate token ${shown(candidate)} is not one token of the model's vocabulary, but ${parts || "none"}`,
      );
    }
    return ids[0];
  }

  override async readInput(input: Input, inputs: Inputs, truncate: boolean): Promise<TaskInput> {
    const request = await inputs.singlePassArrays(input, truncate);
    const ids = this.idsOf(request);
    if (!ids.includes(this.mask)) {
      const cut = truncate ? " (or truncation removed it)" : "";
      throw new InputError(`the input has no mask${cut}: write ${this.reader.token(this.mask)} where it belongs`);
    }
    return { requests: [request], details: ids };
  }

  /** Read an input, also one without a mask. */
  override singleRequest(input: Input, inputs: Inputs, truncate: boolean): Promise<Sources> {
    return inputs.singlePassArrays(input, truncate);
  }

  private idsOf(request: Sources): Int32Array {
    const spec = this.manifest.encode!.inputs.find(({ role }) => role === "ids")!;
    return request.get(spec.name)!.data as Int32Array;
  }

  /** Return the scores of the masks. The scores of all positions would take much more memory. */
  override selectOutputs([scores]: Outputs, request: Sources): Outputs {
    const width = scores.shape[1];
    const rows = [...this.idsOf(request).entries()].filter(([, id]) => id === this.mask).map(([position]) => position);
    const kept = new Float32Array(rows.length * width);
    rows.forEach((row, i) => kept.set(scores.data.subarray(row * width, (row + 1) * width), i * width));
    return [numberArray(kept, [rows.length, width])];
  }

  makeResult(reading: TaskInput, [[logits]]: readonly Outputs[], settings: Settings): Filled {
    const ids = reading.details as Int32Array;
    const positions = [...ids.keys()].filter((position) => ids[position] === this.mask);
    const width = logits.shape[1];
    return positions.map((position, i) => {
      const scores = softmax(Float64Array.from(logits.data.subarray(i * width, (i + 1) * width)));
      const tokens = settings.candidates ?? [...scores.keys()];
      // Other masks remain in the text.
      return [...tokens]
        .sort((one, other) => scores[other] - scores[one])
        .slice(0, settings.topK)
        .map((id) => {
          const filled = ids.slice();
          filled[position] = id;
          const text = this.reader.text(filled, positions.length > 1);
          return { token: this.reader.text([id], true), id, score: scores[id], text };
        });
    });
  }
}
