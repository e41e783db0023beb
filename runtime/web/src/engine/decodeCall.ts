/** A run of the decode stage in a session: inputs and outputs are bound once for each shape. */

import type { Backend, Binding, Session, Tensor } from "../backend/session.js";
import { asNumbers, numberArray, sizeOf, writeNumbers, type Dtype, type NumberArray } from "../base/arrays.js";
import { allOrNothing, disposeAll } from "../base/disposal.js";
import {
  ADAPTER_ROWS,
  COLUMN_IDS,
  COLUMN_WEIGHT,
  LAST_POSITION,
  logitCount,
  NEW_COUNTS,
  POSITIONS,
  SELECTED_TOKENS,
  SLOT_INDICES,
  START_SLOT,
  stepFeatures,
  TOTAL_SLOTS,
  type DecodeStage,
} from "../format/manifest.js";
import { LogitScatter } from "./shortlist.js";
import type { DecodeCall, LogitPositions, State } from "./state.js";

/** What the calls of an engine share. placeholders: a tensor for every graph input that no call sets. */
export interface CallResources {
  readonly backend: Backend;
  readonly session: Session;
  readonly decode: DecodeStage;
  readonly maxLength: number;
  readonly inputNames: readonly string[];
  placeholder(name: string): Tensor;
}

/** A `DecodeCall` with inputs and outputs bound once. A run only writes the few numbers that change. */
export class SessionCall implements DecodeCall {
  private readonly inputs = new Map<string, Tensor>(); // those of this call
  private readonly tensors: Tensor[] = []; // all of this call, but for `slotIndices`
  private logits!: Tensor;
  private scatter: LogitScatter | undefined;
  private bindings: Binding[] = [];
  private slotIndices: Tensor | undefined; // as many as in the latest run
  private readonly hasSelect: boolean;
  private readonly rows: number;

  /** Throw OutOfMemoryError. */
  constructor(
    private readonly resources: CallResources,
    state: State,
    private readonly newTokens: number,
    private readonly logitPositions: LogitPositions,
  ) {
    this.rows = state.rows;
    this.hasSelect = resources.decode.controls.includes(SELECTED_TOKENS);
    try {
      this.allocate(state);
      if (!resources.decode.controls.includes(SLOT_INDICES)) this.bindings = this.bindAll(state);
    } catch (error) {
      this.dispose();
      throw error;
    }
  }

  private allocate(state: State): void {
    const { rows, newTokens, logitPositions } = this;
    const { decode } = this.resources;
    const controls = new Set(decode.controls);
    const selected = logitPositions === "all" ? newTokens : 1;
    const shapes: [string, number[]][] = [
      [POSITIONS, [rows, newTokens]],
      [LAST_POSITION, [rows]],
      [TOTAL_SLOTS, []],
      [START_SLOT, [rows]],
      [NEW_COUNTS, [rows]],
      [SELECTED_TOKENS, [rows, selected]],
      [ADAPTER_ROWS, [rows]],
    ];
    this.inputs.set(decode.step.name, this.tensor(decode.step.dtype, [rows, newTokens, ...stepFeatures(decode)]));
    for (const [name, shape] of shapes) {
      if (!controls.has(name)) continue;
      const dtype = name === LAST_POSITION || name === TOTAL_SLOTS ? "int32" : "int64";
      this.inputs.set(name, this.tensor(dtype, shape));
    }
    const numPositions = this.hasSelect ? selected : newTokens;
    const { candidates } = state;
    this.logits = this.tensor("float32", [rows, numPositions, candidates?.ids.length || logitCount(decode)]);
    this.scatter = candidates && new LogitScatter(rows, numPositions, candidates);
    if (candidates?.weight) {
      const columns = this.tensor("int64", [candidates.ids.length]);
      writeNumbers(columns.data(), candidates.ids);
      this.inputs.set(COLUMN_IDS, columns);
    }
    if (logitPositions === "all" && this.hasSelect) {
      const low = this.low(SELECTED_TOKENS)!;
      for (let i = 0; i < rows * newTokens; i++) low[2 * i] = i % newTokens;
    }
  }

  /** Return a new tensor of this call. */
  private tensor(dtype: Dtype, dims: readonly number[]): Tensor {
    const tensor = this.resources.backend.tensor(dtype, dims);
    this.tensors.push(tensor);
    return tensor;
  }

  private bindAll(state: State, slotIndices?: Tensor): Binding[] {
    return allOrNothing((keep) =>
      Array.from({ length: state.cache.sides }, (_, side) => keep(this.bind(state, side, slotIndices))),
    );
  }

  /** Return a binding of all inputs and outputs. side: of the caches that holds the past. */
  private bind(state: State, side: number, slotIndices: Tensor | undefined): Binding {
    const { decode, session, inputNames } = this.resources;
    const bound = new Map(this.inputs);
    if (slotIndices) bound.set(SLOT_INDICES, slotIndices);
    if (state.candidates?.weight) bound.set(COLUMN_WEIGHT, state.candidates.weight);
    const context = state.context.values();
    decode.context.forEach((name, i) => bound.set(name, context[i]));
    const past = state.cache.past(side);
    decode.caches.forEach((cache, i) => bound.set(cache.past, past[i]));
    const inputs = new Map(inputNames.map((name) => [name, bound.get(name) ?? this.resources.placeholder(name)]));
    const outputs = new Map<string, Tensor | "host">([[decode.logits.name, this.logits]]);
    const present = state.cache.present(side);
    decode.caches.forEach((cache, i) => outputs.set(cache.present, present[i]));
    for (const name of state.stepExtras) outputs.set(name, "host");
    return session.bind(inputs, outputs);
  }

  async run(
    state: State,
    tokens: ArrayLike<number>,
    counts: Int32Array | undefined,
    totalSlots: number,
  ): Promise<Float32Array> {
    this.writeInputs(state, tokens, counts, totalSlots);
    if (this.resources.decode.controls.includes(SLOT_INDICES)) this.bindSlots(state, totalSlots);
    const binding = this.bindings[state.cache.side];
    const running = binding.run();
    if (running) await running;
    const { lengths } = state;
    if (state.cache.hasCarries) state.lengthsBefore = lengths.slice();
    state.cache.recordWrites(lengths, this.newTokens);
    if (counts === undefined || this.newTokens === 1) {
      for (let row = 0; row < this.rows; row++) lengths[row] += counts ? counts[row] : this.newTokens;
      state.maxRowLength = counts ? maximum(lengths) : totalSlots;
    } else {
      for (let row = 0; row < this.rows; row++) lengths[row] += counts[row];
      state.maxRowLength = maximum(lengths);
    }
    if (state.stepExtras.length) state.extras = this.readExtras(binding, state.stepExtras, counts);
    const computed = this.logits.data() as Float32Array;
    const logits = this.scatter?.scatter(computed) ?? computed;
    if (this.logitPositions === "all" || this.hasSelect || this.newTokens === 1) return logits;
    return this.lastPositions(logits, logitCount(this.resources.decode), counts);
  }

  private writeInputs(
    state: State,
    tokens: ArrayLike<number>,
    counts: Int32Array | undefined,
    totalSlots: number,
  ): void {
    const { decode, maxLength } = this.resources;
    const { rows, newTokens } = this;
    const { lengths } = state;
    const step = this.inputs.get(decode.step.name)!.data();
    if (step instanceof Float32Array) {
      step.set(tokens);
      // Attention gives padding a weight of 0, but 0 times NaN is NaN.
      const width = step.length / (rows * newTokens);
      for (let row = 0; counts && newTokens > 1 && row < rows; row++) {
        step.fill(0, (row * newTokens + counts[row]) * width, (row + 1) * newTokens * width);
      }
    } else {
      const low = this.low(decode.step.name)!;
      for (let i = 0; i < tokens.length; i++) low[2 * i] = tokens[i];
    }
    const positions = this.low(POSITIONS);
    const starts = this.low(START_SLOT);
    const newCounts = this.low(NEW_COUNTS);
    const selected = this.logitPositions === "last" ? this.low(SELECTED_TOKENS) : undefined;
    const adapters = this.low(ADAPTER_ROWS);
    const last = this.inputs.get(LAST_POSITION)?.data() as Int32Array | undefined;
    const total = this.inputs.get(TOTAL_SLOTS)?.data();
    for (let row = 0; row < rows; row++) {
      const count = counts && newTokens > 1 ? counts[row] : newTokens;
      if (positions) {
        for (let i = 0; i < newTokens; i++) {
          positions[2 * (row * newTokens + i)] = Math.min(lengths[row] + i, maxLength - 1);
        }
      }
      if (last) last[row] = lengths[row] + count - 1;
      if (starts) starts[2 * row] = lengths[row];
      if (newCounts) newCounts[2 * row] = counts ? counts[row] : newTokens;
      if (selected) selected[2 * row] = count - 1;
      if (adapters) adapters[2 * row] = state.adapters?.[row] ?? 0;
    }
    if (total) total[0] = totalSlots;
  }

  /** Return the low halves of an int64 input, at even places. The high halves stay 0, as no number is negative. */
  private low(name: string): Int32Array | undefined {
    const data = this.inputs.get(name)?.data();
    return data && new Int32Array(data.buffer as ArrayBuffer, data.byteOffset, 2 * data.length);
  }

  /** Bind the indices of all slots, whose number changes with each run. */
  private bindSlots(state: State, totalSlots: number): void {
    if (this.slotIndices?.dims[0] === totalSlots) return;
    const [slotIndices, bindings] = allOrNothing((keep) => {
      const indices = keep(this.resources.backend.tensor("int64", [totalSlots]));
      const data = indices.data() as BigInt64Array;
      for (let i = 0; i < totalSlots; i++) data[i] = BigInt(i);
      return [indices, this.bindAll(state, indices)] as const;
    });
    disposeAll(this.bindings);
    this.slotIndices?.dispose();
    this.slotIndices = slotIndices;
    this.bindings = bindings;
  }

  /** Return the values of each row's last token. width: of each token. */
  private lastPositions<T extends Float32Array | Float64Array | Int32Array>(
    values: T,
    width: number,
    counts: Int32Array | undefined,
  ): T {
    const out = new (values.constructor as new (length: number) => T)(this.rows * width);
    for (let row = 0; row < this.rows; row++) {
      const place = (row * this.newTokens + (counts ? counts[row] : this.newTokens) - 1) * width;
      out.set(values.subarray(place, place + width), row * width);
    }
    return out;
  }

  /** Return copies of the extra outputs, in the layout of the logits. */
  private readExtras(
    binding: Binding,
    names: readonly string[],
    counts: Int32Array | undefined,
  ): Map<string, NumberArray> {
    const extras = new Map<string, NumberArray>();
    for (const name of names) {
      const tensor = binding.output(name);
      try {
        let values = asNumbers(tensor.data(), tensor.dtype).slice();
        const shape = tensor.dims.slice(2);
        if (this.logitPositions === "last" && !this.hasSelect && this.newTokens > 1) {
          values = this.lastPositions(values, sizeOf(shape), counts);
        }
        extras.set(name, numberArray(values, this.logitPositions === "all" ? tensor.dims : [this.rows, ...shape]));
      } finally {
        tensor.dispose();
      }
    }
    return extras;
  }

  dispose(): void {
    disposeAll(this.bindings);
    disposeAll(this.tensors);
    this.slotIndices?.dispose();
    this.bindings = [];
    this.inputs.clear();
  }
}

function maximum(values: Int32Array): number {
  let most = 0;
  for (let i = 0; i < values.length; i++) if (values[i] > most) most = values[i];
  return most;
}
