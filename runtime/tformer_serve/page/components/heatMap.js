// An alignment as a heat map.

import { element, svg, uniqueId } from "./elements.js";

/**
 * Return a table of weights: a column for each source token, a row for each token of the result. The greatest weight of each
 * row has a frame. The time grows with the number of weights.
 * @param {readonly string[]} source
 * @param {readonly string[]} tokens
 * @param {readonly (readonly number[])[]} weights from 0 to 1
 */
export function heatMap(source, tokens, weights) {
  const id = uniqueId();
  const head = element("tr", {}, element("td"), ...source.map((token) => element("th", { scope: "col" }, token)));
  const rows = weights.map((row, i) => {
    const token = tokens[i] ?? "";
    const greatest = row.indexOf(Math.max(...row));
    const cells = row.map((weight, j) => {
      const box = svg("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" });
      box.append(svg("rect", { width: 1, height: 1, "fill-opacity": weight }));
      const number = element("span", { class: "hidden" }, weight.toFixed(2));
      const attributes = { title: `${token}, ${source[j]}: ${weight.toFixed(3)}`, class: j === greatest && "best" };
      return element("td", attributes, box, number);
    });
    return element("tr", {}, element("th", { scope: "row" }, token), ...cells);
  });
  const caption = element("figcaption", { id, class: "hint" }, "Weights of the source (columns) for each token (rows)");
  const table = element("table", { class: "heat", "aria-labelledby": id });
  table.append(element("thead", {}, head), element("tbody", {}, ...rows));
  // The keyboard scrolls only what has the focus.
  const region = element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Heat map" }, table);
  return element("figure", {}, caption, region);
}
