/** The bytes of the caches and encoder outputs of all requests of a model. */

export class MemoryUse {
  usedBytes = 0;
  peakBytes = 0;

  /** Count bytes that were allocated, or freed if they are negative. */
  add(bytes: number): void {
    this.usedBytes += bytes;
    this.peakBytes = Math.max(this.peakBytes, this.usedBytes);
  }
}
