/**
 * Products of quantised weights in the form that is fast in WebAssembly.
 *
 * onnxruntime has no kernel of MatMulNBits in WebAssembly: each run unpacks all weights to floats and multiplies those. Its
 * products of bytes, MatMulInteger, are faster with any number of rows. So each MatMulNBits is replaced. Its weights are
 * whole numbers of at most 8 bits times a scale for each column, as its record in the manifest says. Its activations become
 * three rows of bytes: the first are the multiples of 1/127 of the row's largest magnitude, the next two the rest of the rows
 * before, in steps that are 254 times as fine. So activations have the precision of float32. A product of bytes that reads
 * three rows takes little longer than with one.
 *
 * The kernel of these products reads the weights row by row. Rows whose length is a multiple of 512 bytes fall into the same
 * places of the processor's caches, and take up to three times as long. So they get 64 more columns, of zeros, where products
 * have few rows: in the decode stage.
 *
 * The branch for few rows (`few_rows_branch.py`) has the same products for other processors. It is left out.
 *
 * Figures: docs/design/runtime.md#products-in-webassembly.
 */

import type { Dtype } from "../base/arrays.js";
import type { MatrixSpec, ProductSpec, StoredProducts } from "./manifest.js";
import { allNames, encodeModel, inputNames, parseModel, removeUnread, type Graph, type Node } from "./onnxGraph.js";
import {
  addReference,
  addValues,
  graphName,
  inlineBranch,
  newNode,
  type FileReader,
  type NodeOptions,
  type StoredTensor,
} from "./onnxGraphEdit.js";
import { findColumns, findPackedWeights, isArray, type StoredWeights } from "./storedWeights.js";
import { VisibleValues, type Scope } from "./visibleValues.js";

const CONTRIB = "com.microsoft";
const FEW_ROWS = "few.rows"; // the value that chooses the branch for few rows
const STEPS = 127; // up to the largest magnitude of a row, on each side of zero
const FINER = 2 * STEPS; // of a row of bytes against the row before: a rest is half a step at most
const PARTS = 3;
const MAX_INNER = 2 ** 31 / 128 ** 2; // rows of a matrix: sums of more products of bytes could exceed int32
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
 * A product without a record, or whose weights are not as its record says, stays as it is. Time and memory grow with the
 * number of weights. Throw WireError unless the bytes are a model.
 */
export function withIntegerProducts(model: Uint8Array, readFile: FileReader, stored: StoredProducts): RewrittenModel {
  const parsed = parseModel(model);
  const hasBranch = withoutFewRows(parsed.graph);
  const rewriter = new ProductRewriter(parsed.graph, readFile, stored);
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
  private readonly sourceNumbers = new Map<Uint8Array, number>(); // of encoded weights
  private readonly columns = new Map<string, WideColumns>(); // by the weights that they are made of
  private readonly vectors = new Map<string, string>();
  private readonly operands = new Map<Graph, Map<string, Operand>>();
  private readonly prefix: string; // of new names
  private productCount = 0;
  private operandCount = 0;

  /** Whether products have few rows, so that reading the weights takes most of their time. */
  private readonly hasFewRows: boolean;

  constructor(
    private readonly main: Graph,
    private readonly readFile: FileReader,
    private readonly stored: StoredProducts,
  ) {
    this.hasFewRows = graphName(main) !== MANY_ROWS_GRAPH;
    const names = [...allNames(main)];
    let prefix = "tformer";
    while (names.some((name) => name.startsWith(`${prefix}.`))) prefix += "_";
    this.prefix = prefix;
  }

  /** Rewrite the products of a graph and of its branches. outer: the graphs around it, the nearest first. */
  rewrite(graph: Graph, outer: readonly Scope[]): void {
    const { nodes } = graph;
    const producers = new Map(nodes.flatMap((node) => node.outputs.map((name) => [name, node] as const)));
    const scopes = [{ graph, producers, inputs: inputNames(graph) }, ...outer];
    const values = new VisibleValues(scopes, this.readFile);
    graph.nodes = [];
    for (const node of nodes) {
      for (const branch of node.branches.values()) this.rewrite(branch, scopes);
      const spec = this.stored.products.get(node.outputs[0]);
      const matrix = spec && this.stored.matrices[spec.matrix];
      const isReplaced =
        matrix && (this.replacePacked(graph, node, values, spec, matrix) || this.widen(graph, node, values, matrix));
      if (!isReplaced) graph.nodes.push(node);
    }
  }

  /** Add the nodes that compute a MatMulNBits. Return false, and add none, for other nodes, and for nodes that stay. */
  private replacePacked(
    graph: Graph,
    node: Node,
    values: VisibleValues,
    spec: ProductSpec,
    matrix: MatrixSpec,
  ): boolean {
    if (node.opType !== "MatMulNBits" || node.domain !== CONTRIB || node.inputs.length > 6) return false;
    const [activations, , , , groups, bias] = node.inputs;
    const [result] = node.outputs;
    const found = groups ? undefined : findPackedWeights(node, values, spec, matrix);
    if (!found || found.weights.inner > MAX_INNER) return false;
    const stride = this.strideOf(found.weights.columns);
    const scale = this.widened(found.scale, stride);
    const columns = scale && this.columnsOf(found.weights, stride);
    if (!scale || !columns) return false;
    const { width } = columns;
    const operand = this.operand(graph, activations, found.weights.inner);
    const name = `${this.prefix}.product.${this.productCount++}`;
    const add = (opType: string, inputs: string[], output: string, options?: NodeOptions) =>
      void graph.nodes.push(newNode(opType, inputs, [output], options));
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
  private widen(graph: Graph, node: Node, values: VisibleValues, matrix: MatrixSpec): boolean {
    const isFloat = node.opType === "MatMulIntegerToFloat" && node.domain === CONTRIB;
    if (!isFloat && !(node.opType === "MatMulInteger" && !node.domain)) return false;
    const inputs = [...node.inputs];
    if (inputs[isFloat ? 5 : 3]) return false; // zero points of the weights
    const found = findColumns(values, inputs[1], matrix);
    if (!found) return false;
    const stride = this.strideOf(found.columns);
    if (stride === found.columns) return false;
    for (const i of isFloat ? [3, 6] : []) {
      if (!inputs[i]) continue;
      const vector = values.weight(inputs[i]);
      const wide = vector && isArray(vector, "float32", [found.columns]) ? this.widened(vector, stride) : undefined;
      if (wide === undefined) return false;
      inputs[i] = wide;
    }
    const columns = this.columnsOf(found, stride);
    if (!columns) return false;
    inputs[1] = columns.name;
    const wide = `${this.prefix}.product.${this.productCount++}`;
    graph.nodes.push(newNode(node.opType, inputs, [wide], { domain: node.domain }));
    this.cut(graph, wide, columns.width, node.outputs[0]);
    return true;
  }

  /** Add the weights of a product to the model. Return undefined if their file is not there. */
  private columnsOf(weights: StoredWeights, stride: number): WideColumns | undefined {
    const { inner, columns: width, sources, form } = weights;
    const key = [form, inner, ...sources.map((source) => this.sourceNumber(source))].join(" ");
    let columns = this.columns.get(key);
    if (columns) return columns;
    const values = weights.write(this.readFile, { inner, columns: width, stride });
    if (!values) return undefined;
    const name = `${this.prefix}.columns.${this.files.size}`;
    this.files.set(name, new Uint8Array(values.buffer as ArrayBuffer));
    addReference(this.main, name, "int8", [inner, stride], name);
    columns = { name, width, stride };
    this.columns.set(key, columns);
    return columns;
  }

  /** Return a number for an encoded weight. Its name may be that of another weight in another branch. */
  private sourceNumber(encoded: Uint8Array): number {
    const known = this.sourceNumbers.get(encoded) ?? this.sourceNumbers.size;
    this.sourceNumbers.set(encoded, known);
    return known;
  }

  /** Return the number of columns that a matrix with `columns` gets. */
  private strideOf(columns: number): number {
    return this.hasFewRows && columns % SLOW_COLUMNS === 0 ? columns + MORE_COLUMNS : columns;
  }

  /** Add a vector of floats as one with zeros up to `stride` numbers. Return undefined if its file is not there. */
  private widened(vector: StoredTensor, stride: number): string | undefined {
    const key = `${this.sourceNumber(vector.encoded)} ${stride}`;
    const known = this.vectors.get(key);
    if (known) return known;
    const bytes = vector.read(this.readFile);
    if (!bytes) return undefined;
    const wide = new Uint8Array(stride * Float32Array.BYTES_PER_ELEMENT);
    wide.set(bytes);
    const name = this.add(`vector.${this.vectors.size}`, "float32", [stride], wide);
    this.vectors.set(key, name);
    return name;
  }

  /** Add the node that returns the first columns of a product. */
  private cut(graph: Graph, wide: string, width: number, output: string): void {
    graph.nodes.push(newNode("Slice", [wide, this.axis(0), this.axis(width), this.axis(-1)], [output]));
  }

  /** Return the operand of a product, which all products of one value share. inner: the numbers of a row. */
  private operand(graph: Graph, value: string, inner: number): Operand {
    const known = this.operands.get(graph) ?? new Map<string, Operand>();
    this.operands.set(graph, known);
    let operand = known.get(value);
    if (operand) return operand;
    const prefix = `${this.prefix}.parts.${this.operandCount++}`; // a branch may read the value, too
    const add = (opType: string, inputs: string[], suffix: string, options?: NodeOptions) => {
      const output = `${prefix}.${suffix}`;
      graph.nodes.push(newNode(opType, inputs, [output], options));
      return output;
    };
    const row = add("Unsqueeze", [value, this.axis(-2)], "row");
    const maxima = add("ReduceMax", [add("Abs", [row], "size"), this.axis(-1)], "maxima");
    // For no rows, (0, K), onnxruntime gives the maxima the shape (0, K) too.
    const maximum = add("Slice", [maxima, this.axis(0), this.axis(1), this.axis(-1)], "maximum");
    const step = add("Mul", [maximum, this.constant("step", [], [1 / STEPS])], "step");
    // The maximum and the bytes of a row do not tell whether it has a NaN. This product is 0, or NaN.
    const nothing = add(
      "MatMul",
      [row, this.constant(`nothing.${inner}`, [inner, 1], new Array(inner).fill(0))],
      "none",
    );
    const scale = add("Add", [step, nothing], "scale");
    let rest = add("Div", [row, step], "ratio"); // the reciprocal of a very small step is infinite
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
    const whole = `${this.prefix}.${name}`;
    if (!this.main.initializers.has(whole)) addValues(this.main, whole, dtype, shape, values);
    return whole;
  }
}
