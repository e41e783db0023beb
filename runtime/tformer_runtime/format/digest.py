"""The digest of a model file: whether its bytes are those that the exporter wrote.

A damaged weight gives other numbers and no error. So the exporter ends a file with its digest, the BLAKE3 hash of all
bytes before it. They hold the graph, the weights and the manifest; where the weights have a second file, they hold the
hash of that file. The digest is an entry of the metadata, which other readers of ONNX skip.

A digest finds damage. An attacker can write a digest that matches: sign the file for that (see SECURITY.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import BinaryIO

from blake3 import blake3

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.onnx_fields import (
    MODEL_METADATA_PROPS,
    STRING_STRING_ENTRY_KEY,
    STRING_STRING_ENTRY_VALUE,
)
from tformer_runtime.format.onnx_wire import bytes_field

DIGEST_KEY = "tformer.digest"  # the last entry of the metadata
WEIGHTS_DIGEST_KEY = "tformer.weights_digest"  # the hash and the name of the second file
CHUNK_BYTES = 1 << 20  # fits into a core's cache, so that hashing reads memory once


def new_hash() -> blake3:
    """Return a hash to update."""
    return blake3()


def digest_entry(digest: str, key: str = DIGEST_KEY) -> bytes:
    """Return the field of a ModelProto that holds a digest. Those of DIGEST_KEY have the same length."""
    entry = bytes_field(STRING_STRING_ENTRY_KEY, key.encode()) + bytes_field(STRING_STRING_ENTRY_VALUE, digest.encode())
    return bytes_field(MODEL_METADATA_PROPS, entry)


ENTRY_BYTES = len(digest_entry(new_hash().hexdigest()))


def digest_of(file: BinaryIO) -> tuple[str | None, int]:
    """Return the digest that ends an open file, and the number of bytes that it is of."""
    size = max(0, os.fstat(file.fileno()).st_size - ENTRY_BYTES)
    buffer = bytearray(ENTRY_BYTES)
    entry = bytes(buffer[: _read_at(file, memoryview(buffer), size)])
    digest = entry[-len(new_hash().hexdigest()) :].decode("ascii", "replace")
    return (digest if entry == digest_entry(digest) else None), size


def weights_entry(digest: str, name: str) -> bytes:
    """Return the field of a ModelProto that holds the digest and the name of the second file."""
    return digest_entry(f"{digest} {name}", WEIGHTS_DIGEST_KEY)


def check_digest(file: BinaryIO, second: BinaryIO | None, weights: str | None) -> str | None:
    """Compare a file with its digest, and return it; None for a file without one.

    file, second: open, without a buffer.
    weights: digest and name of the second file, from the metadata; None if there is none.
    Raise ModelFileError for another digest. Cost: reads both files, at 7 GB/s on one core from the page cache.
    """
    digest, size = digest_of(file)
    if digest is None:
        return None
    _compare(file, _hash(file, size), digest)
    if weights is not None:
        assert second is not None
        _compare(second, _hash(second, os.fstat(second.fileno()).st_size), weights.partition(" ")[0])
    return digest


def _compare(file: BinaryIO, digest: str, expected: str) -> None:
    if digest != expected:
        raise ModelFileError(
            f"{file.name} is damaged, or was changed after its export: its digest does not match. Copy it again or "
            "export the model again; verify=False opens it as it is"
        )


def _hash(file: BinaryIO, size: int) -> str:
    """Return the hash of the first bytes of an open file. size: their number."""
    running, buffer, position = new_hash(), memoryview(bytearray(CHUNK_BYTES)), 0
    while position < size and (count := _read_at(file, buffer[: min(size - position, CHUNK_BYTES)], position)):
        running.update(buffer[:count])
        position += count
    return running.hexdigest()


def copy_bytes(source: BinaryIO, target: BinaryIO, size: int) -> None:
    """Copy the first bytes of an open file into another one. Raise OSError if it has fewer."""
    buffer, position = memoryview(bytearray(min(size, CHUNK_BYTES))), 0
    while position < size:
        count = _read_at(source, buffer[: min(size - position, CHUNK_BYTES)], position)
        if not count:
            raise OSError(f"{source.name} has become shorter")
        position += target.write(buffer[:count])  # which may be fewer


def _read_at(file: BinaryIO, buffer: memoryview, position: int) -> int:
    """Read bytes of a file, and return their number. Forked processes share the position of an open file."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [buffer], position)
    file.seek(position)
    return file.readinto(buffer) or 0  # type: ignore[attr-defined]


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
