import { expect, test } from "vitest";
import { InputError } from "../../src/base/errors.js";
import { inOrder, type Item } from "../../src/decoding/ordered.js";

interface Number extends Item<number> {
  readonly value: number;
}

function batching(fails: (value: number) => boolean, batches: number[][] = []) {
  return {
    windowSize: 5,
    read: (value: number) => {
      if (value < 0) throw new InputError("the input is negative");
      return { value } as Number;
    },
    *batches(items: readonly Number[]) {
      const sorted = [...items].sort((one, other) => other.value - one.value);
      for (let i = 0; i < sorted.length; i += 2) yield sorted.slice(i, i + 2);
    },
    run: async (batch: readonly Number[]) => {
      batches.push(batch.map(({ value }) => value));
      if (batch.some(({ value }) => fails(value))) throw new InputError("the input fails");
      for (const item of batch) item.outcome = { value: item.value * 10 };
    },
  };
}

async function collect(values: AsyncIterable<number>): Promise<{ found: number[]; error?: Error }> {
  const found: number[] = [];
  try {
    for await (const value of values) found.push(value);
  } catch (error) {
    return { found, error: error as Error };
  }
  return { found };
}

test("results are in the order of the inputs, and batches are of similar inputs", async () => {
  const batches: number[][] = [];
  const { found } = await collect(
    inOrder(
      [3, 1, 4, 1, 5, 9, 2, 6],
      batching(() => false, batches),
    ),
  );
  expect(found).toEqual([30, 10, 40, 10, 50, 90, 20, 60]);
  expect(batches).toEqual([[5, 4], [3, 1], [1], [9, 6], [2]]);
});

test("an input that fails does so in its turn, and alone", async () => {
  const { found, error } = await collect(
    inOrder(
      [3, 1, 4, 2],
      batching((value) => value === 4),
    ),
  );
  expect(found).toEqual([30, 10]);
  expect(error!.message).toBe("input 3: the input fails");
});

test("an input that cannot be read does so in its turn", async () => {
  const { found, error } = await collect(
    inOrder(
      [3, 1, -1, 2],
      batching(() => false),
    ),
  );
  expect(found).toEqual([30, 10]);
  expect(error!.message).toBe("input 3: the input is negative");
});

test("inputs are read lazily, and the end of the caller ends the reading", async () => {
  let read = 0;
  function* endless() {
    for (;;) yield ++read;
  }
  for await (const value of inOrder(
    endless(),
    batching(() => false),
  ))
    if (value === 70) break;
  expect(read).toBe(10);
});

test("errors that are not an input's end all", async () => {
  const broken = { ...batching(() => false), run: () => Promise.reject(new TypeError("a bug")) };
  const { error } = await collect(inOrder([1, 2], broken));
  expect(error).toBeInstanceOf(TypeError);
});
