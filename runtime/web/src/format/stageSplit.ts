/**
 * One stage of a model file with two, as a model of its own.
 *
 * A file with an encoder has one graph whose stages are the branches of an `If`. Each stage gets a session of its own:
 * its nodes move into the main graph, and what only the other stage needs is left out. A session then reads the inputs
 * of its stage alone. Both models refer to the weights that both stages read, such as an embedding.
 */

import { ModelFileError } from "../base/errors.js";
import { STAGE_INPUT } from "./manifest.js";
import { GRAPH_INPUT, GRAPH_NAME, GRAPH_OUTPUT } from "./onnxFields.js";
import {
  encodeModel,
  graphNamesRead,
  namesRead,
  parseModel,
  removeUnread,
  valueName,
  type Graph,
  type Node,
} from "./onnxGraph.js";
import { inlineBranch } from "./onnxGraphEdit.js";
import { bytesField, concatBytes, contentOf, iterFields, WireError } from "./onnxWire.js";

export type Stage = "encode" | "decode";

const BRANCHES: Record<Stage, string> = { decode: "then_branch", encode: "else_branch" };

/**
 * Return a model whose graph is one stage of a model with both.
 *
 * model: weights that are references into a file stay so.
 * Time and memory grow with the size of the model without its weights. Throw ModelFileError if it has another form.
 */
export function extractStage(model: Uint8Array, stage: Stage): Uint8Array<ArrayBuffer> {
  try {
    return extract(model, stage);
  } catch (error) {
    if (error instanceof WireError) {
      throw new ModelFileError("the file's graph is not whole: it is damaged, export the model again");
    }
    throw error;
  }
}

function extract(model: Uint8Array, stage: Stage): Uint8Array<ArrayBuffer> {
  const parsed = parseModel(model);
  const graph = parsed.graph;
  const choice = findChoice(graph);
  const branch = choice.branches.get(BRANCHES[stage]);
  if (branch === undefined || branch.outputs.length !== choice.outputs.length) throw otherForm();
  inlineBranch(graph, choice, branch);
  // A branch returns empty constants for the outputs of the other stage.
  const outputs = new Set(choice.outputs);
  const missing = new Set<string>();
  for (const node of branch.nodes) {
    if (node.inputs.length === 0) for (const name of node.outputs) if (outputs.has(name)) missing.add(name);
  }
  // Nodes outside of the branches compute what both stages read, such as weights, or compute with their results.
  for (const node of graph.nodes) {
    for (const name of namesRead(node)) {
      if (!missing.has(name)) continue;
      for (const output of node.outputs) missing.add(output);
      break;
    }
  }
  graph.outputs = graph.outputs.filter((name) => !missing.has(name));
  removeUnread(graph);
  const read = graphNamesRead(graph);
  graph.rest = graph.rest.filter((field) => isKept(field, read, missing));
  graph.rest.push(concatBytes(bytesField(GRAPH_NAME, stage)));
  return encodeModel(parsed);
}

/** Return the `If` that chooses the stage. */
function findChoice(graph: Graph): Node {
  const choice = graph.nodes.find(
    (node) => node.opType === "If" && node.inputs.length === 1 && node.inputs[0] === STAGE_INPUT,
  );
  if (choice === undefined) throw otherForm();
  return choice;
}

/** Return whether a field of the graph, other than nodes and weights, belongs to the stage. */
function isKept(encoded: Uint8Array, read: ReadonlySet<string>, missing: ReadonlySet<string>): boolean {
  for (const field of iterFields(encoded)) {
    if (field.number === GRAPH_INPUT) return read.has(valueName(contentOf(encoded, field)));
    return field.number === GRAPH_OUTPUT && !missing.has(valueName(contentOf(encoded, field)));
  }
  return false;
}

function otherForm(): ModelFileError {
  return new ModelFileError("the file's stages are not the branches of one If: export the model again");
}
