"""Write the cases of a test of runtime/web: plain values as JSON, and arrays as bytes in a file next to them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


class GoldenFile:
    """Collects arrays, and writes them with the cases to the folder of the command line."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0

    def array(self, values: np.ndarray) -> dict[str, Any]:
        """Add an array. Return what stands for it in a case."""
        data = np.ascontiguousarray(values).tobytes()
        place = {"dtype": str(values.dtype), "offset": self._size, "shape": list(values.shape)}
        self._chunks.append(data)
        self._size += len(data)
        return place

    def write(self, cases: list[dict[str, Any]]) -> None:
        folder = Path(sys.argv[1])
        (folder / "cases.json").write_text(json.dumps(cases))
        (folder / "arrays.bin").write_bytes(b"".join(self._chunks))
