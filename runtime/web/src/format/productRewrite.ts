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
 * The kernel of these products reads the weights row by row. Rows whose length is a multiple of 512 bytes fall into the same
 * places of the processor's caches, and take up to three times as long. So they get 64 more columns, of zeros, where products
 * have few rows: in the decode stage.
 *
 * The branch for few rows (`few_rows_branch.py`) has the same products for other processors. It is left out.
 *
 * Figures: docs/design/kernels.md#products-in-webassembly.
 */

import type { Dtype } from "../base/arrays.js";
import { encodeModel, parseModel, removeUnread, type Graph, type Node } from "./onnxGraph.js";
import {
  addReference,
  addValues,
  graphName,
  inlineBranch,
  newNode,
  type FileReader,
  type NodeOptions,
} from "./onnxGraphEdit.js";
import { findColumns, findPackedWeights, isArray, weight, type Scope, type StoredWeights } from "./storedWeights.js";

const CONTRIB = "com.microsoft";
const FEW_ROWS = "few.rows"; // the value that chooses the branch for few rows
const STEPS = 127; // up to the largest magnitude of a row, on each side of zero
const FINER = 2 * STEPS; // of a row of bytes against the row before: a rest is half a step at most
const PARTS = 3;
const SLOW_COLUMNS = 512; // a kernel is slow for a number of columns that is a multiple of this
const MORE_COLUMNS = 64;
const MANY_ROWS_GRAPH = "encode"; // reads whole inputs

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

/** The names of the bytes of an operand, and of their scales. */
interface Operand {
  readonly bytes: string;
  readonly scales: string;
}

/** Weights of the model. width: their columns, `stride` with zeros. */
interface WideColumns {
  readonly name: string;
  readonly width: number;
  readonly stride: number;
}

class ProductRewriter {
  readonly files = new Map<string, Uint8Array>();
  private readonly columns = new Map<string, WideColumns>(); // by the names of a product's weights
  private readonly vectors = new Set<string>();
  private readonly operands = new Map<Graph, Map<string, Operand>>();
  private operandCount = 0;

  /** Whether products have few rows, so that reading the weights takes most of their time. */
  private readonly hasFewRows: boolean;

  constructor(
    private readonly main: Graph,
    private readonly readFile: FileReader,
  ) {
    this.hasFewRows = graphName(main) !== MANY_ROWS_GRAPH;
  }

  /** Rewrite the products of a graph and of its branches. outer: the graphs around it, the nearest first. */
  rewrite(graph: Graph, outer: readonly Scope[]): void {
    const { nodes } = graph;
    const producers = new Map(nodes.flatMap((node) => node.outputs.map((name) => [name, node] as const)));
    const scopes = [{ graph, producers }, ...outer];
    graph.nodes = [];
    for (const node of nodes) {
      for (const branch of node.branches.values()) this.rewrite(branch, scopes);
      if (!this.replacePacked(graph, node, scopes) && !this.widen(graph, node, scopes)) graph.nodes.push(node);
    }
  }

  /** Add the nodes that compute a MatMulNBits. Return false, and add none, for another node or one that stays. */
  private replacePacked(graph: Graph, node: Node, scopes: readonly Scope[]): boolean {
    if (node.opType !== "MatMulNBits") return false;
    const [activations, packed, scales, , groups, bias] = node.inputs;
    const [result] = node.outputs;
    if (groups) return false;
    const found = findPackedWeights(node, scopes);
    const columns = found && this.columnsOf(`${packed} ${scales}`, found.weights);
    if (!found || !columns) return false;
    const { width, stride } = columns;
    const operand = this.operand(graph, activations);
    const name = `${result}.integer`;
    const add = (opType: string, inputs: string[], output: string, options?: NodeOptions) =>
      void graph.nodes.push(newNode(opType, inputs, [output], options));
    const scale = this.widened(found.scale.name, width, stride);
    const inputs = [operand.bytes, columns.name, this.unit(), scale, this.middle()];
    add("MatMulIntegerToFloat", inputs, `${name}.parts`, { domain: CONTRIB });
    // Not ReduceSum, which returns another shape for no rows.
    add("MatMul", [operand.scales, `${name}.parts`], `${name}.row`);
    const last = stride > width || bias ? `${name}.sum` : result;
    add("Squeeze", [`${name}.row`, this.axis(-2)], last);
    const own = bias ? `${name}.own` : result;
    if (stride > width) this.cut(graph, last, width, own);
    if (bias) add("Add", [stride > width ? own : last, bias], result);
    return true;
  }

  /** Add a product of bytes with more columns, and cut them off. Return false, and add none, for another node. */
  private widen(graph: Graph, node: Node, scopes: readonly Scope[]): boolean {
    if (node.opType !== "MatMulInteger" && node.opType !== "MatMulIntegerToFloat") return false;
    const inputs = [...node.inputs];
    const isFloat = node.opType === "MatMulIntegerToFloat";
    if (inputs[isFloat ? 5 : 3]) return false; // zero points of the weights
    const found = findColumns(scopes, inputs[1]);
    if (!found || this.strideOf(found.columns) === found.columns) return false;
    const byColumn = isFloat ? [3, 6].filter((i) => inputs[i]) : [];
    const vectors = byColumn.map((i) => weight(scopes, inputs[i]));
    if (!vectors.every((vector) => vector && isArray(vector, "float32", [found.columns]))) return false;
    const columns = this.columnsOf(inputs[1], found);
    if (!columns) return false;
    const { width, stride } = columns;
    inputs[1] = columns.name;
    for (const i of byColumn) inputs[i] = this.widened(inputs[i], width, stride);
    const wide = `${node.outputs[0]}.wide`;
    graph.nodes.push(newNode(node.opType, inputs, [wide], { domain: isFloat ? CONTRIB : "" }));
    this.cut(graph, wide, width, node.outputs[0]);
    return true;
  }

  /** Add the weights of a product to the model. Return undefined if their file is not there. */
  private columnsOf(key: string, weights: StoredWeights): WideColumns | undefined {
    let columns = this.columns.get(key);
    if (columns) return columns;
    const { inner, columns: width } = weights;
    const stride = this.strideOf(width);
    const values = weights.write(this.readFile, { inner, columns: width, stride });
    if (!values) return undefined;
    const name = `tformer.columns.${this.files.size}`;
    this.files.set(name, new Uint8Array(values.buffer as ArrayBuffer));
    addReference(this.main, name, "int8", [inner, stride], name);
    columns = { name, width, stride };
    this.columns.set(key, columns);
    return columns;
  }

  /** Return the number of columns that a matrix with `columns` gets. */
  private strideOf(columns: number): number {
    return this.hasFewRows && columns % SLOW_COLUMNS === 0 ? columns + MORE_COLUMNS : columns;
  }

  /** Return a vector with a number for each column as one that has zeros for further columns. */
  private widened(vector: string, width: number, stride: number): string {
    const name = `tformer.wide.${vector}`;
    if (this.vectors.has(name)) return name;
    this.vectors.add(name);
    const flat = stride > width ? `${name}.flat` : name;
    const added: Node[] = [newNode("Reshape", [vector, this.axis(-1)], [flat])];
    if (stride > width) {
      const zeros = this.constant(`zeros.${stride - width}`, [stride - width], new Array(stride - width).fill(0));
      added.push(newNode("Concat", [flat, zeros], [name], { attributes: { axis: 0 } }));
    }
    this.main.nodes.unshift(...added);
    return name;
  }

  /** Add the node that returns the first columns of a product. */
  private cut(graph: Graph, wide: string, width: number, output: string): void {
    graph.nodes.push(newNode("Slice", [wide, this.axis(0), this.axis(width), this.axis(-1)], [output]));
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
    const scales = add("Mul", [scale, this.constant("powers", [1, PARTS], powers)], "scales");
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
