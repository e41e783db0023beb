/**
 * The settings of a request, and the rules between options. The table of the options is `optionTable.ts`.
 *
 * The names are those of the Python runtime in camelCase, and so are the rules of their choice:
 *
 * - sampling, if temperature, topK, topP or minP is set and temperature is not 0;
 * - otherwise beam search, if numBeams is more than 1;
 * - otherwise greedy decoding.
 *
 * A sampling option of the caller overrides numBeams of the file, and the other way round. An error follows if the caller
 * sets both. What this runtime lacks (grammars, speculation) is in `ABSENT` and refused by name.
 */

import { OptionError } from "../base/errors.js";
import { checkNames } from "../base/validation.js";
import { camelCase, snakeCase } from "../format/typedJson.js";
import {
  ABSENT,
  NOT_IN_FILES,
  OPTIONS,
  type GenerationOptions,
  type OptionName,
  type Settings,
} from "./optionTable.js";

export type { GenerationOptions, Settings } from "./optionTable.js";

const OPTION_NAMES = Object.keys(OPTIONS) as readonly OptionName[];
const SAMPLING = ["temperature", "topK", "topP", "minP"] as const;
const GROUPS = ["numBeamGroups", "diversityPenalty"] as const;

type Checked = { -readonly [N in OptionName]?: Settings[N] };

/** Return options with each value checked. Throw OptionError for an unknown name or an impossible value. */
function checked(options: Readonly<Record<string, unknown>>): Checked {
  for (const [name, advice] of Object.entries(ABSENT)) {
    if (options[name] !== undefined) {
      throw new OptionError(`${name} is an option that the JavaScript runtime does not have: ${advice}`, name);
    }
  }
  const given = Object.entries(options).filter(([, value]) => value !== undefined && value !== null);
  checkNames(
    given.map(([name]) => name),
    OPTION_NAMES,
  );
  return Object.fromEntries(given.map(([name, value]) => [name, OPTIONS[name as OptionName][0](name, value)]));
}

/**
 * Return the caller's options; without one, the default of the file; without that, the default of the table.
 *
 * defaults: of the file, whose names are in snake_case.
 * Throw OptionError if options contradict each other, or if the file has a default that does not exist.
 */
export function settingsOf(options: GenerationOptions, defaults: ReadonlyMap<string, unknown>): Settings {
  if (typeof options !== "object" || options === null) throw new OptionError("options must be an object");
  const caller = checked(options as Record<string, unknown>);
  let file = fileDefaults(defaults);
  const isSet = (names: readonly OptionName[]) => names.some((name) => caller[name] !== undefined);
  if (caller.temperature !== 0 && isSet(SAMPLING)) {
    file = without(file, ["numBeams", "numReturnSequences", "patience", ...GROUPS]);
  } else if ((caller.numBeams ?? 1) > 1) {
    file = without(file, SAMPLING);
  } else if (caller.numBeams !== undefined) {
    file = without(file, ["patience", ...GROUPS]);
  }
  const fallbacks = Object.fromEntries(OPTION_NAMES.map((name) => [name, OPTIONS[name][1]]));
  const settings = { ...fallbacks, ...file, ...caller } as unknown as Settings;
  if (caller.seed !== undefined && caller.temperature === undefined && !samples(settings)) {
    throw new OptionError(`seed: ${settings.seed} changes nothing without sampling: set a temperature`, "seed");
  }
  checkTogether(settings);
  return settings;
}

/** Return the generation defaults of a model file as options. Throw OptionError for those that no file can have. */
export function fileDefaults(defaults: ReadonlyMap<string, unknown>): Checked {
  try {
    const options = checked(Object.fromEntries([...defaults].map(([name, value]) => [camelCase(name), value])));
    for (const [name, kind] of Object.entries(NOT_IN_FILES)) {
      if (name in options) throw new OptionError(`${name} is ${kind}, which a file cannot hold`);
    }
    return options;
  } catch (error) {
    if (!(error instanceof OptionError)) throw error;
    throw new OptionError(
      `the model file's generation defaults: ${error.reason}`,
      error.option && snakeCase(error.option),
    );
  }
}

/** Return whether tokens are drawn at random. */
export function samples(settings: Settings): boolean {
  return settings.temperature !== 0 && SAMPLING.some((name) => settings[name] !== undefined);
}

/** Return whether beam search chooses the tokens. */
export function usesBeams(settings: Settings): boolean {
  return settings.numBeams > 1 && !samples(settings);
}

/** Return the rows of a batch that a request takes. */
export function widthOf(settings: Settings): number {
  return Math.max(settings.numBeams, settings.numReturnSequences);
}

function checkTogether(settings: Settings): void {
  const { numBeams, numReturnSequences, minNewTokens, maxNewTokens, numBeamGroups, diversityPenalty } = settings;
  if (samples(settings) && numBeams > 1) {
    throw new OptionError(`numBeams: ${numBeams} and sampling (${SAMPLING.join(", ")}) exclude each other`);
  }
  if (!samples(settings) && numReturnSequences > numBeams) {
    throw new OptionError(
      `numReturnSequences: ${numReturnSequences} needs a numBeams of at least ${numReturnSequences}, or sampling`,
      "numReturnSequences",
    );
  }
  if (maxNewTokens !== undefined && minNewTokens > maxNewTokens) {
    throw new OptionError(`minNewTokens: ${minNewTokens} is more than maxNewTokens: ${maxNewTokens}`, "minNewTokens");
  }
  if (numBeams % numBeamGroups) {
    throw new OptionError(
      `numBeamGroups: ${numBeamGroups} must divide numBeams, which is ${numBeams}`,
      "numBeamGroups",
    );
  }
  if (diversityPenalty && numBeamGroups === 1) {
    throw new OptionError(
      `diversityPenalty: ${diversityPenalty} needs a numBeamGroups of at least 2`,
      "diversityPenalty",
    );
  }
  const enough = Math.floor(numBeams * settings.patience + 0.5);
  if (numBeams > 1 && enough < numReturnSequences) {
    throw new OptionError(
      `patience: ${settings.patience} ends at ${enough} hypotheses, fewer than numReturnSequences: ${numReturnSequences}`,
      "patience",
    );
  }
  if (settings.forcedBosTokenId !== undefined && settings.suppressTokens.includes(settings.forcedBosTokenId)) {
    throw new OptionError(
      `forcedBosTokenId: ${settings.forcedBosTokenId} is one of the ids that suppressTokens forbids`,
      "forcedBosTokenId",
    );
  }
}

function without(options: Checked, names: readonly OptionName[]): Checked {
  return Object.fromEntries(Object.entries(options).filter(([name]) => !names.includes(name as OptionName)));
}
