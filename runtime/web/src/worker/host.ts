/** The side of the worker: a model, its conversations and its prefixes, whose methods the page calls. */

import { checkAborted } from "../base/errors.js";
import { releasedPrefixError } from "../decoding/request.js";
import { Connection, type Port } from "./connection.js";

type Target = Record<string, (...args: unknown[]) => unknown>;
type Options = Readonly<Record<string, unknown>>;

/** An iterator of the page in a message. */
export interface SharedIterator {
  readonly sharedIterator: number;
}

export interface LoadCall {
  readonly address: unknown;
  readonly options: Options;
  readonly hasProgress: boolean;
  /** Whether the page has a store of its own. */
  readonly hasStore: boolean;
}

/** The last turn of a conversation. ids: up to the end of the answer. */
export interface SentTurn {
  readonly result: unknown;
  readonly ids: Int32Array;
}

/** A cached prefix in the options of a message: its number. */
export interface SentPrefix {
  readonly cachedPrefix: number;
}

const KEPT = ["chat", "cachePrefix"]; // their results stay here, and the page has their numbers

/** Serve a model to the page. load: `Model.load`. */
export function serveModel(port: Port, load: (address: never, options: never) => Promise<unknown>): void {
  const targets = new Map<number, Target>(); // 0 is the model, others are conversations and prefixes until their release
  let count = 0; // of the others so far
  const connection = new Connection(
    port,
    {
      load: async ([call], signal) => {
        const { address, options, hasProgress, hasStore } = call as LoadCall;
        const all = {
          ...options,
          signal,
          worker: false,
          ...(hasProgress ? { onProgress: (progress: unknown) => void connection.call("progress", [progress]) } : {}),
          ...(hasStore ? { cache: storeOfPage(connection) } : {}),
        };
        const model = (await load(address as never, all as never)) as Target;
        targets.set(0, model);
        return { manifest: model["manifest"], device: model["device"], info: model["info"]() };
      },
      call: async ([number, method, args, options, turns], signal) => {
        const target = targets.get(number as number)!;
        const all = argumentsOf(connection, targets, args as unknown[], options as Options | undefined, signal);
        if (turns !== undefined) keepTurns(target, turns as number);
        const value = await target[method as string](...all);
        if (KEPT.includes(method as string)) {
          if (signal.aborted) (value as Target)["release"](); // the page does not wait for its number
          checkAborted(signal);
          targets.set(++count, value as Target);
          return count;
        }
        if (method === "release") targets.delete(number as number);
        return turns === undefined ? value : turnOf(target, value);
      },
      iterate: ([number, method, args, options, turns]) => {
        const target = targets.get(number as number)!;
        const controller = new AbortController();
        const all = argumentsOf(
          connection,
          targets,
          args as unknown[],
          options as Options | undefined,
          controller.signal,
        );
        const iterator = target[method as string](...all) as AsyncGenerator<unknown, unknown>;
        const isChat = turns !== undefined;
        return connection.share(isChat ? withTurn(target, iterator, turns as number) : iterator, controller);
      },
    },
    { news: () => (targets.get(0) as { memory(): unknown } | undefined)?.memory() },
  );
}

/** Return the arguments of a method: those of the message, with iterators of the page, and options with a signal. */
function argumentsOf(
  connection: Connection,
  targets: ReadonlyMap<number, Target>,
  args: readonly unknown[],
  options: Options | undefined,
  signal: AbortSignal,
): unknown[] {
  const all = args.map((one) => {
    const number = (one as Partial<SharedIterator> | null | undefined)?.sharedIterator;
    return number === undefined ? one : connection.values(number);
  });
  if (!options) return all;
  const number = (options["prefix"] as Partial<SentPrefix> | null | undefined)?.cachedPrefix;
  if (number !== undefined && !targets.has(number)) throw releasedPrefixError();
  const prefix = number === undefined ? {} : { prefix: targets.get(number) };
  return [...all, { ...options, ...prefix, signal }];
}

function turnsOf(chat: Target): { readonly ids: Int32Array }[] {
  return chat["turns"] as unknown as { readonly ids: Int32Array }[];
}

/** Take back the turns that the page does not know: it took them back, or did not wait for their end. */
function keepTurns(chat: Target, count: number): void {
  chat["rewind"](turnsOf(chat).length - count);
}

function turnOf(chat: Target, result: unknown): SentTurn {
  const turns = turnsOf(chat);
  return { result, ids: turns[turns.length - 1].ids };
}

async function* withTurn(
  chat: Target,
  iterator: AsyncGenerator<unknown, unknown>,
  knownTurns: number,
): AsyncGenerator<unknown, SentTurn> {
  keepTurns(chat, knownTurns);
  return turnOf(chat, yield* iterator);
}

function storeOfPage(connection: Connection): unknown {
  const call =
    (method: string) =>
    (...args: unknown[]) =>
      connection.call("store", [method, ...args]);
  return { get: call("get"), put: call("put"), delete: call("delete") };
}
