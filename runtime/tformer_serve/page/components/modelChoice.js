// The list of models, and the part of the page that belongs to the chosen one.

import { element, problem } from "./elements.js";

/**
 * Fill the list of models, and show the one that the address names, or the first.
 * @template {{ id: string, title: string, note: string }} Entry
 * @param {readonly Entry[]} entries
 * @param {(entry: Entry, place: HTMLElement, signal: AbortSignal) => void | Promise<void>} show
 *     fills the place; the signal is aborted when another model is chosen
 */
export function chooseModels(entries, show) {
  const list = /** @type {HTMLElement} */ (document.querySelector("#models"));
  const main = /** @type {HTMLElement} */ (document.querySelector("#form"));
  /** @type {AbortController | null} */
  let current = null;
  const buttons = entries.map((entry) =>
    element(
      "button",
      { type: "button", "data-model": entry.id, click: () => choose(entry, true) },
      entry.title,
      element("small", {}, entry.note),
    ),
  );

  /** @param {Entry} entry @param {boolean} moves whether the focus moves there */
  async function choose(entry, moves) {
    current?.abort();
    const { signal } = (current = new AbortController());
    for (const button of buttons) button.setAttribute("aria-current", String(button.dataset.model === entry.id));
    buttons[entries.indexOf(entry)].scrollIntoView({ block: "nearest", inline: "nearest" });
    history.replaceState(null, "", `#${encodeURIComponent(entry.id)}`);
    document.title = `${entry.title} · tformer`;
    const place = element("div");
    main.replaceChildren(element("h2", {}, entry.title), place);
    if (moves) main.focus();
    try {
      await show(entry, place, signal);
    } catch (error) {
      if (!signal.aborted) place.replaceChildren(element("div", { role: "alert" }, problem(error)));
    }
  }

  /** Return the model that the address names. */
  const named = () => entries.find(({ id }) => [id, encodeURIComponent(id)].includes(location.hash.slice(1)));
  addEventListener("hashchange", () => {
    const entry = named();
    if (entry) choose(entry, true);
  });
  list.replaceChildren(...buttons.map((button) => element("li", {}, button)));
  choose(named() ?? entries[0], false);
}
