// A page of models that run in it. Elements and plots are those of the server's page.

import { Model } from "../src/index.js";
import { element, field, scores } from "../../tformer_serve/page/dom.js";
import { heatMap, plot, short } from "../../tformer_serve/page/plot.js";
import { EL_NINO } from "./elnino.js";

const DEMOS = [
  { file: "g2p", title: "Pronunciation", task: "from letters to sounds, with the alignment", show: pronunciation },
  { file: "words", title: "Words", task: "pronounces words in a conversation", show: words },
  { file: "languages", title: "Languages", task: "guesses the language as you type", show: languages },
  { file: "elnino", title: "El Niño", task: "forecasts the temperature of the sea", show: forecast },
];
const list = document.querySelector("#models"), main = document.querySelector("#form"), network = document.querySelector("#network");
let choice = null; // aborts what the last choice does

/** Load a model and show its form. moves: whether the focus goes there. */
async function choose(demo, moves = true) {
  choice?.abort();
  const controller = choice = new AbortController(), { signal } = controller;
  for (const button of list.querySelectorAll("button")) button.setAttribute("aria-current", String(button.dataset.file === demo.file));
  history.replaceState(null, "", `#${demo.file}`);
  document.title = `${demo.title} · tformer`;
  const bar = element("progress", { "aria-label": `Download of ${demo.file}.onnx` }), note = element("p", { class: "hint" }, "Loading …");
  main.replaceChildren(element("h2", {}, demo.title), bar, note);
  if (moves) main.focus();
  try {
    // The build copies the WebAssembly of this device alone.
    const model = await Model.load(`models/${demo.file}.onnx`, { device: "wasm", signal, onProgress: ({ loaded, total }) => {
      if (total) [bar.max, bar.value] = [total, loaded];
      note.textContent = total ? `${megabytes(loaded)} of ${megabytes(total)} MB` : `${megabytes(loaded)} MB`;
    } });
    if (signal.aborted) return void model.dispose();
    signal.addEventListener("abort", () => model.dispose());
    const { task, precision, quantization } = model.info();
    const facts = [task, quantization === "none" ? precision : quantization, "in a worker of this page"].filter(Boolean).join(" · ");
    main.replaceChildren(element("h2", {}, demo.title), element("p", { class: "hint facts" }, facts), demo.show(model, signal));
  } catch (error) {
    if (!signal.aborted) main.replaceChildren(element("h2", {}, demo.title), problem(error));
  }
}

function megabytes(bytes) {
  return (bytes / 1e6).toFixed(1);
}

function problem(error) {
  return element("p", { class: "error", role: "alert" }, error.message);
}

/** Return a form with one line and its result. run(text, result, signal): ends when a newer text comes. live: at each key. */
function lineForm(label, value, button, run, signal, { live = false, hint = "" } = {}) {
  const input = element("input", { value, autocomplete: "off", spellcheck: "false" });
  const result = element("div", { class: "result", "aria-live": live ? "off" : "polite" });
  let newest = null;
  const start = async () => {
    newest?.abort();
    const controller = newest = new AbortController();
    const both = AbortSignal.any([signal, controller.signal]);
    result.setAttribute("aria-busy", "true");
    try {
      await run(input.value, result, both);
    } catch (error) {
      if (!both.aborted) result.replaceChildren(problem(error));
    }
    if (newest === controller) result.setAttribute("aria-busy", "false");
  };
  const form = element("form", { submit: (event) => (event.preventDefault(), start()) }, field(label, input, hint),
    ...(button ? [element("div", { class: "row" }, element("button", {}, button))] : []));
  if (live) input.addEventListener("input", start);
  start();
  return element("div", {}, form, result);
}

function pronunciation(model, signal) {
  return lineForm("An English word", "transformer", "Pronounce", async (text, result, ended) => {
    const word = text.trim().toLowerCase();
    const output = element("p", { class: "text" }), drawing = element("div", {});
    result.replaceChildren(output, drawing);
    const draw = async (sounds) => {
      if (sounds.length && hasAttentions(model)) drawing.replaceChildren(await alignment(model, word, sounds, ended));
    };
    for await (const piece of model.stream(word, { signal: ended })) {
      output.append(piece);
      if (piece.includes(" ")) await draw(output.textContent.split(" ").slice(0, -1)); // the last one may be half a sound
    }
    await draw(output.textContent.split(" "));
    const options = { numBeams: 4, numReturnSequences: 3, signal: ended };
    const best = await model.generate(word, options);
    const rows = [best, ...best.alternatives].map((one) => [one.text, Math.exp(one.score)]);
    result.append(scores("The three best of four beams", "Sounds", rows));
  }, signal, { hint: "The tokens appear as they are computed, each with the letters that it comes from." });
}

function hasAttentions(model) {
  const { encode, decode } = model.manifest;
  return [encode, decode].some((stage) => stage?.extras?.some(({ kind }) => kind === "cross_attentions"));
}

/** Return the weights of the letters for each of the sounds so far. */
async function alignment(model, word, sounds, signal) {
  const { data, shape: [tokens, positions] } = await model.align(word, sounds.join(" "), { signal });
  const letters = [...word];
  const source = Array.from({ length: positions }, (_, i) => letters[i] ?? "end");
  const rows = Array.from({ length: tokens }, (_, i) => [...data.subarray(i * positions, (i + 1) * positions)]);
  return heatMap(source, sounds, rows);
}

function words(model, signal) {
  const log = element("div", { class: "log result", role: "log", "aria-label": "Conversation", tabindex: 0 });
  const input = element("input", { value: "browser", autocomplete: "off", required: true });
  const button = element("button", {}, "Send"), note = element("div", { role: "alert" });
  const begin = () => model.chat();
  let chat = begin();
  const show = (role, content) => {
    const body = element("span", {}, content);
    log.append(element("div", { class: `message ${role}` }, element("b", {}, role === "user" ? "You" : "words"), body));
    log.scrollTop = log.scrollHeight;
    return body;
  };
  const form = element("form", { submit: async (event) => {
    event.preventDefault();
    const text = input.value.trim().toLowerCase();
    button.disabled = true;
    note.replaceChildren();
    show("user", text);
    const reply = show("assistant", "");
    input.value = "";
    try {
      for await (const piece of chat.stream(text, { signal })) reply.append(piece);
    } catch (error) {
      if (!signal.aborted) note.replaceChildren(problem(error));
    }
    button.disabled = false;
    input.focus();
  } }, field("An English word", input, "A decoder alone: it answers a word with its sounds, and keeps the conversation in its cache."),
    element("div", { class: "row" }, button, element("button", { type: "button", class: "plain", click: () => {
      chat.release();
      chat = begin();
      log.replaceChildren();
    } }, "New conversation")));
  return element("div", {}, form, note, log);
}

function languages(model, signal) {
  return lineForm("A sentence in any of its languages", "Das Passwort ist zu kurz", "", async (text, result, ended) => {
    if (!text.trim()) return void result.replaceChildren();
    const begin = performance.now();
    const [{ top }] = await model.classify([text], { topK: 5, signal: ended });
    const names = new Intl.DisplayNames("en", { type: "language" });
    const named = top.map(([code, share]) => [`${names.of(code)} (${code})`, share]);
    result.replaceChildren(scores("The likeliest languages", "Language", named),
      element("p", { class: "hint" }, `${(performance.now() - begin).toFixed(0)} ms`));
  }, signal, { live: true, hint: "The guess follows each key." });
}

function forecast(model, signal) {
  const steps = element("input", { type: "range", min: 1, max: 12, value: 12 });
  const result = element("div", { "aria-live": "polite" });
  const run = async () => {
    try {
      const { data } = await model.forecast(EL_NINO, { horizon: Number(steps.value), signal });
      const values = [...data];
      const head = element("tr", {}, element("th", { scope: "col" }, "Month"), element("th", { scope: "col" }, "°C"));
      const rows = values.map((value, i) => element("tr", {}, element("th", { scope: "row" }, `+${i + 1}`), element("td", { class: "number" }, short(value))));
      const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
      result.replaceChildren(plot("Sea surface temperature, Niño 1+2, °C, months", EL_NINO, values),
        element("details", {}, element("summary", {}, "The forecast as a table"), table));
    } catch (error) {
      if (!signal.aborted) result.replaceChildren(problem(error));
    }
  };
  steps.addEventListener("input", run);
  run();
  return element("div", {}, field("Months to forecast", steps, "1 to 12 months after the end of the history."), result);
}

list.replaceChildren(...DEMOS.map((demo) => element("li", {}, element("button", { type: "button", "data-file": demo.file, click: () => choose(demo) },
  demo.title, element("small", {}, demo.task)))));
choose(DEMOS.find(({ file }) => `#${file}` === location.hash) ?? DEMOS[0], false);

/** Say whether the page works without a network. */
async function offline() {
  if (!("serviceWorker" in navigator)) return;
  try {
    await navigator.serviceWorker.register("service-worker.js");
    await navigator.serviceWorker.ready;
    network.textContent = "Models stay here once they are loaded: the page then works offline.";
  } catch { /* the page works all the same, with a network */ }
}
offline();
