/**
 * Streams whose memory no garbage collector frees.
 *
 * A reader ends a stream by reading to its end or leaving its loop, which calls `return`. One that takes single values may
 * do neither. Then its owner can close the stream between two reads; and a stream that is lost is closed when the garbage
 * collector finds it.
 */

const lost = new FinalizationRegistry<AsyncGenerator<unknown, unknown>>(close);

function close(values: AsyncGenerator<unknown, unknown>): void {
  values.return(undefined).catch(() => {}); // there is nobody to tell
}

/** What the owner of a stream keeps of it: it does not keep the stream alive. */
export class StreamControl<T = unknown, R = unknown> {
  private reads = 0; // that wait for their value
  private error: Error | undefined; // of later reads

  constructor(readonly values: AsyncGenerator<T, R>) {}

  /** Whether a value is being computed. */
  get isRead(): boolean {
    return this.reads > 0;
  }

  async next(): Promise<IteratorResult<T, R>> {
    if (this.error) throw this.error;
    this.reads++;
    try {
      return await this.values.next();
    } finally {
      this.reads--;
    }
  }

  /** End a stream that is not being read. error: of later reads. */
  close(error: Error): void {
    this.error = error;
    close(this.values);
  }
}

const ASYNC_ITERATOR = Object.getPrototypeOf(Object.getPrototypeOf(async function* () {}.prototype)) as object;

/** Return the reader's side of a stream: an object of its own, which the garbage collector can find. */
export function readerOf<T, R>(control: StreamControl<T, R>): AsyncGenerator<T, R> {
  const { values } = control;
  const calls = {
    next: () => control.next(),
    return: (value: R) => values.return(value),
    throw: (error: unknown) => values.throw(error),
  };
  const reader = Object.assign(Object.create(ASYNC_ITERATOR) as object, calls) as AsyncGenerator<T, R>;
  lost.register(reader, values);
  return reader;
}

/** Return a stream of values. */
export function ownedStream<T, R>(values: AsyncGenerator<T, R>): AsyncGenerator<T, R> {
  return readerOf(new StreamControl(values));
}
