/** SHA-256, by the native code of the platform. */

import { takeTurn } from "./eventLoop.js";

/**
 * Return the SHA-256 hash of bytes, 32 bytes.
 *
 * A page has WebCrypto only over https or from localhost. Other pages load an implementation in JavaScript, which is some
 * ten times slower, and takes turns with the event loop between two calls.
 */
export async function sha256(bytes: Uint8Array): Promise<Uint8Array> {
  const { subtle } = globalThis.crypto ?? {};
  if (subtle !== undefined) {
    const own = bytes.buffer instanceof ArrayBuffer ? (bytes as Uint8Array<ArrayBuffer>) : bytes.slice(); // not shared
    return new Uint8Array(await subtle.digest("SHA-256", own));
  }
  const { sha256: inJavaScript } = await import("@noble/hashes/sha2.js");
  await takeTurn(undefined);
  return inJavaScript(bytes);
}

/** Return bytes as hexadecimal digits. */
export function hexOf(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
