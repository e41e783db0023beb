/** The values of a graph and of the graphs around it, and patterns of the operators that derive a value from weights. */

import { sizeOf, type Dtype } from "../base/arrays.js";
import type { Graph, Node } from "./onnxGraph.js";
import { attributesOf, weightOf, type Attribute, type FileReader, type StoredTensor } from "./onnxGraphEdit.js";

const MAX_NUMBERS = 1024; // of a constant of a pattern

/** A graph, the nodes that compute its values by name, and the names of its inputs. */
export interface Scope {
  readonly graph: Graph;
  readonly producers: ReadonlyMap<string, Node>;
  readonly inputs: ReadonlySet<string>;
}

/**
 * A value of a graph: `value` stands for any, `weight` for a weight and `numbers` for a small constant, by the names under
 * which a match has them; a list for a constant with these numbers in any shape; else an operator.
 */
export type Pattern =
  | { readonly value: string }
  | { readonly weight: string }
  | { readonly numbers: string }
  | readonly number[]
  | OperatorPattern;

/** An operator of the standard, with exactly these attributes and inputs, and with one output. */
interface OperatorPattern {
  readonly opType: string;
  readonly attributes: Readonly<Record<string, Attribute>>;
  readonly inputs: readonly Pattern[];
}

/** What the names of a pattern stand for. */
export interface Match {
  readonly values: Record<string, string>;
  readonly weights: Record<string, StoredTensor>;
  readonly numbers: Record<string, readonly number[]>;
}

export function operator(
  opType: string,
  inputs: readonly Pattern[],
  attributes: OperatorPattern["attributes"] = {},
): Pattern {
  return { opType, attributes, inputs };
}

/** The values that the nodes of a graph can read. */
export class VisibleValues {
  /** scopes: the graph and those around it, the nearest first. */
  constructor(
    private readonly scopes: readonly Scope[],
    private readonly readFile: FileReader,
  ) {}

  /** Return the node that computes a value; undefined for weights and inputs. */
  producer(name: string): Node | undefined {
    return this.scopeOf(name)?.producers.get(name);
  }

  /** Return a weight that has numbers; undefined for other values. */
  weight(name: string): StoredTensor | undefined {
    const scope = this.scopeOf(name);
    const found = scope && weightOf(scope.graph, name);
    return found && sizeOf(found.shape) > 0 ? found : undefined;
  }

  private scopeOf(name: string): Scope | undefined {
    return this.scopes.find(
      ({ graph, producers, inputs }) => graph.initializers.has(name) || producers.has(name) || inputs.has(name),
    );
  }

  /** Return the numbers of a small constant; undefined for other values. */
  numbers(name: string): readonly number[] | undefined {
    const tensor = this.weight(name);
    if (!tensor?.dtype || sizeOf(tensor.shape) > MAX_NUMBERS) return undefined;
    const bytes = tensor.read(this.readFile);
    return bytes && numbersOf(bytes, tensor.dtype);
  }

  /** Return what a pattern matches; undefined if a value is derived in another way. Cost: linear in the pattern. */
  match(name: string, pattern: Pattern): Match | undefined {
    const match: Match = { values: {}, weights: {}, numbers: {} };
    return this.matches(name, pattern, match) ? match : undefined;
  }

  private matches(name: string, pattern: Pattern, match: Match): boolean {
    if ("opType" in pattern) {
      const node = this.producer(name);
      return (
        node !== undefined &&
        isStandard(node, pattern.opType, pattern.inputs.length) &&
        hasAttributes(node, pattern.attributes) &&
        pattern.inputs.every((input, i) => this.matches(node.inputs[i], input, match))
      );
    }
    if ("value" in pattern) {
      match.values[pattern.value] = name;
      return true;
    }
    if ("weight" in pattern) {
      const found = this.weight(name);
      const known = match.weights[pattern.weight];
      if (!found || (known && known.encoded !== found.encoded)) return false;
      match.weights[pattern.weight] = found;
      return true;
    }
    const found = this.numbers(name);
    if (!found) return false;
    if ("numbers" in pattern) {
      match.numbers[pattern.numbers] = found;
      return true;
    }
    return areEqual(found, pattern);
  }
}

/** Return whether a node is this operator of the standard, with so many inputs and one output. */
function isStandard(node: Node, opType: string, inputs: number): boolean {
  return node.opType === opType && !node.domain && node.inputs.length === inputs && node.outputs.length === 1;
}

function hasAttributes(node: Node, expected: OperatorPattern["attributes"]): boolean {
  const found = attributesOf(node);
  return (
    found.size === Object.keys(expected).length &&
    Object.entries(expected).every(([name, value]) => {
      const own = found.get(name);
      return Array.isArray(value) && Array.isArray(own) ? areEqual(own, value) : own === value;
    })
  );
}

function areEqual(one: readonly number[], other: readonly number[]): boolean {
  return one.length === other.length && one.every((number, i) => number === other[i]);
}

function numbersOf(bytes: Uint8Array, dtype: Dtype): readonly number[] | undefined {
  const { buffer } = bytes.slice(); // aligned
  if (dtype === "uint8") return [...new Uint8Array(buffer)];
  if (dtype === "int8") return [...new Int8Array(buffer)];
  if (dtype === "int32") return [...new Int32Array(buffer)];
  if (dtype === "int64") return [...new BigInt64Array(buffer)].map(Number);
  if (dtype === "float32") return [...new Float32Array(buffer)];
  return undefined;
}
