/**
 * Products of quantised weights in the form that is fast in WebAssembly.
 *
 * onnxruntime has no kernel of MatMulNBits in WebAssembly: each run unpacks all weights to floats and multiplies those. Its
 * products of bytes, MatMulInteger, are faster with any number of rows. So each MatMulNBits is replaced. Its weights are
 * whole numbers of at most 8 bits times a scale for each column, as the exporter stores them
 * (`tformer_export/quantize/weight_storage.py`). Its activations become three rows of bytes: the first are the multiples of
 * 1/127 of the row's largest magnitude, the next two what the rows before leave, in steps that are 254 times as fine. So
 * activations have the precision of float32. A product of bytes that reads three rows takes little longer than with one.
 *
 * The branch for few rows (`few_rows_branch.py`) has the same products for other processors. It is left out.
 *
 * Figures: docs/benchmarks/web.md#products-in-webassembly.
 */

import type { Dtype } from "../base/arrays.js";
import { sizeOf } from "../base/arrays.js";
import { encodeModel, parseModel, removeUnread, type Graph, type Node } from "./onnxGraph.js";
import {
  addReference,
  addValues,
  inlineBranch,
  integerAttributes,
  newNode,
  weightOf,
  type FileReader,
  type NodeOptions,
  type StoredTensor,
} from "./onnxGraphEdit.js";
import { columnsOf4Bits, columnsOf8Bits, type PackedSizes } from "./weightForms.js";

const CONTRIB = "com.microsoft";
const FEW_ROWS = "few.rows"; // the value that chooses the branch for few rows
const STEPS = 127; // up to the largest magnitude of a row, on each side of zero
const FINER = 2 * STEPS; // of a row of bytes against the row before: a rest is half a step at most
const PARTS = 3;

/** The rewritten model, and the weights that it refers to by the name of a file. */
export interface RewrittenModel {
  readonly model: Uint8Array;
  readonly files: ReadonlyMap<string, Uint8Array>;
}

/**
 * Return a model with the products of WebAssembly; the same model if it has no others.
 *
 * A product whose weights are not as the exporter stores them stays as it is. Time and memory grow with the number of
 * weights. Throw WireError if the bytes are no model.
 */
export function withIntegerProducts(model: Uint8Array, readFile: FileReader): RewrittenModel {
  const parsed = parseModel(model);
  const hasBranch = withoutFewRows(parsed.graph);
  const rewriter = new ProductRewriter(parsed.graph, readFile);
  rewriter.rewrite(parsed.graph, []);
  if (!hasBranch && !rewriter.files.size) return { model, files: rewriter.files };
  removeUnread(parsed.graph);
  return { model: encodeModel(parsed), files: rewriter.files };
}

/** Put the branch for many rows in the place of both. Return whether there are such branches. */
function withoutFewRows(graph: Graph): boolean {
  const choice = graph.nodes.find(({ opType, inputs }) => opType === "If" && inputs[0] === FEW_ROWS);
  const branch = choice?.branches.get("else_branch");
  if (!choice || !branch || branch.outputs.length !== choice.outputs.length) return false;
  inlineBranch(graph, choice, branch);
  return true;
}

/** Weights of a product. scale: the name of the scales of columns. */
interface Columns extends PackedSizes {
  readonly packed: StoredTensor;
  readonly codes: StoredTensor | undefined;
  readonly scale: StoredTensor;
}

/** The names of the bytes of an operand, and of their scales. */
interface Operand {
  readonly bytes: string;
  readonly scales: string;
}

/** A graph with the nodes that compute its values, by name. */
interface Scope {
  readonly graph: Graph;
  readonly producers: ReadonlyMap<string, Node>;
}

class ProductRewriter {
  readonly files = new Map<string, Uint8Array>();
  private readonly columns = new Map<string, { weights: string; scale: string }>(); // by the names of a product's weights
  private readonly operands = new Map<Graph, Map<string, Operand>>();
  private operandCount = 0;

  constructor(
    private readonly main: Graph,
    private readonly readFile: FileReader,
  ) {}

  /** Rewrite the products of a graph and of its branches. outer: the graphs around it, the nearest first. */
  rewrite(graph: Graph, outer: readonly Scope[]): void {
    const { nodes } = graph;
    const producers = new Map(nodes.flatMap((node) => node.outputs.map((name) => [name, node] as const)));
    const scopes = [{ graph, producers }, ...outer];
    graph.nodes = [];
    for (const node of nodes) {
      for (const branch of node.branches.values()) this.rewrite(branch, scopes);
      if (node.opType !== "MatMulNBits" || !this.replace(graph, node, scopes)) graph.nodes.push(node);
    }
  }

  /** Add the nodes that compute a product. Return false, and add none, for one that stays. */
  private replace(graph: Graph, node: Node, scopes: readonly Scope[]): boolean {
    const [activations, packed, scales, , groups, bias] = node.inputs;
    const [result] = node.outputs;
    if (groups) return false;
    const key = `${packed} ${scales}`;
    let columns = this.columns.get(key);
    if (!columns) {
      const found = findColumns(node, scopes);
      const values = found && this.unpack(found);
      if (!found || !values) return false;
      columns = this.addColumns(found, values);
      this.columns.set(key, columns);
    }
    const operand = this.operand(graph, activations);
    const name = `${result}.integer`;
    const add = (opType: string, inputs: string[], output: string, options?: NodeOptions) =>
      void graph.nodes.push(newNode(opType, inputs, [output], options));
    const inputs = [operand.bytes, columns.weights, this.unit(), columns.scale, this.middle()];
    add("MatMulIntegerToFloat", inputs, `${name}.parts`, { domain: CONTRIB });
    add("Mul", [`${name}.parts`, operand.scales], `${name}.scaled`);
    const sum = bias ? `${name}.sum` : result;
    add("ReduceSum", [`${name}.scaled`, this.axis(-2)], sum, { attributes: { keepdims: 0 } });
    if (bias) add("Add", [sum, bias], result);
    return true;
  }

  /** Return the int8 columns of weights; undefined if their file is not there. */
  private unpack({ packed, codes, ...sizes }: Columns): Int8Array | undefined {
    const values = packed.read(this.readFile);
    if (!codes) return values && columnsOf8Bits(values, sizes);
    const numbers = codes.read(this.readFile);
    return values && numbers && columnsOf4Bits(values, numbers, sizes);
  }

  private addColumns({ inner, columns, scale }: Columns, values: Int8Array): { weights: string; scale: string } {
    const weights = `tformer.columns.${this.files.size}`;
    this.files.set(weights, new Uint8Array(values.buffer as ArrayBuffer));
    addReference(this.main, weights, "int8", [inner, columns], weights);
    const flat = `${weights}.scale`;
    this.main.nodes.unshift(newNode("Reshape", [scale.name, this.axis(-1)], [flat]));
    return { weights, scale: flat };
  }

  /** Return the operand of a product, which all products of one value share. */
  private operand(graph: Graph, value: string): Operand {
    const known = this.operands.get(graph) ?? new Map<string, Operand>();
    this.operands.set(graph, known);
    let operand = known.get(value);
    if (operand) return operand;
    const prefix = `tformer.parts.${this.operandCount++}`; // a branch may read the value, too
    const add = (opType: string, inputs: string[], suffix: string, options?: NodeOptions) => {
      const output = `${prefix}.${suffix}`;
      graph.nodes.push(newNode(opType, inputs, [output], options));
      return output;
    };
    const row = add("Unsqueeze", [value, this.axis(-2)], "row");
    const maxima = add("ReduceMax", [add("Abs", [row], "size"), this.axis(-1)], "maxima");
    // For no rows, (0, K), onnxruntime gives the maxima the shape (0, K) too.
    const maximum = add("Slice", [maxima, this.axis(0), this.axis(1), this.axis(-1)], "maximum");
    const scale = add("Mul", [maximum, this.constant("step", [], [1 / STEPS])], "scale");
    let rest = add("Mul", [row, add("Reciprocal", [scale], "inverse")], "ratio");
    const parts: string[] = [];
    for (let i = 1; i < PARTS; i++) {
      const whole = add("Round", [rest], `whole.${i}`);
      parts.push(whole);
      const fraction = add("Sub", [rest, whole], `fraction.${i}`);
      rest = add("Mul", [fraction, this.constant("finer", [], [FINER])], `rest.${i}`);
    }
    const rows = add("Concat", [...parts, rest], "rows", { attributes: { axis: -2 } });
    const bytes = add("QuantizeLinear", [rows, this.unit(), this.middle()], "bytes");
    const powers = Array.from({ length: PARTS }, (_, i) => FINER ** -i);
    const scales = add("Mul", [scale, this.constant("powers", [PARTS, 1], powers)], "scales");
    operand = { bytes, scales };
    known.set(value, operand);
    return operand;
  }

  private unit(): string {
    return this.constant("unit", [], [1]);
  }

  /** Return the zero point of bytes. */
  private middle(): string {
    return this.add("middle", "uint8", [], Uint8Array.of(128));
  }

  private axis(axis: number): string {
    return this.add(`axis.${axis}`, "int64", [1], BigInt64Array.of(BigInt(axis)));
  }

  private constant(name: string, shape: readonly number[], values: readonly number[]): string {
    return this.add(name, "float32", shape, Float32Array.from(values));
  }

  private add(name: string, dtype: Dtype, shape: readonly number[], values: ArrayBufferView): string {
    const whole = `tformer.${name}`;
    if (!this.main.initializers.has(whole)) addValues(this.main, whole, dtype, shape, values);
    return whole;
  }
}

/** Return the weights of a MatMulNBits; undefined if they are not as the exporter stores them. */
function findColumns(node: Node, scopes: readonly Scope[]): Columns | undefined {
  const [, packedName, scalesName, zerosName] = node.inputs;
  const { K: inner, N: columns, bits, block_size: block } = integerAttributes(node);
  const packed = weight(scopes, packedName);
  const scales = producer(scopes, scalesName);
  if (!packed || !scales || !(inner > 0) || !(columns > 0) || !(block > 0)) return undefined;
  const blocks = Math.ceil(inner / block);
  if (!isArray(packed, "uint8", [columns, blocks, (block * bits) / 8])) return undefined;
  let scale: StoredTensor | undefined;
  let codes: StoredTensor | undefined;
  if (bits === 8 && scales.opType === "Expand" && !zerosName) {
    scale = weight(scopes, scales.inputs[0]);
  } else if (bits === 4 && scales.opType === "Mul" && zerosName) {
    scale = weight(scopes, scales.inputs[1]);
    codes = codesOf(scopes, scales.inputs[0], zerosName);
    if (!codes || !isArray(codes, "uint8", [columns, blocks])) return undefined;
  }
  if (!scale || !isArray(scale, "float32", [columns, 1])) return undefined;
  return { inner, columns, block, packed, codes, scale };
}

/** Return the codes from which both the multipliers and the zero points of blocks of 4 bits are derived. */
function codesOf(scopes: readonly Scope[], multipliers: string, zeros: string): StoredTensor | undefined {
  const masked = above(scopes, multipliers, ["Add", "Cast", "BitwiseAnd"]);
  const shifted =
    above(scopes, zeros, ["Cast", "ReduceSum", "Mul", "Cast", "Reshape", "BitShift"]) ??
    above(scopes, zeros, ["Cast", "ReduceSum", "Mul", "Cast", "Reshape", "Pad", "BitShift"]);
  return masked !== undefined && masked === shifted ? weight(scopes, masked) : undefined;
}

/** Return the first input of the last operator of a chain of first inputs; undefined if the operators are others. */
function above(scopes: readonly Scope[], name: string, operators: readonly string[]): string | undefined {
  let current: string | undefined = name;
  for (const operator of operators) {
    const node: Node | undefined = current === undefined ? undefined : producer(scopes, current);
    if (node?.opType !== operator) return undefined;
    current = node.inputs[0];
  }
  return current;
}

function isArray({ dtype, shape }: StoredTensor, expected: Dtype, sizes: readonly number[]): boolean {
  return dtype === expected && shape.length === sizes.length && shape.every((size, i) => size === sizes[i]);
}

function producer(scopes: readonly Scope[], name: string): Node | undefined {
  const scope = scopes.find(({ graph, producers }) => graph.initializers.has(name) || producers.has(name));
  return scope?.producers.get(name);
}

/** Return a weight that has numbers. */
function weight(scopes: readonly Scope[], name: string): StoredTensor | undefined {
  const scope = scopes.find(({ graph, producers }) => graph.initializers.has(name) || producers.has(name));
  const found = scope && weightOf(scope.graph, name);
  return found && sizeOf(found.shape) > 0 ? found : undefined;
}
