/** New nodes and weights of a graph, and the weights that it has. */

import { append, itemBytes, sizeOf, type Dtype } from "../base/arrays.js";
import {
  ATTRIBUTE_I,
  ATTRIBUTE_INTS,
  ATTRIBUTE_NAME,
  ATTRIBUTE_S,
  ATTRIBUTE_TYPE,
  ATTRIBUTE_TYPE_INT,
  ATTRIBUTE_TYPE_INTS,
  ATTRIBUTE_TYPE_STRING,
  DATA_TYPES,
  ENTRY_KEY,
  ENTRY_VALUE,
  GRAPH_INITIALIZER,
  GRAPH_NAME,
  NODE_ATTRIBUTE,
  NODE_DOMAIN,
  NODE_INPUT,
  NODE_OP_TYPE,
  NODE_OUTPUT,
  TENSOR_DATA_LOCATION,
  TENSOR_DATA_LOCATION_EXTERNAL,
  TENSOR_DATA_TYPE,
  TENSOR_DIMS,
  TENSOR_EXTERNAL_DATA,
  TENSOR_NAME,
  TENSOR_RAW_DATA,
} from "./onnxFields.js";
import { renameValues, type Graph, type Node } from "./onnxGraph.js";
import {
  bytesField,
  concatBytes,
  contentOf,
  integerField,
  iterFields,
  signedVarintsOf,
  textOf,
  varintField,
  varintsOf,
} from "./onnxWire.js";

/** Read the bytes of a file with weights; undefined if it is not there. */
export type FileReader = (location: string) => Uint8Array | undefined;

/** A weight. encoded: its field. read: returns its bytes; undefined if the file does not have them. */
export interface StoredTensor {
  readonly encoded: Uint8Array;
  readonly dtype: Dtype | undefined;
  readonly shape: readonly number[];
  read(readFile: FileReader): Uint8Array | undefined;
}

/** domain: of the operator, by default the standard one. attributes: whole numbers, by name. */
export interface NodeOptions {
  readonly domain?: string;
  readonly attributes?: Readonly<Record<string, number>>;
}

export function newNode(opType: string, inputs: string[], outputs: string[], options: NodeOptions = {}): Node {
  const attributes = Object.entries(options.attributes ?? {}).map(([name, value]) => [
    ...bytesField(ATTRIBUTE_NAME, name),
    ...integerField(ATTRIBUTE_I, value),
    ...varintField(ATTRIBUTE_TYPE, ATTRIBUTE_TYPE_INT),
  ]);
  const encoded = [
    ...inputs.flatMap((name) => bytesField(NODE_INPUT, name)),
    ...outputs.flatMap((name) => bytesField(NODE_OUTPUT, name)),
    ...bytesField(NODE_OP_TYPE, opType),
    ...attributes.flatMap((attribute) => bytesField(NODE_ATTRIBUTE, attribute)),
    ...(options.domain ? bytesField(NODE_DOMAIN, options.domain) : []),
  ];
  return { opType, domain: options.domain ?? "", inputs, outputs, encoded, branches: new Map() };
}

/** The value of an attribute; undefined if it is neither a whole number, nor a list of these, nor a text. */
export type Attribute = number | readonly number[] | string | undefined;

/**
 * Return the attributes of a node, by name.
 *
 * A number that is 0, an empty list and an empty text may be absent: writers of protobuf's third version leave them out. The
 * type says what is meant.
 */
export function attributesOf(node: Node): Map<string, Attribute> {
  const attributes = new Map<string, Attribute>();
  const whole = concatBytes(node.encoded);
  for (const field of iterFields(whole)) {
    if (field.number !== NODE_ATTRIBUTE) continue;
    const content = contentOf(whole, field);
    let name = "";
    let type = 0;
    let number = 0;
    let text = "";
    const numbers: number[] = [];
    for (const part of iterFields(content)) {
      if (part.number === ATTRIBUTE_NAME) name = textOf(content, part);
      else if (part.number === ATTRIBUTE_TYPE) type = part.varint;
      else if (part.number === ATTRIBUTE_I) [number] = [...signedVarintsOf(content, part), 0];
      else if (part.number === ATTRIBUTE_INTS) append(numbers, signedVarintsOf(content, part));
      else if (part.number === ATTRIBUTE_S) text = textOf(content, part);
    }
    const values: Record<number, Attribute> = {
      [ATTRIBUTE_TYPE_INT]: number,
      [ATTRIBUTE_TYPE_INTS]: numbers,
      [ATTRIBUTE_TYPE_STRING]: text,
    };
    attributes.set(name, values[type]);
  }
  return attributes;
}

/** Return the name of a graph; an empty one if it has none. */
export function graphName(graph: Graph): string {
  let name = "";
  for (const encoded of graph.rest) {
    for (const field of iterFields(encoded)) if (field.number === GRAPH_NAME) name = textOf(encoded, field);
  }
  return name;
}

/** Put the nodes and weights of a branch in the place of the node that chooses it. They give its outputs. */
export function inlineBranch(graph: Graph, choice: Node, branch: Graph): void {
  const newNames = new Map(branch.outputs.map((name, i) => [name, choice.outputs[i]]));
  for (const node of branch.nodes) renameValues(node, newNames);
  const place = graph.nodes.indexOf(choice);
  graph.nodes = [...graph.nodes.slice(0, place), ...branch.nodes, ...graph.nodes.slice(place + 1)];
  for (const [name, encoded] of branch.initializers) graph.initializers.set(name, encoded);
}

/** Add a weight with these values. */
export function addValues(
  graph: Graph,
  name: string,
  dtype: Dtype,
  shape: readonly number[],
  { buffer, byteOffset, byteLength }: ArrayBufferView,
): void {
  const values = new Uint8Array(buffer as ArrayBuffer, byteOffset, byteLength);
  addTensor(graph, name, dtype, shape, bytesField(TENSOR_RAW_DATA, values));
}

/** Add a weight whose values are all bytes of a file. */
export function addReference(
  graph: Graph,
  name: string,
  dtype: Dtype,
  shape: readonly number[],
  location: string,
): void {
  const length = String(sizeOf(shape) * itemBytes(dtype));
  const entries = Object.entries({ location, offset: "0", length }).flatMap(([key, value]) =>
    bytesField(TENSOR_EXTERNAL_DATA, [...bytesField(ENTRY_KEY, key), ...bytesField(ENTRY_VALUE, value)]),
  );
  addTensor(graph, name, dtype, shape, [
    ...entries,
    ...varintField(TENSOR_DATA_LOCATION, TENSOR_DATA_LOCATION_EXTERNAL),
  ]);
}

function addTensor(graph: Graph, name: string, dtype: Dtype, shape: readonly number[], data: Uint8Array[]): void {
  const tensor = [
    ...shape.flatMap((size) => varintField(TENSOR_DIMS, size)),
    ...varintField(TENSOR_DATA_TYPE, DATA_TYPES[dtype]),
    ...bytesField(TENSOR_NAME, name),
    ...data,
  ];
  graph.initializers.set(name, concatBytes(bytesField(GRAPH_INITIALIZER, tensor)));
}

/** Return the weight of a name; undefined if the graph has none. Throw WireError if it is damaged. */
export function weightOf(graph: Graph, name: string): StoredTensor | undefined {
  const encoded = graph.initializers.get(name);
  if (!encoded) return undefined;
  const shape: number[] = [];
  const reference = new Map<string, string>();
  let dtype: Dtype | undefined;
  let raw: Uint8Array | undefined;
  let isReference = false;
  for (const outer of iterFields(encoded)) {
    const tensor = contentOf(encoded, outer);
    for (const field of iterFields(tensor)) {
      if (field.number === TENSOR_DIMS) append(shape, varintsOf(tensor, field));
      else if (field.number === TENSOR_DATA_TYPE) {
        dtype = (Object.keys(DATA_TYPES) as Dtype[]).find((known) => DATA_TYPES[known] === field.varint);
      } else if (field.number === TENSOR_RAW_DATA) raw = contentOf(tensor, field);
      else if (field.number === TENSOR_DATA_LOCATION) isReference = field.varint === TENSOR_DATA_LOCATION_EXTERNAL;
      else if (field.number === TENSOR_EXTERNAL_DATA) {
        const [key, value] = entryOf(contentOf(tensor, field));
        reference.set(key, value);
      }
    }
  }
  const read = (readFile: FileReader) => {
    const bytes = isReference ? referred(reference, readFile) : raw;
    return dtype !== undefined && bytes?.length === sizeOf(shape) * itemBytes(dtype) ? bytes : undefined;
  };
  return { encoded, dtype, shape, read };
}

function referred(reference: ReadonlyMap<string, string>, readFile: FileReader): Uint8Array | undefined {
  const offset = Number(reference.get("offset") ?? 0);
  const end = offset + Number(reference.get("length"));
  const file = readFile(reference.get("location") ?? "");
  return file && offset >= 0 && end <= file.length ? file.subarray(offset, end) : undefined;
}

function entryOf(entry: Uint8Array): [string, string] {
  const texts = new Map<number, string>();
  for (const field of iterFields(entry)) texts.set(field.number, textOf(entry, field));
  return [texts.get(ENTRY_KEY) ?? "", texts.get(ENTRY_VALUE) ?? ""];
}
