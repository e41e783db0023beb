/** The nodes, weights and tensors of a graph, and the changes of them that splitting a file needs. */

import { append, type Dtype } from "../base/arrays.js";
import {
  ATTRIBUTE_G,
  ATTRIBUTE_NAME,
  ATTRIBUTE_TYPE,
  ATTRIBUTE_TYPE_GRAPH,
  DATA_TYPES,
  DIM_VALUE,
  ENTRY_KEY,
  ENTRY_VALUE,
  GRAPH_INITIALIZER,
  GRAPH_INPUT,
  GRAPH_NODE,
  GRAPH_OUTPUT,
  MODEL_GRAPH,
  NODE_ATTRIBUTE,
  NODE_DOMAIN,
  NODE_INPUT,
  NODE_OP_TYPE,
  NODE_OUTPUT,
  SHAPE_DIM,
  TENSOR_EXTERNAL_DATA,
  TENSOR_NAME,
  TENSOR_RAW_DATA,
  TYPE_TENSOR_ELEM_TYPE,
  TYPE_TENSOR_SHAPE,
  TYPE_TENSOR_TYPE,
  VALUE_INFO_NAME,
  VALUE_INFO_TYPE,
} from "./onnxFields.js";
import {
  bytesField,
  concatBytes,
  contentOf,
  encodedOf,
  iterFields,
  textOf,
  varintField,
  WireError,
} from "./onnxWire.js";

const BRANCHING_OPERATORS = ["If", "Loop", "Scan"]; // the standard operators with graphs of their own
const STANDARD_DOMAIN = "ai.onnx"; // the long name of the empty one
const MAX_DEPTH = 8; // of branches in branches

/**
 * A node.
 *
 * domain: of its operator; empty for operators of the standard.
 * encoded: its NodeProto, in parts; without its branches if it has any.
 * branches: name of an attribute → its graph.
 */
export interface Node {
  readonly opType: string;
  readonly domain: string;
  inputs: string[];
  outputs: string[];
  encoded: Uint8Array[];
  readonly branches: Map<string, Graph>;
}

/**
 * A graph, or a branch of a node.
 *
 * initializers: name of a weight → its encoded field.
 * rest: its other fields, encoded.
 */
export interface Graph {
  nodes: Node[];
  readonly initializers: Map<string, Uint8Array>;
  outputs: string[];
  rest: Uint8Array[];
}

/** A model. rest: its other fields than the graph, encoded. */
export interface OnnxModel {
  readonly graph: Graph;
  readonly rest: Uint8Array[];
}

/** Parse a ModelProto. Throw WireError unless the bytes are a model, or if a branch is too deep in others. */
export function parseModel(model: Uint8Array): OnnxModel {
  const rest: Uint8Array[] = [];
  const graphs: Uint8Array[] = [];
  for (const field of iterFields(model)) {
    if (field.number === MODEL_GRAPH) graphs.push(contentOf(model, field));
    else rest.push(encodedOf(model, field));
  }
  // Parts of a message are merged.
  return { graph: parseGraph(graphs.length === 1 ? graphs[0] : concatBytes(graphs), 0), rest };
}

/** Encode a model. */
export function encodeModel(model: OnnxModel): Uint8Array<ArrayBuffer> {
  return concatBytes([...model.rest, ...bytesField(MODEL_GRAPH, encodeGraph(model.graph))]);
}

/** Return the names of the values that a node and its branches read. */
export function namesRead(node: Node): Set<string> {
  const names = new Set(node.inputs);
  for (const branch of node.branches.values()) for (const name of graphNamesRead(branch)) names.add(name);
  return names;
}

/** Return the names of the values that nodes and outputs read, here and in branches. */
export function graphNamesRead(graph: Graph): Set<string> {
  const names = new Set(graph.outputs);
  for (const node of graph.nodes) for (const name of namesRead(node)) names.add(name);
  return names;
}

/** Return the names of the inputs of a graph. */
export function inputNames(graph: Graph): Set<string> {
  const names = new Set<string>();
  for (const encoded of graph.rest) {
    for (const info of messages(encoded, GRAPH_INPUT)) names.add(valueName(info));
  }
  return names;
}

/** Return the names of all values and weights of a graph, also in branches. */
export function allNames(graph: Graph, names = new Set<string>()): Set<string> {
  for (const name of [...inputNames(graph), ...graph.outputs, ...graph.initializers.keys()]) names.add(name);
  for (const node of graph.nodes) {
    for (const name of [...node.inputs, ...node.outputs]) names.add(name);
    for (const branch of node.branches.values()) allNames(branch, names);
  }
  return names;
}

/** Rename the values that a node reads and computes, also in its branches. */
export function renameValues(node: Node, newNames: ReadonlyMap<string, string>): void {
  if ([...node.inputs, ...node.outputs].some((name) => newNames.has(name))) {
    node.inputs = node.inputs.map((name) => newNames.get(name) ?? name);
    node.outputs = node.outputs.map((name) => newNames.get(name) ?? name);
    const whole = concatBytes(node.encoded);
    const kept: Uint8Array[] = [];
    for (const field of iterFields(whole)) {
      if (field.number !== NODE_INPUT && field.number !== NODE_OUTPUT) kept.push(encodedOf(whole, field));
    }
    node.encoded = [
      ...node.inputs.flatMap((name) => bytesField(NODE_INPUT, name)),
      ...node.outputs.flatMap((name) => bytesField(NODE_OUTPUT, name)),
      ...kept,
    ];
  }
  for (const branch of node.branches.values()) for (const inner of branch.nodes) renameValues(inner, newNames);
}

/** Remove nodes and weights that nothing reads, here and in branches. */
export function removeUnread(graph: Graph): void {
  const needed = new Set<string>();
  keepNeeded(graph, needed);
  removeWeights(graph, needed);
}

/** Keep the nodes whose results are needed, and add the names that they read to those needed. */
function keepNeeded(graph: Graph, needed: Set<string>): void {
  for (const name of graph.outputs) needed.add(name);
  const kept: Node[] = [];
  for (const node of [...graph.nodes].reverse()) {
    if (!node.outputs.some((name) => needed.has(name))) continue;
    kept.push(node);
    for (const name of node.inputs) needed.add(name);
    for (const branch of node.branches.values()) keepNeeded(branch, needed);
  }
  graph.nodes = kept.reverse();
}

function removeWeights(graph: Graph, needed: ReadonlySet<string>): void {
  for (const name of [...graph.initializers.keys()]) if (!needed.has(name)) graph.initializers.delete(name);
  for (const node of graph.nodes) for (const branch of node.branches.values()) removeWeights(branch, needed);
}

/** Return the bytes of the largest weight of a model, also in branches. Throw WireError unless the bytes are a model. */
export function largestWeight(model: Uint8Array): number {
  return largestOf(parseModel(model).graph);
}

function largestOf(graph: Graph): number {
  let most = 0;
  for (const encoded of graph.initializers.values()) {
    for (const tensor of messages(encoded, GRAPH_INITIALIZER)) most = Math.max(most, weightBytes(tensor));
  }
  for (const node of graph.nodes) {
    for (const branch of node.branches.values()) most = Math.max(most, largestOf(branch));
  }
  return most;
}

/** Return the bytes of a TensorProto's values, here or in a second file. */
function weightBytes(tensor: Uint8Array): number {
  let bytes = 0;
  for (const field of iterFields(tensor)) {
    if (field.number === TENSOR_RAW_DATA) bytes = field.end - field.start;
    if (field.number !== TENSOR_EXTERNAL_DATA) continue;
    const entry = contentOf(tensor, field);
    if (lastText(entry, ENTRY_KEY) === "length") bytes = Number(lastText(entry, ENTRY_VALUE)) || bytes;
  }
  return bytes;
}

/** A tensor of a graph: its type, undefined for an unknown one; and its shape, with undefined for free axes. */
export interface GraphTensor {
  readonly dtype: Dtype | undefined;
  readonly shape: readonly (number | undefined)[] | undefined;
}

/** Return the inputs and the outputs of a graph, by name. */
export function graphTensors(graph: Graph): { inputs: Map<string, GraphTensor>; outputs: Map<string, GraphTensor> } {
  const inputs = new Map<string, GraphTensor>();
  const outputs = new Map<string, GraphTensor>();
  for (const encoded of graph.rest) {
    for (const field of iterFields(encoded)) {
      if (field.number !== GRAPH_INPUT && field.number !== GRAPH_OUTPUT) continue;
      const info = contentOf(encoded, field);
      const name = valueName(info);
      if (field.number === GRAPH_OUTPUT) outputs.set(name, valueTensor(info));
      else if (!graph.initializers.has(name)) inputs.set(name, valueTensor(info));
    }
  }
  return { inputs, outputs };
}

/** Return the name of a ValueInfoProto. */
export function valueName(info: Uint8Array): string {
  return lastText(info, VALUE_INFO_NAME);
}

function valueTensor(info: Uint8Array): GraphTensor {
  let dtype: Dtype | undefined;
  let shape: (number | undefined)[] | undefined;
  for (const type of messages(info, VALUE_INFO_TYPE)) {
    for (const tensor of messages(type, TYPE_TENSOR_TYPE)) {
      for (const field of iterFields(tensor)) {
        if (field.number === TYPE_TENSOR_ELEM_TYPE) {
          dtype = (Object.keys(DATA_TYPES) as Dtype[]).find((name) => DATA_TYPES[name] === field.varint);
        } else if (field.number === TYPE_TENSOR_SHAPE) {
          shape = [...messages(contentOf(tensor, field), SHAPE_DIM)].map((dim) => {
            for (const part of iterFields(dim)) if (part.number === DIM_VALUE) return part.varint;
            return undefined;
          });
        }
      }
    }
  }
  return { dtype, shape };
}

function* messages(data: Uint8Array, number: number): Generator<Uint8Array> {
  for (const field of iterFields(data)) if (field.number === number) yield contentOf(data, field);
}

function parseGraph(content: Uint8Array, depth: number): Graph {
  if (depth > MAX_DEPTH) throw new WireError();
  const graph: Graph = { nodes: [], initializers: new Map(), outputs: [], rest: [] };
  for (const field of iterFields(content)) {
    if (field.number === GRAPH_NODE) {
      graph.nodes.push(parseNode(contentOf(content, field), depth));
    } else if (field.number === GRAPH_INITIALIZER) {
      graph.initializers.set(lastText(contentOf(content, field), TENSOR_NAME), encodedOf(content, field));
    } else {
      if (field.number === GRAPH_OUTPUT) graph.outputs.push(valueName(contentOf(content, field)));
      graph.rest.push(encodedOf(content, field));
    }
  }
  return graph;
}

function parseNode(content: Uint8Array, depth: number): Node {
  const inputs: string[] = [];
  const outputs: string[] = [];
  const branches = new Map<string, Graph>();
  const attributes: Uint8Array[] = [];
  const kept: Uint8Array[] = [];
  let opType = "";
  let domain = "";
  for (const field of iterFields(content)) {
    if (field.number === NODE_INPUT) inputs.push(textOf(content, field));
    else if (field.number === NODE_OUTPUT) outputs.push(textOf(content, field));
    else if (field.number === NODE_OP_TYPE) opType = textOf(content, field);
    else if (field.number === NODE_DOMAIN) domain = textOf(content, field);
    (field.number === NODE_ATTRIBUTE ? attributes : kept).push(encodedOf(content, field));
  }
  if (domain === STANDARD_DOMAIN) domain = "";
  if (!BRANCHING_OPERATORS.includes(opType)) return { opType, domain, inputs, outputs, encoded: [content], branches };
  for (const encoded of attributes) {
    let name = "";
    let graph: Uint8Array | undefined;
    for (const attribute of messages(encoded, NODE_ATTRIBUTE)) {
      name = lastText(attribute, ATTRIBUTE_NAME);
      for (const found of messages(attribute, ATTRIBUTE_G)) graph = found;
    }
    if (graph === undefined) kept.push(encoded);
    else branches.set(name, parseGraph(graph, depth + 1));
  }
  return { opType, domain, inputs, outputs, encoded: kept, branches };
}

function encodeGraph(graph: Graph): Uint8Array[] {
  const parts: Uint8Array[] = [];
  for (const node of graph.nodes) {
    const content = [...node.encoded];
    for (const [name, branch] of node.branches) {
      const attribute = [
        ...bytesField(ATTRIBUTE_NAME, name),
        ...bytesField(ATTRIBUTE_G, encodeGraph(branch)),
        ...varintField(ATTRIBUTE_TYPE, ATTRIBUTE_TYPE_GRAPH),
      ];
      append(content, bytesField(NODE_ATTRIBUTE, attribute));
    }
    append(parts, bytesField(GRAPH_NODE, content));
  }
  append(parts, graph.initializers.values());
  append(parts, graph.rest);
  return parts;
}

/** Return a text of a message: the last one, if a field is there several times, as protobuf has it. */
function lastText(content: Uint8Array, number: number): string {
  let text = "";
  for (const field of iterFields(content)) if (field.number === number) text = textOf(content, field);
  return text;
}
