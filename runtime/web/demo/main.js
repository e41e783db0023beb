// A page of models that run in it. What it shows is made by the components of the server's page.

import { Model } from "../src/index.js";
import { conversation } from "../../tformer_serve/page/components/conversation.js";
import { element, field } from "../../tformer_serve/page/components/elements.js";
import { showForecast } from "../../tformer_serve/page/components/forecast.js";
import { heatMap } from "../../tformer_serve/page/components/heatMap.js";
import { chooseModels } from "../../tformer_serve/page/components/modelChoice.js";
import { progressLine } from "../../tformer_serve/page/components/progress.js";
import { runForm } from "../../tformer_serve/page/components/runForm.js";
import { scoreTable } from "../../tformer_serve/page/components/scoreTable.js";
import { EL_NINO } from "./elnino.js";

/**
 * @typedef {(model: Model, signal: AbortSignal) => Node} MakeForm signal: ends the form
 * @typedef {{ id: string, title: string, note: string, form: MakeForm }} Demo
 */

/** @type {readonly Demo[]} */
const DEMOS = [
  { id: "g2p", title: "Pronunciation", note: "from letters to sounds, with the alignment", form: pronunciation },
  { id: "words", title: "Words", note: "pronounces words in a conversation", form: words },
  { id: "languages", title: "Languages", note: "guesses the language as you type", form: languages },
  { id: "elnino", title: "El Niño", note: "forecasts the temperature of the sea", form: forecast },
];

/**
 * Load a model and show its form.
 * @param {Demo} demo
 * @param {HTMLElement} place
 * @param {AbortSignal} signal
 */
async function show({ id, form }, place, signal) {
  const line = progressLine();
  line.begin("Loading …");
  place.replaceChildren(line.node);
  // The build copies the WebAssembly of this device alone.
  const model = await Model.load(`models/${id}.onnx`, {
    device: "wasm",
    signal,
    onProgress: ({ loaded, total }) => line.bytes(loaded, total),
  });
  if (signal.aborted) return void model.dispose();
  signal.addEventListener("abort", () => model.dispose());
  const { task, precision, quantization } = model.info();
  const weights = quantization === "none" ? precision : quantization;
  const facts = [task, weights, "in a worker of this page"].filter(Boolean).join(" · ");
  place.replaceChildren(element("p", { class: "hint facts" }, facts), form(model, signal));
}

/** @type {MakeForm} */
function pronunciation(model, signal) {
  const input = element("input", { value: "transformer", autocomplete: "off", spellcheck: "false", required: true });
  const controls = [
    field(
      "An English word",
      input,
      "The tokens appear as they are computed, each with the letters that it comes from.",
    ),
  ];
  const hasAlignment = [model.manifest.encode, model.manifest.decode].some((stage) =>
    stage?.extras?.some(({ kind }) => kind === "cross_attentions"),
  );
  /** @param {HTMLElement} result @param {AbortSignal} ended */
  const run = async (result, ended) => {
    const word = input.value.trim().toLowerCase();
    const output = element("p", { class: "text" });
    const drawing = element("div");
    result.replaceChildren(output, drawing);
    /** @param {string[]} sounds */
    const draw = async (sounds) => {
      if (sounds.length && hasAlignment) drawing.replaceChildren(await alignment(model, word, sounds, ended));
    };
    let text = "";
    for await (const piece of model.stream(word, { signal: ended })) {
      text += piece;
      output.append(piece);
      if (piece.includes(" ")) await draw(text.split(" ").slice(0, -1)); // the last one may be half a sound
    }
    await draw(text.split(" "));
    const best = await model.generate(word, { numBeams: 4, numReturnSequences: 3, signal: ended });
    const rows = [best, ...best.alternatives].map((one) => /** @type {const} */ ([one.text, Math.exp(one.score)]));
    result.append(scoreTable("The three best of four beams", "Sounds", rows));
  };
  const { form, alert, result } = runForm({ controls, run, button: "Pronounce", starts: true, signal });
  return element("div", {}, form, alert, result);
}

/**
 * Return the weights of the letters for each of the sounds so far.
 * @param {Model} model
 * @param {string} word
 * @param {readonly string[]} sounds
 * @param {AbortSignal} signal
 */
async function alignment(model, word, sounds, signal) {
  const { data, shape } = await model.align(word, sounds.join(" "), { signal });
  const [tokens, positions] = shape;
  const letters = [...word];
  const source = Array.from({ length: positions }, (_, i) => letters[i] ?? "end");
  const rows = Array.from({ length: tokens }, (_, i) => [...data.subarray(i * positions, (i + 1) * positions)]);
  return heatMap(source, sounds, rows);
}

/** @type {MakeForm} */
function words(model, signal) {
  let chat = model.chat();
  return conversation({
    name: "words",
    input: element("input", { value: "browser", autocomplete: "off", required: true }),
    label: "An English word",
    hint: "A decoder alone: it answers a word with its sounds, and keeps the conversation in its cache.",
    answer: (text, ended) => chat.stream(text.trim().toLowerCase(), { signal: ended }),
    clear: () => {
      chat.release();
      chat = model.chat();
    },
    signal,
  });
}

/** @type {MakeForm} */
function languages(model, signal) {
  const input = element("input", { value: "Das Passwort ist zu kurz", autocomplete: "off", spellcheck: "false" });
  const names = new Intl.DisplayNames("en", { type: "language" });
  /** @param {HTMLElement} result @param {AbortSignal} ended */
  const run = async (result, ended) => {
    if (!input.value.trim()) return void result.replaceChildren();
    const [{ top = [] }] = await model.classify([input.value], { topK: 5, signal: ended });
    const rows = top.map(([code, share]) => /** @type {const} */ ([`${names.of(code)} (${code})`, share]));
    result.replaceChildren(scoreTable("The likeliest languages", "Language", rows));
  };
  const controls = [field("A sentence in any of its languages", input, "The guess follows each key.")];
  const { form, alert, result } = runForm({ controls, run, starts: true, signal });
  return element("div", {}, form, alert, result);
}

/** @type {MakeForm} */
function forecast(model, signal) {
  const steps = element("input", { type: "range", min: 1, max: 12, value: 12 });
  const title = "Sea surface temperature, Niño 1+2, °C, months";
  /** @param {HTMLElement} result @param {AbortSignal} ended */
  const run = async (result, ended) => {
    const { data } = await model.forecast(EL_NINO, { horizon: Number(steps.value), signal: ended });
    showForecast(result, "Month", [{ title, heading: "°C", history: EL_NINO, forecast: [...data] }]);
  };
  const controls = [field("Months to forecast", steps, "1 to 12 months after the end of the history.")];
  const { form, alert, result } = runForm({ controls, run, starts: true, signal });
  return element("div", {}, form, alert, result);
}

/** Say whether the page works without a network. */
async function sayOffline() {
  if (!("serviceWorker" in navigator)) return;
  try {
    await navigator.serviceWorker.register("service-worker.js");
    await navigator.serviceWorker.ready;
    const network = /** @type {HTMLElement} */ (document.querySelector("#network"));
    network.textContent = "Models stay here once they are loaded: the page then works offline.";
  } catch {
    // the page works all the same, with a network
  }
}

chooseModels(DEMOS, show);
sayOffline();
