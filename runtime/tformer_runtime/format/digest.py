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
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.base.special_files import endless_reason
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
    file.seek(size)
    entry = file.read()
    file.seek(0)
    digest = entry[-len(new_hash().hexdigest()) :].decode("ascii", "replace")
    return (digest if entry == digest_entry(digest) else None), size


def weights_entry(digest: str, name: str) -> bytes:
    """Return the field of a ModelProto that holds the digest and the name of the second file."""
    return digest_entry(f"{digest} {name}", WEIGHTS_DIGEST_KEY)


def check_digest(path: Path, weights: str | None) -> str | None:
    """Compare a file with its digest, and return it; None for a file without one.

    path: the file itself, and no link to it: onnxruntime looks for the second file next to it.
    weights: digest and name of the second file, from the metadata; None if there is none.
    Raise ModelFileError for another digest. Cost: reads both files, at 7 GB/s on one core from the page cache.
    """
    try:
        with _open(path) as file:
            digest, size = digest_of(file)
            if digest is None:
                return None
            _compare(path, _hash(file, size), digest)
        if weights is not None:
            expected, _, name = weights.partition(" ")
            if not name or Path(name).name != name:
                raise ModelFileError(f"{path} is damaged: {name!r} is no name of a file with weights")
            second = path.with_name(name)
            with _open(second) as file:
                _compare(second, _hash(file, os.fstat(file.fileno()).st_size), expected)
    except OSError as error:
        raise ModelFileError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    return digest


def _open(path: Path) -> BinaryIO:
    """Open a file without a buffer. Raise ModelFileError for a pipe or a device, which may never end."""
    if (reason := endless_reason(path)) is not None:
        raise ModelFileError(reason)
    return path.open("rb", buffering=0)


def _compare(path: Path, digest: str, expected: str) -> None:
    if digest != expected:
        raise ModelFileError(
            f"{path} is damaged, or was changed after its export: its digest does not match. Copy it again or export "
            "the model again; verify=False opens it as it is"
        )


def _hash(file: BinaryIO, size: int) -> str:
    """Return the hash of the next bytes of an open file. size: their number."""
    running, buffer = new_hash(), memoryview(bytearray(CHUNK_BYTES))
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
