/** The interface of tasks: arrays of an input, and a result from outputs. */

import type { NumberArray } from "../base/arrays.js";
import { InputError, ModelFileError, OptionError } from "../base/errors.js";
import { checkBoolean } from "../base/validation.js";
import type { Manifest, OutputMeaning } from "../format/manifest.js";
import type { Sources } from "../format/sizes.js";
import type { Inputs } from "../preprocess/inputs.js";
import type { Input } from "../preprocess/values.js";

export type Outputs = readonly NumberArray[]; // of the model for one request, without batch axis and padding
export type SettingValues = Readonly<Record<string, unknown>>;

/**
 * One input as arrays.
 *
 * requests: a mapping from request inputs to arrays for each run of the model; several for an input that is read in parts.
 * details: facts about the input that `Task.makeResult` needs.
 */
export interface TaskInput<Details = unknown> {
  readonly requests: readonly Sources[];
  readonly details?: Details;
}

/** A task of single-pass models. Subclasses set the fields and override methods. */
export abstract class Task<Result = unknown, Settings = unknown> {
  /** A verb phrase for error messages, such as "classifies its inputs". */
  abstract readonly does: string;
  /** The method of `Model` for this task. */
  abstract readonly call: string;
  readonly batchSize: number = 32;
  readonly canTruncate: boolean = true;
  protected readonly meaning: OutputMeaning;

  constructor(readonly manifest: Manifest) {
    this.meaning = manifest.outputMeaning;
  }

  /** Return a setting of the file; undefined without it. Throw ModelFileError for one of another type. */
  protected fileSetting(name: string, type: "string"): string | undefined;
  protected fileSetting(name: string, type: "number"): number | undefined;
  protected fileSetting(name: string, type: "string" | "number"): unknown {
    const value = this.meaning.settings.get(name);
    if (value !== undefined && typeof value !== type) {
      throw new ModelFileError(
        `the task settings of the file are damaged (${name} is no ${type}): export the model again`,
      );
    }
    return value;
  }

  /** Check the settings of results, and fill in the defaults. Throw OptionError for an impossible value. */
  abstract settings(values: SettingValues): Settings;

  /** Throw OptionError for settings that the task does not have. */
  protected checkKnown(values: SettingValues, known: readonly string[]): void {
    const others = Object.keys(values).filter((name) => values[name] !== undefined && !known.includes(name));
    if (others.length) throw new OptionError(`this file ${this.does}: it takes no ${others.join(", ")}`, others[0]);
  }

  /** Return whether inputs that are too long are cut. Throw OptionError if inputs of this task cannot be cut. */
  truncates(truncate: unknown, _settings: Settings): boolean {
    if (checkBoolean("truncate", truncate) && !this.canTruncate) {
      throw new OptionError(`this file ${this.does}: it takes no truncate`, "truncate");
    }
    return truncate as boolean;
  }

  /** Read an input. Throw InputError for an input that the model cannot read. */
  async readInput(input: Input, inputs: Inputs, truncate: boolean, _settings: Settings): Promise<TaskInput> {
    return { requests: [await inputs.singlePassArrays(input, truncate)] };
  }

  /**
   * Read an input for one run of the model, whose attention weights are computed.
   *
   * Throw InputError for an input that is read in windows.
   */
  async singleRequest(input: Input, inputs: Inputs, truncate: boolean, settings: Settings): Promise<Sources> {
    const { requests } = await this.readInput(input, inputs, truncate, settings);
    if (requests.length === 1) return requests[0];
    throw new InputError(
      `the input is read in ${requests.length} windows, but attention weights are computed within one of them: shorten it`,
    );
  }

  /** Return the part of the outputs for a request that `makeResult` needs. */
  selectOutputs(outputs: Outputs, _request: Sources): Outputs {
    return outputs;
  }

  /** Return the result of an input. outputs: of each of its requests, after `selectOutputs`. */
  abstract makeResult(reading: TaskInput, outputs: readonly Outputs[], settings: Settings): Result;
}
