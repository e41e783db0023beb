// A form that runs something, with its state, its error and its result.

import { element, problem } from "./elements.js";
import { progressLine } from "./progress.js";

/**
 * @typedef {object} FormParts
 * @property {readonly Node[]} controls
 * @property {(result: HTMLElement, signal: AbortSignal) => Promise<void>} run fills the result; `signal` ends it
 * @property {string} [button] the text of the button; without it the form runs at each change of its controls
 * @property {readonly Node[]} [buttons] more of them
 * @property {boolean} [starts] run once at the beginning
 * @property {boolean} [waits] a run is not replaced: after it was stopped, the next one begins at its end
 * @property {HTMLElement} [result]
 * @property {AbortSignal} signal ends the form
 */

/**
 * Return a form, and a function that stops its run. A new run replaces the one before it.
 * @param {FormParts} parts
 */
export function runForm({ controls, run, button, buttons = [], starts = false, waits = false, result, signal }) {
  const live = button === undefined;
  const output = result ?? element("div", { class: "result", "aria-live": live ? "off" : "polite" });
  const alert = element("div", { role: "alert" });
  const line = progressLine({ announces: !live });
  const submit = element("button", {}, button ?? "");
  const stop = element("button", { type: "button", class: "plain", disabled: true, click: end }, "Stop");
  /** @type {AbortController | null} */
  let current = null;
  let isNextWaiting = false; // for the end of a run that was stopped

  function end() {
    isNextWaiting = false;
    if (!current) return;
    current.abort();
    submit.disabled = false;
  }

  async function begin() {
    if (waits && current) {
      isNextWaiting = current.signal.aborted;
      submit.disabled = true;
      return;
    }
    end();
    const controller = (current = new AbortController());
    const began = performance.now();
    if (!live) line.begin("Running …");
    submit.disabled = waits;
    stop.disabled = false;
    output.setAttribute("aria-busy", "true");
    alert.replaceChildren();
    let outcome = "";
    try {
      await run(output, controller.signal);
      outcome = `Done in ${duration(performance.now() - began)}`;
    } catch (error) {
      if (!controller.signal.aborted) alert.replaceChildren(problem(error));
    }
    if (current !== controller) return; // a newer run has the form
    current = null;
    line.end(controller.signal.aborted ? "Stopped" : outcome);
    output.setAttribute("aria-busy", "false");
    submit.disabled = false;
    if (document.activeElement === stop) submit.focus(); // a disabled button loses the focus
    stop.disabled = true;
    if (!isNextWaiting) return;
    isNextWaiting = false;
    begin();
  }

  /** @param {Event} event */
  const onSubmit = (event) => {
    event.preventDefault();
    if (!live) begin();
  };
  const form = element("form", { submit: onSubmit }, ...controls);
  if (live) form.addEventListener("input", begin);
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault(); // a field of one line would submit too
    form.requestSubmit();
  });
  form.append(element("div", { class: "row" }, ...(live ? [] : [submit, stop, ...buttons]), line.node));
  signal.addEventListener("abort", end);
  if (starts) begin();
  return { form, alert, result: output, end };
}

/** @param {number} milliseconds */
function duration(milliseconds) {
  return milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
