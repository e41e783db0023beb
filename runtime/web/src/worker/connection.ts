/**
 * Calls between two threads by messages. Both sides can call, and each message has the number of its call.
 *
 * An iterator stays where it is: the other side has a number for it, and asks for its values one by one. So inputs are read
 * lazily and a stream computes no more than is read.
 */

import { AbortedError, checkAborted, InputError } from "../base/errors.js";
import { SentErrors, type SentError } from "./sentErrors.js";

/** A worker, its inside, or a MessagePort. */
export interface Port {
  postMessage(message: unknown): void;
  onmessage: ((event: MessageEvent) => void) | null;
}

type Message =
  | { readonly kind: "call"; readonly id: number; readonly name: string; readonly args: readonly unknown[] }
  | { readonly kind: "abort"; readonly id: number }
  | { readonly kind: "done"; readonly id: number; readonly value: unknown; readonly news: unknown }
  | { readonly kind: "failed"; readonly id: number; readonly error: SentError; readonly news: unknown };

export type Handler = (args: readonly unknown[], signal: AbortSignal) => unknown;

interface Waiting {
  resolve(value: unknown): void;
  reject(error: unknown): void;
}

/** Takes the value of a call whose caller no longer waits, if the other side keeps something for it. */
export type OnLate = (value: unknown) => void;

interface Shared {
  readonly iterator: AsyncIterator<unknown, unknown> | Iterator<unknown, unknown>;
  readonly controller: AbortController;
}

export interface ConnectionOptions {
  /** Return what is sent with each answer. */
  readonly news?: () => unknown;
  readonly onNews?: (news: unknown) => void;
  /** The time that the other side has for its answer to an abort, in milliseconds. */
  readonly abortTime?: number;
}

const ABORT_MS = 2000; // longer than most steps of a model

/** The error of an aborted call of a side that computes and reads no messages. */
class SilentError extends AbortedError {
  constructor(signal: AbortSignal | undefined) {
    const reason = "the call was aborted by its signal, and the worker of the model still computes: dispose() ends it";
    super(reason, undefined, signal?.reason);
  }
}

export class Connection {
  private readonly waiting = new Map<number, Waiting>();
  private readonly running = new Map<number, AbortController>();
  private readonly shared = new Map<number, Shared>();
  private readonly errors = new SentErrors();
  private count = 0;
  private ended: unknown; // the error of all later calls

  constructor(
    private readonly port: Port,
    private readonly handlers: Readonly<Record<string, Handler>>,
    private readonly options: ConnectionOptions = {},
  ) {
    port.onmessage = ({ data }) => void this.receive(data as Message);
  }

  /** Call a handler of the other side. Throw its error, AbortedError, or InputError for what no message can hold. */
  async call(name: string, args: readonly unknown[] = [], signal?: AbortSignal, onLate?: OnLate): Promise<unknown> {
    if (this.ended !== undefined) throw this.ended;
    checkAborted(signal);
    const id = ++this.count;
    const answer = new Promise<unknown>((resolve, reject) => this.waiting.set(id, { resolve, reject }));
    let timer: ReturnType<typeof setTimeout> | undefined;
    const abort = () => {
      this.port.postMessage({ kind: "abort", id } satisfies Message);
      timer = setTimeout(
        () => this.waiting.get(id)?.reject(new SilentError(signal)),
        this.options.abortTime ?? ABORT_MS,
      );
    };
    try {
      this.post({ kind: "call", id, name, args });
      signal?.addEventListener("abort", abort);
      return await answer;
    } catch (error) {
      this.waiting.delete(id);
      if (onLate && error instanceof SilentError) this.waiting.set(id, { resolve: onLate, reject: () => {} });
      throw error;
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  /** Keep an iterator for the other side. Return its number. controller: ends its computation. */
  share(iterator: Shared["iterator"], controller = new AbortController()): number {
    const number = ++this.count;
    this.shared.set(number, { iterator, controller });
    return number;
  }

  /** Forget an iterator that the other side does not know, or does not ask for values. */
  unshare(number: number): void {
    this.shared.delete(number);
  }

  /** Yield the values of an iterator of the other side. */
  async *values(number: number, signal?: AbortSignal): AsyncGenerator<unknown, unknown> {
    let isOpen = true;
    let isSilent = false; // does not answer
    try {
      for (;;) {
        const { done, value } = (await this.call("iterator.next", [number], signal)) as IteratorResult<unknown>;
        if (done) {
          isOpen = false;
          return value;
        }
        yield value;
      }
    } catch (error) {
      if (!signal?.aborted) isOpen = false; // an iterator ends with its error
      isSilent = error instanceof SilentError;
      throw error;
    } finally {
      if (isOpen && this.ended === undefined) {
        const closing = this.call("iterator.return", [number]).catch(() => {});
        if (!isSilent) await closing;
      }
    }
  }

  /** End all calls of this side with an error. */
  end(error: unknown): void {
    this.ended ??= error;
    for (const { reject } of this.waiting.values()) reject(error);
    for (const controller of this.running.values()) controller.abort();
  }

  private post(message: Message): void {
    try {
      this.port.postMessage(message);
    } catch (error) {
      if ((error as { name?: string }).name !== "DataCloneError") throw error;
      throw new InputError(
        `an input or an option cannot be sent to the worker of the model (${(error as Error).message}): load the model ` +
          "with worker: false",
        undefined,
        error,
      );
    }
  }

  private async receive(message: Message): Promise<void> {
    if (message.kind === "call") return this.answer(message.id, message.name, message.args);
    if (message.kind === "abort") return this.running.get(message.id)?.abort();
    this.options.onNews?.(message.news);
    const call = this.waiting.get(message.id);
    this.waiting.delete(message.id);
    if (message.kind === "done") call?.resolve(message.value);
    else call?.reject(this.errors.receive(message.error));
  }

  private async answer(id: number, name: string, args: readonly unknown[]): Promise<void> {
    const controller = new AbortController();
    this.running.set(id, controller);
    try {
      const value = await this.run(name, args, controller.signal);
      this.post({ kind: "done", id, value, news: this.options.news?.() });
    } catch (error) {
      this.post({ kind: "failed", id, error: this.errors.send(error), news: this.options.news?.() });
    } finally {
      this.running.delete(id);
    }
  }

  private async run(name: string, args: readonly unknown[], signal: AbortSignal): Promise<unknown> {
    const number = args[0] as number;
    if (name === "iterator.next") return this.next(number, signal);
    if (name === "iterator.return") {
      const one = this.shared.get(number);
      this.shared.delete(number);
      one?.controller.abort();
      await one?.iterator.return?.();
      return undefined;
    }
    return this.handlers[name](args, signal);
  }

  private async next(number: number, signal: AbortSignal): Promise<IteratorResult<unknown>> {
    const one = this.shared.get(number);
    if (!one) return { done: true, value: undefined };
    const abort = () => one.controller.abort(signal.reason);
    signal.addEventListener("abort", abort);
    try {
      const { done = false, value } = await one.iterator.next();
      if (done) this.shared.delete(number);
      return { done, value };
    } catch (error) {
      this.shared.delete(number);
      throw error;
    } finally {
      signal.removeEventListener("abort", abort);
    }
  }
}
