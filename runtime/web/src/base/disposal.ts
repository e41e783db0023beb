/** Objects that hold memory which no garbage collector frees. */

export interface Disposable {
  dispose(): void;
}

/** Takes what a computation has made, and returns it. */
export type Keep = <Made extends Disposable>(one: Made) => Made;

/** Return the result of a computation. If it throws, all that it has given to `keep` is disposed, the latest first. */
export function allOrNothing<T>(make: (keep: Keep) => T): T {
  const made: Disposable[] = [];
  try {
    return make((one) => {
      made.push(one);
      return one;
    });
  } catch (error) {
    disposeAll(made.reverse());
    throw error;
  }
}

export function disposeAll(made: Iterable<Disposable>): void {
  for (const one of made) one.dispose();
}
