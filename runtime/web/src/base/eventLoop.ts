/** Turns of the event loop during long computations, so that a page stays alive and can abort them. */

import { checkAborted } from "./errors.js";

const MAX_BUSY_MS = 12; // without a turn of the event loop

let lastTurn = 0; // of the event loop, which all computations share: each may be done in less time

/** Give the event loop a turn if its last one was long ago. Throw AbortedError if the signal of the call is aborted. */
export async function takeTurn(signal: AbortSignal | undefined): Promise<void> {
  checkAborted(signal);
  if (performance.now() - lastTurn <= MAX_BUSY_MS) return;
  await turnOfEventLoop();
  lastTurn = performance.now();
  checkAborted(signal);
}

function turnOfEventLoop(): Promise<void> {
  return new Promise((resolve) => {
    if (typeof setImmediate === "function") {
      setImmediate(resolve);
      return;
    }
    const { port1, port2 } = new MessageChannel(); // setTimeout waits 4 ms
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });
}
