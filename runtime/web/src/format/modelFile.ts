/**
 * Reading of a model file without its weights: its metadata, its manifest, and a model whose weights are references.
 *
 * An ONNX file is one protobuf message, `ModelProto`. Its metadata are a few short fields next to the (large) graph.
 * Reading them by hand skips the weights. It also detects a damaged, foreign or too new file before onnxruntime spends
 * time on it.
 */

import { append } from "../base/arrays.js";
import { ModelFileError } from "../base/errors.js";
import { manifestFromJson, MANIFEST_KEY, type Manifest } from "./manifest.js";
import { checkManifest } from "./manifestChecks.js";
import {
  ENTRY_KEY,
  ENTRY_VALUE,
  GRAPH_INITIALIZER,
  MODEL_FUNCTIONS,
  MODEL_GRAPH,
  MODEL_IR_VERSION,
  MODEL_METADATA_PROPS,
  TENSOR_DATA_LOCATION,
  TENSOR_DATA_LOCATION_EXTERNAL,
  TENSOR_EXTERNAL_DATA,
  TENSOR_RAW_DATA,
} from "./onnxFields.js";
import { bytesField, concatBytes, readField, textOf, varintField, WireError } from "./onnxWire.js";

const MAX_FIELD_NUMBER = 64; // ModelProto has a few dozen fields at most: a message with a higher number is not ONNX
const MAX_INLINE_BYTES = 1024; // smaller weights stay in the model: onnxruntime reads sizes and shapes from them
const WEIGHT_ALIGNMENT_BYTES = 64; // kernels read whole vectors, so that weights at other offsets are copied

/** Run a reader of a file, whose WireError becomes a ModelFileError. name: of the file. */
export function readingFile<T>(name: string, read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (error instanceof WireError) {
      throw new ModelFileError(`${name} is not a whole ONNX file: it is something else, damaged or cut short`);
    }
    if (error instanceof ModelFileError) throw new ModelFileError(`${name}: ${error.reason}`, undefined, error);
    throw error;
  }
}

/** Return the metadata of an ONNX file, by key. Throw WireError for other bytes. */
export function readMetadata(file: Uint8Array): Map<string, string> {
  const metadata = new Map<string, string>();
  const seen = new Set<number>();
  for (let position = 0; position < file.length;) {
    const field = readOnnxField(file, position, file.length);
    seen.add(field.number);
    if (field.number === MODEL_FUNCTIONS) {
      throw new ModelFileError("its graph has functions of its own, which the exporter does not write");
    }
    if (field.number === MODEL_METADATA_PROPS) {
      const [key, value] = readEntry(file, field.start, field.end);
      metadata.set(key, value);
    }
    position = field.end;
  }
  if (!seen.has(MODEL_IR_VERSION) || !seen.has(MODEL_GRAPH)) throw new WireError();
  return metadata;
}

/** Return the manifest in the metadata of a file. Throw ModelFileError if there is none, or if it is damaged. */
export function manifestOf(metadata: ReadonlyMap<string, string>): Manifest {
  const text = metadata.get(MANIFEST_KEY);
  if (text === undefined) {
    throw new ModelFileError("the file has no tformer manifest: export the model with tformer-export");
  }
  const manifest = manifestFromJson(text);
  checkManifest(manifest);
  return manifest;
}

/**
 * Return the model with its large weights as references to the bytes of the file.
 *
 * location: the name of the file in these references.
 * Time and memory grow with the size of the model without its weights. Throw WireError for other bytes.
 */
export function withMappedWeights(file: Uint8Array, location: string): Uint8Array<ArrayBuffer> {
  const parts: Uint8Array[] = [];
  copyWithoutWeights(file, 0, file.length, [MODEL_GRAPH, GRAPH_INITIALIZER], location, parts);
  return concatBytes(parts);
}

/** Append a copy of a message. path: field numbers that lead to its tensors; empty if it is a TensorProto itself. */
function copyWithoutWeights(
  file: Uint8Array,
  begin: number,
  end: number,
  path: readonly number[],
  location: string,
  parts: Uint8Array[],
): void {
  let copied = begin; // the message up to here is in `parts`
  for (let position = begin; position < end;) {
    const { number, start, end: next } = readOnnxField(file, position, end);
    if (path.length > 0 && number === path[0]) {
      if (copied < position) parts.push(file.subarray(copied, position));
      const inner: Uint8Array[] = [];
      copyWithoutWeights(file, start, next, path.slice(1), location, inner);
      append(parts, bytesField(number, inner));
      copied = next;
    } else if (path.length === 0 && number === TENSOR_RAW_DATA && isMappable(start, next - start)) {
      if (copied < position) parts.push(file.subarray(copied, position));
      for (const [key, value] of [
        ["location", location],
        ["offset", String(start)],
        ["length", String(next - start)],
      ]) {
        parts.push(
          ...bytesField(TENSOR_EXTERNAL_DATA, [...bytesField(ENTRY_KEY, key), ...bytesField(ENTRY_VALUE, value)]),
        );
      }
      parts.push(...varintField(TENSOR_DATA_LOCATION, TENSOR_DATA_LOCATION_EXTERNAL));
      copied = next;
    }
    position = next;
  }
  if (copied < end) parts.push(file.subarray(copied, end));
}

function isMappable(offset: number, length: number): boolean {
  return length > MAX_INLINE_BYTES && offset % WEIGHT_ALIGNMENT_BYTES === 0;
}

function readOnnxField(file: Uint8Array, position: number, end: number) {
  const field = readField(file, position, end);
  if (field.number > MAX_FIELD_NUMBER) throw new WireError();
  return field;
}

/** Read a StringStringEntryProto. */
function readEntry(file: Uint8Array, begin: number, end: number): [string, string] {
  let key = "";
  let value = "";
  for (let position = begin; position < end;) {
    const field = readOnnxField(file, position, end);
    if (field.number === ENTRY_KEY) key = textOf(file, field);
    else if (field.number === ENTRY_VALUE) value = textOf(file, field);
    else throw new WireError();
    position = field.end;
  }
  return [key, value];
}
