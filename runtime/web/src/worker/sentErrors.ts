/** Errors as messages between threads: they keep their class and their sentence. */

import {
  AbortedError,
  DeviceError,
  InputError,
  MissingExtraError,
  ModelFileError,
  OptionError,
  OutOfMemoryError,
  TformerError,
  UnsupportedCallError,
} from "../base/errors.js";

const CLASSES = new Map(
  [
    InputError,
    OutOfMemoryError,
    ModelFileError,
    DeviceError,
    AbortedError,
    UnsupportedCallError,
    MissingExtraError,
    TformerError,
  ].map((one) => [one.kind, one]),
);

/** An error in a message. original: its number on the side that it came from. */
export interface SentError {
  readonly kind: string;
  readonly message: string;
  readonly option: string | undefined;
  readonly inputNumber: number | undefined;
  readonly stack: string | undefined;
  readonly original: number | undefined;
}

const MAX_KEPT = 64;

/**
 * The errors of one side of a connection. An error that comes back is the same object again. Such an error is
 * thrown by a list of inputs that the caller reads.
 */
export class SentErrors {
  private readonly sent = new Map<number, unknown>();
  private readonly received = new WeakMap<object, number>();
  private count = 0;

  send(error: unknown): SentError {
    const { name, message, stack } = error instanceof Error ? error : new Error(String(error));
    const known = error instanceof TformerError ? error : undefined;
    let original = typeof error === "object" && error !== null ? this.received.get(error) : undefined;
    if (original === undefined) {
      original = -++this.count; // negative: an error of the sender
      this.sent.set(this.count, error);
      this.sent.delete(this.count - MAX_KEPT);
    }
    return {
      kind: known ? (known.constructor as typeof TformerError).kind : name,
      message: known?.reason ?? message,
      option: error instanceof OptionError ? error.option : undefined,
      inputNumber: known?.inputNumber,
      stack,
      original,
    };
  }

  receive({ kind, message, option, inputNumber, stack, original }: SentError): unknown {
    if (original !== undefined && original > 0 && this.sent.has(original)) return this.sent.get(original);
    const Kind = CLASSES.get(kind);
    let error: Error;
    if (kind === OptionError.kind) error = new OptionError(message, option, inputNumber);
    else if (Kind) error = new Kind(message, inputNumber);
    else {
      error = new Error(message);
      error.name = kind;
    }
    if (stack !== undefined) error.stack = stack;
    if (original !== undefined && original < 0) this.received.set(error, -original);
    return error;
  }
}
