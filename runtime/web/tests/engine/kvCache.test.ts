import { describe, expect, test } from "vitest";
import { backendOf } from "../../src/backend/devices.js";
import { KVCache } from "../../src/engine/kvCache.js";
import { MemoryUse } from "../../src/engine/memoryUse.js";
import type { CacheSpec } from "../../src/format/manifest.js";

const KEYS: CacheSpec = {
  past: "past.0",
  present: "present.0",
  dtype: "float32",
  shape: ["batch", 2, "slot", 3],
  inPlace: true,
};
const COPIED: CacheSpec = { ...KEYS, past: "past.1", present: "present.1", shape: ["batch", "slot"], inPlace: false };
const CARRY: CacheSpec = { ...KEYS, past: "past.2", present: "present.2", shape: ["batch", 4], inPlace: false };

/** Write what a run of a model would: each slot gets numbers of its history, a carry the history itself. */
function step(cache: KVCache, histories: number[][], lengths: Int32Array, tokens: number[][]): void {
  const count = tokens[0].length;
  cache.reserve(Math.max(...lengths) + count, Math.max(...lengths));
  const [present, past] = [cache.present(), cache.past()];
  present.forEach((tensor, k) => {
    const data = tensor.data() as Float32Array;
    if (k > 0) data.set(past[k].data() as Float32Array);
    tokens.forEach((row, r) => {
      row.forEach((token, i) => {
        if (k === 2) data.fill(token, r * 4, r * 4 + 4);
        const slot = lengths[r] + i;
        const slots = tensor.dims[k === 0 ? 2 : 1];
        if (k === 0)
          for (let h = 0; h < 2; h++)
            data.fill(token + h / 10, ((r * 2 + h) * slots + slot) * 3, ((r * 2 + h) * slots + slot + 1) * 3);
        if (k === 1) data[r * slots + slot] = token;
      });
    });
  });
  cache.recordWrites(lengths, count);
  tokens.forEach((row, r) => {
    histories[r].push(...row);
    lengths[r] += count;
  });
}

function check(cache: KVCache, histories: number[][]): void {
  const [keys, copied, carry] = cache.past();
  histories.forEach((history, r) => {
    const slots = keys.dims[2];
    history.forEach((token, slot) => {
      for (let h = 0; h < 2; h++) {
        expect((keys.data() as Float32Array)[((r * 2 + h) * slots + slot) * 3 + 2]).toBeCloseTo(token + h / 10, 4);
      }
      expect((copied.data() as Float32Array)[r * copied.dims[1] + slot]).toBe(token);
    });
    expect((carry.data() as Float32Array)[r * 4 + 3]).toBe(history[history.length - 1]);
  });
}

describe.each(["node", "wasm"])("a cache on %s", (device) => {
  test("keeps the histories of rows that grow, move, repeat and leave", async () => {
    const backend = await backendOf(device, {});
    const use = new MemoryUse();
    const cache = new KVCache(backend, [KEYS, COPIED, CARRY], 400, 1, 4, 0, use);
    let histories: number[][] = [[]];
    let lengths = new Int32Array(1);
    let token = 0;
    const next = (count: number) => Array.from({ length: count }, () => ++token);
    const take = (rows: number[]) => {
      const order = Int32Array.from(rows);
      cache.reorder(order, lengths);
      histories = rows.map((row) => [...histories[row]]);
      lengths = order.map((row) => lengths[row]) as Int32Array<ArrayBuffer>;
      check(cache, histories);
    };
    step(cache, histories, lengths, [next(5)]);
    check(cache, histories);
    take([0, 0, 0, 0]);
    for (const rows of [
      [1, 0, 3, 2],
      [0, 0, 1, 2],
      [3, 3, 3, 0],
      [1, 2, 3, 0],
      [0, 1, 2],
      [2, 2],
      [1, 0, 1, 0, 1],
    ]) {
      step(
        cache,
        histories,
        lengths,
        histories.map(() => next(7)),
      );
      check(cache, histories);
      take(rows);
    }
    expect(cache.past()[0].dims[0]).toBe(5);
    const copy = cache.copy(Int32Array.of(4, 0), Math.max(...lengths), 2, 0);
    check(copy, [histories[4], histories[0]]);
    expect(use.usedBytes).toBeGreaterThan(0);
    copy.release();
    check(cache, histories);
    cache.release();
    expect(use.usedBytes).toBe(0);
    expect(use.peakBytes).toBeGreaterThan(0);
  });

  test("goes back to the carries before the latest step", async () => {
    const backend = await backendOf(device, {});
    const cache = new KVCache(backend, [CARRY], 400, 1, 1, 0, new MemoryUse());
    cache.reserve(2, 0);
    (cache.present()[0].data() as Float32Array).fill(1);
    cache.recordWrites(Int32Array.of(0), 1);
    (cache.present()[0].data() as Float32Array).fill(2);
    cache.recordWrites(Int32Array.of(1), 1);
    expect((cache.past()[0].data() as Float32Array)[0]).toBe(2);
    cache.swapSides();
    expect((cache.past()[0].data() as Float32Array)[0]).toBe(1);
    cache.clear();
    expect((cache.past()[0].data() as Float32Array)[0]).toBe(0);
    cache.release();
  });
});
