/** The task of a file that is no text generator. */

import { UnsupportedCallError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";
import type { Task } from "./base.js";
import { Classifier, ImageClassifier } from "./classification.js";
import { Features, ImageFeatures } from "./features.js";

type TaskClass = new (manifest: Manifest) => Task;

const TASKS: Readonly<Record<string, TaskClass>> = {
  "text-classification": Classifier,
  "feature-extraction": Features,
  "sentence-similarity": Features,
  "image-classification": ImageClassifier,
  "image-feature-extraction": ImageFeatures,
};

/** Tasks of the Python runtime that this one does not have yet. */
const ABSENT = ["token-classification", "question-answering", "fill-mask"];

/**
 * Return the task of a single-pass model.
 *
 * A task without a class, or one that needs a tokenizer in a file without one, becomes `Features`, whose results are the
 * outputs of the model. Throw UnsupportedCallError for a task that this runtime does not have.
 */
export function taskOf(manifest: Manifest): Task {
  if (ABSENT.includes(manifest.task) && manifest.tokenizerOf.size) {
    throw new UnsupportedCallError(
      `the JavaScript runtime does not have the task ${manifest.task}: run the model with the Python runtime`,
    );
  }
  return new (Object.hasOwn(TASKS, manifest.task) ? TASKS[manifest.task] : Features)(manifest);
}
