"""Exports a model when it is imported, so that forks of the process begin with all modules and tables in memory."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch

from faults.plain_model import plain
from tformer_export import Quantization, export

torch.set_num_threads(1)  # a fork has no other threads
_module, _example = plain()
with tempfile.TemporaryDirectory() as _folder:
    export(_module, Path(_folder) / "m.onnx", _example, step_input="tgt", quantization=Quantization("int8"))
gc.collect()
