"""Folders whose weights are packed in 4-bit integers, by GPTQ or AWQ.

Their layouts pack eight integers into an int32, the first in the lowest bits:

          qweight          qzeros            scales     order in an int32
    gptq  (K / 8, N)       (groups, N / 8)   (groups, N)  along rows of qweight and columns of qzeros; zero points
                                                          are stored less one, except in the format gptq_v2;
                                                          g_idx (K,): the group of each row
    awq   (K, N / 8)       (groups, N / 8)   (groups, N)  columns 0, 2, 4, 6, 1, 3, 5, 7 of each eight

A weight is (integer − zero point) · scale. The reference model has these weights as floats.

https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/casper-hansen/AutoAWQ (WQLinear_GEMM)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tformer_export.common.packed_weight import BLOCKS, PackedWeight
from tformer_export.sources.untrusted_files import read_json
from tformer_runtime.base.errors import SourceError

_GPTQ, _AWQ = "gptq", "awq"
_PER_INT32 = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each place in an int32
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_REMEDY = "give the folder of the unquantised model, and quantise it with --quantize int8 or int4"


@dataclass(frozen=True)
class _Packing:
    """How the weights of a folder are packed. zero_offset: what is added to stored zero points."""

    method: str
    group_size: int
    zero_offset: int


def read_packing(config: Any) -> _Packing | None:
    """Read `quantization_config` of a transformers config; None for a model that is not quantised.

    Raises SourceError for a method, a number of bits or a layout that is not read.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    settings: Mapping[str, Any] = stated if isinstance(stated, Mapping) else stated.to_dict()
    method, bits = str(settings.get("quant_method", "an unnamed method")), settings.get("bits", settings.get("w_bit"))
    if method not in (_GPTQ, _AWQ):
        raise SourceError(f"its weights are quantised with {method}, and only gptq and awq are read: {_REMEDY}")
    if bits != 4:
        raise SourceError(f"its weights are quantised with {method} to {bits} bits, and only 4 are read: {_REMEDY}")
    layout = str(settings.get("checkpoint_format" if method == _GPTQ else "version") or "").lower()
    layouts = {_GPTQ: ("", "gptq", "gptq_v2"), _AWQ: ("", "gemm")}[method]
    if layout not in layouts:
        raise SourceError(
            f"its weights are packed in the layout {layout} of {method}, and only {layouts[1]} is read: {_REMEDY}"
        )
    group_size = settings.get("group_size", settings.get("q_group_size", -1))
    if not isinstance(group_size, int) or (group_size != -1 and group_size < 1):
        raise SourceError(f"the group_size in its quantization_config must be a whole number or -1, not {group_size!r}")
    return _Packing(method, group_size, int(method == _GPTQ and layout != "gptq_v2"))


def load_packed(
    folder: Path, kind: Any, config: Any, packing: _Packing, options: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, PackedWeight]]:
    """Load a folder of packed weights as the reference model in float32.

    kind: its class. options: of from_pretrained.

    Return the model, transformers' account of its weights, and the packed weights by the names of their parameters.
    Raises SourceError for weights that are not as the config says. Memory: the model in float32 twice for a while.
    """
    import transformers

    del config.quantization_config
    kind = kind if not hasattr(kind, "_model_mapping") else kind._model_mapping[type(config)]
    state = _read_state(folder)
    with torch.device("meta"):
        layers = dict(kind(config).named_modules())
    packed: dict[str, PackedWeight] = {}
    for name in sorted(key.removesuffix(".qweight") for key in state if key.endswith(".qweight")):
        parts = {part: _numbers(state.pop(f"{name}.{part}")) for part in _PARTS if f"{name}.{part}" in state}
        layer = layers.get(name)
        weight = unpack(parts, packing, name, _inner_size(layer))
        packed[f"{name}.weight"] = weight
        floats = torch.from_numpy(weight.dequantize())
        state[f"{name}.weight"] = floats.T.contiguous() if isinstance(layer, nn.Linear) else floats
        bias = state.get(f"{name}.bias")  # some packers write zeros for layers without a bias
        if bias is not None and getattr(layer, "bias", None) is None and not bias.any():
            del state[f"{name}.bias"]
    if not packed:
        raise SourceError("its config names a quantisation, but no weight of it is packed (.qweight)")
    module, info = kind.from_pretrained(None, config=config, state_dict=state, **options)
    if (folder / "generation_config.json").exists() and hasattr(module, "generation_config"):
        module.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return module, info, packed


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    numbers: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return numbers


def _inner_size(layer: nn.Module | None) -> int | None:
    """Return the number of inputs of a linear layer; None for any other module."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.weight.shape[0] if isinstance(layer, Conv1D) else None  # it stores (K, N)


def unpack(parts: Mapping[str, np.ndarray], packing: _Packing, name: str, inner: int | None) -> PackedWeight:
    """Unpack the tensors of a layer.

    inner: its number of inputs, K; None if it is not a linear layer, which is refused.

    Raises SourceError for shapes and values that do not belong together.
    """

    def refused(reason: str) -> SourceError:
        return SourceError(f"the packed weight {name}.qweight {reason}: {_REMEDY}")

    if inner is None:
        raise refused("belongs to no linear layer of the model")
    if missing := [part for part in _PARTS[:3] if part not in parts]:
        raise refused(f"has no {', '.join(missing)} next to it")
    qweight, qzeros, scales = (parts[part] for part in _PARTS[:3])
    if any(array.ndim != 2 for array in (qweight, qzeros, scales)) or {qweight.dtype, qzeros.dtype} != {
        np.dtype(np.int32)
    }:
        raise refused("and its zero points and scales must be matrices, of int32 and floats")
    columns = scales.shape[1]
    size = inner if packing.group_size == -1 else packing.group_size
    groups = -(-inner // size)
    is_gptq = packing.method == _GPTQ
    shapes = {
        "qweight": (inner / _PER_INT32, columns) if is_gptq else (inner, columns / _PER_INT32),
        "qzeros": (groups, columns / _PER_INT32),
        "scales": (groups, columns),
    }
    for part, expected in shapes.items():
        if parts[part].shape != expected:
            raise refused(f"is not in 4 bits with groups of {size} rows: {part} is {parts[part].shape}, not {expected}")
    unpack_columns: Callable[[np.ndarray], np.ndarray] = _columns if is_gptq else _interleaved_columns
    integers = _columns(np.ascontiguousarray(qweight.T)).T if is_gptq else unpack_columns(qweight)
    zeros = unpack_columns(qzeros) + packing.zero_offset
    if zeros.max(initial=0) > 15:
        raise refused("has a zero point of 16, which no 4-bit operator takes")
    if not np.isfinite(scales).all():
        raise refused("has scales that are not finite")
    order = _order(parts["g_idx"], inner, size, refused) if "g_idx" in parts else None
    block = next((block for block in BLOCKS if size % block == 0 or groups == 1), None)
    if block is None:
        raise refused(f"has groups of {size} rows, which are not whole blocks of {BLOCKS[-1]}")
    blocks = -(-inner // block)
    return PackedWeight(
        np.ascontiguousarray(integers if order is None else integers[order]),
        np.repeat(scales.astype(np.float32), math.ceil(size / block), 0)[:blocks],
        np.repeat(zeros, math.ceil(size / block), 0)[:blocks],
        block,
        order,
    )


def _order(groups: np.ndarray, inner: int, size: int, refused: Callable[[str], SourceError]) -> np.ndarray | None:
    """Return the inputs in the order of their groups; None if they are in it already.

    Raises SourceError unless all groups but the last have `size` rows.
    """
    if groups.shape != (inner,) or groups.dtype.kind != "i":
        raise refused(f"has a g_idx of the shape {groups.shape}, not ({inner},)")
    order = np.argsort(groups, kind="stable").astype(np.int64)
    expected = np.arange(inner) // size
    if not np.array_equal(groups[order], expected):
        raise refused(f"has a g_idx whose groups are not of {size} rows each")
    return None if np.array_equal(groups, expected) else order


def _columns(packed: np.ndarray) -> np.ndarray:
    """Unpack int32 (rows, N / 8) to uint8 (rows, N)."""
    shifts = np.arange(_PER_INT32, dtype=np.uint32) * 4
    numbers = packed.view(np.uint32)[:, :, None] >> shifts & 15
    return numbers.astype(np.uint8).reshape(len(packed), -1)


def _interleaved_columns(packed: np.ndarray) -> np.ndarray:
    """Unpack int32 (rows, N / 8) to uint8 (rows, N), with the places of an int32 in AWQ's order."""
    places = _columns(packed).reshape(len(packed), -1, _PER_INT32)
    columns = np.empty_like(places)
    columns[:, :, _AWQ_ORDER] = places
    return columns.reshape(len(packed), -1)


def _read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder in safetensors."""
    from safetensors.torch import load_file

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    elif single.exists():
        names = [single.name]
    else:
        raise SourceError(f"packed weights are read in safetensors: there is neither {single.name} nor {index.name}")
    state: dict[str, torch.Tensor] = {}
    for name in names:
        state |= load_file(folder / name)
    return state
