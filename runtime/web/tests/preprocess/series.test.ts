import { describe, expect, test } from "vitest";
import type { Preprocessing } from "../../src/format/manifest.js";
import { SeriesPreprocessor, type History } from "../../src/preprocess/series.js";
import { errorOf, Golden, type Place } from "../golden/golden.js";

const PLAIN = {
  features: 2,
  columns: ["load", "price"],
  targets: [1],
  feedback: [0],
  horizon: null,
  at_once: false,
  begin: 0,
  normalize: "none",
  mean: [],
  scale: [],
  min_context_length: 1,
  max_context_length: null,
  ragged: true,
};

function of(settings: object): SeriesPreprocessor {
  const entry: Preprocessing = { kind: "series", numbers: new Map(Object.entries(settings)) };
  return SeriesPreprocessor.of({ preprocessing: new Map([["history", entry]]) })!;
}

describe("With random histories and settings of files", () => {
  interface Case {
    settings: object;
    history: Place<"float64">;
    room: number | null;
    values: Place<"float32">;
    mean: Place<"float64">;
    scale: Place<"float64">;
    start: Place<"float32">;
    forecast: Place<"float32">;
    denormalized: Place<"float32">;
    names: string[];
  }
  const golden = new Golden<Case>("preprocess/histories.py");

  test("windows, decoder inputs and forecasts are those of the Python runtime, to the rounding of sums", () => {
    for (const { settings, history, room, ...expected } of golden.cases) {
      const series = of(settings);
      const place = JSON.stringify(settings);
      const given = { data: golden.array(history), shape: history.shape };
      const window = series.window(given, room ?? undefined, true);
      expect(window.values.shape, place).toEqual(expected.values.shape);
      // Two sums of n numbers differ by n * 2 ** -52 of their magnitudes, and so do a mean and a scale. A number of
      // float32 that is computed with them may be rounded to the next one.
      const sums = history.shape[0] * 2 ** -52;
      const [mean, scale] = [golden.array(expected.mean), golden.array(expected.scale)];
      const most = Math.max(...given.data.map(Math.abs));
      const [least, greatest] = [Math.min(...scale.map(Math.abs)), Math.max(...scale.map(Math.abs))];
      const isClose = (found: ArrayLike<number>, numbers: Float32Array | Float64Array, error: number) => {
        const last = numbers instanceof Float32Array ? 2 ** -23 : 0;
        expect(found.length, place).toBe(numbers.length);
        numbers.forEach((value, i) => {
          expect(Math.abs(found[i] - value), place).toBeLessThanOrEqual((last + sums) * Math.abs(value) + error);
        });
      };
      isClose(window.mean, mean, sums * most);
      isClose(window.scale, scale, sums * most);
      isClose(window.values.data, golden.array(expected.values), (sums * most) / least);
      const start = series.decoderStart(window);
      expect(start.shape, place).toEqual(expected.start.shape);
      isClose(start.data, golden.array(expected.start), (sums * most) / least);
      const forecast = golden.array(expected.forecast);
      const found = series.denormalize({ data: forecast, shape: expected.forecast.shape }, window);
      expect(found.shape, place).toEqual(expected.denormalized.shape);
      const largest = Math.max(...forecast.map(Math.abs));
      isClose(found.data, golden.array(expected.denormalized), sums * (most + largest * greatest));
      expect(series.names).toEqual(expected.names);
    }
  });
});

test("A history may be rows of numbers, and numbers for one column", () => {
  expect(of(PLAIN).window([[1, 2], new Float32Array([3, 4])]).values).toEqual({
    data: Float32Array.of(1, 2, 3, 4),
    shape: [2, 2],
  });
  const one = of({ ...PLAIN, features: 1, columns: [], targets: [0] });
  expect(one.window([1, 2, 3]).values.shape).toEqual([3, 1]);
  expect(one.window(Float64Array.of(1, 2)).values.shape).toEqual([2, 1]);
  expect(one.window([[1], [2]]).values.shape).toEqual([2, 1]);
  expect(one.names).toEqual(["1"]);
});

test("A history that the model cannot read is refused with its place", () => {
  for (const [history, message] of [
    ["1 2 3", 'a history is an array of numbers, (time, 2), not "1 2 3"'],
    [null, "a history is an array of numbers, (time, 2), not null"],
    [[[1, 2], [3]], "a history is an array of numbers, (time, 2), not 1 numbers in row 2 and 2 in the first"],
    [[[1, 2], 3], "a history is an array of numbers, (time, 2), not 3 in row 2 and 2 in the first"],
    [[[1, "2"]], 'a history is an array of numbers, (time, 2), not "2" in row 1'],
    [[1, 2, 3], "the history has the shape (3): the model reads (time, 2), 2 numbers a row (load, price)"],
    [[[1, 2, 3]], "the history has the shape (1, 3): the model reads (time, 2), 2 numbers a row (load, price)"],
    [
      [
        [1, 2],
        [3, NaN],
      ],
      'row 2 of column "price" is NaN: fill gaps before, as suits the data',
    ],
    [[[1, 1e39]], "the history holds numbers that are too large for float32"],
    [[], "the history has the shape (0): the model reads (time, 2), 2 numbers a row (load, price)"],
  ] as const) {
    const error = errorOf(() => of(PLAIN).window(history as unknown as History));
    expect(`${error}`).toBe(`InputError: ${message}`);
  }
  const rows = [[1, 2], [3, 4], [5, NaN]]; // prettier-ignore
  expect(errorOf(() => of({ ...PLAIN, min_context_length: 4 }).window(rows)).message).toBe(
    "the history has 3 rows and the model reads 4 at least",
  );
  const limited = of({ ...PLAIN, max_context_length: 2 });
  expect(errorOf(() => limited.window(rows)).message).toBe(
    "the history has 3 rows and the model reads at most 2: give the last of them, or have it cut with truncate: true",
  );
  expect(errorOf(() => limited.window(rows, undefined, true)).message).toMatch(/^row 3 of column "price" is NaN/);
});

test("A forecast that is too large for float32 is refused, and one that is infinite itself is not", () => {
  const series = of({ ...PLAIN, normalize: "fixed", mean: [0, 0], scale: [1, 1e30] });
  const window = series.window([[1, 2]]);
  const forecast = (value: number) => ({ data: Float32Array.of(value), shape: [1, 1] });
  expect(errorOf(() => series.denormalize(forecast(1e10), window)).message).toMatch(/^the forecast is too large/);
  expect(series.denormalize(forecast(Infinity), window).data[0]).toBe(Infinity);
});

test("The horizon is that of the call or of the file, and the file's is the maximum of a model that returns all at once", () => {
  expect(errorOf(() => of(PLAIN).steps(undefined)).message).toMatch(/^the file has no default horizon: set horizon/);
  expect(of(PLAIN).steps(9)).toBe(9);
  const fixed = of({ ...PLAIN, horizon: 4, at_once: true });
  expect([fixed.steps(undefined), fixed.steps(3)]).toEqual([4, 3]);
  const error = errorOf(() => fixed.steps(5));
  expect(`${error}`).toBe("OptionError: horizon must be at most 4, the number of steps that the model returns, not 5");
  expect(errorOf(() => fixed.steps(0)).name).toBe("OptionError");
  expect(errorOf(() => fixed.steps(1.5)).name).toBe("OptionError");
});

test("Damaged settings are refused with what is damaged", () => {
  for (const [change, reason] of [
    [{ columns: ["a"] }, "1 names of 2 columns"],
    [{ targets: [2] }, "targets [2] with the outputs [0], of 2 columns"],
    [{ targets: [] }, "targets [] with the outputs [0], of 2 columns"],
    [{ feedback: [0, 1] }, "targets [1] with the outputs [0, 1], of 2 columns"],
    [{ normalize: "log" }, "expected one of none, fixed, instance"],
    [{ normalize: "fixed", mean: [1], scale: [1, 1] }, "1 means and 2 scales of 2 columns"],
    [{ normalize: "fixed", mean: [1, 1], scale: [1, 0] }, "a scale of 0"],
    [{ begin: [] }, "begin has no finite number for each target"],
    [{ begin: [[1, 2]] }, "begin has no finite number for each target"],
    [{ begin: -1 }, "expected"],
    [{ features: 0 }, "expected a whole number from 1"],
    [{ seasons: 4 }, "unknown field `seasons`"],
  ] as const) {
    const error = errorOf(() => of({ ...PLAIN, ...change }));
    expect(error.name, JSON.stringify(change)).toBe("ModelFileError");
    expect(error.message).toContain("the series settings of the file are damaged (");
    expect(error.message).toContain(reason);
  }
  expect(SeriesPreprocessor.of({ preprocessing: new Map() })).toBeUndefined();
});
