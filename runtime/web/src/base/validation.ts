/** Checks of option values. Each throws an OptionError that names the option. */

import { OptionError, quotable } from "./errors.js";

export const MAX_INT = 2 ** 31 - 1; // of any option
export const MAX_THREADS = 1024; // more would only wait for each other

/** Return the error for an option with an invalid value. requirement: a noun phrase such as "a whole number". */
export function invalidValue(name: string, requirement: string, value: unknown): OptionError {
  return new OptionError(`${name} must be ${requirement}, not ${shown(value)}`, name);
}

/** Return a value as a sentence shows it. */
export function shown(value: unknown): string {
  if (typeof value === "string") return quotable(JSON.stringify(value));
  if (typeof value === "function") return "a function";
  if (typeof value === "object" && value !== null && !Array.isArray(value)) return `an object`;
  if (Array.isArray(value)) return quotable(`[${value.map(shown).join(", ")}]`);
  return String(value);
}

/**
 * Return the words for the first lone surrogate of a text and its place; undefined for a text without any.
 * It is half of a character, and no text of any encoding holds it.
 */
export function surrogateIn(text: string): string | undefined {
  let number = 0;
  for (const character of text) {
    number++;
    const code = character.codePointAt(0)!;
    if (code >= 0xd800 && code <= 0xdfff) {
      return `'\\u${code.toString(16)}' (character ${number}), which is half of a character and no text`;
    }
  }
  return undefined;
}

export function checkBoolean(name: string, value: unknown): boolean {
  if (typeof value !== "boolean") throw invalidValue(name, "true or false", value);
  return value;
}

/** Return an integer from `minimum` to `maximum`. Throw OptionError for any other value. */
export function checkInt(name: string, value: unknown, minimum = 1, maximum = MAX_INT): number {
  if (typeof value !== "number" || !Number.isInteger(value) || value < minimum) {
    throw invalidValue(name, `a whole number of at least ${minimum}`, value);
  }
  if (value > maximum) throw invalidValue(name, `a whole number of at most ${maximum.toLocaleString("en-US")}`, value);
  return value;
}

/** Throw OptionError, with a hint, for names of options that do not exist. */
export function checkNames(given: Iterable<string>, known: readonly string[]): void {
  for (const name of given) {
    if (known.includes(name)) continue;
    const near = closest(name, known);
    throw new OptionError(
      `there is no option ${quotable(JSON.stringify(name))}: ${near ? `did you mean ${near}?` : known.length ? `there are ${known.join(", ")}` : "there are none here"}`,
      name,
    );
  }
}

/** Return the name that is nearest to another, if it is near enough to be meant. */
function closest(name: string, known: readonly string[]): string | undefined {
  let best: string | undefined;
  let least = Math.max(2, Math.floor(name.length / 3)) + 1;
  for (const other of known) {
    const distance = editDistance(name.slice(0, 64).toLowerCase(), other.toLowerCase());
    if (distance < least) [best, least] = [other, distance];
  }
  return best;
}

function editDistance(one: string, other: string): number {
  let row = Array.from({ length: other.length + 1 }, (_, i) => i);
  for (let i = 1; i <= one.length; i++) {
    const next = [i];
    for (let j = 1; j <= other.length; j++) {
      next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + Number(one[i - 1] !== other[j - 1]));
    }
    row = next;
  }
  return row[other.length];
}
