/** The task of a file that does not generate text. The code of a task is loaded for files that have it. */

import { AUDIO, stepFeatures, type Manifest } from "../format/manifest.js";
import type { TextCode } from "../preprocess/textReader.js";
import type { Task } from "./base.js";

type TaskClass = new (manifest: Manifest, textCodes: readonly TextCode[]) => Task;

const SPEECH = "automatic-speech-recognition";

const features = async (): Promise<TaskClass> => (await import("./features.js")).Features;

const TASKS: Readonly<Record<string, () => Promise<TaskClass>>> = {
  "text-classification": async () => (await import("./classification.js")).Classifier,
  "feature-extraction": features,
  "sentence-similarity": features,
  "image-classification": async () => (await import("./classification.js")).ImageClassifier,
  "image-feature-extraction": async () => (await import("./features.js")).ImageFeatures,
  "token-classification": async () => (await import("./tokenClassification.js")).TokenClassification,
  "question-answering": async () => (await import("./questionAnswering.js")).QuestionAnswering,
  "fill-mask": async () => (await import("./fillMask.js")).FillMask,
  [SPEECH]: async () => (await import("./ctcRecognition.js")).CtcRecognition,
};

const NEEDS_TOKENIZER = ["token-classification", "question-answering", "fill-mask"];

/** Return whether a file transcribes speech by generating text. */
export function isSpeechToText(manifest: Manifest): boolean {
  const reads = [...manifest.preprocessing.values()].some(({ kind }) => kind === AUDIO);
  const { decode } = manifest;
  return decode !== undefined && !stepFeatures(decode).length && manifest.task === SPEECH && reads;
}

/**
 * Return the task of a single-pass model.
 *
 * A task without a class becomes `Features`, whose results are the outputs of the model; so does a task that needs a
 * tokenizer, in a file without one. textCodes: the tokenizers of the file. Throw ModelFileError for damaged settings of a task.
 */
export async function taskOf(manifest: Manifest, textCodes: readonly TextCode[]): Promise<Task> {
  const isRaw = NEEDS_TOKENIZER.includes(manifest.task) && !manifest.tokenizerOf.size;
  const load = Object.hasOwn(TASKS, manifest.task) && !isRaw ? TASKS[manifest.task] : features;
  return new (await load())(manifest, textCodes);
}
