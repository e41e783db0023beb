// A forecast: a plot for each column, and a table.

import { element, numberTable } from "./elements.js";
import { seriesPlot, short } from "./seriesPlot.js";

/**
 * Show a forecast in place of an earlier one, whose table stays open if it is.
 * @param {HTMLElement} result
 * @param {string} step the heading of the steps
 * @param {readonly { title: string, heading: string, history: readonly number[], forecast: readonly number[] }[]} columns
 *     title: of the plot; heading: in the table
 */
export function showForecast(result, step, columns) {
  const open = result.querySelector("details")?.open ?? false;
  const rows = columns[0].forecast.map((_, i) => [`+${i + 1}`, ...columns.map(({ forecast }) => short(forecast[i]))]);
  const table = numberTable([step, ...columns.map(({ heading }) => heading)], rows);
  result.replaceChildren(
    ...columns.map(({ title, history, forecast }) => seriesPlot(title, history, forecast)),
    element("details", { open }, element("summary", {}, "The forecast as a table"), table),
  );
}
