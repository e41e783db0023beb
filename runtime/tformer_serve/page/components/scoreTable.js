// Names with scores, which have bars.

import { element, svg } from "./elements.js";

/**
 * Return a table of names and scores.
 * @param {string} caption
 * @param {string} heading of the names
 * @param {readonly (readonly [string, number])[]} rows
 */
export function scoreTable(caption, heading, rows) {
  const body = rows.map(([name, score]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      element("td", { class: "bar" }, bar(score)),
      element("td", { class: "number" }, score.toFixed(4)),
    ),
  );
  const head = element(
    "tr",
    {},
    element("th", { scope: "col" }, heading),
    element("td", { "aria-hidden": "true" }),
    element("th", { scope: "col", class: "number" }, "Score"),
  );
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, head),
    element("tbody", {}, ...body),
  );
}

/**
 * Return a bar of a share from 0 to 1, for the eye alone: the number is in the next cell.
 * @param {number} share
 */
function bar(share) {
  const width = Math.max(0, Math.min(1, share)) * 100;
  const drawing = { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" };
  return svg("svg", drawing, svg("rect", { x: 0, y: 0, width, height: 8 }));
}
