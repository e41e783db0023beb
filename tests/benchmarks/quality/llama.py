"""llama.cpp's files, by llama_model_quantize.

The cache is float32 in all of them, so that only the weights differ, and the inputs of products, which llama.cpp rounds
to 8 bits for quantised weights. A calibrated form has an importance matrix: the mean square of each input of a product,
as llama.cpp's own tool collects it, which leaves out the output too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from versus.engines import UnavailableError, build_once, llama
from versus.shapes import Shape

from quality.distance import compare
from quality.forms import SHAPE, is_calibrated, weights_of
from quality.importance import IMPORTANCE


def prepare(folder: Path, shape: Shape, form: str) -> int:
    if not is_calibrated(form):
        return llama.prepare(folder, shape, form, form)
    plain, path = llama.model_path(folder, "F32"), llama.model_path(folder, form)
    return build_once(path.parent, lambda part: _calibrated(folder, plain, part / path.name, weights_of(form)))


def _calibrated(folder: Path, plain: Path, path: Path, type: str) -> None:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
    importance = {
        name: np.ascontiguousarray(values, np.float32) for name, values in np.load(folder / IMPORTANCE).items()
    }
    entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()  # the last one has no name
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    options.imatrix = entries
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(options)):
        raise UnavailableError(f"llama_model_quantize to {type} failed")


class Engine(llama.Engine):
    def __init__(self, folder: Path, form: str, threads: int) -> None:
        self.type = form
        super().__init__(folder, SHAPE, "fp32", threads)
        self.session = self._session(1, SHAPE.max_length, SHAPE.max_length, outputs=SHAPE.max_length)

    def logits_of(self, ids: np.ndarray) -> np.ndarray:
        self.session.clear()
        return self.session.logits([(0, 0, ids.tolist())], every=True)


def measure(folder: str, compared: str, form: str, threads: int) -> dict[str, Any]:
    """Return the bytes of the file and of its tensors, and the figures of `compare`."""
    import gguf

    path = llama.model_path(Path(folder), form)
    return {
        "file": path.stat().st_size,
        "weights": sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors),
        **compare(Path(compared), Engine(Path(folder), form, threads).logits_of),
    }
