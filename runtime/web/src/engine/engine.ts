/**
 * The lowest level of decoding: encode requests, feed tokens, return logits. Search is in the layers above.
 *
 *     const state = await engine.start(new Map([["src", [ids, otherIds]]]), { rows: 2 });
 *     const logits = await engine.step(state, [1, 1]);       // (2, vocabulary)
 *     engine.reorder(state, Int32Array.of(1, 1));            // beams; or fewer rows, to drop finished rows
 */

import type { Backend, Binding, Session, Tensor, Weights } from "../backend/session.js";
import { closedError } from "../backend/session.js";
import { asNumbers, numberArray, sizeOf, writeNumbers, type NumberArray } from "../base/arrays.js";
import { disposeAll } from "../base/disposal.js";
import { InputError, ModelFileError, OutOfMemoryError, UnsupportedCallError } from "../base/errors.js";
import {
  ADAPTER_INPUT,
  BATCH_AXIS,
  COLUMN_IDS,
  COLUMN_WEIGHT,
  encodedOutputs,
  GATHER_IDS,
  GATHERED_COLUMNS,
  logitCount,
  stepFeatures,
  type DecodeStage,
  type Manifest,
  type TensorSpec,
} from "../format/manifest.js";
import { checkGraph, graphInputs } from "../format/manifestChecks.js";
import { manifestOf, readingFile, readMetadata, withMappedWeights } from "../format/modelFile.js";
import { graphTensors, parseModel, type GraphTensor } from "../format/onnxGraph.js";
import { extractStage, type Stage } from "../format/stageSplit.js";
import { encodeItems } from "./itemContext.js";
import { SessionCall, type CallResources } from "./decodeCall.js";
import { EncoderContext } from "./encoderContext.js";
import { KVCache } from "./kvCache.js";
import { MemoryUse } from "./memoryUse.js";
import { paddedRequestTensors, type Requests } from "./padding.js";
import { isIdentity } from "./rowMoves.js";
import { Candidates, Shortlist } from "./shortlist.js";
import { State, type LogitPositions } from "./state.js";

const PREFILL_CHUNK_TOKENS = 512; // larger calls are not faster
const MAX_CACHED_CALL_TOKENS = 32; // larger calls are not kept for later steps
const LARGE_CALL = "large"; // key of the latest call that is not kept

/** A model file in memory. path: where it is on the disk of a Node process; undefined for one from elsewhere. */
export interface ModelSource {
  readonly name: string;
  readonly bytes: Uint8Array;
  readonly path?: { readonly folder: string; readonly file: string };
  /** Name of a second file with weights → its bytes, for a device that maps weights from bytes. */
  readonly dataFiles?: ReadonlyMap<string, Uint8Array>;
}

export interface StartOptions {
  readonly rows: number;
  /** The rows for which buffers are allocated at once; by default `rows`. */
  readonly roomForRows?: number;
  /** Names of the extra outputs to compute, of either stage. */
  readonly extras?: readonly string[];
  /** The expected maximum of tokens of a row; 0 if it is not known. */
  readonly maxTokens?: number;
  /** For a file with a shortlist: the candidate ids of each row, in order; undefined for a row with all ids. */
  readonly candidates?: readonly (Int32Array | undefined)[];
}

interface OpenStage {
  readonly session: Session;
  readonly inputNames: readonly string[];
}

export class Engine {
  readonly memory = new MemoryUse();
  private readonly placeholders = new Map<string, Tensor>();
  private closed = false;
  private runs = 0; // in flight

  private constructor(
    readonly name: string,
    readonly backend: Backend,
    readonly manifest: Manifest,
    private readonly stages: ReadonlyMap<Stage, OpenStage>,
    private readonly graphShapes: ReadonlyMap<string, GraphTensor>,
    readonly shortlist: Shortlist | undefined,
  ) {}

  /** Open a model file. Throw ModelFileError for another file, a damaged one, or another version. */
  static async open(source: ModelSource, backend: Backend): Promise<Engine> {
    const { name, bytes, path, dataFiles } = source;
    const [manifest, model, weights, metadata] = readingFile(name, () => {
      const metadata = readMetadata(bytes);
      const manifest = manifestOf(metadata);
      const maps = backend.mapsWeights === "bytes" || path !== undefined;
      const location = maps ? (path?.file ?? "model.onnx") : undefined;
      const model = location === undefined ? bytes : withMappedWeights(bytes, location);
      const weights: Weights = { location, folder: path?.folder, bytes, dataFiles };
      return [manifest, model, weights, metadata] as const;
    });
    const shortlist = await shortlistOf(manifest, metadata, name);
    const graphs = readingFile(name, () => stageModels(manifest, model));
    const stages = new Map<Stage, OpenStage>();
    try {
      for (const [stage, graph] of graphs.models) {
        const session = await backend.open(graph.model, weights, manifest, name);
        stages.set(stage, { session, inputNames: [...graph.inputs.keys()] });
      }
    } catch (error) {
      for (const { session } of stages.values()) session.dispose();
      throw error;
    }
    return new Engine(name, backend, manifest, stages, graphs.inputs, shortlist);
  }

  /** The decode stage. Throw UnsupportedCallError if the file has none. */
  get decode(): DecodeStage {
    if (!this.manifest.decode) {
      throw new UnsupportedCallError(`${this.name} holds a single-pass model, which does not decode`);
    }
    return this.manifest.decode;
  }

  get isClosed(): boolean {
    return this.closed;
  }

  /** Free the weights, after the runs in flight. Later runs throw UnsupportedCallError. States keep their own caches. */
  close(): void {
    if (this.closed) return;
    this.closed = true;
    if (!this.runs) this.free();
  }

  private free(): void {
    for (const { session } of this.stages.values()) session.dispose();
    for (const tensor of this.placeholders.values()) tensor.dispose();
    this.placeholders.clear();
  }

  /** Return the result of a run, which uses the sessions and the placeholders until its end. */
  private async running<T>(run: () => Promise<T>): Promise<T> {
    this.runs++;
    try {
      return await run();
    } finally {
      if (!--this.runs && this.closed) this.free();
    }
  }

  private stage(stage: Stage): OpenStage {
    const open = this.stages.get(stage);
    if (!open || this.closed) throw closedError();
    return open;
  }

  /** Return a tensor to bind to an input that the stage does not read: zeros, empty if it has a free axis. */
  private placeholder(name: string, freeSize = 0): Tensor {
    const key = `${name}/${freeSize}`;
    let tensor = this.placeholders.get(key);
    if (!tensor) {
      const spec = graphInputs(this.manifest).find((input) => input.name === name)!;
      const shape = this.graphShapes.get(name)?.shape ?? spec.shape;
      tensor = this.backend.tensor(
        spec.dtype,
        shape.map((size) => (typeof size === "number" ? size : freeSize)),
      );
      this.placeholders.set(key, tensor);
    }
    return tensor;
  }

  /**
   * Run the encode stage and return its outputs by name. The caller disposes them.
   *
   * requests: for each request input that is not a mask, `rows` arrays, one a row. In a file with adapters also
   *     ADAPTER_INPUT → the number of each row's adapter, by default 0 for none.
   * extras: names of extra outputs of the stage to return with its outputs.
   * gatherIds: ids whose columns of the output projection are returned as GATHERED_COLUMNS.
   * checked: whether the lengths of each row were checked (`checkRow`).
   */
  async encode(
    requests: Requests,
    rows: number,
    extras: readonly string[] = [],
    gatherIds?: Int32Array,
    checked = false,
  ): Promise<Map<string, Tensor>> {
    const { encode } = this.manifest;
    if (!encode) {
      throw new UnsupportedCallError(`${this.name} has no input other than the tokens that it continues`);
    }
    const { session, inputNames } = this.stage("encode");
    const [inputs, adapters] = this.splitAdapters(requests, rows);
    const tensors = paddedRequestTensors(this.backend, encode, inputs, rows, checked);
    const names = [
      ...encode.outputs.map((output) => output.name),
      ...encode.extras.map((extra) => extra.name).filter((name) => extras.includes(name)),
      ...(gatherIds ? [GATHERED_COLUMNS] : []),
    ];
    try {
      if (gatherIds) tensors.set(GATHER_IDS, idTensor(this.backend, gatherIds));
      if (adapters) {
        tensors.set(ADAPTER_INPUT, idTensor(this.backend, adapters));
      }
      const isColumn = (name: string) => name === COLUMN_IDS || name === COLUMN_WEIGHT;
      const bound = new Map(
        inputNames.map((name) => [name, tensors.get(name) ?? this.placeholder(name, Number(isColumn(name)))]),
      );
      const binding = session.bind(bound, new Map(names.map((name) => [name, this.placeOf(name)])));
      return await this.running(() => this.encoded(binding, names, encode.outputs, rows));
    } catch (error) {
      if (!(error instanceof OutOfMemoryError)) throw error;
      const shapes = [...inputs.keys()].map((name) => `${name} (${tensors.get(name)?.dims.join(", ")})`).join(", ");
      throw new OutOfMemoryError(
        `there is not enough memory to read the input (${shapes}; most models need memory that grows with the square ` +
          "of the length): cut it into parts",
        undefined,
        error,
      );
    } finally {
      for (const tensor of tensors.values()) tensor.dispose();
    }
  }

  /** Run a binding of the encode stage, which is then disposed. Return the named outputs. specs: of those to check. */
  private async encoded(
    binding: Binding,
    names: readonly string[],
    specs: readonly TensorSpec[],
    rows: number,
  ): Promise<Map<string, Tensor>> {
    const outputs = new Map<string, Tensor>();
    try {
      await binding.run();
      for (const name of names) outputs.set(name, binding.output(name));
      for (const spec of specs) this.checkShape(spec, outputs.get(spec.name)!, rows);
      return outputs;
    } catch (error) {
      for (const tensor of outputs.values()) tensor.dispose();
      throw error;
    } finally {
      binding.dispose();
    }
  }

  /**
   * Return where an output of encode is allocated: on the device if the decode stage alone reads it. Items are merged in
   * memory. Masks and lengths are small, and read on the CPU too; and devices copy words of 4 bytes.
   */
  private placeOf(name: string): "host" | "device" {
    const { decode, placeholders } = this.manifest;
    if (!decode || placeholders.size) return "host";
    const spec = encodedOutputs(this.manifest).find((output) => output.name === name);
    const inner = spec?.shape[spec.shape.length - 1];
    const isWhole = spec?.dtype === "float32" || (spec?.dtype === "float16" && Number(inner) % 2 === 0);
    return isWhole ? "device" : "host";
  }

  /** Return the other inputs, and the number of each row's adapter; undefined for a file without adapters. */
  private splitAdapters(requests: Requests, rows: number): [Requests, Int32Array | undefined] {
    if (!this.manifest.adapters.length) return [requests, undefined];
    const others = new Map(requests);
    others.delete(ADAPTER_INPUT);
    const given = requests.get(ADAPTER_INPUT);
    return [others, Int32Array.from({ length: rows }, (_, row) => given?.[row].data[0] ?? 0)];
  }

  /** Throw ModelFileError for an output of another shape than the manifest declares: the graph is damaged. */
  private checkShape(spec: TensorSpec, tensor: Tensor, rows: number): void {
    const { dims } = tensor;
    const fits =
      dims.length === spec.shape.length &&
      spec.shape.every(
        (size, i) => dims[i] === (size === BATCH_AXIS ? rows : typeof size === "number" ? size : dims[i]),
      );
    if (!fits) {
      throw new ModelFileError(
        `${this.name} is damaged: its graph returns ${spec.name} of the shape (${dims.join(", ")}), and its manifest ` +
          `declares (${spec.shape.join(", ")}): export the model again`,
      );
    }
  }

  /**
   * Encode `rows` requests and return a state with a row for each.
   *
   * requests: as for `encode`; empty for a decoder-only model, but for ADAPTER_INPUT.
   */
  async start(requests: Requests, options: StartOptions): Promise<State> {
    const { rows, extras = [], maxTokens = 0 } = options;
    const { decode } = this;
    const room = Math.max(rows, options.roomForRows ?? rows);
    const cache = new KVCache(this.backend, decode.caches, this.manifest.maxLength, rows, room, maxTokens, this.memory);
    const encoded = new Map<string, NumberArray>();
    let outputs = new Map<string, Tensor>();
    let candidates: Candidates | undefined;
    if (options.candidates?.some((ids) => ids)) {
      candidates = new Candidates(options.candidates, logitCount(decode), this.memory);
    }
    try {
      if (this.manifest.encode) {
        outputs = await (this.manifest.placeholders.size
          ? this.encodeItems(requests, rows, extras)
          : this.encode(requests, rows, extras, candidates?.ids.length ? candidates.ids : undefined));
        for (const extra of this.manifest.encode.extras) {
          const tensor = outputs.get(extra.name);
          if (!tensor) continue;
          encoded.set(extra.name, numberArray(asNumbers(tensor.data(), tensor.dtype).slice(), tensor.dims));
          tensor.dispose();
        }
      }
      const stepExtras = decode.extras.map((extra) => extra.name).filter((name) => extras.includes(name));
      const adapters = this.splitAdapters(requests, rows)[1];
      const columns = outputs.get(GATHERED_COLUMNS);
      if (columns) candidates?.setColumns(columns);
      const buffers = encodedOutputs(this.manifest).map((spec) => outputs.get(spec.name)!);
      const context = new EncoderContext(this.backend, buffers, rows, decode.sharesContext, this.memory);
      return new State(context, cache, rows, encoded, stepExtras, candidates, adapters);
    } catch (error) {
      disposeAll(outputs.values());
      throw error;
    }
  }

  /** Encode the items of each request, as `encodeItems` does. */
  private encodeItems(requests: Requests, rows: number, extras: readonly string[]): Promise<Map<string, Tensor>> {
    const encode = this.manifest.encode!;
    const names = encode.inputs.filter((spec) => spec.role !== "mask").map((spec) => spec.name);
    const specs = [...encode.outputs, ...encode.extras.filter((extra) => extras.includes(extra.name))];
    return encodeItems(this.backend, requests, names, rows, specs, (one) => this.encode(one, 1, extras));
  }

  /**
   * Feed new tokens to every row and return the logits that follow them.
   *
   * tokens: (rows, N) ids, right-padded with any; or (rows, N, features) for a model that continues a series.
   * counts: the number of valid tokens of each row, at least 1; undefined: N for every row.
   * logitPositions: "last" returns (rows, vocabulary) for the last token of each row; "all" (rows, N, vocabulary).
   *
   * The next call overwrites the returned array, and the extra outputs of the state.
   * Throw InputError if a row would exceed the maximum length. Then the state is unchanged.
   */
  async step(
    state: State,
    tokens: ArrayLike<number>,
    counts?: Int32Array,
    logitPositions: LogitPositions = "last",
  ): Promise<Float32Array> {
    state.check();
    const { rows } = state;
    const { session, inputNames } = this.stage("decode");
    const newTokens = tokens.length / (rows * sizeOf(stepFeatures(this.decode)));
    const totalSlots = state.maxRowLength + newTokens;
    if (totalSlots > this.manifest.maxLength) {
      throw new InputError(`${totalSlots} tokens are more than the ${this.manifest.maxLength} that the model can hold`);
    }
    if (newTokens > 1 && rows > 1 && state.maxRowLength > 0 && !this.decode.chunkedPrefill) {
      throw new UnsupportedCallError("rows with a past read one token at a time, and several were given");
    }
    if (state.cache.reserve(totalSlots, state.maxRowLength)) state.dropCalls();
    let key = `${newTokens} ${logitPositions}`;
    if (rows * newTokens > MAX_CACHED_CALL_TOKENS) {
      key = LARGE_CALL;
      state.calls.get(key)?.dispose();
      state.calls.delete(key);
    }
    let call = state.calls.get(key);
    if (!call) {
      const resources: CallResources = {
        backend: this.backend,
        session,
        decode: this.decode,
        maxLength: this.manifest.maxLength,
        inputNames,
        placeholder: (name) => this.placeholder(name),
      };
      call = new SessionCall(resources, state, newTokens, logitPositions);
      state.calls.set(key, call);
    }
    return this.running(() => call.run(state, tokens, counts, totalSlots));
  }

  /**
   * Feed tokens to a state of one row in calls of at most `chunk` tokens. Return the logits of the last.
   *
   * So the memory of activations does not grow with the length of a prompt, and that of an attention's scores not with
   * its square.
   */
  async stepInParts(state: State, tokens: Int32Array, chunk = PREFILL_CHUNK_TOKENS): Promise<Float32Array> {
    const total = state.maxRowLength + tokens.length;
    if (tokens.length <= chunk || total > this.manifest.maxLength) return this.step(state, tokens);
    state.check();
    if (state.cache.reserve(total, state.maxRowLength)) state.dropCalls(); // at once, as growing would copy
    // Parts of equal length, because the kernels for one token round differently.
    const parts = Math.ceil(tokens.length / chunk);
    let begin = 0;
    for (let part = 0; ; part++) {
      const size = Math.floor(tokens.length / parts) + Number(part < tokens.length % parts);
      const logits = await this.step(state, tokens.subarray(begin, begin + size));
      begin += size;
      if (part === parts - 1) return logits;
    }
  }

  /** Replace row i by row rows[i]. Rows may repeat (beams), and be fewer (finished rows) or more than before. */
  reorder(state: State, rows: Int32Array): void {
    if (isIdentity(rows, state.rows)) return;
    state.check();
    state.lengthsBefore = undefined;
    const lengths = rows.map((row) => state.lengths[row]);
    const changed = [
      state.context.reorder(rows),
      state.cache.reorder(rows, state.lengths),
      rows.length !== state.rows,
    ].some(Boolean);
    if (changed) state.dropCalls();
    state.candidates?.reorder(rows);
    state.adapters = state.adapters && rows.map((row) => state.adapters![row]);
    state.setLengths(lengths);
  }

  /** Return a new state whose row i is a copy of row rows[i]. */
  copy(state: State, rows: Int32Array, options: Omit<StartOptions, "rows">): State {
    state.check();
    const lengths = rows.map((row) => state.lengths[row]);
    const used = lengths.reduce((most, length) => Math.max(most, length), 0);
    const context = state.context.copy(rows);
    const room = Math.max(rows.length, options.roomForRows ?? rows.length);
    let cache: KVCache;
    try {
      cache = state.cache.copy(rows, used, room, options.maxTokens ?? 0);
    } catch (error) {
      context.release();
      throw error;
    }
    const { extras = [] } = options;
    const stepExtras = this.decode.extras.map((extra) => extra.name).filter((name) => extras.includes(name));
    const adapters = state.adapters && rows.map((row) => state.adapters![row]);
    const other = new State(context, cache, rows.length, state.encoded, stepExtras, undefined, adapters);
    other.setLengths(lengths);
    return other;
  }
}

/** Return the shortlist of a file, whose code is loaded for files that have one. Throw ModelFileError. */
async function shortlistOf(
  manifest: Manifest,
  metadata: ReadonlyMap<string, string>,
  name: string,
): Promise<Shortlist | undefined> {
  const { decode } = manifest;
  if (!decode?.shortlist) return undefined;
  const { readShortlist, SHORTLIST_KEY } = await import("../format/shortlistFile.js");
  const { vocabulary, common, tables } = await readShortlist(metadata.get(SHORTLIST_KEY));
  const inputs = (manifest.encode?.inputs ?? []).filter(({ role }) => role === "ids").map(({ name }) => name);
  if (vocabulary !== logitCount(decode)) {
    throw new ModelFileError(`${name}: the file's shortlist is of another vocabulary: export it again`);
  }
  if (![...tables.keys()].every((input) => inputs.includes(input))) {
    throw new ModelFileError(`${name}: the file's shortlist is of other inputs: export it again`);
  }
  return new Shortlist(vocabulary, common, tables);
}

function idTensor(backend: Backend, ids: Int32Array): Tensor {
  const tensor = backend.tensor("int64", [ids.length]);
  writeNumbers(tensor.data(), ids);
  return tensor;
}

interface StageModel {
  readonly model: Uint8Array;
  readonly inputs: ReadonlyMap<string, GraphTensor>;
}

/** Return the model of each stage of the file, whose graphs are checked against the manifest. */
function stageModels(
  manifest: Manifest,
  model: Uint8Array,
): { models: Map<Stage, StageModel>; inputs: Map<string, GraphTensor> } {
  const models = new Map<Stage, StageModel>();
  const inputs = new Map<string, GraphTensor>();
  const outputs = new Map<Stage, ReadonlyMap<string, GraphTensor>>();
  for (const stage of ["encode", "decode"] as const) {
    if (!manifest[stage]) continue;
    const whole = manifest.encode && manifest.decode ? extractStage(model, stage) : model;
    const tensors = graphTensors(parseModel(whole).graph);
    models.set(stage, { model: whole, inputs: tensors.inputs });
    for (const [name, tensor] of tensors.inputs) inputs.set(name, tensor);
    outputs.set(stage, tensors.outputs);
  }
  const none = new Map<string, GraphTensor>();
  checkGraph(manifest, inputs, outputs.get("encode") ?? none, outputs.get("decode") ?? none);
  return { models, inputs };
}
