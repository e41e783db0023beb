/**
 * A bound on how much longer a tokenizer may make a text: a normalizer that writes ten characters for one, nine times in a
 * row, takes a gigabyte for a character.
 */

import { append } from "../base/arrays.js";
import { ModelFileError } from "../base/errors.js";

const MAX_GROWTH = 1024; // characters for one; tokenizers of published models stay below 120
const GROWTH: Readonly<Record<string, number>> = {
  NFKD: 18,
  NFKC: 18,
  Precompiled: 18,
  NFD: 4,
  NFC: 3,
  ByteLevel: 2,
  Metaspace: 3,
  Lowercase: 3,
};

type Step = Readonly<Record<string, unknown>>;

/** The parts of a tokenizer's JSON with steps. Its vocabulary is in another one. */
const STAGES = ["normalizer", "pre_tokenizer", "post_processor", "decoder"];

/** Return whether a step of a tokenizer has a regular expression of its own. json: of the tokenizer. */
export function hasExpressions(json: Step): boolean {
  return STAGES.some((stage) => stepsOf(json[stage]).some((step) => Object.hasOwn(step, "Regex")));
}

/** Throw ModelFileError for a tokenizer that may make a text more than MAX_GROWTH times as long. json: its JSON. */
export function checkGrowth(json: Step): void {
  for (const stage of STAGES) {
    let growth = 1;
    for (const step of stepsOf(json[stage])) {
      growth *= growthOf(step);
      if (growth > MAX_GROWTH) {
        throw new ModelFileError(
          `the file's tokenizer may make a text more than ${MAX_GROWTH} times as long (${stage})`,
        );
      }
    }
  }
}

/** Return the objects in a part of a tokenizer: its steps, also those of sequences within it, and their patterns. */
function stepsOf(part: unknown): Step[] {
  const [steps, waiting] = [[] as Step[], [part]];
  while (waiting.length) {
    const step = waiting.pop();
    if (typeof step !== "object" || step === null || Array.isArray(step)) continue;
    steps.push(step as Step);
    for (const value of Object.values(step)) append(waiting, Array.isArray(value) ? value : [value]);
  }
  return steps;
}

/** Return a bound on the length of a step's output, in multiples of its input's. */
function growthOf(step: Step): number {
  if (step["type"] === "Replace") {
    const pattern = step["pattern"] as { String?: unknown } | undefined;
    const found = String(pattern?.String ?? ""); // a regular expression may match nothing
    return Math.max(1, (String(step["content"] ?? "").length + Number(!found)) / Math.max(1, found.length));
  }
  if (step["type"] === "TemplateProcessing") {
    const texts = ["single", "pair"].map((name) => {
      const items = step[name];
      return Array.isArray(items)
        ? items.filter((item) => item && typeof item === "object" && "Sequence" in item).length
        : 0;
    });
    return Math.max(1, ...texts);
  }
  return GROWTH[String(step["type"])] ?? 1;
}
