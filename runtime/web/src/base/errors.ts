/**
 * Every error that tformer raises on purpose, as one tree. The classes are those of the Python runtime.
 *
 * TformerError                base class; its message is one sentence for the user
 * ├── InputError              an input that the model cannot take: empty, too long, outside the vocabulary
 * │   └── OutOfMemoryError    an input that does not fit into the memory
 * ├── OptionError             an option with an unknown name or an impossible value
 * ├── ModelFileError          a file that is not a tformer model, is damaged, or has another version than this runtime
 * ├── DeviceError             a requested device that is not available
 * ├── AbortedError            a call that the caller's AbortSignal ended
 * ├── UnsupportedCallError    a call that this model, or this build of the runtime, does not offer
 * └── MissingExtraError       an optional dependency that is not installed
 */

const MAX_QUOTED_CHARS = 200; // of the text of another library's error, or of an input
const MAX_SENTENCE_CHARS = 20_000;

export class TformerError extends Error {
  static readonly kind: string = "TformerError"; // minifiers rename classes
  /** The sentence without the number of the input. */
  readonly reason: string;
  /** The number of the input that caused the error, from 1; undefined if no input did, or if the call has one only. */
  readonly inputNumber: number | undefined;

  constructor(reason: string, inputNumber?: number, cause?: unknown) {
    const text = reason.length <= MAX_SENTENCE_CHARS ? reason : shortened(reason, MAX_SENTENCE_CHARS);
    super(inputNumber === undefined ? text : `input ${inputNumber}: ${text}`, cause === undefined ? {} : { cause });
    this.name = new.target.kind;
    this.reason = text;
    this.inputNumber = inputNumber;
  }
}

export class InputError extends TformerError {
  static override readonly kind: string = "InputError";
}

export class OutOfMemoryError extends InputError {
  static override readonly kind: string = "OutOfMemoryError";
}

export class OptionError extends TformerError {
  static override readonly kind: string = "OptionError";
  /** The name of the option that the sentence begins with; undefined if it is about no option or several. */
  readonly option: string | undefined;

  constructor(reason: string, option?: string, inputNumber?: number, cause?: unknown) {
    super(reason, inputNumber, cause);
    this.option = option;
  }
}

export class ModelFileError extends TformerError {
  static override readonly kind: string = "ModelFileError";
}

export class DeviceError extends TformerError {
  static override readonly kind: string = "DeviceError";
}

export class AbortedError extends TformerError {
  static override readonly kind: string = "AbortedError";
}

export class UnsupportedCallError extends TformerError {
  static override readonly kind: string = "UnsupportedCallError";
}

export class MissingExtraError extends TformerError {
  static override readonly kind: string = "MissingExtraError";
}

/** Return the same error with the number of its input, from 1. For calls with several inputs. */
export function withInputNumber(error: TformerError, inputNumber: number): TformerError {
  if (error instanceof OptionError) return new OptionError(error.reason, error.option, inputNumber, error);
  const Kind = error.constructor as new (reason: string, inputNumber?: number, cause?: unknown) => TformerError;
  return new Kind(error.reason, inputNumber, error);
}

/** Return the error's name and the first line of its text. */
export function errorSummary(error: unknown): string {
  const name = error instanceof Error ? error.name : typeof error;
  const text = String(error instanceof Error ? error.message : error)
    .split("\n")
    .map((line) => line.trim())
    .find((line) => line);
  return text ? `${name}: ${quotable(text)}` : name;
}

/** Return a text of an input or of another library, cut to a length that a sentence can hold. */
export function quotable(text: unknown): string {
  const whole = String(text);
  return whole.length <= MAX_QUOTED_CHARS ? whole : `${whole.slice(0, MAX_QUOTED_CHARS)} …`;
}

/** Return a text without its middle. Its end says what to do. */
function shortened(text: string, length: number): string {
  return `${text.slice(0, (length * 3) / 4)} … ${text.slice(-length / 5)}`;
}

/** Return the error of a call that its signal ended. */
export function abortedError(signal: AbortSignal): AbortedError {
  return new AbortedError("the call was aborted by its signal", undefined, signal.reason);
}

/** Throw AbortedError if the signal is aborted, OptionError for another object, such as its controller. */
export function checkAborted(signal: AbortSignal | undefined): void {
  if (signal === undefined || signal === null) return;
  if (typeof signal.aborted !== "boolean" || typeof signal.addEventListener !== "function") {
    throw new OptionError("signal must be an AbortSignal: that of an AbortController is its signal", "signal");
  }
  if (signal.aborted) throw abortedError(signal);
}
