/**
 * Features: the output of the model for each input, one vector if the file pools, else one per token.
 *
 * A file with several outputs gives a Map from their names to arrays.
 */

import type { NumberArray } from "../base/arrays.js";
import { UnsupportedCallError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";
import type { Inputs } from "../preprocess/inputs.js";
import type { Input } from "../preprocess/values.js";
import { Task, type Outputs, type SettingValues, type TaskInput } from "./base.js";

export type Vectors = NumberArray | ReadonlyMap<string, NumberArray>;

const PROMPT = "prompt"; // setting of the manifest: a text that goes before each input text

export class Features extends Task<Vectors, undefined> {
  readonly does: string = "turns each input into numbers";
  readonly call: string = "embed()";
  private readonly prompt: string;

  constructor(manifest: Manifest) {
    super(manifest);
    this.prompt = this.fileSetting(PROMPT, "string") ?? "";
  }

  /** Throw UnsupportedCallError if an input has several vectors. caller: the feature that needs one, for the error. */
  mustPool(caller: string): void {
    const outputs = this.manifest.encode!.outputs;
    if (outputs.length > 1) {
      throw new UnsupportedCallError(
        `this file gives ${outputs.map((output) => output.name).join(", ")} for an input, not one vector, which ` +
          `${caller} needs: take them with predict()`,
      );
    }
    if (outputs[0].shape.length !== 2 || typeof outputs[0].shape[1] !== "number") {
      throw new UnsupportedCallError(
        `this file gives numbers for each position of an input, not a vector for the whole, which ${caller} needs: ` +
          "export it with --pooling mean (Task(pooling='mean')), or take them with predict()",
      );
    }
  }

  settings(values: SettingValues): undefined {
    this.checkKnown(values, []);
  }

  override async readInput(input: Input, inputs: Inputs, truncate: boolean): Promise<TaskInput> {
    const read = this.prompt && typeof input === "string" ? this.prompt + input : input;
    return { requests: [await inputs.singlePassArrays(read, truncate)] };
  }

  makeResult(_reading: TaskInput, [outputs]: readonly Outputs[]): Vectors {
    const specs = this.manifest.encode!.outputs;
    return outputs.length === 1 ? outputs[0] : new Map(specs.map((spec, i) => [spec.name, outputs[i]]));
  }
}

/** Features of images, which are resized, so that none is too long. */
export class ImageFeatures extends Features {
  override readonly does = "turns each image into numbers";
  override readonly canTruncate = false;
}
