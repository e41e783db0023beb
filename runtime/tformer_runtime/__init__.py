"""Run files of tformer-export with onnxruntime, without PyTorch.

from tformer_runtime import Model
model = Model.load("model.onnx")
print(model.generate("a text").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tformer_runtime.base.quick_start import quick_start

with quick_start():
    from tformer_runtime.base.errors import (
        DeadlineError,
        DeviceError,
        InputError,
        MemoryBudgetError,
        MissingExtraError,
        ModelChangedError,
        ModelFileError,
        OptionError,
        OutOfMemoryError,
        OutputError,
        ParityError,
        SourceError,
        TformerError,
        UnsupportedCallError,
        UnsupportedModelError,
    )
    from tformer_runtime.base.process_memory import limit_process_memory
    from tformer_runtime.chat import CachedPrefix, Chat
    from tformer_runtime.decoding.options import GenerationOptions
    from tformer_runtime.decoding.request import Result, Speculation, Timing
    from tformer_runtime.model import Model
    from tformer_runtime.tasks import Answer, Classification, MaskCandidate, Segment, Span, Transcription

if TYPE_CHECKING:
    from tformer_runtime.async_model import AsyncModel, AsyncModelStats

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AsyncModel",
    "AsyncModelStats",
    "CachedPrefix",
    "Chat",
    "Classification",
    "DeadlineError",
    "DeviceError",
    "GenerationOptions",
    "InputError",
    "MaskCandidate",
    "MemoryBudgetError",
    "MissingExtraError",
    "Model",
    "ModelChangedError",
    "ModelFileError",
    "OptionError",
    "OutOfMemoryError",
    "OutputError",
    "ParityError",
    "Result",
    "Segment",
    "SourceError",
    "Span",
    "Speculation",
    "TformerError",
    "Timing",
    "Transcription",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "__version__",
    "limit_process_memory",
]


def __getattr__(name: str) -> Any:
    # Importing asyncio takes long, so it is imported only for AsyncModel.
    if name in ("AsyncModel", "AsyncModelStats"):
        from tformer_runtime import async_model

        return getattr(async_model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
