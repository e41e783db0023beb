/** The script of the pages of `browser.test.ts` and `webgpu.test.ts`: it loads the bundle and compares models with their golden files. */

import type * as tformer from "../../src/index.js";
import { differences as allDifferences } from "../support/goldenReplay.js";

declare global {
  interface Window {
    replay: typeof replay;
    loadTformer: typeof loadTformer;
  }
}

/** Return the bundle of scripts/bundle.mjs, and no copy in this script. */
async function loadTformer(): Promise<typeof tformer> {
  const bundle = "/bundle/tformer.js";
  return import(bundle);
}

/** Return how the results of a model differ from its golden file, and facts about the page and the download. */
async function replay(name: string, options: tformer.LoadOptions = {}) {
  const { Model } = await loadTformer();
  const golden: unknown = await (await fetch(`/models/${name}.golden.json`)).json();
  const progress: [number, number][] = [];
  const model = await Model.load(`/models/${name}.onnx`, {
    worker: false,
    ...options,
    onProgress: ({ loaded, total }) => progress.push([loaded, total]),
  });
  const differences = await allDifferences(model, golden);
  const { usedBytes } = model.memory();
  await model.dispose();
  return {
    differences,
    device: model.device,
    usedBytes,
    lastProgress: progress[progress.length - 1],
    isolated: crossOriginIsolated,
  };
}

window.replay = replay;
window.loadTformer = loadTformer;
document.title = "ready";
