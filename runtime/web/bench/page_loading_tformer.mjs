import { Model } from "/tformer/tformer.js";
import { TEXT } from "./loading_texts.mjs";

const model = await Model.load(`/models/${location.search.slice(1)}`);
const loaded = performance.now(); // from the beginning of the page
const [vector] = await model.embed([TEXT]);
window.result = { loaded, first: performance.now(), vector: [...vector] };
