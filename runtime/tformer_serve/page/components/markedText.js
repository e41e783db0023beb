// A text in which spans are coloured.

import { element } from "./elements.js";

const COLOURS = 8; // .c0 to .c7 of style.css

/**
 * Return a text in which spans are coloured by their labels. Of spans that overlap, the one that begins first is shown.
 * @param {string} text
 * @param {readonly { start: number, end: number, label: string }[]} spans in characters, as Python counts them
 */
export function markedText(text, spans) {
  const characters = [...text];
  const labels = [...new Set(spans.map((span) => span.label))];
  const paragraph = element("p", { class: "text" });
  let done = 0;
  for (const { start, end, label } of [...spans].sort((one, other) => one.start - other.start)) {
    if (start < done) continue;
    const mark = element(
      "mark",
      { class: `c${labels.indexOf(label) % COLOURS}` },
      characters.slice(start, end).join(""),
    );
    mark.append(element("small", {}, label));
    paragraph.append(characters.slice(done, start).join(""), mark);
    done = end;
  }
  paragraph.append(characters.slice(done).join(""));
  return paragraph;
}
