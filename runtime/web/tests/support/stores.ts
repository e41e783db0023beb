/** The Cache API and a file system in memory, with the parts of their interfaces that `store` calls. */

import type { ModelStore } from "../../src/loading/store.js";

export class MemoryStore implements ModelStore {
  readonly entries = new Map<string, Uint8Array>();

  async get(key: string): Promise<Uint8Array | undefined> {
    return this.entries.get(key)?.slice();
  }

  async put(key: string, bytes: Uint8Array): Promise<void> {
    this.entries.set(key, bytes.slice());
  }

  async delete(key: string): Promise<void> {
    this.entries.delete(key);
  }
}

export function memoryCaches(): CacheStorage {
  const all = new Map<string, Map<string, Response>>();
  return {
    async open(name: string) {
      if (!all.has(name)) all.set(name, new Map());
      const cache = all.get(name)!;
      return {
        match: async (key: string) => cache.get(key)?.clone(),
        put: async (key: string, response: Response) => void cache.set(key, response),
        delete: async (key: string) => cache.delete(key),
      };
    },
  } as unknown as CacheStorage;
}

/** A folder whose files change when they are closed, as those of the origin private file system. */
export function memoryFolder(): FileSystemDirectoryHandle {
  const folders = new Map<string, unknown>();
  const files = new Map<string, Uint8Array>();
  const missing = () => new DOMException("no such entry", "NotFoundError");
  return {
    async getDirectoryHandle(name: string, { create = false } = {}) {
      if (!folders.has(name) && !create) throw missing();
      if (!folders.has(name)) folders.set(name, memoryFolder());
      return folders.get(name);
    },
    async getFileHandle(name: string, { create = false } = {}) {
      if (!files.has(name) && !create) throw missing();
      if (!files.has(name)) files.set(name, new Uint8Array(0));
      return {
        getFile: async () => new Blob([files.get(name)!.slice()]),
        async createWritable() {
          let written = new Uint8Array(0);
          return {
            write: async (bytes: Uint8Array) => void (written = bytes.slice()),
            close: async () => void files.set(name, written),
            abort: async () => {},
          };
        },
      };
    },
    async removeEntry(name: string) {
      if (!files.delete(name)) throw missing();
    },
  } as unknown as FileSystemDirectoryHandle;
}
