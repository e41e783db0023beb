/**
 * The manifest: everything that a runtime must know about a model file, as JSON in the file's own metadata.
 *
 * The exporter writes it and the runtime reads it. `format/manifest.py` of the Python runtime describes the fields, the
 * two stages (`encode`: request inputs → context; `decode`: new tokens + context + caches → logits + caches) and the
 * control inputs, which give the decode stage the positions of the new tokens. A call feeds `N` new token slots to each
 * of `B` rows. The first `count[b]` of them are valid and follow `past[b]` cached tokens:
 *
 * POSITIONS        int64 (B, N)   past[b] + i, clipped to maxLength - 1
 * LAST_POSITION    int32 (B,)     past[b] + count[b] - 1
 * TOTAL_SLOTS      int32 ()       max(past) + N
 * START_SLOT       int64 (B,)     past[b]
 * SLOT_INDICES     int64 (total,) 0 … total - 1
 * NEW_COUNTS       int64 (B,)     count[b]; 0 for a row whose carries must not change
 * SELECTED_TOKENS  int64 (B, M)   indices of the new tokens for which the stage computes logits
 * ADAPTER_ROWS     int64 (B,)     the number of each row's adapter; 0 for none
 *
 * The logits are (B, M, vocabulary), float32. A file with a shortlist has three more inputs:
 *
 * GATHER_IDS       int64 (G,)     ids whose columns of the output projection are returned as GATHERED_COLUMNS, (d, G)
 * COLUMN_IDS       int64 (C,)     ids of the columns in COLUMN_WEIGHT. The stage computes only their logits, (B, M, C);
 *                                 without ids all logits
 * COLUMN_WEIGHT    (d, C)         GATHERED_COLUMNS for these ids
 *
 * In a call of encode COLUMN_IDS and COLUMN_WEIGHT have one column with arbitrary content.
 */

import { DTYPES, type Dtype } from "../base/arrays.js";
import { ModelFileError, OptionError } from "../base/errors.js";
import { MAX_THREADS, shown } from "../base/validation.js";
import {
  anything,
  boolean,
  count,
  either,
  id,
  index,
  integer,
  list,
  mapping,
  name,
  nullable,
  notNegative,
  object,
  oneOf,
  readTyped,
  text,
  type Reader,
} from "./typedJson.js";

export const MANIFEST_KEY = "tformer.manifest";
export const MANIFEST_VERSION = 11;
export const VERSION_WITHOUT_PRODUCTS = 10; // has no record of stored products, and is read as a file without any

export const STAGE_INPUT = "stage.decode";
export const POSITIONS = "decode.positions";
export const LAST_POSITION = "decode.last";
export const TOTAL_SLOTS = "decode.total";
export const START_SLOT = "decode.start";
export const SLOT_INDICES = "decode.slots";
export const NEW_COUNTS = "decode.counts";
export const SELECTED_TOKENS = "decode.select";
export const ADAPTER_ROWS = "decode.adapter";
export const ADAPTER_INPUT = "request.adapter";
export const GATHER_IDS = "shortlist.gather";
export const GATHERED_COLUMNS = "shortlist.gathered";
export const COLUMN_IDS = "shortlist.columns";
export const COLUMN_WEIGHT = "shortlist.weight";

export const BATCH_AXIS = "batch"; // names of axes of tensors
export const NEW_AXIS = "new";
export const SLOT_AXIS = "slot";

export const BASE_ADAPTER = "base"; // the name of the model without an adapter

export const AUDIO = "audio"; // kinds of Preprocessing
export const IMAGE = "image";
export const SERIES = "series";

export const CROSS_ATTENTIONS = "cross_attentions"; // kinds of ExtraOutput
export const ATTENTIONS = "attentions";
export const HIDDEN_STATES = "hidden_states";

export const SINGLE_LABEL = "single_label_classification"; // values of OutputMeaning.problemType
export const MULTI_LABEL = "multi_label_classification";
export const REGRESSION = "regression";

const dtype = oneOf(...DTYPES) as Reader<Dtype>;
const shape = list(either(index, name));

const tensor = { name, dtype, shape };
const tensorSpec = object(tensor);
const requestInput = object({
  ...tensor,
  role: oneOf("ids", "types", "mask", "data"),
  of: nullable(text),
  keep: boolean,
  pad: id,
  maxLength: nullable(count),
  vocabulary: nullable(count),
  required: boolean,
});
const extraOutput = object({ ...tensor, kind: oneOf(CROSS_ATTENTIONS, ATTENTIONS, HIDDEN_STATES) });
const cacheSpec = object({ past: name, present: name, dtype, shape, inPlace: boolean });
const derivedLength = object({ of: name, minimum: index, stride: count });
const encodeStage = object({
  inputs: list(requestInput),
  outputs: list(tensorSpec),
  extras: list(extraOutput),
  ragged: boolean,
  derivedLengths: mapping(derivedLength),
  minLengths: mapping(count),
  noLongerThan: mapping(list(name)),
});
const shortlistSpec = object({ dtype, inner: count, common: index, each: index, measured: mapping(anything) });
const decodeStage = object({
  step: tensorSpec,
  controls: list(name),
  caches: list(cacheSpec),
  logits: tensorSpec,
  context: list(name),
  vocabulary: nullable(count),
  chunkedPrefill: boolean,
  extras: list(extraOutput),
  sharesContext: boolean,
  shortlist: nullable(shortlistSpec),
  smallBatchLimit: nullable(index),
  hiddenId: nullable(index),
});
const specialTokens = object({ bosTokenIds: list(index), eosTokenIds: list(index), padTokenId: nullable(index) });
const outputMeaning = object({ labels: list(text), problemType: text, settings: mapping(anything) });
const preprocessing = object({ kind: oneOf(AUDIO, IMAGE, SERIES), numbers: mapping(anything) });
const placeholder = object({
  tokenId: index,
  positions: count,
  marker: text,
  replacement: text,
  grids: mapping(list(text)),
});
const sessionSettings = object({
  threads: nullable(integer(1, MAX_THREADS)),
  spinning: boolean,
  disabledOptimizers: list(text),
});
const matrixSpec = object({
  form: oneOf("int8_columns", "int8_rows", "int8_blocks", "int6_planes", "int4_blocks"),
  inner: count,
  columns: count,
  block: count,
  weights: name,
  codes: nullable(name),
  lower: nullable(name),
});
const rowScaling = object({
  magnitude: boolean,
  floor: notNegative,
  step: notNegative,
  zero: integer(0, 255),
  reciprocal: boolean,
  fixedScale: notNegative,
  mayBeEmpty: boolean,
});
const productSpec = object({
  matrix: index,
  source: name,
  result: name,
  scale: name,
  bias: nullable(name),
  scaling: nullable(rowScaling),
});
const storedProducts = object({ matrices: list(matrixSpec), products: mapping(productSpec) });
const manifest = object({
  task: text,
  maxLength: index,
  encode: nullable(encodeStage),
  decode: nullable(decodeStage),
  specialTokens,
  tokenizers: list(text),
  tokenizerOf: mapping(index),
  generationDefaults: mapping(anything),
  target: text,
  devices: list(name),
  precision: text,
  quantization: text,
  maxLengthCause: text,
  weightBits: mapping(index),
  optimizedFor: text,
  session: sessionSettings,
  kernelForms: mapping(text),
  sourceDigest: text,
  producer: mapping(text),
  parity: mapping(anything),
  chatTemplate: nullable(text),
  chatTokens: mapping(text),
  outputMeaning,
  preprocessing: mapping(preprocessing),
  adapters: list(name),
  placeholders: mapping(placeholder),
  storedProducts,
  version: integer(VERSION_WITHOUT_PRODUCTS, MANIFEST_VERSION),
});

type ReadBy<R> = R extends Reader<infer T> ? T : never;
export type Shape = ReadBy<typeof shape>;
export type TensorSpec = ReadBy<typeof tensorSpec>;
export type RequestInput = ReadBy<typeof requestInput>;
export type ExtraOutput = ReadBy<typeof extraOutput>;
export type CacheSpec = ReadBy<typeof cacheSpec>;
export type EncodeStage = ReadBy<typeof encodeStage>;
export type DecodeStage = ReadBy<typeof decodeStage>;
export type SpecialTokens = ReadBy<typeof specialTokens>;
export type OutputMeaning = ReadBy<typeof outputMeaning>;
export type Preprocessing = ReadBy<typeof preprocessing>;
export type Placeholder = ReadBy<typeof placeholder>;
export type SessionSettings = ReadBy<typeof sessionSettings>;
export type MatrixSpec = ReadBy<typeof matrixSpec>;
export type ProductSpec = ReadBy<typeof productSpec>;
export type StoredProducts = ReadBy<typeof storedProducts>;
export type Manifest = ReadBy<typeof manifest>;

/**
 * Read a manifest: all fields, of their types and within their bounds, and no others.
 *
 * `manifestChecks` has the rules that concern several fields. A file of VERSION_WITHOUT_PRODUCTS has none stored.
 * Throw ModelFileError if it is damaged, or has another version than this runtime.
 */
export function manifestFromJson(json: string): Manifest {
  let data: unknown;
  try {
    data = JSON.parse(json);
  } catch {
    data = undefined;
  }
  const version = (data as { version?: unknown } | null | undefined)?.version;
  if (typeof version !== "number" || !Number.isInteger(version)) {
    throw new ModelFileError("the file's tformer manifest is damaged: export the model again");
  }
  if (version > MANIFEST_VERSION) {
    throw new ModelFileError(
      `the file's manifest has version ${version} and this runtime reads version ${MANIFEST_VERSION}: upgrade tformer`,
    );
  }
  if (version === VERSION_WITHOUT_PRODUCTS) {
    data = { stored_products: { matrices: [], products: {} }, ...(data as object) };
  } else if (version < MANIFEST_VERSION) {
    throw new ModelFileError(
      `the file was written by an earlier tformer (its manifest has version ${version}, this runtime reads version ` +
        `${MANIFEST_VERSION}): export the model again`,
    );
  }
  return readTyped(manifest, data, "the file's tformer manifest is damaged");
}

/** Return whether a cache has no slots: it holds a value after the last token, and none of earlier tokens. */
export function isCarry(cache: CacheSpec): boolean {
  return !cache.shape.includes(SLOT_AXIS);
}

/** Return the shape of the step input at each position: [] for an id, [F] for F numbers. */
export function stepFeatures(decode: DecodeStage): readonly number[] {
  return decode.step.shape.slice(2).map(Number);
}

/** Return the number of logits at a position. */
export function logitCount(decode: DecodeStage): number {
  return Number(decode.logits.shape[decode.logits.shape.length - 1]);
}

/** Return whether a text of the caller is the beginning of the step input, and not the source of an encoder. */
export function takesPrompt(file: Manifest): boolean {
  return file.decode !== undefined && (file.encode === undefined || file.placeholders.size > 0);
}

/** Return the outputs of the encode stage without its extra outputs. */
export function encodedOutputs(file: Manifest): readonly TensorSpec[] {
  return file.encode?.outputs ?? [];
}

/** Return the extra outputs of both stages. */
export function extraOutputs(file: Manifest): readonly ExtraOutput[] {
  return [...(file.encode?.extras ?? []), ...(file.decode?.extras ?? [])];
}

/** Return the qualified name of the submodule whose output the hidden states are. */
export function moduleOf(extra: ExtraOutput): string {
  return extra.name.startsWith(`${HIDDEN_STATES}.`) ? extra.name.slice(HIDDEN_STATES.length + 1) : extra.name;
}

/** Return the number of an adapter; 0 for BASE_ADAPTER and undefined. Throw OptionError for another name. */
export function adapterNumber(file: Manifest, adapter: string | undefined): number {
  if (adapter === undefined || adapter === BASE_ADAPTER) return 0;
  if (file.adapters.length === 0) {
    throw new OptionError(
      `adapter: ${shown(adapter)} names an adapter and the file holds none: export the model with --adapters FOLDER`,
      "adapter",
    );
  }
  const place = file.adapters.indexOf(adapter);
  if (place < 0) {
    const names = [BASE_ADAPTER, ...file.adapters].join(", ");
    throw new OptionError(`adapter must be one of ${names}, not ${shown(adapter)}`, "adapter");
  }
  return 1 + place;
}
