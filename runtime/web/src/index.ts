/** Run model files of tformer-export in browsers and in Node. */

export {
  AbortedError,
  DeviceError,
  InputError,
  MissingExtraError,
  ModelFileError,
  OptionError,
  OutOfMemoryError,
  TformerError,
  UnsupportedCallError,
} from "./base/errors.js";
export type { NumberArray } from "./base/arrays.js";
export { CachedPrefix, Chat, type CallOptions, type ChatMessage, type Turn } from "./chat.js";
export type { Alternatives } from "./decoding/logProbabilities.js";
export type { EarlyStopping, LogitsProcessor } from "./decoding/optionChecks.js";
export type { GenerationOptions } from "./decoding/options.js";
export type { Result, Timing } from "./decoding/request.js";
export type { FinishReason } from "./decoding/sequence.js";
export type { Manifest } from "./format/manifest.js";
export type { Progress } from "./loading/download.js";
export type { ModelAddress } from "./loading/source.js";
export type { ModelStore } from "./loading/store.js";
export { Model } from "./load.js";
export type {
  AttentionLabels,
  BatchOptions,
  GenerateOptions,
  LoadOptions,
  PredictOptions,
  ReadOptions,
} from "./modelTypes.js";
export type { Message, MessagePart, Tools } from "./preprocess/conversation.js";
export type { Input, Value } from "./preprocess/values.js";
export type { Classification } from "./tasks/classification.js";
export type { Vectors } from "./tasks/features.js";
export type { Segment, Transcription } from "./tasks/speech.js";
export type { ForecastOptions } from "./tasks/forecasting.js";
export type { AudioInput } from "./preprocess/audio.js";
export type { ImageInput } from "./preprocess/images.js";
export type { History } from "./preprocess/series.js";
export type { Filled, MaskCandidate } from "./tasks/fillMask.js";
export type { Answer } from "./tasks/questionAnswering.js";
export type { Span } from "./tasks/tokenClassification.js";
