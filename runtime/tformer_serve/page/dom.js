// Elements of the page. Texts of models and of the user become text nodes, never HTML.

const SVG = "http://www.w3.org/2000/svg";
let count = 0;

/** Return an element. attributes: a function is a listener; true is an attribute without a value. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Return a labelled field: the element for the page, with the control as `control`. */
export function field(label, control, hint = "") {
  control.id ||= `field-${++count}`;
  const box = element("div", {}, element("label", { for: control.id }, label));
  if (hint) {
    control.setAttribute("aria-describedby", `${control.id}-hint`);
    box.append(element("p", { class: "hint", id: `${control.id}-hint` }, hint));
  }
  box.append(control);
  return box;
}

/** Return a bar of a share from 0 to 1, for the eye alone: the number stands next to it. */
export function bar(share) {
  const width = Math.max(0, Math.min(1, share)) * 100;
  return svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { x: 0, y: 0, width, height: 8 }));
}

/** Return a table of names and numbers with bars. rows: [[name, number], …]. */
export function scores(caption, heading, rows) {
  const body = rows.map(([name, score]) => element("tr", {}, element("th", { scope: "row" }, name),
    element("td", { class: "bar" }, bar(score)), element("td", { class: "number" }, score.toFixed(4))));
  const head = element("tr", {}, element("th", { scope: "col" }, heading),
    element("td", { "aria-hidden": "true" }), element("th", { scope: "col" }, "Score"));
  return element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body));
}

/** Return a text in which spans are coloured. spans: {start, end, label} in characters, as Python counts them. */
export function spanned(text, spans) {
  const characters = [...text];
  const labels = [...new Set(spans.map((span) => span.label))];
  const parts = [];
  let done = 0;
  for (const span of [...spans].sort((one, other) => one.start - other.start)) {
    if (span.start < done) continue;
    parts.push(characters.slice(done, span.start).join(""));
    const number = labels.indexOf(span.label) % 8;
    parts.push(element("mark", { class: `c${number}` }, characters.slice(span.start, span.end).join(""),
      element("small", {}, span.label)));
    done = span.end;
  }
  parts.push(characters.slice(done).join(""));
  return element("p", { class: "text" }, ...parts);
}
