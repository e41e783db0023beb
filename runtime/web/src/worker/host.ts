/** The side of the worker: a model, its conversations and its prefixes, whose methods the page calls. */

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
const CHAT_RESULTS = ["send", "stream"]; // their results come with the ids of the conversation

/** Serve a model to the page. load: `Model.load`. */
export function serveModel(port: Port, load: (address: never, options: never) => Promise<unknown>): void {
  const targets = new Map<number, Target>(); // 0 is the model, others are conversations and prefixes
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
      call: async ([number, method, args, options], signal) => {
        const target = targets.get(number as number)!;
        const all = argumentsOf(connection, targets, args as unknown[], options as Options | undefined, signal);
        const value = await target[method as string](...all);
        if (KEPT.includes(method as string)) {
          targets.set(targets.size, value as Target);
          return targets.size - 1;
        }
        return number && CHAT_RESULTS.includes(method as string) ? turnOf(target, value) : value;
      },
      iterate: ([number, method, args, options]) => {
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
        return connection.share(number ? withTurn(target, iterator) : iterator, controller);
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
  const prefix = number === undefined ? {} : { prefix: targets.get(number) };
  return [...all, { ...options, ...prefix, signal }];
}

function turnOf(chat: Target, result: unknown): SentTurn {
  const turns = chat["turns"] as unknown as { ids: Int32Array }[];
  return { result, ids: turns[turns.length - 1].ids };
}

async function* withTurn(chat: Target, iterator: AsyncGenerator<unknown, unknown>): AsyncGenerator<unknown, SentTurn> {
  return turnOf(chat, yield* iterator);
}

function storeOfPage(connection: Connection): unknown {
  const call =
    (method: string) =>
    (...args: unknown[]) =>
      connection.call("store", [method, ...args]);
  return { get: call("get"), put: call("put"), delete: call("delete") };
}
