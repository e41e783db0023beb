"""From what a caller gives for each row to the padded arrays and masks that the encode stage reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError
from tformer_runtime.format.manifest import RequestInput
from tformer_runtime.format.sizes import own_sizes


def lengths_of(
    specs: Sequence[RequestInput], requests: Mapping[str, Sequence[Array]], rows: int, more: int
) -> dict[str, npt.NDArray[np.int64]]:
    """name of a free axis → (rows,) how long each row is there, and `more`."""
    sizes = [
        own_sizes(specs, {name: np.asarray(values[row]) for name, values in requests.items()}) for row in range(rows)
    ]
    return {axis: np.array([own[axis] + more for own in sizes], np.int64) for axis in (sizes[0] if sizes else ())}


def request_arrays(
    specs: Sequence[RequestInput], requests: Mapping[str, Sequence[Array]], rows: int, widen: int = 0
) -> dict[str, Array]:
    """name → array for every request input: rows of any length padded to the longest, masks derived from lengths.

    requests: for each input that is not a mask, one array a row, without the batch axis; ids are 1-D.
    widen: rows are padded by so many positions more than that, as far as an input takes them.
    Raises InputError for a missing or unknown input, an empty row or one longer than the input's maximum.
    """
    given = [spec.name for spec in specs if spec.role != "mask"]
    if set(requests) != set(given):
        raise InputError(f"the model reads the inputs {', '.join(given)}, not {', '.join(requests) or 'none'}")
    arrays = {spec.name: _padded(spec, requests[spec.name], rows, widen) for spec in specs if spec.role != "mask"}
    lengths = {name: np.array([len(row) for row in requests[name]]) for name in given}
    masks = {spec.name: _mask(spec, lengths, arrays) for spec in specs if spec.role == "mask"}
    return {**arrays, **masks}


def _padded(spec: RequestInput, values: Sequence[Array], rows: int, widen: int) -> Array:
    """Stack rows, padding every free axis at its end to the largest."""
    if len(values) != rows:
        raise InputError(f"input {spec.name} has {len(values)} rows where {rows} are to be run")
    items = [np.asarray(value) for value in values]
    inner = spec.shape[1:]
    for item in items:
        if item.ndim != len(inner):
            raise InputError(f"input {spec.name} takes {len(inner)} axes a row, not {item.ndim}")
        if item.size == 0:
            raise InputError(f"input {spec.name} is empty")
        if spec.max_length is not None and len(item) > spec.max_length:
            raise InputError(f"input {spec.name} is {len(item)} long and the model takes at most {spec.max_length}")
        for size, wanted in zip(item.shape, inner, strict=True):
            if isinstance(wanted, int) and size != wanted:
                raise InputError(f"input {spec.name} has the shape {item.shape} where {inner} is needed")
    shape = [max(item.shape[axis] for item in items) for axis in range(len(inner))]
    if isinstance(inner[0], str):
        shape[0] = min(shape[0] + widen, spec.max_length or shape[0] + widen)
    array: Array = np.full((rows, *shape), spec.pad, spec.dtype)
    for row, item in enumerate(items):
        array[row][tuple(slice(0, size) for size in item.shape)] = item
    return array


def _mask(spec: RequestInput, lengths: Mapping[str, Array], arrays: Mapping[str, Array]) -> Array:
    """(batch, time), with axes of size 1 where the spec has them: which positions of the input `of` are a row's own."""
    if spec.of is None or spec.of not in arrays:
        raise InputError(f"input {spec.name} is a mask of {spec.of}, which is no input of the model")
    time = arrays[spec.of].shape[1]
    valid = np.arange(time) < lengths[spec.of][:, None]
    keep = valid if spec.keep else ~valid
    shape = [len(keep), *(time if isinstance(axis, str) else axis for axis in spec.shape[1:])]
    return keep.astype(spec.dtype).reshape(shape)
