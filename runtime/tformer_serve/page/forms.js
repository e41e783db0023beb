// A form for each path that a model has.

import { base64, events, post, postForm } from "./api.js";
import { element, field, scores, spanned } from "./dom.js";
import { heatMap, plot, short } from "./plot.js";

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

/** Return the elements of a model's forms. */
export function formOf(model) {
  const paths = model.tformer.paths.filter((path) => FORMS[path] && (path !== "/v1/generate" || model.tformer.aligns));
  const readable = model.tformer.reads !== "numbers";
  if (!paths.length || !readable) {
    const list = model.tformer.paths.join(", ") || "no path";
    return [element("p", {}, `This model has no form here: it reads numbers. The API has ${list} for it.`)];
  }
  return paths.map((path) => {
    const [title, make] = FORMS[path];
    return element("section", { "aria-label": title }, element("h3", {}, title), make(model));
  });
}

/** Return a form that runs once at a time. controls: its elements. run(result, signal): fills the element of the result. */
function runner(label, controls, run, result = element("div", { class: "result", "aria-live": "polite" })) {
  const start = element("button", {}, label);
  const stop = element("button", { type: "button", class: "plain", disabled: true, click: () => controller?.abort() }, "Stop");
  const problem = element("div", { role: "alert" });
  let controller = null;
  const form = element("form", { submit: async (event) => {
    event.preventDefault();
    if (controller) return;
    controller = new AbortController();
    start.disabled = true;
    stop.disabled = false;
    problem.replaceChildren();
    result.setAttribute("aria-busy", "true");
    try {
      await run(result, controller.signal);
    } catch (error) {
      if (error.name !== "AbortError") problem.replaceChildren(element("p", { class: "error" }, error.message));
    } finally {
      result.setAttribute("aria-busy", "false");
      controller = null;
      start.disabled = false;
      stop.disabled = true;
    }
  } }, ...controls, element("div", { class: "row" }, start, stop));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return element("div", {}, form, problem, result);
}

function area(attributes = {}) {
  return element("textarea", { rows: 4, required: true, ...attributes });
}

/** Return the fields of sampling, and a function that reads them. */
function sampling() {
  const temperature = element("input", { type: "number", min: 0, max: 5, step: 0.1, value: 0 });
  const length = element("input", { type: "number", min: 1, step: 1, value: 200 });
  const row = element("div", { class: "row" }, field("Temperature", temperature), field("Maximum tokens", length));
  return [row, () => ({ temperature: Number(temperature.value), max_tokens: Number(length.value) })];
}

function chat(model) {
  const text = area(), [options, read] = sampling();
  const log = element("div", { class: "log result", role: "log", "aria-label": "Conversation", tabindex: 0 });
  const messages = [];
  const show = (role, content) => {
    const body = element("span", {}, content);
    log.append(element("div", { class: `message ${role}` }, element("b", {}, role === "user" ? "You" : model.id), body));
    return body;
  };
  const clear = element("button", { type: "button", class: "plain", click: () => { messages.length = 0; log.replaceChildren(); } }, "New conversation");
  const run = async (_, signal) => {
    const question = { role: "user", content: text.value };
    show("user", text.value);
    const reply = show("assistant", "");
    text.value = "";
    const body = { model: model.id, messages: [...messages, question], ...read() };
    for await (const event of events("/v1/chat/completions", body, signal)) {
      reply.append(event.choices[0]?.delta.content ?? "");
      log.scrollTop = log.scrollHeight;
    }
    messages.push(question, { role: "assistant", content: reply.textContent });
  };
  const fields = [field("Message", text, "Ctrl and Enter send it."), options];
  return element("div", {}, runner("Send", fields, run, log), element("div", { class: "row" }, clear));
}

function completion(model) {
  const text = area(), [options, read] = sampling();
  const run = async (result, signal) => {
    const output = element("p", { class: "text" });
    result.replaceChildren(output);
    const body = { model: model.id, prompt: text.value, ...read() };
    for await (const event of events("/v1/completions", body, signal)) output.append(event.choices[0]?.text ?? "");
  };
  return runner("Generate", [field("Text", text), options], run);
}

function alignment(model) {
  const text = area();
  return runner("Align", [field("Source", text)], async (result, signal) => {
    const body = { model: model.id, input: text.value, cross_attentions: true };
    const [best] = (await post("/v1/generate", body, signal)).results;
    const [source, tokens] = best.labels;
    result.replaceChildren(element("p", { class: "text" }, best.text), heatMap(source, tokens, best.cross_attentions));
  });
}

function classes(model) {
  if (model.tformer.reads === "pictures") return pictureClasses(model);
  const text = area();
  return runner("Classify", [field("Text", text)], async (result, signal) => {
    const answer = await post("/v1/classify", { model: model.id, inputs: [text.value], top_k: 10 }, signal);
    result.replaceChildren(classTable(answer.results[0]));
  });
}

function classTable(result) {
  const top = result.top ?? [result];
  return scores("The likeliest labels", "Label", top.map((one) => [one.label, one.score]));
}

function pictureClasses(model) {
  const picture = element("input", { type: "file", accept: "image/*", required: true });
  return runner("Classify", [field("Picture", picture)], async (result, signal) => {
    const [file] = picture.files;
    const image = element("img", { class: "preview", alt: `The picture ${file.name}`, src: URL.createObjectURL(file) });
    const body = { model: model.id, inputs: [{ base64: await base64(file) }], top_k: 10 };
    const answer = await post("/v1/classify", body, signal);
    result.replaceChildren(image, classTable(answer.results[0]));
  });
}

function entities(model) {
  const text = area();
  return runner("Label", [field("Text", text)], async (result, signal) => {
    const answer = await post("/v1/entities", { model: model.id, texts: [text.value] }, signal);
    const { spans } = answer.results[0];
    const rows = spans.map((span) => [`${span.label}: ${span.text}`, span.score]);
    result.replaceChildren(spanned(text.value, spans), spans.length ? scores("Spans", "Label and text", rows) : element("p", {}, "No span has a label."));
  });
}

function answer(model) {
  const question = element("input", { required: true }), context = area();
  return runner("Answer", [field("Question", question), field("Context", context)], async (result, signal) => {
    const body = { model: model.id, pairs: [[question.value, context.value]], top_k: 3 };
    const [best] = (await post("/v1/answer", body, signal)).results;
    const rows = [best, ...(best.alternatives ?? [])].map((one) => [one.text, one.score]);
    const span = { start: best.start, end: best.end, label: "answer" };
    result.replaceChildren(spanned(context.value, best.text ? [span] : []), scores("Answers", "Text", rows));
  });
}

function fill(model) {
  const text = area(), mask = model.tformer.mask;
  const insert = element("button", { type: "button", class: "plain", click: () => { text.setRangeText(mask, text.selectionStart, text.selectionEnd, "end"); text.focus(); } }, `Insert ${mask}`);
  const fields = [field("Text", text, `${mask} stands for each word to find.`), element("div", { class: "row" }, insert)];
  return runner("Fill in", fields, async (result, signal) => {
    const [{ masks }] = (await post("/v1/fill", { model: model.id, texts: [text.value], top_k: 8 }, signal)).results;
    result.replaceChildren(...masks.map((candidates, i) => scores(`Mask ${i + 1}`, "Token", candidates.map((one) => [one.token, one.score]))));
  });
}

function similarity(model) {
  if (model.tformer.reads !== "text") return element("p", {}, "The form is for texts: the API compares pictures.");
  const one = area(), other = area();
  return runner("Compare", [field("One text", one), field("Another", other)], async (result, signal) => {
    const { cosines } = await post("/v1/similarity", { model: model.id, pairs: [[one.value, other.value]] }, signal);
    result.replaceChildren(scores("Cosine of the vectors", "Pair", [["one and another", cosines[0]]]));
  });
}

function ranks(model) {
  if (model.tformer.reads !== "text") return element("p", {}, "The form is for texts.");
  const query = element("input", { required: true }), documents = area();
  return runner("Order", [field("Query", query), field("Documents", documents, "One a line.")], async (result, signal) => {
    const lines = documents.value.split("\n").map((line) => line.trim()).filter(Boolean);
    const { results } = await post("/v1/rerank", { model: model.id, query: query.value, documents: lines }, signal);
    result.replaceChildren(scores("By relevance", "Document", results.map((one) => [lines[one.index], one.relevance_score])));
  });
}

function transcription(model) {
  const sound = element("input", { type: "file", accept: "audio/*", required: true });
  return runner("Transcribe", [field("Sound", sound, "WAV, FLAC, OGG or MP3.")], async (result, signal) => {
    const [file] = sound.files;
    const { times } = model.tformer;
    const fields = { model: model.id, file, response_format: "verbose_json", "timestamp_granularities[]": times };
    const found = await postForm("/v1/audio/transcriptions", fields, signal);
    const timed = found.segments ?? found.words.map((one) => ({ ...one, text: one.word }));
    const player = element("audio", { controls: true, src: URL.createObjectURL(file), "aria-label": `The sound ${file.name}` });
    const parts = timed.map((part) => element("button", { type: "button", click: () => { player.currentTime = part.start; player.play(); } },
      element("small", {}, `${part.start.toFixed(2)} – ${part.end.toFixed(2)} s`), part.text));
    player.addEventListener("timeupdate", () => timed.forEach((part, i) =>
      parts[i].setAttribute("aria-current", String(part.start <= player.currentTime && player.currentTime < part.end))));
    result.replaceChildren(player, element("p", { class: "text" }, found.text),
      element("ul", { class: "times", "aria-label": "Parts with their times" }, ...parts.map((part) => element("li", {}, part))));
  });
}

function forecast(model) {
  const { columns, targets, horizon, min_context_length: shortest, max_context_length: longest } = model.tformer.series;
  const numbers = area({ class: "numbers", spellcheck: "false" });
  const steps = element("input", { type: "number", min: 1, step: 1, value: horizon ?? 12 });
  const room = longest === shortest ? `${shortest} rows` : `at least ${shortest} rows${longest ? ` and at most ${longest}` : ""}`;
  const hint = `A row for each step, with ${columns.length === 1 ? "one number" : `${columns.length} numbers`} (${columns.join(", ")}): ${room}. Longer histories are cut to their end.`;
  const fields = [field("History", numbers, hint), element("div", { class: "row" }, field("Steps", steps))];
  return runner("Forecast", fields, async (result, signal) => {
    const history = rowsOf(numbers.value, columns.length);
    const body = { model: model.id, histories: [history], horizon: Number(steps.value), truncate: true };
    const [found] = (await post("/v1/forecast", body, signal)).results;
    const plots = targets.map((name, i) => {
      const column = columns.indexOf(name);
      return plot(name, history.map((row) => row[column]), found.forecast.map((row) => row[i]));
    });
    const head = element("tr", {}, element("th", { scope: "col" }, "Step"), ...targets.map((name) => element("th", { scope: "col" }, name)));
    const rows = found.forecast.map((row, i) => element("tr", {}, element("th", { scope: "row" }, `+${i + 1}`),
      ...row.map((value) => element("td", {}, short(value)))));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
    result.replaceChildren(...plots, element("details", {}, element("summary", {}, "The forecast as a table"), table));
  });
}

/** Return rows of numbers. Throw the place of a wrong one. One column may stand in any number of lines. */
function rowsOf(text, width) {
  const lines = text.split("\n").map((line) => line.split(/[\s,;]+/).filter(Boolean)).filter((line) => line.length);
  const rows = width === 1 ? lines.flat().map((word) => [word]) : lines;
  return rows.map((row, i) => {
    const values = row.map(Number);
    if (values.length !== width || values.some((value) => !Number.isFinite(value))) {
      throw new Error(`row ${i + 1} is ${row.join(" ").slice(0, 60)}: it needs ${width === 1 ? "a number" : `${width} numbers`}`);
    }
    return values;
  });
}
