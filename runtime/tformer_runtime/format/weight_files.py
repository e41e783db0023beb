"""The bytes of weights in the files beside a model, mapped into memory."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from types import TracebackType

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.onnx_graph import Tensor


class WeightFiles:
    """The files of one folder. Arrays are valid until the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, mmap.mmap | None] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()  # a mapping ends with the last array that reads it

    def is_whole(self, tensor: Tensor) -> bool:
        """Return whether a weight has as many bytes as its shape says, in the model or in a file of the folder."""
        if tensor.byte_count <= 0 or min(tensor.shape, default=1) <= 0:
            return False
        return len(tensor.raw) == tensor.byte_count if tensor.raw is not None else self.has(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a file of the folder has the bytes of a weight, as many as its shape says if that is known."""
        mapped = self._map(tensor.location)
        fits = tensor.dtype is None or tensor.length == tensor.byte_count
        return (
            mapped is not None
            and fits
            and tensor.offset >= 0
            and tensor.length > 0
            and tensor.offset + tensor.length <= len(mapped)
        )

    def read(self, tensor: Tensor) -> Array:
        """Return the bytes of a weight, uint8; empty if the file does not have them."""
        mapped = self._map(tensor.location)
        if mapped is None or not self.has(tensor):
            return np.empty(0, np.uint8)
        return np.frombuffer(mapped, np.uint8, tensor.length, tensor.offset)

    def _map(self, location: str) -> mmap.mmap | None:
        """Map a file of the folder; None for a link, another folder, an empty file, a pipe or a device."""
        if location not in self._files:
            self._files[location] = None
            if location and location == os.path.basename(location):
                try:
                    descriptor = os.open(self.folder / location, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                    with os.fdopen(descriptor, "rb") as file:
                        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                            self._files[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError):
                    pass
        return self._files[location]
