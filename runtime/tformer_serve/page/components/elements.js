// Elements of a page. Texts of models and of the user become text nodes, never HTML.

/** @typedef {string | Node} Child */
/** @typedef {Record<string, unknown>} Attributes a function is a listener; true is an attribute without a value */

const SVG = "http://www.w3.org/2000/svg";
let count = 0;

/**
 * Return an element of HTML.
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Attributes} attributes
 * @param {...Child} children
 */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/**
 * Return an element of SVG.
 * @template {keyof SVGElementTagNameMap} Name
 * @param {Name} name
 * @param {Attributes} attributes
 * @param {...Child} children
 */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/**
 * @template {Element} T
 * @param {T} node
 * @param {Attributes} attributes
 * @param {readonly Child[]} children
 * @returns {T}
 */
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, /** @type {EventListener} */ (value));
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(key, String(value));
  }
  node.append(...children);
  return node;
}

/** Return an id that no other element has. */
export function uniqueId() {
  count += 1;
  return `part-${count}`;
}

/**
 * Return a control with its label.
 * @param {string} label
 * @param {HTMLElement} control
 */
export function field(label, control, hint = "") {
  control.id ||= uniqueId();
  const box = element("div", { class: "field" }, element("label", { for: control.id }, label));
  if (hint) {
    control.setAttribute("aria-describedby", `${control.id}-hint`);
    box.append(element("p", { class: "hint", id: `${control.id}-hint` }, hint));
  }
  box.append(control);
  return box;
}

/**
 * Return a table of numbers. Each row begins with its heading.
 * @param {readonly Child[]} headings
 * @param {readonly (readonly Child[])[]} rows
 */
export function numberTable(headings, rows) {
  const [first, ...others] = headings;
  const head = others.map((heading) => element("th", { scope: "col", class: "number" }, heading));
  const body = rows.map(([name, ...values]) => {
    const cells = values.map((value) => element("td", { class: "number" }, value));
    return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
  });
  const top = element("tr", {}, element("th", { scope: "col" }, first), ...head);
  return element("table", {}, element("thead", {}, top), element("tbody", {}, ...body));
}

/**
 * Return what went wrong, for a parent with the role `alert`.
 * @param {unknown} error
 */
export function problem(error) {
  return element("p", { class: "error" }, error instanceof Error ? error.message : String(error));
}
