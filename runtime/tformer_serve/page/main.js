// The models of the server, and the form of the one that is chosen.

import { get, useKey } from "./api.js";
import { element } from "./dom.js";
import { formOf } from "./forms.js";

const list = document.querySelector("#models"), main = document.querySelector("#form"), keyForm = document.querySelector("#key-form");

async function load() {
  let models;
  try {
    models = (await get("/v1/models")).data;
  } catch (error) {
    keyForm.hidden = error.status !== 401;
    main.replaceChildren(element("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  keyForm.hidden = true;
  list.replaceChildren(...models.map((model) => element("li", {}, element("button", { type: "button", click: () => choose(model) },
    model.id, element("small", {}, model.tformer.task)))));
  const named = decodeURIComponent(location.hash.slice(1));
  choose(models.find((model) => model.id === named) ?? models[0], false);
}

/** Show the form of a model. moves: whether the focus goes there. */
function choose(model, moves = true) {
  for (const button of list.querySelectorAll("button")) {
    button.setAttribute("aria-current", String(button.firstChild.data === model.id));
  }
  history.replaceState(null, "", `#${encodeURIComponent(model.id)}`);
  document.title = `${model.id} · tformer`;
  main.replaceChildren(element("h2", {}, model.id), ...formOf(model));
  if (moves) main.focus();
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(document.querySelector("#key").value.trim());
  load();
});
load();
