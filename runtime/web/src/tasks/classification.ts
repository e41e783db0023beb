/**
 * Classification: the probability of each label from the logits z, as in transformers' pipeline.
 *
 * p = softmax(z)            single-label: exactly one label is true
 * p = 1 / (1 + exp(−z))     multi-label: any number of labels is true; also for a model with a single label
 * z                         regression
 */

import { checkInt } from "../base/validation.js";
import { MULTI_LABEL, REGRESSION } from "../format/manifest.js";
import { Task, type Outputs, type SettingValues, type TaskInput } from "./base.js";

/** The labels of an input. */
export interface Classification {
  /** The most probable label. */
  readonly label: string;
  /** Its probability; the output of a regression. */
  readonly score: number;
  /** The probabilities of all labels, in the order of the model. */
  readonly scores: Readonly<Record<string, number>>;
  /** The `topK` most probable labels and their scores. */
  readonly top: readonly (readonly [label: string, score: number])[];
}

interface Settings {
  readonly topK: number;
}

export class Classifier extends Task<Classification, Settings> {
  readonly does: string = "classifies its inputs";
  readonly call: string = "classify()";

  settings(values: SettingValues): Settings {
    this.checkKnown(values, ["topK"]);
    return { topK: values["topK"] === undefined ? 1 : checkInt("topK", values["topK"]) };
  }

  makeResult(_reading: TaskInput, [[output]]: readonly Outputs[], { topK }: Settings): Classification {
    const scores = this.scores(Float64Array.from(output.data));
    const names = this.meaning.labels;
    const labelled = Array.from(scores, (score, i) => [names.length ? names[i] : `LABEL_${i}`, score] as const);
    const top = [...labelled].sort((one, other) => other[1] - one[1]).slice(0, topK);
    const [label, score] = top[0];
    return { label, score, scores: Object.fromEntries(labelled), top };
  }

  private scores(logits: Float64Array): Float64Array {
    const { problemType } = this.meaning;
    if (problemType === REGRESSION) return logits;
    if (problemType === MULTI_LABEL) return logits.map((logit) => 1 / (1 + Math.exp(-logit)));
    return softmax(logits);
  }
}

/** Classification of images, which are resized, so that none is too long. */
export class ImageClassifier extends Classifier {
  override readonly does = "classifies images";
  override readonly canTruncate = false;
}

/** Return probabilities that sum to 1. */
export function softmax(logits: Float64Array): Float64Array {
  let top = -Infinity;
  for (const logit of logits) top = Math.max(top, logit);
  const weights = logits.map((logit) => Math.exp(logit - top));
  let sum = 0;
  for (const weight of weights) sum += weight;
  return weights.map((weight) => weight / sum);
}
