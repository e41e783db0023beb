"""The digest of a model file: whether its bytes are those that the exporter wrote.

A damaged weight gives other numbers and no error. So the exporter ends a file with its digest, the BLAKE3 hash of all
bytes before it. They hold the graph, the weights and the manifest; where the weights have a second file, they hold the
hash of that file. The digest is an entry of the metadata, which other readers of ONNX skip.

A digest finds damage. It does not find an attacker, who would write a digest of his own: sign the file for that (see
SECURITY.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
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
WEIGHTS_DIGEST_KEY = "tformer.weights_digest"  # the hash of the second file
CHUNK_BYTES = 1 << 20  # fits into a core's cache, so that hashing reads memory once


def new_hash() -> blake3:
    """Return a hash to update."""
    return blake3()


def digest_entry(digest: str, key: str = DIGEST_KEY) -> bytes:
    """Return the field of a ModelProto that holds a digest. All have the same length."""
    entry = bytes_field(STRING_STRING_ENTRY_KEY, key.encode()) + bytes_field(STRING_STRING_ENTRY_VALUE, digest.encode())
    return bytes_field(MODEL_METADATA_PROPS, entry)


ENTRY_BYTES = len(digest_entry(new_hash().hexdigest()))


def read_digest(path: Path) -> str | None:
    """Return the digest that ends a file; None for a file without one. Raise OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - ENTRY_BYTES))
        entry = file.read()
    digest = entry[-len(new_hash().hexdigest()) :].decode("ascii", "replace")
    return digest if entry == digest_entry(digest) else None


def check_digest(path: Path, weights: Path, weights_digest: str | None) -> str | None:
    """Compare a file with its digest, and return it; None for a file without one.

    weights: the second file.
    weights_digest: its hash in the metadata; None if there is no second file.
    Raise ModelFileError for another digest. Cost: reads both files, at 7 GB/s on one core from the page cache.
    """
    try:
        digest = read_digest(path)
        if digest is None:
            return None
        parts = [(path, digest, path.stat().st_size - ENTRY_BYTES)]
        if weights_digest is not None:
            parts.append((weights, weights_digest, weights.stat().st_size))
        for file, expected, size in parts:
            if hash_file(file, size) != expected:
                raise ModelFileError(
                    f"{file} is damaged, or was changed after its export: its digest is another. Copy it anew or "
                    "export the model again; verify=False opens it as it is"
                )
    except OSError as error:
        raise ModelFileError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    return digest


def hash_file(path: Path, size: int) -> str:
    """Return the hash of the first bytes of a file. size: their number."""
    running, buffer = new_hash(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size > 0 and (count := _read_into(file, buffer[: min(size, CHUNK_BYTES)])):
            running.update(buffer[:count])
            size -= count
    return running.hexdigest()


def _read_into(file: BinaryIO, buffer: memoryview) -> int:
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
