// A series and its forecast as a plot.

import { element, svg } from "./elements.js";

const WIDE = 760;
const NARROW = 400;
const HEIGHT = 300;
const RIGHT = 12;
const TOP = 12;
const BOTTOM = 34;
const CHARACTER = 7.5; // the width of a digit of style.css
const LABEL = 48; // room of a label below the plot

/**
 * Return a plot of a series and its forecast. The time grows with the number of values.
 * @param {string} name
 * @param {readonly number[]} history
 * @param {readonly number[]} forecast
 */
export function seriesPlot(name, history, forecast) {
  const all = [...history, ...forecast];
  const { low, high } = range(all);
  const values = ticks(low, high);
  // A narrow page has a narrow drawing, so that its labels keep their size.
  const width = matchMedia("(max-width: 45rem)").matches ? NARROW : WIDE;
  const left = 16 + CHARACTER * Math.max(...values.map((value) => short(value).length));
  /** @param {number} step */
  const x = (step) => left + (step / Math.max(1, all.length - 1)) * (width - left - RIGHT);
  /** @param {number} value */
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  /** @param {readonly number[]} series @param {number} first */
  const line = (series, first) =>
    series.map((value, i) => `${i ? "L" : "M"}${x(first + i).toFixed(1)} ${y(value).toFixed(1)}`).join("");

  const now = history.length - 1;
  const last = all.length - 1;
  const ends = `from ${short(forecast[0])} to ${short(forecast[forecast.length - 1])}`;
  const description = `${name}: ${history.length} steps of history, then a forecast of ${forecast.length} steps ${ends}`;
  const drawing = svg("svg", {
    class: "plot",
    viewBox: `0 0 ${width} ${HEIGHT}`,
    role: "img",
    "aria-label": description,
  });
  for (const value of values) {
    drawing.append(
      svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    );
  }
  /** @param {number} step @param {string} anchor @param {string} text */
  const label = (step, anchor, text) =>
    drawing.append(svg("text", { x: x(step), y: HEIGHT - 12, "text-anchor": anchor }, text));
  label(now, "middle", "now");
  if (x(now) - x(0) > LABEL) label(0, "start", `−${now}`);
  if (x(last) - x(now) > LABEL) label(last, "end", `+${forecast.length}`);
  drawing.append(
    svg("line", { class: "now", x1: x(now), x2: x(now), y1: TOP, y2: HEIGHT - BOTTOM }),
    svg("path", { class: "history", d: line(history, 0) }),
    svg("path", { class: "forecast", d: line([history[now], ...forecast], now) }),
  );
  return element("figure", {}, element("figcaption", {}, element("strong", {}, name), legend()), drawing);
}

function legend() {
  const names = ["history", "forecast"].map((kind) => {
    const sample = { class: "plot", viewBox: "0 0 32 12", "aria-hidden": "true" };
    return element("span", {}, svg("svg", sample, svg("path", { class: kind, d: "M0 6L32 6" })), kind);
  });
  return element("div", { class: "legend" }, ...names);
}

/**
 * Return the least and the greatest number of the vertical axis.
 * @param {readonly number[]} values
 */
function range(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  const room = (high - low || 1) * 0.06;
  return { low: low - room, high: high + room };
}

/**
 * Return two to seven round numbers between two.
 * @param {number} low
 * @param {number} high
 */
function ticks(low, high) {
  const rough = (high - low) / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const first = Math.ceil(low / step);
  // Multiples of the step, not sums: a sum of rounded numbers passes its end or stays before it.
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
}

/**
 * Return a number with five digits.
 * @param {number} value
 */
export function short(value) {
  return String(Number(value.toPrecision(5)));
}
