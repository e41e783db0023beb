"""Exports a model when it is imported, so that forks of the process begin with all modules and tables in memory."""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
from pathlib import Path

import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from faults.plain_model import plain
from tformer_export import Quantization, export

torch.set_num_threads(1)  # a fork has no other threads
_read_registry = functools.cache(ONNXRegistry.from_torchlib)


def _from_torchlib(**options: int) -> ONNXRegistry:
    registry = copy.copy(_read_registry(**options))
    registry.functions = {name: [*overloads] for name, overloads in registry.functions.items()}
    return registry


ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)
_module, _example = plain()
with tempfile.TemporaryDirectory() as _folder:
    export(_module, Path(_folder) / "m.onnx", _example, step_input="tgt", quantization=Quantization("int8"))
gc.collect()
