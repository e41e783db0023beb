"""Run models that tformer-export has written, with onnxruntime and without PyTorch.

from tformer_runtime import Model
model = Model.load("model.onnx")
print(model.generate("a text").text)
"""

from tformer_runtime.errors import (
    DeviceError,
    InputError,
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
from tformer_runtime.generate import Result
from tformer_runtime.model import Model
from tformer_runtime.options import GenerationOptions

__version__ = "0.1.0"

__all__ = [
    "DeviceError",
    "GenerationOptions",
    "InputError",
    "MissingExtraError",
    "Model",
    "ModelFileError",
    "OptionError",
    "OutputError",
    "ParityError",
    "Result",
    "SourceError",
    "TformerError",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "__version__",
]
