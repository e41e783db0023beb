// A bar and a sentence on what goes on.

import { element } from "./elements.js";

/**
 * Return a line that says what goes on.
 * @param {{ announces?: boolean }} options announces: screen readers say each sentence
 */
export function progressLine({ announces = false } = {}) {
  const bar = element("progress", { "aria-label": "Progress", hidden: true });
  const note = element("span", { class: "hint", role: announces && "status" });
  const node = element("div", { class: "progress" }, bar, note);
  return {
    node,
    /**
     * Something has begun, and its length is unknown.
     * @param {string} text
     */
    begin(text) {
      bar.removeAttribute("value");
      bar.hidden = false;
      note.textContent = text;
    },
    /**
     * So many bytes have come. total: of all, if it is known.
     * @param {number} loaded
     * @param {number | undefined} total
     */
    bytes(loaded, total) {
      bar.hidden = false;
      if (total) [bar.max, bar.value] = [total, loaded];
      note.textContent = total ? `${megabytes(loaded)} of ${megabytes(total)} MB` : `${megabytes(loaded)} MB`;
    },
    /**
     * It has ended.
     * @param {string} text
     */
    end(text) {
      bar.hidden = true;
      note.textContent = text;
    },
  };
}

/** @param {number} bytes */
function megabytes(bytes) {
  return (bytes / 1e6).toFixed(1);
}
