/**
 * Checks of single generation options.
 *
 * A check takes an option's name and value and returns the value in the form that `Settings` keeps. It throws
 * OptionError, with the option's name, for an impossible value.
 */

import { OptionError } from "../base/errors.js";
import { checkBoolean, checkInt, invalidValue, MAX_INT, surrogateIn } from "../base/validation.js";

export type Check<T> = (name: string, value: unknown) => T;
export type EarlyStopping = boolean | "never";
/** From all ids so far and the logits of the next token to logits of the same length. Both are copies. */
export type LogitsProcessor = (ids: Int32Array, logits: Float32Array) => ArrayLike<number>;

export function wholeNumber(minimum: number, maximum = MAX_INT): Check<number> {
  return (name, value) => checkInt(name, value, minimum, maximum);
}

/** Bounds of a number. above: the number must be greater. orZero: whether 0 is allowed, whatever the bounds. */
interface Bounds {
  readonly minimum?: number;
  readonly above?: number;
  readonly maximum?: number;
  readonly orZero?: boolean;
}

/** Return a check for a finite number within bounds. allowed: the allowed numbers, for the error. */
export function number(allowed: string, bounds: Bounds = {}): Check<number> {
  const { minimum = -Infinity, above = -Infinity, maximum = Infinity, orZero = false } = bounds;
  return (name, value) => {
    const allows = (x: number) => (orZero && x === 0) || (minimum <= x && above < x && x <= maximum);
    if (typeof value !== "number" || !Number.isFinite(value) || !allows(value)) {
      throw invalidValue(name, allowed, value);
    }
    return value;
  };
}

/** Return a check for a whole number that may be beyond 2 ** 53: a number, or a bigint. */
export function bigInteger(minimum: bigint, maximum: bigint): Check<bigint> {
  return (name, value) => {
    const isWhole = typeof value === "bigint" || (typeof value === "number" && Number.isSafeInteger(value));
    const whole = isWhole ? BigInt(value as number | bigint) : minimum - 1n;
    if (whole < minimum || whole > maximum) {
      throw invalidValue(name, `a whole number from ${minimum} to ${maximum} (a bigint beyond 2 ** 53)`, value);
    }
    return whole;
  };
}

export const boolean: Check<boolean> = checkBoolean;

export const earlyStopping: Check<EarlyStopping> = (name, value) => {
  if (typeof value === "boolean" || value === "never") return value;
  throw invalidValue(name, 'true, false or "never"', value);
};

export const text: Check<string> = (name, value) => {
  if (typeof value !== "string" || !value) throw invalidValue(name, "a string that is not empty", value);
  return wholeCharacters(name, value);
};

export const stopStrings: Check<readonly string[]> = (name, value) => {
  const strings = items(typeof value === "string" ? [value] : value);
  if (!strings?.every((one) => typeof one === "string" && one)) {
    throw invalidValue(name, "strings that are not empty", value);
  }
  return (strings as string[]).map((one) => wholeCharacters(name, one));
};

export const tokenId: Check<number> = (name, value) => {
  if (!isId(value)) throw invalidValue(name, "a token id, a whole number of at least 0", value);
  return value;
};

export const tokenIds: Check<readonly number[]> = (name, value) => {
  const ids = items(value);
  if (!ids?.every(isId)) throw invalidValue(name, "a sequence of token ids", value);
  return ids as number[];
};

export const prefix: Check<string | readonly number[]> = (name, value) => {
  if (typeof value === "string") return wholeCharacters(name, value) || [];
  if (!items(value)) throw invalidValue(name, "text or a sequence of token ids", value);
  return tokenIds(name, value);
};

export const tokenSequences: Check<readonly (readonly number[])[]> = (name, value) => {
  const sequences = items(value)?.map(items);
  if (!sequences?.every((ids) => ids?.length && ids.every(isId))) {
    throw invalidValue(name, "a sequence of sequences of token ids, none of them empty", value);
  }
  return sequences as number[][];
};

/** Return pairs of id and number, sorted by id, from an object, a Map or pairs. */
export const logitBias: Check<readonly (readonly [number, number])[]> = (name, value) => {
  const isPlain = typeof value === "object" && value !== null && !(Symbol.iterator in value);
  const pairs = items(isPlain ? Object.entries(value) : value)?.map((pair) => {
    const [key, weight, ...rest] = items(pair) ?? [];
    const id = typeof key === "string" && /^\d+$/.test(key) ? Number(key) : key;
    const isPair = isId(id) && typeof weight === "number" && Number.isFinite(weight) && !rest.length;
    return isPair ? ([id, weight] as const) : undefined;
  });
  if (!pairs?.every((pair) => pair) || new Set(pairs.map((pair) => pair![0])).size !== pairs.length) {
    throw invalidValue(name, "a mapping from token ids to numbers, each id once", value);
  }
  return (pairs as (readonly [number, number])[]).toSorted((one, other) => one[0] - other[0]);
};

export const logitsProcessor: Check<LogitsProcessor> = (name, value) => {
  if (typeof value !== "function") throw invalidValue(name, "a function", value);
  return value as LogitsProcessor;
};

function isId(value: unknown): value is number {
  return typeof value === "number" && Number.isInteger(value) && value >= 0 && value <= MAX_INT;
}

/** Return the items of an array, a typed array or a set as an array; undefined for any other value. */
function items(value: unknown): unknown[] | undefined {
  if (typeof value !== "object" || value === null || !(Symbol.iterator in value)) return undefined;
  return Array.from(value as Iterable<unknown>, (item) => (typeof item === "bigint" ? Number(item) : item));
}

function wholeCharacters(name: string, value: string): string {
  const found = surrogateIn(value);
  if (found !== undefined) throw new OptionError(`${name} holds ${found}`, name);
  return value;
}
