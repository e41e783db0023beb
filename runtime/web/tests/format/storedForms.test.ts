/** Expressions of stored forms, compared with those of Python (`golden/stored_forms.py`). */

import { expect, test } from "vitest";
import type { MatrixSpec } from "../../src/format/manifest.js";
import {
  blockScalesOf,
  columnsOf,
  constantsOf,
  flatten,
  isNumbers,
  packedOf,
  shapeOf,
  zeroPointsOf,
} from "../../src/format/storedForms.js";
import type { Expression } from "../../src/format/storedForms.js";
import { Golden } from "../golden/golden.js";

interface Case {
  matrix: MatrixSpec;
  constants: Record<string, [string, string, number[]]>;
  expressions: string[];
}

const golden = new Golden<Case>("stored_forms.py");

/** Return an expression as a text, as `shown` of Python does. */
function shown(expression: Expression): string {
  if (typeof expression === "string") return expression;
  if (isNumbers(expression)) return `${shapeOf(expression).join("×")}: ${flatten(expression).join(" ")}`;
  const { opType, inputs, attributes } = expression;
  const names = Object.keys(attributes).sort();
  return `${opType}${names.map((name) => ` ${name}=${attributes[name]}`).join("")}(${inputs.map(shown).join(", ")})`;
}

test.each(golden.cases)("$matrix.form of $matrix.inner rows", ({ matrix, constants, expressions }) => {
  const found = [columnsOf, packedOf].flatMap((make) => [false, true].map((isLocal) => make(matrix, isLocal)));
  expect([...found, blockScalesOf(matrix), zeroPointsOf(matrix)].map(shown)).toEqual(expressions);
  expect(Object.fromEntries(constantsOf(matrix))).toEqual(constants);
});
