/** The values of a graph and of the graphs around it, compared with expressions of stored forms. */

import { sizeOf, type Dtype } from "../base/arrays.js";
import type { Graph, Node } from "./onnxGraph.js";
import { attributesOf, weightOf, type FileReader, type StoredTensor } from "./onnxGraphEdit.js";
import { flatten, isNumbers, shapeOf, type Expression, type Numbers, type Operator } from "./storedForms.js";

const MAX_NUMBERS = 1024; // of a constant of an expression

/** A graph, the nodes that compute its values by name, and the names of its inputs. */
export interface Scope {
  readonly graph: Graph;
  readonly producers: ReadonlyMap<string, Node>;
  readonly inputs: ReadonlySet<string>;
}

/** The values that the nodes of a graph can read. */
export class VisibleValues {
  /** scopes: the graph and those around it, the nearest first. */
  constructor(
    private readonly scopes: readonly Scope[],
    private readonly readFile: FileReader,
  ) {}

  /** Return the node that computes a value; undefined for weights and inputs. */
  private producer(name: string): Node | undefined {
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

  /** Return whether a value is a small constant of these numbers and of their shape. */
  private hasNumbers(name: string, expected: Numbers): boolean {
    const tensor = this.weight(name);
    if (!tensor?.dtype || sizeOf(tensor.shape) > MAX_NUMBERS) return false;
    if (!areEqual(tensor.shape, shapeOf(expected))) return false;
    const bytes = tensor.read(this.readFile);
    const found = bytes && numbersOf(bytes, tensor.dtype);
    return found !== undefined && areEqual(found, flatten(expected));
  }

  /**
   * Return whether a value is computed as an expression says. Cost: linear in the expression.
   *
   * weights: name in the expression → weight.
   */
  equals(name: string, expression: Expression, weights: ReadonlyMap<string, StoredTensor>): boolean {
    if (typeof expression === "string") {
      return expression ? this.weight(name)?.encoded === weights.get(expression)?.encoded : !name;
    }
    if (isNumbers(expression)) return this.hasNumbers(name, expression);
    const node = this.producer(name);
    return (
      node !== undefined &&
      isStandard(node, expression.opType, expression.inputs.length) &&
      hasAttributes(node, expression.attributes) &&
      expression.inputs.every((input, i) => this.equals(node.inputs[i], input, weights))
    );
  }
}

/** Return whether a node is this operator of the standard, with so many inputs and one output. */
function isStandard(node: Node, opType: string, inputs: number): boolean {
  return node.opType === opType && !node.domain && node.inputs.length === inputs && node.outputs.length === 1;
}

function hasAttributes(node: Node, expected: Operator["attributes"]): boolean {
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
