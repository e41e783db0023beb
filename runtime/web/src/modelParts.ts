/**
 * The parts of a model that only some files need: tokenizers, chat templates, images, recordings, series and tasks.
 * Their code is loaded for these files, so that a page loads less.
 */

import { numberArray } from "./base/arrays.js";
import { isNode } from "./backend/devices.js";
import { ModelFileError, OptionError } from "./base/errors.js";
import { startTimeLimits } from "./base/timeLimit.js";
import { settingsOf } from "./decoding/options.js";
import type { Engine } from "./engine/engine.js";
import { adapterNumber, AUDIO, IMAGE, SERIES, type Manifest } from "./format/manifest.js";
import type { AudioInput } from "./preprocess/audio.js";
import type { PromptTemplate } from "./preprocess/conversation.js";
import type { DataReader } from "./preprocess/inputs.js";
import type { PromptItems } from "./preprocess/promptItems.js";
import type { TextCode } from "./preprocess/textReader.js";
import type { Task } from "./tasks/base.js";
import type { Forecaster } from "./tasks/forecasting.js";
import { isSpeechToText, taskOf } from "./tasks/index.js";
import type { SpeechToText } from "./tasks/speechToText.js";

export interface ModelParts {
  readonly textCodes: readonly TextCode[];
  /** Makes the chat template of a file; undefined for a file without one. */
  readonly templateOf: ((manifest: Manifest) => PromptTemplate) | undefined;
  /** Input → the function that reads an image or a recording for it. */
  readonly dataReaders: ReadonlyMap<string, DataReader>;
  /** The task of a single-pass model. */
  readonly task: Task | undefined;
  readonly forecaster: Forecaster | undefined;
  readonly speechToText: SpeechToText | undefined;
  /** Reads the images of prompts; undefined for a model that reads none. */
  readonly promptItems: PromptItems | undefined;
}

/**
 * Return the parts of a model.
 *
 * Throw ModelFileError for settings of the file that no call could use, as a stranger may have written them.
 */
export async function loadParts(engine: Engine): Promise<ModelParts> {
  const { manifest, name } = engine;
  try {
    const textCodes = await textCodesOf(manifest);
    const forecaster = await forecasterOf(engine);
    const task = forecaster || manifest.decode ? undefined : await taskOf(manifest, textCodes);
    const speechToText = isSpeechToText(manifest)
      ? new (await import("./tasks/speechToText.js")).SpeechToText(manifest)
      : undefined;
    if (manifest.decode && !forecaster) {
      adapterNumber(manifest, settingsOf({}, manifest.generationDefaults).adapter);
    }
    const hasTemplate = manifest.chatTemplate !== undefined;
    const templateOf = hasTemplate ? (await import("./preprocess/chatTemplate.js")).templateOf : undefined;
    return {
      textCodes,
      templateOf,
      dataReaders: await readersOf(manifest),
      task,
      forecaster,
      speechToText,
      promptItems: await promptItemsOf(manifest),
    };
  } catch (error) {
    if (error instanceof ModelFileError) throw new ModelFileError(`${name}: ${error.reason}`, undefined, error);
    if (!(error instanceof OptionError)) throw error;
    throw new ModelFileError(
      `the defaults of ${name} are damaged (${error.reason}): export the model again`,
      undefined,
      error,
    );
  }
}

async function textCodesOf({ tokenizers }: Manifest): Promise<TextCode[]> {
  if (!tokenizers.length) return [];
  if (isNode()) await startTimeLimits();
  const { TextCode } = await import("./preprocess/textReader.js");
  return tokenizers.map((definition) => new TextCode(definition));
}

async function forecasterOf(engine: Engine): Promise<Forecaster | undefined> {
  if (!hasKind(engine.manifest, SERIES)) return undefined;
  const { SeriesPreprocessor } = await import("./preprocess/series.js");
  const { Forecaster } = await import("./tasks/forecasting.js");
  return new Forecaster(engine, SeriesPreprocessor.of(engine.manifest)!);
}

async function promptItemsOf(manifest: Manifest): Promise<PromptItems | undefined> {
  if (!manifest.placeholders.size) return undefined;
  const { imageInputs } = await import("./preprocess/images.js");
  const { PromptItems } = await import("./preprocess/promptItems.js");
  return PromptItems.of(manifest, imageInputs(manifest.preprocessing));
}

async function readersOf(manifest: Manifest): Promise<Map<string, DataReader>> {
  const readers = new Map<string, DataReader>();
  if (hasKind(manifest, IMAGE)) {
    const { imageInputs, isImage } = await import("./preprocess/images.js");
    for (const [name, images] of imageInputs(manifest.preprocessing)) {
      readers.set(name, (value) => {
        if (!isImage(value)) return value;
        const { data, shape } = images.pixels(value);
        return numberArray(Float32Array.from(data), shape);
      });
    }
  }
  if (hasKind(manifest, AUDIO)) {
    const { audioOf } = await import("./preprocess/audio.js");
    const named = audioOf(manifest)!;
    readers.set(named.name, (value) => named.audio.fromSamples(value as AudioInput));
  }
  return readers;
}

function hasKind(manifest: Manifest, kind: string): boolean {
  return [...manifest.preprocessing.values()].some((entry) => entry.kind === kind);
}
