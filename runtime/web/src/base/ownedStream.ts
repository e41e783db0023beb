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

/** The reader's side of a stream. */
export class OwnedStream<T, R> implements AsyncGenerator<T, R> {
  constructor(private readonly control: StreamControl<T, R>) {
    lost.register(this, control.values);
  }

  next(): Promise<IteratorResult<T, R>> {
    return this.control.next();
  }

  return(value: R | PromiseLike<R>): Promise<IteratorResult<T, R>> {
    return this.control.values.return(value);
  }

  throw(error: unknown): Promise<IteratorResult<T, R>> {
    return this.control.values.throw(error);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.return(undefined as R);
  }
}

/** Return a stream of values. */
export function ownedStream<T, R>(values: AsyncGenerator<T, R>): OwnedStream<T, R> {
  return new OwnedStream(new StreamControl(values));
}
