"""The table of ONNX forms of torch's operators. torch.onnx reads it for each program, in half a second."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def operator_table_kept() -> Iterator[None]:
    """Patch torch.onnx for the whole process, which reads the table once. The caller holds TORCH_PATCH_LOCK."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # imports onnxscript's library: a second

    original = vars(ONNXRegistry)["from_torchlib"]
    read = _kept(ONNXRegistry.from_torchlib.__func__)  # type: ignore[attr-defined]

    def from_torchlib(cls: type, *arguments: Any, **options: Any) -> Any:
        table = copy.copy(read(cls, *arguments, **options))  # a translation may add forms to its table
        table.functions = {name: [*forms] for name, forms in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]


@functools.cache
def _kept(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its results kept: the same one for each translation of the process."""
    return functools.cache(read)
