/** A GPU device in memory, with the copies that `Gpu` makes, under WebGPU's rules for them. */

class FakeBuffer {
  readonly bytes: Uint8Array<ArrayBuffer>;
  destroyed = false;

  constructor(readonly size: number) {
    this.bytes = new Uint8Array(size);
  }

  destroy(): void {
    this.destroyed = true;
  }
}

export type FakeGpuBuffer = FakeBuffer & GPUBuffer;

export class FakeGpuDevice {
  readonly buffers: FakeBuffer[] = [];
  destroyed = false;
  copies = 0;
  submits = 0;
  private readonly listeners: ((event: unknown) => void)[] = [];
  lose!: (message: string) => void;
  readonly lost = new Promise((resolve) => (this.lose = (message) => resolve({ message, reason: "unknown" })));
  readonly limits: { maxBufferSize: number; maxStorageBufferBindingSize: number };
  readonly queue = {
    submit: (lists: (() => void)[][]) => {
      this.submits++;
      for (const command of lists.flat()) command();
    },
  };

  constructor(maxBytes = 1 << 28) {
    this.limits = { maxBufferSize: maxBytes, maxStorageBufferBindingSize: maxBytes };
  }

  addEventListener(_: string, listener: (event: unknown) => void): void {
    this.listeners.push(listener);
  }

  /** Report an error that no call throws. */
  report(message: string): void {
    for (const listener of this.listeners) listener({ error: { message }, preventDefault() {} });
  }

  destroy(): void {
    this.destroyed = true;
    this.lose("Device was destroyed.");
  }

  createBuffer({ size }: { size: number }): FakeBuffer {
    const buffer = new FakeBuffer(size);
    this.buffers.push(buffer);
    return buffer;
  }

  createCommandEncoder() {
    const commands: (() => void)[] = [];
    const rule = (holds: boolean, text: string) => {
      if (!holds) throw new Error(`WebGPU's rules: ${text}`);
    };
    return {
      clearBuffer: (buffer: FakeBuffer) => commands.push(() => void buffer.bytes.fill(0)),
      copyBufferToBuffer: (from: FakeBuffer, fromOffset: number, to: FakeBuffer, toOffset: number, size: number) => {
        rule(from !== to, "a buffer is not copied to itself");
        for (const number of [fromOffset, toOffset, size]) rule(number % 4 === 0, "multiples of 4");
        rule(fromOffset + size <= from.size && toOffset + size <= to.size, "within the buffers");
        this.copies++;
        commands.push(() => {
          rule(!from.destroyed && !to.destroyed, "no destroyed buffers");
          to.bytes.set(from.bytes.subarray(fromOffset, fromOffset + size), toOffset);
        });
      },
      finish: () => commands,
    };
  }

  asDevice(): GPUDevice {
    return this as unknown as GPUDevice;
  }
}
