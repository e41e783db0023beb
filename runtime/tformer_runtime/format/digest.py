"""The digest of a model file: whether its bytes are those that the exporter wrote.

A damaged weight gives other numbers and no error. So the exporter ends a file with the digest of all bytes before it.
They hold the graph, the weights and the manifest; where the weights have a second file, they hold the digest of all
bytes of that file. The digest is an entry of the metadata, which other readers of ONNX skip.

The digest of bytes: cut them into chunks of 1 MiB. The last may be shorter. Hash each chunk with SHA-256.
Append the hashes, of 32 bytes each, in the order of the chunks. The digest is the SHA-256 hash of that list, in
hexadecimal digits. Python and browsers both have SHA-256 in native code, and the hashes of chunks are computed in
parallel. `runtime/web/src/format/digest.ts` is the same in TypeScript.

A digest finds damage. An attacker can write a digest that matches: sign the file for that (see SECURITY.md).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.onnx_fields import (
    MODEL_METADATA_PROPS,
    STRING_STRING_ENTRY_KEY,
    STRING_STRING_ENTRY_VALUE,
)
from tformer_runtime.format.onnx_wire import bytes_field

if TYPE_CHECKING:
    from hashlib import _Hash

DIGEST_KEY = "tformer.sha256_chunks"  # the last entry of the metadata
WEIGHTS_DIGEST_KEY = "tformer.weights_sha256_chunks"  # the digest and the name of the second file
CHUNK_BYTES = 1 << 20  # fits into a core's cache, so that hashing reads memory once
HASHING_THREADS = 4  # by default
DIGEST_CHARS = 64


def _sha256(content: bytes | memoryview = b"") -> _Hash:
    """Return a hash of bytes, to which more can be added."""
    import hashlib  # takes 4 ms, in the thread of a check

    return hashlib.sha256(content)


class Digest:
    """The digest of bytes that are given one after the other."""

    def __init__(self) -> None:
        self._list, self._chunk = _sha256(), _sha256()
        self._room = CHUNK_BYTES  # of the chunk

    def update(self, content: bytes) -> None:
        """Add bytes."""
        rest = memoryview(content)
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._chunk.update(part)
            self._room -= len(part)
            if not self._room:
                self._list.update(self._chunk.digest())
                self._chunk, self._room = _sha256(), CHUNK_BYTES

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        chunks = self._list.copy()
        if self._room < CHUNK_BYTES:
            chunks.update(self._chunk.digest())
        return chunks.hexdigest()


def digest_entry(digest: str, key: str = DIGEST_KEY) -> bytes:
    """Return the field of a ModelProto that holds a digest. Those of DIGEST_KEY have the same length."""
    entry = bytes_field(STRING_STRING_ENTRY_KEY, key.encode()) + bytes_field(STRING_STRING_ENTRY_VALUE, digest.encode())
    return bytes_field(MODEL_METADATA_PROPS, entry)


ENTRY_BYTES = len(digest_entry("0" * DIGEST_CHARS))


def digest_of(file: BinaryIO) -> tuple[str | None, int]:
    """Return the digest that ends an open file, and the number of bytes that it is of."""
    size = max(0, os.fstat(file.fileno()).st_size - ENTRY_BYTES)
    buffer = bytearray(ENTRY_BYTES)
    entry = bytes(buffer[: _read_at(file, memoryview(buffer), size)])
    digest = entry[-DIGEST_CHARS:].decode("ascii", "replace")
    return (digest if entry == digest_entry(digest) else None), size


def weights_entry(digest: str, name: str) -> bytes:
    """Return the field of a ModelProto that holds the digest and the name of the second file."""
    return digest_entry(f"{digest} {name}", WEIGHTS_DIGEST_KEY)


def check_digest(
    file: BinaryIO, second: BinaryIO | None, weights: str | None, threads: int = HASHING_THREADS
) -> str | None:
    """Compare a file with its digest, and return it; None for a file without one.

    file, second: open, without a buffer.
    weights: digest and name of the second file, from the metadata; None if there is none.
    threads: those that hash chunks.
    Raise ModelFileError for another digest. Cost: reads and hashes both files.
    """
    digest, size = digest_of(file)
    if digest is None:
        return None
    _compare(file, _hash(file, size, threads), digest)
    if weights is not None:
        assert second is not None
        _compare(second, _hash(second, os.fstat(second.fileno()).st_size, threads), weights.partition(" ")[0])
    return digest


def _compare(file: BinaryIO, digest: str, expected: str) -> None:
    if digest != expected:
        raise ModelFileError(
            f"{file.name} is damaged, or was changed after its export: its digest does not match. Copy it again or "
            "export the model again; verify=False opens it as it is"
        )


def _hash(file: BinaryIO, size: int, threads: int) -> str:
    """Return the digest of the first bytes of an open file. size: their number."""
    hashes = [b""] * math.ceil(size / CHUNK_BYTES)
    numbers = iter(range(len(hashes)))
    taking = threading.Lock()

    def hash_chunks(_: int) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while True:
            with taking:
                if (number := next(numbers, None)) is None:
                    return
            begin = number * CHUNK_BYTES
            count = _read_at(file, buffer[: size - begin], begin)
            hashes[number] = _sha256(buffer[:count]).digest()

    threads = min(threads, len(hashes)) if hasattr(os, "preadv") else 1
    if threads <= 1:
        hash_chunks(0)
    else:
        from concurrent.futures import ThreadPoolExecutor  # takes 2 ms to import

        with ThreadPoolExecutor(threads, "tformer-digest") as pool:
            list(pool.map(hash_chunks, range(threads)))
    return _sha256(b"".join(hashes)).hexdigest()


def copy_bytes(source: BinaryIO, target: BinaryIO, size: int) -> None:
    """Copy the first bytes of an open file into another one. Raise OSError if it has fewer."""
    buffer, position = memoryview(bytearray(min(size, CHUNK_BYTES))), 0
    while position < size:
        count = _read_at(source, buffer[: size - position], position)
        if not count:
            raise OSError(f"{source.name} has become shorter")
        position += target.write(buffer[:count])  # which may be fewer


def _read_at(file: BinaryIO, buffer: memoryview, position: int) -> int:
    """Fill a buffer from a place of a file. Return the number of bytes: fewer if the file ends.

    Threads, and forked processes, share the position of an open file. A system without `preadv` moves it, and there one
    thread reads.
    """
    count = 0
    while count < len(buffer):
        if hasattr(os, "preadv"):
            more = os.preadv(file.fileno(), [buffer[count:]], position + count)
        else:
            file.seek(position + count)
            more = file.readinto(buffer[count:])  # type: ignore[attr-defined]
        if not more:
            break
        count += more
    return count


class BackgroundCheck:
    """A check of a digest in a thread, while onnxruntime opens the file on another core."""

    def __init__(self, check: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(check,), name="tformer-digest", daemon=True)
        self._thread.start()

    def _run(self, check: Callable[[], object]) -> None:
        try:
            check()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the end, and raise the error of the check."""
        self._thread.join()
        if self._error is not None:
            raise self._error
