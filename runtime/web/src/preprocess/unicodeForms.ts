/** Unicode's normalization forms of a text, with the places of its characters (https://unicode.org/reports/tr15). */

import { AlignedText, type Change } from "./alignedText.js";

export type Form = "NFC" | "NFD" | "NFKC" | "NFKD";

/** Return a text in a normalization form. */
export function inForm(text: AlignedText, form: Form): AlignedText {
  const decomposed = decomposition(text.characters, form === "NFKC" || form === "NFKD" ? "NFKD" : "NFD");
  return text.changed(form === "NFC" || form === "NFKC" ? composition(decomposed) : decomposed);
}

/** Return the decomposed characters in canonical order. */
function decomposition(characters: readonly string[], form: "NFD" | "NFKD"): Change[] {
  const changes: Change[] = [];
  let run: Change[] = []; // characters that the order may exchange
  const flush = () => {
    if (run.length > 1) {
      const waiting = [...run];
      for (const character of run
        .map(([one]) => one)
        .join("")
        .normalize("NFD")) {
        const [change] = waiting.splice(
          waiting.findIndex(([one]) => one === character),
          1,
        );
        changes.push(change);
      }
    } else changes.push(...run);
    run = [];
  };
  for (const character of characters) {
    [...character.normalize(form)].forEach((one, i) => {
      if (isStarter(one)) flush();
      if (isStarter(one)) changes.push([one, i && 1]);
      else run.push([one, i && 1]);
    });
  }
  flush();
  return changes;
}

/** Return the composed characters. A composed one replaces all that its parts replace. */
function composition(decomposed: readonly Change[]): Change[] {
  const composed: Change[] = [];
  let base: number | undefined; // place of the latest starter
  let last: string | undefined; // combining character after it that was not composed
  for (const [character, inserted] of decomposed) {
    const starter = isStarter(character);
    if (base !== undefined && (last === undefined || (!starter && comesBefore(last, character)))) {
      const whole = [...(composed[base][0] + character).normalize("NFC")];
      if (whole.length === 1) {
        composed[base] = [whole[0], composed[base][1] + inserted - 1];
        continue;
      }
    }
    composed.push([character, inserted]);
    if (starter) [base, last] = [composed.length - 1, undefined];
    else if (base !== undefined) last = character;
  }
  return composed;
}

const starters = new Map<string, boolean>();

/** Return whether a decomposed character's combining class is 0: no other class lets it change places. */
function isStarter(character: string): boolean {
  if (character < "\u0300") return true;
  let starter = starters.get(character);
  if (starter === undefined) {
    // U+0334 has class 1, and U+0345 the last class, 240.
    starter = !comesBefore("\u0334", character) && !comesBefore(character, "\u0345") && character !== "\u0345";
    if (starters.size < 4096) starters.set(character, starter);
  }
  return starter;
}

/** Return whether the combining class of a character is lower than that of another one, and not 0. */
function comesBefore(one: string, other: string): boolean {
  return one !== other && (other + one).normalize("NFD") === one + other;
}
