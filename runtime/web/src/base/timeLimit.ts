/**
 * A time limit of synchronous code, such as a regular expression of a stranger's tokenizer.
 *
 * JavaScript has no such limit. Node can end a script that takes too long (`node:vm`), with what it calls. A page cannot: there
 * the model runs in a worker, which `Model.dispose` ends as a whole.
 */

import { InputError } from "./errors.js";

const MIN_MS = 10_000;
const MS_PER_CHARACTER = 0.01; // tokenizers read some hundred characters in this time
const TIMED_OUT = "ERR_SCRIPT_EXECUTION_TIMEOUT";

let run: ((work: () => void, milliseconds: number) => void) | undefined;

/** Set time limits from now on, in Node. */
export async function startTimeLimits(): Promise<void> {
  if (run) return;
  const { createContext, Script } = await import("node:vm");
  const script = new Script("work()");
  const context = createContext({}) as { work?: () => void };
  run = (work, timeout) => {
    const { work: outer } = context;
    context.work = work;
    try {
      script.runInContext(context, { timeout });
    } finally {
      context.work = outer;
    }
  };
}

/** Return the time that reading a text may take, in milliseconds. */
export function readingTime(characters: number): number {
  return MIN_MS + MS_PER_CHARACTER * characters;
}

/**
 * Return the result of a function. Throw an error if it takes too long, where time limits are set.
 *
 * late: makes the error. Cost: some tenths of a millisecond.
 */
export function withinTime<T>(milliseconds: number, work: () => T, late: (seconds: number) => Error): T {
  if (!run) return work();
  let result: { readonly value: T } | undefined;
  try {
    run(() => (result = { value: work() }), Math.ceil(milliseconds));
  } catch (error) {
    if ((error as { code?: unknown } | null)?.code !== TIMED_OUT) throw error;
    throw late(Math.ceil(milliseconds / 1000));
  }
  return result!.value;
}

/** Return the error of a text that takes too long. */
export function slowText(seconds: number): InputError {
  return new InputError(
    `the text took more than ${seconds} s, and was stopped: the regular expressions of the file's tokenizer are slow on it`,
  );
}
