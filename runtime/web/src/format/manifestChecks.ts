/**
 * Rules of a manifest that concern several of its fields, and a graph that has to be as the manifest describes it.
 *
 * `manifestFromJson` has checked each field alone: its type and its bounds. A file from a stranger may break any of the
 * rules here. The runtime would then fail in the middle of a request, or read memory that was not meant.
 */

import type { Dtype } from "../base/arrays.js";
import { ModelFileError } from "../base/errors.js";
import {
  ADAPTER_INPUT,
  ADAPTER_ROWS,
  BATCH_AXIS,
  COLUMN_IDS,
  COLUMN_WEIGHT,
  encodedOutputs,
  GATHER_IDS,
  isCarry,
  LAST_POSITION,
  NEW_AXIS,
  NEW_COUNTS,
  POSITIONS,
  SELECTED_TOKENS,
  SLOT_AXIS,
  SLOT_INDICES,
  STAGE_INPUT,
  START_SLOT,
  stepFeatures,
  TOTAL_SLOTS,
  type DecodeStage,
  type EncodeStage,
  type Manifest,
  type Shape,
  type TensorSpec,
} from "./manifest.js";
import type { GraphTensor } from "./onnxGraph.js";

export const CONTROLS: Readonly<Record<string, Dtype>> = {
  [POSITIONS]: "int64",
  [LAST_POSITION]: "int32",
  [TOTAL_SLOTS]: "int32",
  [START_SLOT]: "int64",
  [SLOT_INDICES]: "int64",
  [NEW_COUNTS]: "int64",
  [SELECTED_TOKENS]: "int64",
  [ADAPTER_ROWS]: "int64",
};

type GraphTensors = ReadonlyMap<string, GraphTensor>;

/** Throw ModelFileError for a manifest whose fields contradict each other. Cost: linear in its tensors and ids. */
export function checkManifest(manifest: Manifest): void {
  const { encode, decode } = manifest;
  if (!encode && !decode) throw contradiction("it has no stage");
  if (encode) checkEncode(encode);
  if (decode) checkDecode(manifest, decode);
  const inputs = (encode?.inputs ?? []).filter((input) => input.role !== "mask").map((input) => input.name);
  if (decode) inputs.push(decode.step.name);
  checkUnique("inputs", inputs);
  for (const [name, index] of manifest.tokenizerOf) {
    if (!inputs.includes(name) || index >= manifest.tokenizers.length) {
      throw contradiction(`tokenizer ${index} of '${name}' does not exist, or the input does not`);
    }
  }
  for (const [kind, names] of [
    ["preprocessing", manifest.preprocessing.keys()],
    ["placeholders", manifest.placeholders.keys()],
  ] as const) {
    for (const name of names) {
      if (!inputs.includes(name)) throw contradiction(`${kind} is of '${name}', which is not an input`);
    }
  }
  checkUnique("adapters", manifest.adapters);
  const { matrices, products } = manifest.storedProducts;
  for (const { form, block, weights } of matrices) {
    if (form === "int4_blocks" && block % 2) {
      throw contradiction(`'${weights}' has two weights in a byte, and blocks of ${block}`);
    }
  }
  for (const [name, { matrix }] of products) {
    if (matrix >= matrices.length) {
      throw contradiction(`the matrix ${matrix} of the product '${name}' does not exist`);
    }
  }
  const labels = manifest.outputMeaning.labels.length;
  const sizes = encodedOutputs(manifest).map((output) => output.shape[output.shape.length - 1]);
  if (labels && !decode && !sizes.includes(labels) && sizes.every((size) => typeof size === "number")) {
    throw contradiction(`it has ${labels} labels, and its outputs ${shownShape(sizes)} numbers`);
  }
}

/**
 * Throw ModelFileError unless a graph has the tensors of its manifest, of their types and fixed sizes.
 *
 * inputs: those of the graphs of both stages.
 */
export function checkGraph(
  manifest: Manifest,
  inputs: GraphTensors,
  encodeOutputs: GraphTensors,
  decodeOutputs: GraphTensors,
): void {
  const expected = new Map(graphInputs(manifest).map((spec) => [spec.name, spec]));
  const dataInputs = new Set((manifest.encode?.inputs ?? []).map((spec) => spec.name));
  if (manifest.decode) dataInputs.add(manifest.decode.step.name);
  for (const [name, found] of inputs) {
    const spec = expected.get(name);
    if (spec === undefined) throw contradiction(`the graph has an input '${name}' that it does not describe`);
    checkTensor("input", spec, found, dataInputs.has(name));
  }
  for (const [specs, outputs] of [
    [[...encodedOutputs(manifest), ...(manifest.encode?.extras ?? [])], encodeOutputs],
    [decodeStageOutputs(manifest), decodeOutputs],
  ] as const) {
    for (const spec of specs) {
      const found = outputs.get(spec.name);
      if (found === undefined) throw contradiction(`the graph has no output '${spec.name}'`);
      checkTensor("output", spec, found);
    }
  }
  const decode = manifest.decode;
  if (!decode) return;
  const needed = [decode.step.name, ...decode.caches.map((c) => c.past), ...decode.controls, ...decode.context];
  for (const name of needed) if (!inputs.has(name)) throw contradiction(`the graph has no input '${name}'`);
}

function checkEncode(encode: EncodeStage): void {
  if (!encode.inputs.length || !encode.outputs.length) {
    throw contradiction("the encode stage has no inputs or no outputs");
  }
  checkUnique(
    "inputs of encode",
    encode.inputs.map((input) => input.name),
  );
  checkUnique(
    "outputs of encode",
    [...encode.outputs, ...encode.extras].map((output) => output.name),
  );
  const inputs = new Map(encode.inputs.map((input) => [input.name, input]));
  const axes = new Set(encode.inputs.flatMap((input) => input.shape));
  for (const spec of encode.inputs) {
    checkBatchAxis(spec.name, spec.shape);
    const whole = inputs.get(spec.of ?? "");
    const belongs = spec.role === "mask" || spec.role === "types";
    if (belongs && (!whole || whole.role === "mask" || whole.role === "types")) {
      throw contradiction(`'${spec.name}' belongs to '${spec.of}', which is not an input of ids or data`);
    }
    if (spec.role === "ids" && spec.dtype !== "int32" && spec.dtype !== "int64") {
      throw contradiction(`the ids '${spec.name}' are of type ${spec.dtype}`);
    }
  }
  for (const output of [...encode.outputs, ...encode.extras]) checkBatchAxis(output.name, output.shape);
  for (const axis of encode.minLengths.keys()) {
    if (!axes.has(axis)) throw contradiction(`the least length of '${axis}' is of no axis of an input`);
  }
  for (const [axis, others] of encode.noLongerThan) {
    if (![axis, ...others].every((one) => axes.has(one))) {
      throw contradiction(`'${axis}' is no longer than ${others.join(", ")}, and one is not an axis of an input`);
    }
  }
  for (const [axis, length] of encode.derivedLengths) {
    if (!axes.has(length.of)) {
      throw contradiction(`the length of '${axis}' follows from '${length.of}', which is not an axis of an input`);
    }
  }
}

function checkDecode(manifest: Manifest, decode: DecodeStage): void {
  const { step, logits } = decode;
  const features = step.shape.slice(2);
  if (step.shape[0] !== BATCH_AXIS || step.shape[1] !== NEW_AXIS || features.some((size) => typeof size !== "number")) {
    throw contradiction(`the step input has the shape ${shownShape(step.shape)}`);
  }
  if ((step.dtype !== "int64" && step.dtype !== "float32") || (step.dtype === "float32") !== features.length > 0) {
    throw contradiction(`the step input ${shownShape(step.shape)} is of type ${step.dtype}`);
  }
  const size = logits.shape[logits.shape.length - 1];
  if (logits.shape.length < 2 || typeof size !== "number" || size < 1) {
    throw contradiction(`the logits have the shape ${shownShape(logits.shape)}`);
  }
  if (logits.dtype !== "float32") throw contradiction(`the logits are of type ${logits.dtype}`);
  if (manifest.maxLength < 1) throw contradiction("it decodes no token: its max_length is 0");
  checkUnique("controls", decode.controls);
  for (const name of decode.controls) {
    if (!Object.hasOwn(CONTROLS, name)) throw contradiction(`'${name}' is not a control input`);
  }
  checkUnique(
    "caches",
    decode.caches.flatMap((cache) => [cache.past, cache.present]),
  );
  for (const cache of decode.caches) {
    checkBatchAxis(cache.past, cache.shape);
    const names = cache.shape.slice(1).filter((axis) => typeof axis === "string");
    if (names.length > 1 || (names.length === 1 && names[0] !== SLOT_AXIS) || cache.shape.includes(0)) {
      throw contradiction(`the cache '${cache.past}' has the shape ${shownShape(cache.shape)}`);
    }
    if (isCarry(cache) && cache.inPlace) throw contradiction(`the carry '${cache.past}' is in place`);
  }
  checkUnique(
    "outputs of decode",
    [logits, ...decode.extras].map((output) => output.name),
  );
  const encoded = encodedOutputs(manifest).length;
  if (decode.context.length !== encoded) {
    throw contradiction(`decode reads ${decode.context.length} context tensors and encode has ${encoded}`);
  }
  checkUnique("context", decode.context);
  if (stepFeatures(decode).length === 0) {
    const special = manifest.specialTokens;
    for (const [ids, limit] of [
      [special.bosTokenIds, decode.vocabulary ?? size],
      [special.eosTokenIds, size],
    ] as const) {
      for (const id of ids) {
        if (id >= limit) throw contradiction(`the special token ${id} is not among the ${limit} ids of the vocabulary`);
      }
    }
  }
  if (decode.shortlist && !manifest.encode) throw contradiction("it has a shortlist and no encode stage");
}

function checkBatchAxis(name: string, shape: Shape): void {
  if (shape[0] !== BATCH_AXIS)
    throw contradiction(`'${name}' has the shape ${shownShape(shape)}, without a batch axis`);
}

function checkUnique(kind: string, names: readonly string[]): void {
  const seen = new Set<string>();
  for (const name of names) {
    if (seen.has(name)) throw contradiction(`'${name}' occurs twice among the ${kind}`);
    seen.add(name);
  }
}

/** Return every input that a graph of this manifest may have. */
export function graphInputs(manifest: Manifest): TensorSpec[] {
  const { encode, decode } = manifest;
  const specs: TensorSpec[] = [{ name: STAGE_INPUT, dtype: "bool", shape: [] }];
  if (manifest.adapters.length) specs.push({ name: ADAPTER_INPUT, dtype: "int64", shape: [BATCH_AXIS] });
  if (encode) specs.push(...encode.inputs);
  if (!decode) return specs;
  specs.push(decode.step);
  decode.context.forEach((name, i) => specs.push({ ...encodedOutputs(manifest)[i], name }));
  for (const name of decode.controls) {
    const rank = name === TOTAL_SLOTS ? 0 : name === POSITIONS || name === SELECTED_TOKENS ? 2 : 1;
    specs.push({ name, dtype: CONTROLS[name], shape: Array<string>(rank).fill("any") });
  }
  for (const cache of decode.caches) specs.push({ name: cache.past, dtype: cache.dtype, shape: cache.shape });
  if (decode.shortlist) {
    specs.push({ name: GATHER_IDS, dtype: "int64", shape: ["any"] });
    specs.push({ name: COLUMN_IDS, dtype: "int64", shape: ["any"] });
    specs.push({ name: COLUMN_WEIGHT, dtype: decode.shortlist.dtype, shape: [decode.shortlist.inner, "any"] });
  }
  return specs;
}

function decodeStageOutputs(manifest: Manifest): TensorSpec[] {
  const decode = manifest.decode;
  if (!decode) return [];
  const presents = decode.caches.map((cache) => ({ name: cache.present, dtype: cache.dtype, shape: cache.shape }));
  return [decode.logits, ...decode.extras, ...presents];
}

/** Throw unless a tensor is as its spec. isExact: whether the graph fixes the sizes that the spec does. */
function checkTensor(kind: string, spec: TensorSpec, found: GraphTensor, isExact = false): void {
  const shape = found.shape;
  let fits = found.dtype === spec.dtype;
  if (shape === undefined) fits &&= !isExact;
  else {
    fits &&= !(isExact || shape.length > 0) || shape.length === spec.shape.length || isAnyShape(spec.shape);
    spec.shape.forEach((size, i) => {
      if (typeof size !== "number" || i >= shape.length) return;
      fits &&= size === shape[i] || (shape[i] === undefined && !isExact);
    });
  }
  if (!fits) {
    throw contradiction(
      `the ${kind} '${spec.name}' is ${spec.dtype} ${shownShape(spec.shape)}, and in the graph ${found.dtype} ` +
        shownShape(shape ?? ["unknown"]),
    );
  }
}

/** Return whether a spec says nothing about the axes of its tensor: the batch axis alone stands for any after it. */
function isAnyShape(shape: Shape): boolean {
  return shape.length === 0 || (shape.length === 1 && shape[0] === BATCH_AXIS);
}

function shownShape(shape: readonly (number | string | undefined)[]): string {
  return `(${shape.map((size) => size ?? "free").join(", ")})`;
}

/** Return the error for a rule that a manifest breaks. clause: "it" is the manifest. */
function contradiction(clause: string): ModelFileError {
  return new ModelFileError(`the file's manifest contradicts itself or its graph: ${clause}: export the model again`);
}
