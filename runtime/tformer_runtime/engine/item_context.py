"""The context of requests with items, such as the images of a prompt. A request may have none.

Each request with items is encoded alone, so that no request pays for the items of another. The rows of context that a
request has besides those of its items hold NaN, and there is at least one: the file takes them for "no item".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError
from tformer_runtime.format.dtypes import BFLOAT16, storage_dtype
from tformer_runtime.format.manifest import BATCH_AXIS, EncodeStage, TensorSpec

BFLOAT16_NAN = 0x7FC0
MISSING_ITEMS = 1  # at the end of the items of every request

Encode = Callable[[int, dict[str, list[Array]]], dict[str, Array]]


def encode_items(
    stage: EncodeStage,
    requests: Mapping[str, Sequence[Array]],
    rows: int,
    outputs: Sequence[TensorSpec],
    encode: Encode,
) -> tuple[dict[str, Array], dict[str, Ints]]:
    """Encode the requests that have items. Return the outputs of all rows, and the lengths of the rows by axis.

    requests: for each request input, `rows` arrays (items, …); empty if no request has items.
    encode: from the number of a row and its arrays, as lists of one, to its outputs with a batch axis of 1.
    """
    names = [spec.name for spec in stage.inputs if spec.role != "mask"]
    if requests and set(requests) != set(names):
        raise InputError(f"the model reads the inputs {', '.join(names)}, not {', '.join(requests)}")
    parts: list[dict[str, Array]] = []
    lengths: dict[str, list[int]] = {
        axis: [] for spec in stage.inputs for axis in spec.shape[1:] if isinstance(axis, str)
    }
    for row in range(rows):
        arrays = {name: np.asarray(values[row]) for name, values in requests.items()}
        has_items = any(array.size for array in arrays.values())
        parts.append(encode(row, {name: [array] for name, array in arrays.items()}) if has_items else {})
        for spec in stage.inputs:
            if spec.name in names:
                sizes = arrays[spec.name].shape if has_items else [0] * (len(spec.shape) - 1)
                for axis, size in zip(spec.shape[1:], sizes, strict=True):
                    if isinstance(axis, str):
                        lengths[axis].append(size)
    merged = {spec.name: _merge(spec, [part.get(spec.name) for part in parts]) for spec in outputs}
    return merged, {axis: np.array(sizes, np.int64) + MISSING_ITEMS for axis, sizes in lengths.items()}


def _merge(spec: TensorSpec, parts: Sequence[Array | None]) -> Array:
    """Return one array of all rows, (rows, …). parts: of each row, with a batch axis of 1; None for no items."""
    batch = spec.shape.index(BATCH_AXIS)
    present = [part for part in parts if part is not None]
    shape = [
        max((part.shape[axis] for part in present), default=0) + MISSING_ITEMS if isinstance(size, str) else size
        for axis, size in enumerate(spec.shape)
    ]
    shape[batch] = len(parts)
    merged: Array = np.full(shape, _missing(spec.dtype), storage_dtype(spec.dtype))
    for row, part in enumerate(parts):
        if part is not None:
            place: list[Any] = [slice(0, size) for size in part.shape]
            place[batch] = slice(row, row + 1)
            merged[tuple(place)] = part
    return merged


def _missing(dtype: str) -> float | int:
    if dtype == BFLOAT16:
        return BFLOAT16_NAN
    return np.nan if np.dtype(dtype).kind == "f" else 0
