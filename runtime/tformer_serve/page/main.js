// The models of the server, and the form of the one that is chosen.

import { get, useKey } from "./api.js";
import { element, problem } from "./components/elements.js";
import { chooseModels } from "./components/modelChoice.js";
import { formsOf } from "./forms.js";

const main = /** @type {HTMLElement} */ (document.querySelector("#form"));
const keyForm = /** @type {HTMLFormElement} */ (document.querySelector("#key-form"));
const key = /** @type {HTMLInputElement} */ (document.querySelector("#key"));

async function load() {
  /** @type {import("./forms.js").ServedModel[]} */
  let models;
  try {
    models = (await get("/v1/models")).data;
  } catch (error) {
    keyForm.hidden = /** @type {{ status?: number }} */ (error).status !== 401;
    main.replaceChildren(element("div", { role: "alert" }, problem(error)));
    if (!keyForm.hidden) key.focus();
    return;
  }
  keyForm.hidden = true;
  const entries = models.map((model) => ({ id: model.id, title: model.id, note: model.tformer.task, model }));
  chooseModels(entries, ({ model }, place, signal) => place.replaceChildren(...formsOf(model, signal)));
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(key.value.trim());
  load();
});
load();
