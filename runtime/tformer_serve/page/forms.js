// A form for each path that a model has.

import { base64, events, post, postForm } from "./api.js";
import { conversation } from "./components/conversation.js";
import { element, field } from "./components/elements.js";
import { showForecast } from "./components/forecast.js";
import { heatMap } from "./components/heatMap.js";
import { markedText } from "./components/markedText.js";
import { runForm } from "./components/runForm.js";
import { scoreTable } from "./components/scoreTable.js";

/**
 * @typedef {object} Series
 * @property {string[]} columns
 * @property {string[]} targets
 * @property {number | null} horizon
 * @property {number} min_context_length
 * @property {number | null} max_context_length
 *
 * @typedef {object} Facts
 * @property {string} task
 * @property {string[]} paths
 * @property {string} reads
 * @property {boolean} aligns
 * @property {string} mask
 * @property {string} times
 * @property {Series} series
 *
 * @typedef {{ id: string, tformer: Facts }} ServedModel an entry of /v1/models
 *
 * @typedef {(model: ServedModel, signal: AbortSignal) => Node} MakeForm signal: ends the form
 */

/** @type {Record<string, [string, MakeForm]>} */
const FORMS = {
  "/v1/chat/completions": ["Chat", chat],
  "/v1/completions": ["Completion", completion],
  "/v1/generate": ["Alignment", alignment],
  "/v1/classify": ["Classes", classes],
  "/v1/entities": ["Spans", entities],
  "/v1/answer": ["Answer", answer],
  "/v1/fill": ["Masks", fill],
  "/v1/similarity": ["Similarity", similarity],
  "/v1/rerank": ["Ranks", ranks],
  "/v1/audio/transcriptions": ["Transcription", transcription],
  "/v1/forecast": ["Forecast", forecast],
};

/**
 * Return the forms of a model.
 * @param {ServedModel} model
 * @param {AbortSignal} signal ends them
 */
export function formsOf(model, signal) {
  const { paths, aligns, reads } = model.tformer;
  const shown = paths.filter((path) => FORMS[path] && (path !== "/v1/generate" || aligns));
  if (!shown.length || reads === "numbers") {
    const list = paths.join(", ") || "no path";
    return [element("p", {}, `This model has no form here: it reads numbers. The API has ${list} for it.`)];
  }
  return shown.map((path) => {
    const [title, make] = FORMS[path];
    return element("section", { "aria-label": title }, element("h3", {}, title), make(model, signal));
  });
}

/**
 * Return a form with a button. run: fills the element of the result.
 * @param {string} button
 * @param {readonly Node[]} controls
 * @param {AbortSignal} signal
 * @param {(result: HTMLElement, signal: AbortSignal) => Promise<void>} run
 */
function form(button, controls, signal, run) {
  const parts = runForm({ button, controls, signal, run });
  return element("div", {}, parts.form, parts.alert, parts.result);
}

function area(attributes = {}) {
  return element("textarea", { rows: 4, required: true, ...attributes });
}

/** Return the fields of sampling, and a function that reads them. */
function sampling() {
  const temperature = element("input", { type: "number", min: 0, max: 5, step: 0.1, value: 0 });
  const length = element("input", { type: "number", min: 1, step: 1, value: 200 });
  const row = element("div", { class: "row" }, field("Temperature", temperature), field("Maximum tokens", length));
  const read = () => ({ temperature: Number(temperature.value), max_tokens: Number(length.value) });
  return { row, read };
}

/** @type {MakeForm} */
function chat(model, signal) {
  const { row, read } = sampling();
  /** @type {{ role: string, content: string }[]} */
  let messages = [];

  /** @param {string} text @param {AbortSignal} ended */
  async function* reply(text, ended) {
    const conversed = messages;
    const question = { role: "user", content: text };
    const body = { model: model.id, messages: [...conversed, question], ...read() };
    let content = "";
    for await (const event of events("/v1/chat/completions", body, ended)) {
      const piece = event.choices[0]?.delta.content ?? "";
      content += piece;
      yield piece;
    }
    conversed.push(question, { role: "assistant", content });
  }

  const clear = () => {
    messages = [];
  };
  const hint = "Ctrl and Enter send it.";
  return conversation({
    name: model.id,
    input: area(),
    label: "Message",
    hint,
    options: [row],
    answer: reply,
    clear,
    signal,
  });
}

/** @type {MakeForm} */
function completion(model, signal) {
  const text = area();
  const { row, read } = sampling();
  return form("Generate", [field("Text", text), row], signal, async (result, ended) => {
    const output = element("p", { class: "text" });
    result.replaceChildren(output);
    const body = { model: model.id, prompt: text.value, ...read() };
    for await (const event of events("/v1/completions", body, ended)) output.append(event.choices[0]?.text ?? "");
  });
}

/** @type {MakeForm} */
function alignment(model, signal) {
  const text = area();
  return form("Align", [field("Source", text)], signal, async (result, ended) => {
    const body = { model: model.id, input: text.value, cross_attentions: true };
    const [best] = (await post("/v1/generate", body, ended)).results;
    const [source, tokens] = best.labels;
    const output = element("p", { class: "text" }, best.text);
    result.replaceChildren(output, heatMap(source, tokens, best.cross_attentions));
  });
}

/** @type {MakeForm} */
function classes(model, signal) {
  if (model.tformer.reads === "images") return imageClasses(model, signal);
  const text = area();
  return form("Classify", [field("Text", text)], signal, async (result, ended) => {
    const body = { model: model.id, inputs: [text.value], top_k: 10 };
    result.replaceChildren(classTable((await post("/v1/classify", body, ended)).results[0]));
  });
}

/** @typedef {{ label: string, score: number }} Class */

/** @param {Class & { top?: Class[] }} result */
function classTable(result) {
  const top = result.top ?? [result];
  return scoreTable(
    "The likeliest labels",
    "Label",
    top.map(({ label, score }) => [label, score]),
  );
}

/** @type {MakeForm} */
function imageClasses(model, signal) {
  const input = element("input", { type: "file", accept: "image/*", required: true });
  return form("Classify", [field("Image", input)], signal, async (result, ended) => {
    const file = fileOf(input);
    const body = { model: model.id, inputs: [{ base64: await base64(file) }], top_k: 10 };
    const { results } = await post("/v1/classify", body, ended);
    const image = { class: "preview", alt: `The image ${file.name}`, src: urlOf(file, signal) };
    result.replaceChildren(element("img", image), classTable(results[0]));
  });
}

/** @param {HTMLInputElement} input */
function fileOf(input) {
  const file = input.files?.[0];
  if (!file) throw new Error("choose a file");
  return file;
}

/**
 * Return an address of a file that holds while its form is shown.
 * @param {File} file
 * @param {AbortSignal} signal
 */
function urlOf(file, signal) {
  const url = URL.createObjectURL(file);
  signal.addEventListener("abort", () => URL.revokeObjectURL(url));
  return url;
}

/** @type {MakeForm} */
function entities(model, signal) {
  const text = area();
  return form("Label", [field("Text", text)], signal, async (result, ended) => {
    const texts = [text.value];
    /** @type {{ start: number, end: number, label: string, text: string, score: number }[]} */
    const spans = (await post("/v1/entities", { model: model.id, texts }, ended)).results[0].spans;
    const table = () =>
      scoreTable(
        "Spans",
        "Label and text",
        spans.map((one) => [`${one.label}: ${one.text}`, one.score]),
      );
    result.replaceChildren(
      markedText(texts[0], spans),
      spans.length ? table() : element("p", {}, "No span has a label."),
    );
  });
}

/** @type {MakeForm} */
function answer(model, signal) {
  const question = element("input", { required: true });
  const context = area();
  return form("Answer", [field("Question", question), field("Context", context)], signal, async (result, ended) => {
    const text = context.value;
    const body = { model: model.id, pairs: [[question.value, text]], top_k: 3 };
    const [best] = (await post("/v1/answer", body, ended)).results;
    /** @type {{ text: string, score: number }[]} */
    const answers = [best, ...(best.alternatives ?? [])];
    const spans = best.text ? [{ start: best.start, end: best.end, label: "answer" }] : [];
    const table = scoreTable(
      "Answers",
      "Text",
      answers.map((one) => [one.text, one.score]),
    );
    result.replaceChildren(markedText(text, spans), table);
  });
}

/** @type {MakeForm} */
function fill(model, signal) {
  const text = area();
  const { mask } = model.tformer;
  const insert = () => {
    text.setRangeText(mask, text.selectionStart, text.selectionEnd, "end");
    text.focus();
  };
  const button = element("button", { type: "button", class: "plain", click: insert }, `Insert ${mask}`);
  const fields = [
    field("Text", text, `${mask} stands for each word to find.`),
    element("div", { class: "row" }, button),
  ];
  return form("Fill in", fields, signal, async (result, ended) => {
    const [found] = (await post("/v1/fill", { model: model.id, texts: [text.value], top_k: 8 }, ended)).results;
    /** @type {{ token: string, score: number }[][]} */
    const masks = found.masks;
    const tables = masks.map((candidates, i) =>
      scoreTable(
        `Mask ${i + 1}`,
        "Token",
        candidates.map(({ token, score }) => [token, score]),
      ),
    );
    result.replaceChildren(...tables);
  });
}

/** @type {MakeForm} */
function similarity(model, signal) {
  if (model.tformer.reads !== "text") return element("p", {}, "The form is for texts: the API compares images.");
  const one = area();
  const other = area();
  return form("Compare", [field("One text", one), field("Another", other)], signal, async (result, ended) => {
    const body = { model: model.id, pairs: [[one.value, other.value]] };
    const { cosines } = await post("/v1/similarity", body, ended);
    result.replaceChildren(scoreTable("Cosine of the vectors", "Pair", [["one and another", cosines[0]]]));
  });
}

/** @type {MakeForm} */
function ranks(model, signal) {
  if (model.tformer.reads !== "text") return element("p", {}, "The form is for texts.");
  const query = element("input", { required: true });
  const documents = area();
  const fields = [field("Query", query), field("Documents", documents, "One a line.")];
  return form("Order", fields, signal, async (result, ended) => {
    const lines = documents.value
      .split("\n")
      .map((line) => line.trim())
      .filter(Boolean);
    const body = { model: model.id, query: query.value, documents: lines };
    /** @type {{ index: number, relevance_score: number }[]} */
    const results = (await post("/v1/rerank", body, ended)).results;
    const rows = results.map((one) => /** @type {const} */ ([lines[one.index], one.relevance_score]));
    result.replaceChildren(scoreTable("By relevance", "Document", rows));
  });
}

/** @type {MakeForm} */
function transcription(model, signal) {
  const input = element("input", { type: "file", accept: "audio/*", required: true });
  return form("Transcribe", [field("Recording", input, "WAV, FLAC, OGG or MP3.")], signal, async (result, ended) => {
    const file = fileOf(input);
    const { times } = model.tformer;
    const fields = { model: model.id, file, response_format: "verbose_json", "timestamp_granularities[]": times };
    const found = await postForm("/v1/audio/transcriptions", fields, ended);
    /** @type {{ start: number, end: number, text?: string, word?: string }[]} */
    const parts = found.segments ?? found.words;
    const player = element("audio", {
      controls: true,
      src: urlOf(file, signal),
      "aria-label": `The recording ${file.name}`,
    });
    const buttons = parts.map(({ start, end, text, word }) => {
      const play = () => {
        player.currentTime = start;
        player.play();
      };
      const times = element("small", {}, `${start.toFixed(2)} – ${end.toFixed(2)} s`);
      return element("button", { type: "button", click: play }, times, text ?? word ?? "");
    });
    player.addEventListener("timeupdate", () => {
      for (const [i, { start, end }] of parts.entries()) {
        buttons[i].setAttribute("aria-current", String(start <= player.currentTime && player.currentTime < end));
      }
    });
    const items = buttons.map((button) => element("li", {}, button));
    const list = element("ul", { class: "times", "aria-label": "Parts with their times" }, ...items);
    result.replaceChildren(player, element("p", { class: "text" }, found.text), list);
  });
}

/** @type {MakeForm} */
function forecast(model, signal) {
  const { columns, targets, horizon, min_context_length: shortest, max_context_length: longest } = model.tformer.series;
  const numbers = area({ class: "numbers", spellcheck: "false" });
  const steps = element("input", { type: "number", min: 1, step: 1, value: horizon ?? 12 });
  const most = longest ? ` and at most ${longest}` : "";
  const room = longest === shortest ? `${shortest} rows` : `at least ${shortest} rows${most}`;
  const width = columns.length === 1 ? "one number" : `${columns.length} numbers`;
  const hint = `A row for each step, with ${width} (${columns.join(", ")}): ${room}. Longer histories are cut to their end.`;
  const fields = [field("History", numbers, hint), element("div", { class: "row" }, field("Steps", steps))];
  return form("Forecast", fields, signal, async (result, ended) => {
    const history = rowsOf(numbers.value, columns.length);
    const body = { model: model.id, histories: [history], horizon: Number(steps.value), truncate: true };
    /** @type {number[][]} */
    const rows = (await post("/v1/forecast", body, ended)).results[0].forecast;
    const shown = targets.map((name, i) => {
      const column = columns.indexOf(name);
      const values = { history: history.map((row) => row[column]), forecast: rows.map((row) => row[i]) };
      return { title: name, heading: name, ...values };
    });
    showForecast(result, "Step", shown);
  });
}

/**
 * Return rows of numbers. Throw the place of a wrong one. One column may stand in any number of lines.
 * @param {string} text
 * @param {number} width
 */
function rowsOf(text, width) {
  const lines = text.split("\n").map((line) => line.split(/[\s,;]+/).filter(Boolean));
  const rows = width === 1 ? lines.flat().map((word) => [word]) : lines.filter((line) => line.length);
  return rows.map((row, i) => {
    const values = row.map(Number);
    if (values.length !== width || values.some((value) => !Number.isFinite(value))) {
      const needed = width === 1 ? "a number" : `${width} numbers`;
      throw new Error(`row ${i + 1} is ${row.join(" ").slice(0, 60)}: it needs ${needed}`);
    }
    return values;
  });
}
