/**
 * Series of numbers: normalize a history for a model, and convert a forecast back to the units of the history.
 *
 * fixed      x̂ = (x - mean) / scale, with the mean and scale of each column from the file
 * instance   x̂ = (x - mean) / √(variance + ε), with the mean and variance of each column of the history (Kim et al. 2022,
 *            "Reversible Instance Normalization for Accurate Time-Series Forecasting against Distribution Shift")
 */

import type { NumberArray } from "../base/arrays.js";
import { InputError, ModelFileError, OptionError } from "../base/errors.js";
import { checkInt, shown } from "../base/validation.js";
import { SERIES, type Manifest } from "../format/manifest.js";
import {
  boolean,
  count,
  either,
  index,
  integer,
  list,
  nullable,
  number,
  object,
  oneOf,
  readTyped,
  text,
  type Reader,
} from "../format/typedJson.js";

const NONE = "none";
const FIXED = "fixed";
const INSTANCE = "instance";
const MAX_FEATURES = 1 << 20;
const VARIANCE_EPSILON = 1e-5; // as in the code of the paper
const DAMAGED = "the series settings of the file are damaged";

/**
 * input: the name of the input of the history.
 * features: the number of its columns.
 * columns: their names, in order; empty if they have none.
 * targets: the indices of the forecast columns, whose forecasts are fed back.
 * feedback: the output of the model for each target.
 * horizon: the default number of steps; undefined if the caller must set it.
 * atOnce: whether one run returns the whole horizon, which is then the maximum.
 * begin: the first input of a decoder: the targets of that many last rows of the history, or rows of numbers that are not
 *     normalized. 0 for a model without a decoder, and for a decoder that reads the history.
 * normalize: NONE, FIXED or INSTANCE.
 * mean, scale: of each column, for FIXED.
 * minContextLength, maxContextLength: the minimum and maximum number of rows of a history.
 * ragged: whether histories of different lengths can be batched.
 */
const seriesSettings = object({
  input: text,
  features: integer(1, MAX_FEATURES),
  columns: list(text),
  targets: list(index),
  feedback: list(index),
  horizon: nullable(count),
  atOnce: boolean,
  begin: either(index, list(list(number))),
  normalize: oneOf(NONE, FIXED, INSTANCE),
  mean: list(number),
  scale: list(number),
  minContextLength: count,
  maxContextLength: nullable(count),
  ragged: boolean,
});

/** How a model reads a history and forecasts. The fields are those of the manifest, and the name of the input. */
export type SeriesSettings = typeof seriesSettings extends Reader<infer T> ? T : never;

/** Numbers of rows and columns: an array with a shape, rows of numbers, or numbers for one column. */
export type History = NumberArray | ArrayLike<number> | readonly ArrayLike<number>[];

/**
 * A normalized history.
 *
 * values: (time, columns).
 * mean, scale: of each target, to denormalize a forecast.
 */
export interface SeriesWindow {
  readonly values: { readonly data: Float32Array; readonly shape: readonly [rows: number, columns: number] };
  readonly mean: Float64Array;
  readonly scale: Float64Array;
}

/** Reads the history of a model, and denormalizes its forecasts. */
export class SeriesPreprocessor {
  constructor(readonly settings: SeriesSettings) {}

  /** Return the series of a manifest; undefined without one. Throw ModelFileError for a damaged entry. */
  static of(manifest: Pick<Manifest, "preprocessing">): SeriesPreprocessor | undefined {
    for (const [input, entry] of manifest.preprocessing) {
      if (entry.kind !== SERIES) continue;
      const settings = readTyped(seriesSettings, { input, ...Object.fromEntries(entry.numbers) }, DAMAGED);
      const problem = contradiction(settings);
      if (problem) throw new ModelFileError(`${DAMAGED} (${problem}): export the model again`);
      return new SeriesPreprocessor(settings);
    }
    return undefined;
  }

  /** The names of the targets, or their numbers from 1. */
  get names(): string[] {
    const { columns, targets } = this.settings;
    return targets.map((target) => (columns.length ? columns[target] : String(target + 1)));
  }

  /**
   * Check and normalize a history. Cost: linear in its length.
   *
   * history: (time, columns), or (time,) for one column.
   * room: rows that the decoder has left for the history; undefined if only the file sets a limit.
   * truncate: cut a history that is too long to its last rows.
   * Throw InputError for a history that the model cannot read.
   */
  window(history: History, room?: number, truncate = false): SeriesWindow {
    const { features, columns, targets, minContextLength, maxContextLength } = this.settings;
    let values = this.numbers(history);
    let rows = values.length / features;
    const maxRows = Math.min(maxContextLength ?? Infinity, room ?? Infinity);
    const dropped = truncate ? Math.max(0, rows - maxRows) : 0;
    values = values.subarray(dropped * features);
    rows -= dropped;
    if (rows > maxRows) {
      throw new InputError(
        `the history has ${rows} rows and the model reads at most ${maxRows}: give the last of them, or have it cut ` +
          "with truncate: true",
      );
    }
    if (rows < minContextLength) {
      throw new InputError(`the history has ${rows} rows and the model reads ${minContextLength} at least`);
    }
    const place = values.findIndex((value) => !Number.isFinite(value));
    if (place >= 0) {
      const column = place % features;
      const name = columns.length ? shown(columns[column]) : column + 1;
      throw new InputError(
        `row ${Math.floor(place / features) + dropped + 1} of column ${name} is ${values[place]}: fill gaps before, as ` +
          "suits the data",
      );
    }
    const { mean, scale } = this.meanAndScale(values, rows);
    const normalized = Float32Array.from(values, (value, i) => (value - mean[i % features]) / scale[i % features]);
    if (![normalized, mean, scale].every((numbers) => numbers.every(Number.isFinite))) {
      throw new InputError("the history holds numbers that are too large for float32");
    }
    return {
      values: { data: normalized, shape: [rows, features] },
      mean: Float64Array.from(targets, (target) => mean[target]),
      scale: Float64Array.from(targets, (target) => scale[target]),
    };
  }

  /** Return the first input of a decoder, (rows, targets). */
  decoderStart(window: SeriesWindow): NumberArray {
    const { begin, targets, features } = this.settings;
    if (typeof begin !== "number")
      return { data: Float32Array.from(begin.flat()), shape: [begin.length, targets.length] };
    const [rows] = window.values.shape;
    const first = begin ? Math.max(0, rows - begin) : 0; // as the slice [-begin:] of Python
    const numbers: number[] = [];
    for (let row = first; row < rows; row++) {
      for (const target of targets) numbers.push(window.values.data[row * features + target]);
    }
    return { data: Float32Array.from(numbers), shape: [rows - first, targets.length] };
  }

  /**
   * Return a forecast (horizon, targets) in the units of the history.
   *
   * Throw InputError for a forecast that float32 cannot hold in these units.
   */
  denormalize(values: NumberArray, { mean, scale }: SeriesWindow): NumberArray {
    const columns = mean.length;
    const data = Float32Array.from(values.data, (value, i) => value * scale[i % columns] + mean[i % columns]);
    if (values.data.every(Number.isFinite) && !data.every(Number.isFinite)) {
      throw new InputError("the forecast is too large for float32: give the history in larger units");
    }
    return { data, shape: values.shape };
  }

  /** Return the number of steps to forecast. Throw OptionError for an impossible horizon. */
  steps(horizon: number | undefined): number {
    const steps = horizon ?? this.settings.horizon;
    if (steps === undefined) {
      throw new OptionError("the file has no default horizon: set horizon, the number of steps to forecast", "horizon");
    }
    checkInt("horizon", steps);
    if (this.settings.atOnce && this.settings.horizon !== undefined && steps > this.settings.horizon) {
      throw new OptionError(
        `horizon must be at most ${this.settings.horizon}, the number of steps that the model returns, not ${steps}`,
        "horizon",
      );
    }
    return steps;
  }

  /** Return the numbers of a history, row by row. */
  private numbers(history: History): Float64Array {
    const { features, columns } = this.settings;
    const { data, shape } = asArray(history, features);
    if (shape.length === 1 && features === 1) return data;
    if (shape.length !== 2 || shape[1] !== features) {
      const names = columns.length ? ` (${columns.join(", ")})` : "";
      throw new InputError(
        `the history has the shape (${shape.join(", ")}): the model reads (time, ${features}), ${features} numbers a ` +
          `row${names}`,
      );
    }
    return data;
  }

  private meanAndScale(values: Float64Array, rows: number): { mean: Float64Array; scale: Float64Array } {
    const { normalize, features, mean, scale } = this.settings;
    if (normalize === FIXED) return { mean: Float64Array.from(mean), scale: Float64Array.from(scale) };
    if (normalize === NONE) return { mean: new Float64Array(features), scale: new Float64Array(features).fill(1) };
    const means = columnSums(values, features).map((sum) => sum / rows);
    const squares = values.map((value, i) => (value - means[i % features]) ** 2);
    const scales = columnSums(squares, features).map((sum) => Math.sqrt(sum / rows + VARIANCE_EPSILON));
    return { mean: means, scale: scales };
  }
}

/** Return the sum of each column. */
function columnSums(values: Float64Array, columns: number): Float64Array {
  const sums = new Float64Array(columns);
  for (let i = 0; i < values.length; i++) sums[i % columns] += values[i];
  return sums;
}

/** Return a history as an array. Throw InputError for another value. */
function asArray(history: History, features: number): { data: Float64Array; shape: readonly number[] } {
  if (typeof history === "object" && history !== null && "shape" in history && "data" in history) {
    return { data: Float64Array.from(history.data), shape: history.shape };
  }
  const rows = items(history);
  if (!rows) throw noNumbers(features, shown(history));
  const width = items(rows[0])?.length;
  const data = new Float64Array(rows.length * (width ?? 1));
  for (let row = 0; row < rows.length; row++) {
    const numbers = width === undefined ? [rows[row]] : items(rows[row]);
    if (numbers?.length !== (width ?? 1)) {
      const found = numbers ? `${numbers.length} numbers` : shown(rows[row]);
      throw noNumbers(features, `${found} in row ${row + 1} and ${width} in the first`);
    }
    for (let column = 0; column < numbers.length; column++) {
      const value = numbers[column];
      if (typeof value !== "number") throw noNumbers(features, `${shown(value)} in row ${row + 1}`);
      data[row * numbers.length + column] = value;
    }
  }
  return { data, shape: width === undefined ? [rows.length] : [rows.length, width] };
}

function noNumbers(features: number, found: string): InputError {
  return new InputError(`a history is an array of numbers, (time, ${features}), not ${found}`);
}

function items(value: unknown): ArrayLike<unknown> | undefined {
  const isList = Array.isArray(value) || (ArrayBuffer.isView(value) && !(value instanceof DataView));
  return isList ? (value as unknown as ArrayLike<unknown>) : undefined;
}

/** Return what contradicts itself in the settings; undefined if nothing does. */
function contradiction(settings: SeriesSettings): string | undefined {
  const { features, columns, targets, feedback, normalize, mean, scale, begin } = settings;
  if (columns.length && columns.length !== features) return `${columns.length} names of ${features} columns`;
  if (!targets.length || Math.max(...targets) >= features || feedback.length !== targets.length) {
    return `targets [${targets.join(", ")}] with the outputs [${feedback.join(", ")}], of ${features} columns`;
  }
  if (normalize === FIXED && (mean.length !== features || scale.length !== features)) {
    return `${mean.length} means and ${scale.length} scales of ${features} columns`;
  }
  if (scale.includes(0)) return "a mean or a scale that is not finite, or a scale of 0";
  if (typeof begin !== "number" && (!begin.length || begin.some((row) => row.length !== targets.length))) {
    return "begin has no finite number for each target";
  }
  return undefined;
}
