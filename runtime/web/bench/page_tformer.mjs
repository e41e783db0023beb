import { Model } from "/tformer/tformer.js";
import { tformerRunner } from "./engines.mjs";

window.open_ = async ({ path, threads }) => {
  window.run = tformerRunner(await Model.load(path, { threads, cache: false })).generate;
};
