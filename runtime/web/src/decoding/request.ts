/** A request that is ready to run, and its result. */

import { ADAPTER_INPUT, adapterNumber, type Manifest } from "../format/manifest.js";
import { numberArray, type NumberArray } from "../base/arrays.js";
import { InputError, OptionError, UnsupportedCallError } from "../base/errors.js";
import { shown } from "../base/validation.js";
import type { State } from "../engine/state.js";
import type { Sources } from "../format/sizes.js";
import type { Inputs } from "../preprocess/inputs.js";
import type { Input } from "../preprocess/values.js";
import type { Alternatives } from "./logProbabilities.js";
import type { Settings } from "./options.js";
import type { FinishReason } from "./sequence.js";

/** Seconds of one request. */
export interface Timing {
  /** From the call to the first token. */
  readonly firstToken: number;
  /** From the first token on, for each further token. */
  readonly perToken: number;
}

/** The generated text of one input. */
export interface Result {
  /** The text of the tokens, without the end token and up to a stop string; empty if the file has no tokenizer. */
  readonly text: string;
  /** Every id, with the forced prefix, and with the end token if it was generated. */
  readonly tokenIds: readonly number[];
  /** Σ log-probability / length ** lengthPenalty of the ids after the prefix. */
  readonly score: number;
  /** "end" (an end token), "length" (no more tokens allowed) or "stop" (a stop string). */
  readonly finishReason: FinishReason;
  /** The natural logarithm of the model's probability of each id; options do not change it. */
  readonly tokenLogprobs: readonly number[];
  /** The other results if numReturnSequences is more than 1: the next best hypotheses, or the other samples. */
  readonly alternatives: readonly Result[];
  /** The likeliest ids at each position with their log-probabilities, if the options ask for them. */
  readonly topLogprobs: readonly Alternatives[];
  /** (tokens, source positions): the attention weights of the step that chose each token, if the options ask. */
  readonly crossAttentions: NumberArray | undefined;
  /** Submodule of the source model → its output, if the options ask. */
  readonly hiddenStates: ReadonlyMap<string, NumberArray>;
  readonly timing: Timing;
}

/** Ids that were read before a request, and the state of one row that has read them. */
export interface PromptPrefix {
  readonly state: State;
  readonly tokenIds: Int32Array;
}

/** One input, ready to run. */
export interface Request {
  /** Its place in the list of inputs. */
  readonly index: number;
  /** Request input → its ids or features; also ADAPTER_INPUT in a file with adapters. */
  readonly sources: Sources;
  /** The first ids of the step input, with the ids of `cachedPrefix`. */
  readonly prompt: Int32Array;
  /** The maximum number of tokens to generate. */
  readonly maxTokens: number;
  /** The number of last ids of the prompt with which the result begins. */
  readonly prefixTokens: number;
  readonly cachedPrefix?: PromptPrefix;
}

/** Return the error of a call with a cached prefix after its release. */
export function releasedPrefixError(): UnsupportedCallError {
  return new UnsupportedCallError(
    "the prefix has been released and cannot be continued: read it again with cachePrefix()",
  );
}

/** Return the input that chooses an adapter; empty for a file without adapters. Throw OptionError for another name. */
export function adapterInput(manifest: Manifest, name: string | undefined): Sources {
  const number = adapterNumber(manifest, name);
  return manifest.adapters.length ? new Map([[ADAPTER_INPUT, numberArray(Int32Array.of(number), [])]]) : new Map();
}

/**
 * Return the request of an input.
 *
 * index: the place of the input in the list of inputs. cachedPrefix: ids that were read before the input.
 * Throw InputError for an impossible input, OptionError for an adapter that the file does not have.
 */
export function makeRequest(
  manifest: Manifest,
  inputs: Inputs,
  input: Input,
  index: number,
  settings: Settings,
  cachedPrefix?: PromptPrefix,
): Request {
  const read = inputs.generationInputs(input, !cachedPrefix);
  if (cachedPrefix && [...read.sources.values()].some(({ shape }) => shape[0])) {
    throw new InputError(
      `${[...read.sources.keys()].join(", ")} cannot follow a cached prefix, whose images are read at once: put them ` +
        "into the prefix, or leave the prefix out",
    );
  }
  const before = cachedPrefix?.tokenIds ?? new Int32Array(0);
  if (!before.length && !read.prompt.length) {
    throw new InputError(
      "the file names no token to start from: export the model with special_tokens={'bos_token_id': id, …}",
    );
  }
  const sources = new Map([...read.sources, ...adapterInput(manifest, settings.adapter)]);
  const adapters = cachedPrefix?.state.adapters;
  if (adapters && adapters[0] !== adapterNumber(manifest, settings.adapter)) {
    throw new OptionError(`the prefix was read with another adapter than ${shown(settings.adapter)}`, "adapter");
  }
  const prefix = forcedPrefix(inputs, settings);
  // Without a prefix, a rule forces the id.
  const bos = settings.forcedBosTokenId !== undefined && prefix.length ? [settings.forcedBosTokenId] : [];
  const prompt = Int32Array.from([...before, ...read.prompt, ...bos, ...prefix]);
  const { maxLength } = manifest;
  if (prompt.length >= maxLength) {
    const withPrefix = cachedPrefix ? `, with the ${before.length} before it,` : "";
    throw new InputError(
      `the input${withPrefix} is ${prompt.length} tokens long and the model holds ${maxLength}, what it generates included`,
    );
  }
  const maxTokens = Math.min(maxLength - prompt.length, settings.maxNewTokens ?? Infinity);
  return { index, sources, prompt, maxTokens, prefixTokens: bos.length + prefix.length, cachedPrefix };
}

/** Return the ids with which a result must begin. */
function forcedPrefix(inputs: Inputs, settings: Settings): ArrayLike<number> & Iterable<number> {
  return settings.forcedPrefix.length
    ? inputs.ids(inputs.step, settings.forcedPrefix, { addSpecialTokens: false })
    : [];
}
