/** Extra outputs of each step, which a finished sequence collects although rows moved between the steps. */

import { numberArray, sizeOf, type NumberArray } from "../base/arrays.js";
import type { Shape } from "../format/manifest.js";
import { crop, type Sizes } from "../format/sizes.js";

/** The extra outputs of one row at one step, with a link to the step before. Rows share the steps of their past. */
export class StepHistory {
  constructor(
    readonly previous: StepHistory | undefined,
    readonly values: ReadonlyMap<string, NumberArray>,
  ) {}

  /**
   * Return name → (length, …), the values of the last `length` steps, each cut to the row's sizes.
   *
   * shapes: shape of one row's value at one step, by name, with the names of free axes.
   */
  stackSteps(length: number, sizes: Sizes, shapes: ReadonlyMap<string, Shape>): Map<string, NumberArray> {
    const stacks = new Map<string, NumberArray>();
    for (const name of this.values.keys()) {
      const steps: { data: Float32Array | Float64Array | Int32Array; shape: number[] }[] = [];
      let step: StepHistory | undefined = this;
      for (let i = 0; i < length && step; i++, step = step.previous) {
        const { data, shape } = step.values.get(name)!;
        steps.push(crop(sizes, shapes.get(name)!, data, 0, shape));
      }
      steps.reverse();
      const shape = steps[0].shape;
      const size = sizeOf(shape);
      const stacked = new Float32Array(steps.length * size);
      steps.forEach(({ data }, i) => stacked.set(data, i * size));
      stacks.set(name, numberArray(stacked, [steps.length, ...shape]));
    }
    return stacks;
  }
}

/** Return one row of values that have a batch axis. */
export function rowOf(values: NumberArray, row: number): NumberArray {
  const shape = values.shape.slice(1);
  const size = sizeOf(shape);
  return numberArray(values.data.slice(row * size, (row + 1) * size), shape);
}
