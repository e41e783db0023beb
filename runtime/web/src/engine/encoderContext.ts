/**
 * The context: outputs of the encode stage that decoding reads and never writes, one row for each sequence.
 *
 * If the file supports it (`DecodeStage.sharesContext`), neighbouring rows of one request, such as its beams, share one
 * row of context, provided that every request has the same number of rows.
 */

import { withRows, type Backend, type Tensor } from "../backend/session.js";
import { allOrNothing, disposeAll } from "../base/disposal.js";
import type { MemoryUse } from "./memoryUse.js";
import { moveRows, planMoves, rowCopy } from "./rowMoves.js";

export class EncoderContext {
  /** The number of the request of each row. Rows with the same number have the same context. */
  requests: Int32Array;
  private bufferRequests: Int32Array; // the request of each row of the buffers in use
  private views: Tensor[] | undefined;
  private bytes = 0;

  /** buffers: the outputs of the encode stage, in the order of its outputs, which this object disposes. */
  constructor(
    private readonly backend: Backend,
    private buffers: Tensor[],
    rows: number,
    private readonly shares: boolean,
    private readonly use: MemoryUse,
  ) {
    this.requests = this.bufferRequests = Int32Array.from({ length: rows }, (_, i) => i);
    this.count();
  }

  /** Return the tensors to bind. */
  values(): Tensor[] {
    this.assignRows(this.requests);
    this.views ??= allOrNothing((keep) => this.buffers.map((buffer) => keep(buffer.rows(this.bufferRequests.length))));
    return this.views;
  }

  /** Replace row i by row rows[i]. Return whether there are new tensors to bind. */
  reorder(rows: Int32Array): boolean {
    return this.assignRows(rows.map((row) => this.requests[row]));
  }

  /** Arrange the buffers for rows of these requests. Return whether there are new tensors to bind. */
  private assignRows(requests: Int32Array): boolean {
    const bufferRequests = this.shares ? sharedRequests(requests) : requests;
    if (!this.buffers.length || equal(bufferRequests, this.bufferRequests)) {
      this.requests = requests;
      this.bufferRequests = bufferRequests;
      return false;
    }
    const rows = bufferRequests.map((request) => this.bufferRequests.indexOf(request));
    const changed = rows.length !== this.bufferRequests.length;
    if (rows.length <= this.buffers[0].dims[0]) {
      moveRows(this.backend, this.buffers, planMoves(rows), (buffer, from, row, { target }) =>
        rowCopy(from, row, buffer, target),
      );
      if (changed) this.dropViews();
    } else {
      this.replace(this.taken(rows));
    }
    this.requests = requests;
    this.bufferRequests = bufferRequests;
    return changed;
  }

  /** Return copies of some rows of the buffers. */
  private taken(rows: Int32Array): Tensor[] {
    return allOrNothing((keep) => {
      const made = this.buffers.map((buffer) =>
        keep(this.backend.tensorLike(buffer, withRows(buffer.dims, rows.length))),
      );
      const copies = this.buffers.flatMap((buffer, k) =>
        Array.from(rows, (row, i) => rowCopy(buffer, row, made[k], i)),
      );
      this.backend.copyParts(copies);
      return made;
    });
  }

  /** Return a new context whose row i is a copy of row rows[i]. */
  copy(rows: Int32Array): EncoderContext {
    const requests = rows.map((row) => this.requests[row]);
    const buffers = this.taken(requests.map((request) => this.bufferRequests.indexOf(request)));
    const other = new EncoderContext(this.backend, buffers, rows.length, this.shares, this.use);
    other.requests = other.bufferRequests = requests;
    return other;
  }

  release(): void {
    this.replace([]);
  }

  private replace(buffers: Tensor[]): void {
    this.dropViews();
    disposeAll(this.buffers);
    this.buffers = buffers;
    this.count();
  }

  private count(): void {
    const bytes = this.buffers.reduce((sum, buffer) => sum + buffer.byteLength, 0);
    this.use.add(bytes - this.bytes);
    this.bytes = bytes;
  }

  private dropViews(): void {
    disposeAll(this.views ?? []);
    this.views = undefined;
  }
}

/** Return one number for each run of equal numbers, if all runs have the same length; else the numbers unchanged. */
export function sharedRequests(requests: Int32Array): Int32Array {
  const begins: number[] = [];
  for (let i = 0; i < requests.length; i++) if (i === 0 || requests[i] !== requests[i - 1]) begins.push(i);
  const length = requests.length / begins.length;
  const isUniform = begins.length < requests.length && begins.every((begin, i) => begin === i * length);
  return isUniform ? Int32Array.from(begins, (begin) => requests[begin]) : requests;
}

function equal(one: Int32Array, other: Int32Array): boolean {
  return one.length === other.length && one.every((value, i) => value === other[i]);
}
