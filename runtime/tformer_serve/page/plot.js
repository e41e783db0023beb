// A forecast as a plot over its history, and an alignment as a heat map.

import { element, svg } from "./dom.js";

const WIDTH = 760, HEIGHT = 300, LEFT = 56, RIGHT = 12, TOP = 12, BOTTOM = 34;

/** Return a plot of a column. history, forecast: numbers. */
export function plot(name, history, forecast) {
  const all = [...history, ...forecast];
  const low = Math.min(...all), high = Math.max(...all), room = (high - low || 1) * 0.06;
  const bottom = low - room, top = high + room;
  const x = (step) => LEFT + (step / Math.max(1, all.length - 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((top - value) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
  const line = (values, first) => values.map((value, i) => `${i ? "L" : "M"}${x(first + i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const now = history.length - 1;
  const figure = svg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label":
    `${name}: ${history.length} steps of history, then a forecast of ${forecast.length} steps from ${short(forecast[0])} to ${short(forecast.at(-1))}` });
  for (const value of ticks(bottom, top)) {
    figure.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  const steps = [[0, -now], [now, 0], [all.length - 1, forecast.length]];
  for (const [step, number] of steps) {
    const anchor = step === 0 ? "start" : step === now ? "middle" : "end";
    figure.append(svg("text", { x: x(step), y: HEIGHT - 12, "text-anchor": anchor }, number ? `${number > 0 ? "+" : "−"}${Math.abs(number)}` : "now"));
  }
  figure.append(svg("line", { class: "now", x1: x(now), x2: x(now), y1: TOP, y2: HEIGHT - BOTTOM }),
    svg("path", { class: "history", d: line(history, 0) }),
    svg("path", { class: "forecast", d: line([history.at(-1), ...forecast], now) }));
  return element("figure", { class: "result" }, element("figcaption", {}, element("strong", {}, name), legend()), figure);
}

function legend() {
  const sample = (kind) => svg("svg", { class: "plot", viewBox: "0 0 32 12", "aria-hidden": "true" }, svg("path", { class: kind, d: "M0 6L32 6" }));
  return element("div", { class: "legend" }, element("span", {}, sample("history"), "history"), element("span", {}, sample("forecast"), "forecast"));
}

/** Return some round numbers between two. */
function ticks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) values.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return values;
}

export function short(value) {
  return String(Number(value.toPrecision(5)));
}

/** Return a table of weights: a column for each source token, a row for each token of the result. */
export function heatMap(source, tokens, weights) {
  const head = element("tr", {}, element("td"), ...source.map((token) => element("th", { scope: "col" }, token)));
  const rows = tokens.map((token, i) => {
    const best = weights[i].indexOf(Math.max(...weights[i]));
    const cells = weights[i].map((weight, j) => {
      const box = svg("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { width: 1, height: 1, "fill-opacity": weight }));
      const note = `${token}, ${source[j]}: ${weight.toFixed(3)}`;
      return element("td", { title: note, class: j === best ? "best" : undefined }, box, element("span", { class: "hidden" }, weight.toFixed(2)));
    });
    return element("tr", {}, element("th", { scope: "row" }, token), ...cells);
  });
  const caption = element("caption", {}, "Weights of the source (columns) for each token of the result (rows)");
  const table = element("table", { class: "heat" }, caption, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Heat map" }, table);
}
