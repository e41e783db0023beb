"""Conversion of the rows of a request to the padded arrays and masks that the encode stage reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError
from tformer_runtime.format.manifest import ADAPTER_INPUT, EncodeStage, Manifest, RequestInput
from tformer_runtime.format.sizes import check_row, input_sizes


def row_lengths(
    specs: Sequence[RequestInput], requests: Mapping[str, Sequence[Array]], rows: int, extra_padding: int
) -> dict[str, Ints]:
    """Return name of a free axis → (rows,), the length of each row plus `extra_padding`."""
    sizes = [
        input_sizes(specs, {name: np.asarray(values[row]) for name, values in requests.items()}) for row in range(rows)
    ]
    axes = sizes[0] if sizes else ()
    return {axis: np.array([row_sizes[axis] + extra_padding for row_sizes in sizes], np.int64) for axis in axes}


def split_adapters(
    manifest: Manifest, requests: Mapping[str, Sequence[Array]], rows: int
) -> tuple[dict[str, Sequence[Array]], Ints | None]:
    """Return the other inputs, and the number of each row's adapter, (rows,); None for a file without adapters.

    Raises InputError for numbers of no adapter.
    """
    others = {name: values for name, values in requests.items() if name != ADAPTER_INPUT}
    if not manifest.adapters:
        return dict(requests), None
    numbers: Ints = np.array([int(number) for number in requests.get(ADAPTER_INPUT, (0,) * rows)], np.int64)
    if len(numbers) != rows or ((numbers < 0) | (numbers > len(manifest.adapters))).any():
        raise InputError(f"{rows} numbers of adapters from 0 to {len(manifest.adapters)} are needed, not {numbers}")
    return others, numbers


def padded_request_arrays(
    specs: Sequence[RequestInput],
    requests: Mapping[str, Sequence[Array]],
    rows: int,
    extra_padding: int = 0,
    encode: EncodeStage | None = None,
) -> dict[str, Array]:
    """Return name → array for every request input: rows padded to the longest, and masks derived from their lengths.

    requests: for each input that is not a mask, one array a row, without the batch axis; ids are 1-D.
    extra_padding: further positions of padding for every row, as far as the maximum length of the input allows.
    encode: the stage that takes the lengths of each row; None if they were checked.
    Raises InputError for a missing or unknown input, an empty row, a row longer than the input's maximum, or a row
    that `check_row` refuses.
    """
    names = [spec.name for spec in specs if spec.role != "mask"]
    if set(requests) != set(names):
        raise InputError(f"the model reads the inputs {', '.join(names)}, not {', '.join(requests) or 'none'}")
    masked = {spec.of for spec in specs if spec.role == "mask"}
    arrays = {
        spec.name: _pad_rows(spec, requests[spec.name], rows, extra_padding, spec.name in masked)
        for spec in specs
        if spec.role != "mask"
    }
    if encode is not None:
        for row in range(rows):
            check_row(encode, {name: np.asarray(values[row]) for name, values in requests.items()})
    if not masked:
        return arrays
    lengths = {name: np.array([len(row) for row in requests[name]]) for name in names}
    masks = {spec.name: _make_mask(spec, lengths, arrays) for spec in specs if spec.role == "mask"}
    return {**arrays, **masks}


def _pad_rows(
    spec: RequestInput, values: Sequence[Array], rows: int, extra_padding: int, masked: bool = False
) -> Array:
    """Stack rows, padding every free axis at its end to the largest row.

    masked: whether the model has a mask of the rows. A time axis of one size is then padded to that size.
    """
    if len(values) != rows:
        raise InputError(f"input {spec.name} has {len(values)} rows where {rows} are to be run")
    items = [np.asarray(value) for value in values]
    row_shape = spec.shape[1:]
    item_shapes = dict.fromkeys(item.shape for item in items)
    for item_shape in item_shapes:
        _check_row(spec, item_shape, masked)
    shape = [max(sizes) for sizes in zip(*item_shapes, strict=True)]
    if isinstance(row_shape[0], int):
        shape[0] = row_shape[0]
    else:
        shape[0] = min(shape[0] + extra_padding, spec.max_length or shape[0] + extra_padding)
    if rows == 1 and (*shape,) == items[0].shape and items[0].flags.aligned:
        return np.ascontiguousarray(items[0], spec.dtype)[None]
    array: Array = np.full((rows, *shape), spec.pad, spec.dtype)
    for row, item in zip(array, items, strict=True):
        row[tuple(map(slice, item.shape))] = item
    return array


def _check_row(spec: RequestInput, shape: tuple[int, ...], masked: bool) -> None:
    """Raise InputError for a row of a shape that an input cannot have. masked: as for `_pad_rows`."""
    if len(shape) != len(spec.shape) - 1:
        raise InputError(f"input {spec.name} takes {len(spec.shape) - 1} axes a row, not {len(shape)}")
    if 0 in shape:
        raise InputError(f"input {spec.name} is empty")
    if spec.max_length is not None and shape[0] > spec.max_length:
        raise InputError(f"input {spec.name} is {shape[0]} long and the model takes at most {spec.max_length}")
    for axis, (size, expected) in enumerate(zip(shape, spec.shape[1:], strict=True)):
        fits = not isinstance(expected, int) or size == expected or (masked and axis == 0 and size < expected)
        if not fits:
            raise InputError(f"input {spec.name} has the shape {shape} where {spec.shape[1:]} is needed")


def _make_mask(spec: RequestInput, lengths: Mapping[str, Array], arrays: Mapping[str, Array]) -> Array:
    """Return the mask of the valid positions of the input `of`: (batch, time), and further axes of size 1."""
    if spec.of is None or spec.of not in arrays:
        raise InputError(f"input {spec.name} is a mask of {spec.of}, which is not an input of the model")
    time = arrays[spec.of].shape[1]
    valid = np.arange(time) < lengths[spec.of][:, None]
    mask = valid if spec.keep else ~valid
    shape = [len(mask), *(time if isinstance(axis, str) else axis for axis in spec.shape[1:])]
    return mask.astype(spec.dtype).reshape(shape)
