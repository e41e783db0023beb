/**
 * Forecast series of numbers, in the units of the data.
 *
 * Some models return the whole horizon in one run. Other models decode: each step of the forecast is the next input of
 * the decoder. A decoder-only model reads the history first. A decoder with an encoder starts from
 * `SeriesPreprocessor.decoderStart`.
 */

import { asNumbers, numberArray, type NumberArray } from "../base/arrays.js";
import { checkAborted, ModelFileError, OptionError } from "../base/errors.js";
import { inOrder, WINDOW_BATCHES, type Item } from "../decoding/ordered.js";
import type { Engine } from "../engine/engine.js";
import type { State } from "../engine/state.js";
import { encodedOutputs, logitCount } from "../format/manifest.js";
import { SeriesPreprocessor, type History, type SeriesWindow } from "../preprocess/series.js";

/** Options of a forecast. horizon: the number of steps; by default that of the file. */
export interface ForecastOptions {
  readonly horizon?: number;
  /** Cut a history that is too long to its last rows. */
  readonly truncate?: boolean;
  readonly batchSize?: number;
  readonly signal?: AbortSignal;
}

interface ForecastItem extends Item<NumberArray> {
  readonly window: SeriesWindow;
}

/** Forecasts with one model file. */
export class Forecaster {
  private readonly decoderOnly: boolean;

  /** Throw ModelFileError for damaged settings of the series. */
  constructor(
    private readonly engine: Engine,
    readonly series: SeriesPreprocessor,
  ) {
    const { manifest } = engine;
    this.decoderOnly = !manifest.encode;
    const sizes = (manifest.decode?.logits ?? encodedOutputs(manifest)[0]).shape.slice(2);
    const size = sizes.length ? sizes[sizes.length - 1] : 1; // one target has no axis
    const most = Math.max(...series.settings.feedback);
    if (typeof size === "number" && most >= size) {
      throw new ModelFileError(
        `the series settings of the file are damaged (output ${most} of ${size}): export the model again`,
      );
    }
  }

  /** Yield the forecasts (horizon, targets) of any number of histories, in their order. */
  forecastAll(
    histories: Iterable<History> | AsyncIterable<History>,
    options: ForecastOptions,
  ): AsyncGenerator<NumberArray> {
    const { horizon, truncate = false, batchSize = 32, signal } = options;
    const steps = this.steps(horizon);
    const room = this.room(steps);
    return inOrder<History, ForecastItem, NumberArray>(histories, {
      windowSize: WINDOW_BATCHES * batchSize,
      read: (history) => ({ window: this.series.window(history, room, truncate) }),
      batches: (items) => batchesOf(items, this.series.settings.ragged, batchSize),
      run: async (batch) => {
        const windows = batch.map((item) => item.window);
        const columns = this.series.settings.targets.length;
        const rows = this.series.settings.atOnce
          ? await this.inOneRun(windows, steps)
          : await this.stepByStep(windows, steps, signal);
        batch.forEach((item, row) => {
          const values = rows.subarray(row * steps * columns, (row + 1) * steps * columns);
          item.outcome = { value: this.series.denormalize(numberArray(values, [steps, columns]), item.window) };
        });
      },
    });
  }

  /** Return the number of steps of a forecast. Throw OptionError for more steps than the model can decode. */
  private steps(horizon: number | undefined): number {
    const steps = this.series.steps(horizon);
    const { decode, maxLength } = this.engine.manifest;
    if (!decode) return steps;
    const history = this.decoderOnly ? this.series.settings.minContextLength : 0;
    const most = maxLength - this.decoderRows(0) - history;
    if (steps > most) {
      throw new OptionError(
        `horizon must be at most ${most}, for the model holds ${maxLength} steps, not ${steps}`,
        "horizon",
      );
    }
    return steps;
  }

  /** Return the number of history rows that the model can read with `steps` steps; undefined if there is no limit. */
  private room(steps: number): number | undefined {
    const { maxLength, encode } = this.engine.manifest;
    if (this.decoderOnly) return maxLength - this.decoderRows(steps);
    const spec = encode!.inputs.find(({ name }) => name === this.series.settings.input);
    return typeof spec?.shape[1] === "number" ? spec.shape[1] : spec?.maxLength;
  }

  /** Return the number of rows that a decoder reads for `steps` steps, without the history. */
  private decoderRows(steps: number): number {
    const { begin } = this.series.settings;
    return (typeof begin === "number" ? begin : begin.length) + steps - 1;
  }

  /** Return (rows, steps, targets), normalized. */
  private async inOneRun(windows: readonly SeriesWindow[], steps: number): Promise<Float32Array> {
    const { input, feedback } = this.series.settings;
    const outputs = await this.engine.encode(new Map([[input, windows.map(({ values }) => values)]]), windows.length);
    try {
      const tensor = outputs.get(encodedOutputs(this.engine.manifest)[0].name)!;
      const values = asNumbers(tensor.data(), tensor.dtype);
      const [rows, horizon, width = 1] = tensor.dims; // one target has no axis
      const forecast = new Float32Array(rows * steps * feedback.length);
      let place = 0;
      for (let row = 0; row < rows; row++) {
        for (let step = 0; step < steps; step++) {
          for (const column of feedback) forecast[place++] = values[(row * horizon + step) * width + column];
        }
      }
      return forecast;
    } finally {
      for (const tensor of outputs.values()) tensor.dispose();
    }
  }

  /** Return (rows, steps, targets), normalized. */
  private async stepByStep(
    windows: readonly SeriesWindow[],
    steps: number,
    signal: AbortSignal | undefined,
  ): Promise<Float32Array> {
    const { engine, series } = this;
    const starts = windows.map((window) => (this.decoderOnly ? window.values : series.decoderStart(window)));
    const maxTokens = Math.max(...starts.map(({ shape }) => shape[0])) + steps - 1;
    const requests = this.decoderOnly
      ? new Map<string, NumberArray[]>()
      : new Map([[series.settings.input, windows.map(({ values }) => values as NumberArray)]]);
    const state = await engine.start(requests, { rows: windows.length, maxTokens });
    try {
      return await this.decode(state, starts, steps, signal);
    } finally {
      state.release();
    }
  }

  /** Return (rows, steps, targets). starts: the first decoder input of each row, (length, targets). */
  private async decode(
    state: State,
    starts: readonly NumberArray[],
    steps: number,
    signal: AbortSignal | undefined,
  ): Promise<Float32Array> {
    const { feedback } = this.series.settings;
    const [rows, columns] = [starts.length, feedback.length];
    const counts = Int32Array.from(starts, ({ shape }) => shape[0]);
    const longest = Math.max(...counts);
    const width = starts[0].shape[1]; // a decoder-only model reads all columns of the history
    let tokens = new Float32Array(rows * longest * width);
    starts.forEach(({ data }, row) => tokens.set(data, row * longest * width));
    const forecast = new Float32Array(rows * steps * columns);
    const outputs = logitCount(this.engine.decode);
    for (let step = 0; step < steps; step++) {
      checkAborted(signal);
      const logits = await this.engine.step(state, tokens, step === 0 ? counts : undefined);
      if (step === 0) tokens = new Float32Array(rows * columns);
      for (let row = 0; row < rows; row++) {
        feedback.forEach((output, column) => {
          const value = logits[row * outputs + output];
          forecast[(row * steps + step) * columns + column] = tokens[row * columns + column] = value;
        });
      }
    }
    return forecast;
  }
}

/** Yield batches of histories of similar length. ragged: whether a batch may have several lengths. */
function* batchesOf(items: readonly ForecastItem[], ragged: boolean, batchSize: number): Iterable<ForecastItem[]> {
  const lengthOf = ({ window }: ForecastItem) => window.values.shape[0];
  let batch: ForecastItem[] = [];
  for (const item of [...items].sort((one, other) => lengthOf(one) - lengthOf(other))) {
    const isOther = batch.length > 0 && !ragged && lengthOf(batch[0]) !== lengthOf(item);
    if (batch.length === batchSize || isOther) {
      yield batch;
      batch = [];
    }
    batch.push(item);
  }
  if (batch.length) yield batch;
}
