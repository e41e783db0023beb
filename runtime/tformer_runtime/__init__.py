"""Run models that tformer-export has written, with onnxruntime and without PyTorch.

from tformer_runtime import Model
model = Model.load("model.onnx")
print(model.generate("a text").text)
"""

from tformer_runtime.aio import AsyncModel
from tformer_runtime.errors import (
    DeadlineError,
    DeviceError,
    InputError,
    MemoryBudgetError,
    MissingExtraError,
    ModelFileError,
    OptionError,
    OutputError,
    ParityError,
    SourceError,
    TformerError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from tformer_runtime.generate import Result, Speculation, Timing
from tformer_runtime.model import Model
from tformer_runtime.options import GenerationOptions

__version__ = "0.1.0"

__all__ = [
    "AsyncModel",
    "DeadlineError",
    "DeviceError",
    "GenerationOptions",
    "InputError",
    "MemoryBudgetError",
    "MissingExtraError",
    "Model",
    "ModelFileError",
    "OptionError",
    "OutputError",
    "ParityError",
    "Result",
    "SourceError",
    "Speculation",
    "TformerError",
    "Timing",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "__version__",
]
