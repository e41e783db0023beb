/**
 * Values of JSON as typed objects, checked wholly: each field is there, of its type and within its bounds, and no other.
 *
 * A `Reader` checks a value and returns it with its names in camelCase. It throws a `Mismatch` with the place.
 */

import { ModelFileError } from "../base/errors.js";
import { MAX_INT } from "../base/validation.js";

export type Reader<T> = (value: unknown, place: string) => T;
type ReadBy<R> = R extends Reader<infer T> ? T : never;

/** What a value of JSON is not. Its message has the place. */
class Mismatch extends Error {}

function mismatch(expected: string, place: string): Mismatch {
  return new Mismatch(`expected ${expected} - at \`${place}\``);
}

/** Return a reader's result. damaged: the beginning of the error's sentence. Throw ModelFileError. */
export function readTyped<T>(reader: Reader<T>, value: unknown, damaged: string): T {
  try {
    return reader(value, "$");
  } catch (error) {
    if (!(error instanceof Mismatch || error instanceof RangeError)) throw error;
    throw new ModelFileError(`${damaged} (${error.message}): export the model again`);
  }
}

export const text: Reader<string> = (value, place) => {
  if (typeof value !== "string") throw mismatch("a text", place);
  return value;
};

export const name: Reader<string> = (value, place) => {
  if (text(value, place) === "") throw mismatch("a text that is not empty", place);
  return value as string;
};

export const boolean: Reader<boolean> = (value, place) => {
  if (typeof value !== "boolean") throw mismatch("true or false", place);
  return value;
};

export const number: Reader<number> = (value, place) => {
  if (typeof value !== "number" || !Number.isFinite(value)) throw mismatch("a finite number", place);
  return value;
};

export const notNegative: Reader<number> = (value, place) => {
  if (number(value, place) < 0) throw mismatch("a number of 0 or more", place);
  return value as number;
};

/** Return a reader of whole numbers within bounds. */
export function integer(minimum: number, maximum = MAX_INT): Reader<number> {
  return (value, place) => {
    if (typeof value !== "number" || !Number.isInteger(value) || value < minimum || value > maximum) {
      throw mismatch(`a whole number from ${minimum} to ${maximum}`, place);
    }
    return value;
  };
}

export const count = integer(1);
export const index = integer(0);
export const id = integer(-Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER); // a padding id may be negative

/** Return a reader of some texts. */
export function oneOf<const T extends string>(...texts: readonly T[]): Reader<T> {
  return (value, place) => {
    if (!(texts as readonly unknown[]).includes(value)) throw mismatch(`one of ${texts.join(", ")}`, place);
    return value as T;
  };
}

export function nullable<T>(reader: Reader<T>): Reader<T | undefined> {
  return (value, place) => (value === null ? undefined : reader(value, place));
}

export function either<A, B>(first: Reader<A>, second: Reader<B>): Reader<A | B> {
  return (value, place) => {
    try {
      return first(value, place);
    } catch (error) {
      if (!(error instanceof Mismatch)) throw error;
      return second(value, place);
    }
  };
}

export function list<T>(reader: Reader<T>): Reader<readonly T[]> {
  return (value, place) => {
    if (!Array.isArray(value)) throw mismatch("a list", place);
    return value.map((item, i) => reader(item, `${place}[${i}]`));
  };
}

/** Return a reader of an object with any names. A Map, since a name may be that of a method of objects. */
export function mapping<T>(reader: Reader<T>): Reader<ReadonlyMap<string, T>> {
  return (value, place) =>
    new Map(Object.entries(plain(value, place)).map(([key, item]) => [key, reader(item, `${place}.${key}`)]));
}

export const anything: Reader<unknown> = (value) => value;

/** Return a reader of an object with these fields, whose names in JSON are in snake_case. */
export function object<F extends Record<string, Reader<unknown>>>(
  fields: F,
): Reader<{ readonly [K in keyof F]: ReadBy<F[K]> }> {
  const names = new Map(Object.keys(fields).map((field) => [snakeCase(field), field]));
  return (value, place) => {
    const data = plain(value, place);
    for (const key of Object.keys(data)) {
      if (!names.has(key)) throw new Mismatch(`unknown field \`${key.slice(0, 100)}\` - at \`${place}\``);
    }
    const read: Record<string, unknown> = {};
    for (const [key, field] of names) {
      if (!Object.hasOwn(data, key)) throw new Mismatch(`missing field \`${key}\` - at \`${place}\``);
      read[field] = fields[field](data[key], `${place}.${key}`);
    }
    return read as { readonly [K in keyof F]: ReadBy<F[K]> };
  };
}

/** Return a name in snake_case, as the file has it. */
export function snakeCase(camelCase: string): string {
  return camelCase.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

/** Return a name in camelCase, as JavaScript has it. */
export function camelCase(snake: string): string {
  return snake.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
}

function plain(value: unknown, place: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw mismatch("an object", place);
  return value as Record<string, unknown>;
}
