"""Arrays as JSON, and the part of a large array that a golden file holds.

An array is one of these, each with its "dtype" and "shape", in the order of rows:

values    numbers: whole ones, or booleans as 0 and 1
base64    bytes of the numbers, the least significant byte first
pattern   a seed: the numbers are computed by `pattern`
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Json = dict[str, Any]

MAX_WHOLE = 1024  # numbers of an array that is compared as a whole
SAMPLED = 256  # numbers of a larger array, or columns of logits
TOP = 4  # greatest logits of a position
STORED_POSITIONS = 12  # of the logits of a row: the last ones
MAX_STORED_INPUT = 512  # floats of a drawn input that are stored; a larger one is a pattern
MAX_NUMBERS = 2**24  # of an array that is read from a file: a few words may describe any size
DTYPES = frozenset(
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
)  # of arrays that are read from a file
_MASK = np.uint32(0xFFFFFFFF)


def pattern(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Return float32 numbers in [-1, 1) that any language computes exactly, with whole numbers of 32 bits.

    Number i is h / 2³¹ - 1, where h follows from i + seed by two multiplications and shifts, as in murmur3.
    """
    with np.errstate(over="ignore"):
        h = (np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(seed)) * np.uint32(0x9E3779B1)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) & _MASK
    return (h.astype(np.float64) / 2**31 - 1).astype(np.float32).reshape(tuple(shape))


def encode_array(array: np.ndarray, seed: int | None = None) -> Json:
    """Return an array as JSON. seed: of the pattern that the array is."""
    described: Json = {"dtype": array.dtype.name, "shape": list(array.shape)}
    if seed is not None:
        return {**described, "pattern": seed}
    if array.dtype.kind in "iub":
        return {**described, "values": array.ravel().astype(int).tolist()}
    little = array.astype(array.dtype.newbyteorder("<"))
    return {**described, "base64": base64.b64encode(little.tobytes()).decode()}


def decode_array(json: Mapping[str, Any]) -> np.ndarray:
    """Return the array that `encode_array` has described. Raises ValueError for a type or a size that it has not."""
    if str(json["dtype"]) not in DTYPES:
        raise ValueError(f"an array has numbers of the type {json['dtype']!r:.80}")
    dtype, shape = np.dtype(json["dtype"]), tuple(json["shape"])
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) > MAX_NUMBERS:
        raise ValueError(f"an array has the shape {json['shape']!r:.80}; it may have {MAX_NUMBERS:,} numbers")
    if "pattern" in json:
        return pattern(json["pattern"], shape).astype(dtype)
    if "values" in json:
        return np.array(json["values"], np.int64).astype(dtype).reshape(shape)
    raw = np.frombuffer(base64.b64decode(json["base64"], validate=True), dtype.newbyteorder("<"))
    return raw.astype(dtype).reshape(shape)


def sample(array: np.ndarray, random: np.random.Generator) -> Json:
    """Return an array, or of a large one a seeded choice of its numbers, and facts about all of them.

    minimum, maximum: of the finite numbers, because JSON has no infinity; 0 if there are none.
    argmax: of all numbers, an index of the array as one row.
    """
    array = np.asarray(array)
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
    if array.size <= MAX_WHOLE:
        return encode_array(array)
    flat = array.ravel()
    places = np.sort(random.choice(flat.size, SAMPLED, replace=False))
    minimum, maximum = _finite_range(flat)
    return {
        "shape": list(array.shape),
        "places": places.tolist(),
        "sample": encode_array(flat[places]),
        "minimum": minimum,
        "maximum": maximum,
        "argmax": int(flat.argmax()),
    }


def _finite_range(array: np.ndarray) -> tuple[float, float]:
    """Return the least and the greatest of the finite numbers of an array; zeros if there are none."""
    finite = array[np.isfinite(array)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def stored_positions(length: int) -> list[int]:
    """Return the positions of a row whose logits a golden file holds."""
    return list(range(max(0, length - STORED_POSITIONS), length))


def sample_logits(logits: np.ndarray, positions: Sequence[int], columns: Sequence[int]) -> Json:
    """Return logits (positions, vocabulary) in some columns, with the greatest ones and the range of each position."""
    top = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    finite = np.where(np.isfinite(logits), logits, np.nan)
    return {
        "positions": list(positions),
        "columns": list(columns),
        "values": encode_array(logits[:, list(columns)]),
        "minimum": encode_array(np.nanmin(finite, 1)),
        "maximum": encode_array(np.nanmax(finite, 1)),
        "top_ids": top.tolist(),
        "top_values": encode_array(np.take_along_axis(logits, top, 1)),
    }


def array_difference(expected: Mapping[str, Any], actual: np.ndarray, tolerance: float) -> str | None:
    """Return how an array differs from `sample` of the golden file; None if it does not.

    tolerance: of floats, over the range of all numbers.

    Raises ValueError for a sample of fewer numbers than the format has.
    """
    actual = np.asarray(actual)
    if list(actual.shape) != list(expected["shape"]):
        return f"the shape is {list(actual.shape)}, not {list(expected['shape'])}"
    if "places" not in expected:
        values, found = decode_array(expected), actual
        least, greatest = _finite_range(values)
        span = greatest - least
    else:
        if actual.size <= MAX_WHOLE or len(set(expected["places"])) != SAMPLED:
            raise ValueError(f"{len(expected['places'])} numbers are sampled of {actual.size}")
        values, found = decode_array(expected["sample"]), actual.ravel()[expected["places"]]
        span = expected["maximum"] - expected["minimum"]
        for name, number in zip(("minimum", "maximum"), _finite_range(actual), strict=True):
            if not abs(number - expected[name]) <= tolerance * span:
                return f"the {name} is {number:.6g}, not {expected[name]:.6g}"
    if not span:  # numbers that are all equal
        span = max(1.0, *map(abs, _finite_range(values)))
    return number_difference(values, found, tolerance * span)


def _range_of(logits: np.ndarray) -> np.ndarray:
    """Return the least and the greatest of the finite logits of a position."""
    finite = logits[np.isfinite(logits)]
    return np.array([finite.min(), finite.max()])


def number_difference(expected: np.ndarray, actual: np.ndarray, allowed: float) -> str | None:
    """Return the greatest difference of two arrays of one shape; None if it is allowed. Infinities have to be equal."""
    if expected.shape != actual.shape:
        return f"the shape is {list(actual.shape)}, not {list(expected.shape)}"
    if expected.dtype.kind in "iub":
        return None if np.array_equal(expected, actual) else "whole numbers differ"
    with np.errstate(invalid="ignore"):
        difference = np.where(expected == actual, 0.0, np.abs(expected.astype(np.float64) - actual))
    worst = float(difference.max(initial=0))
    if worst <= allowed:
        return None
    place = tuple(map(int, np.unravel_index(int(np.nan_to_num(difference, nan=np.inf).argmax()), difference.shape)))
    return f"number {list(place)} is {actual[place]:.6g}, not {expected[place]:.6g} ({allowed:.2g} may be between them)"


def logits_difference(expected: Mapping[str, Any], actual: np.ndarray, tolerance: float) -> str | None:
    """Return how logits (length, vocabulary) of a row differ from `sample_logits`; None if they do not.

    tolerance: over the range of the logits of a position.

    Raises ValueError for fewer positions, columns or greatest logits than the format has.
    """
    width = actual.shape[-1]
    stored = [len(set(expected["columns"])), *(len(set(ids)) for ids in expected["top_ids"])]
    if expected["positions"] != stored_positions(len(actual)) or stored != [
        min(width, SAMPLED),
        *[min(width, TOP)] * len(expected["positions"]),
    ]:
        raise ValueError(f"the logits of {len(expected['positions'])} positions are stored in part")
    rows = actual[expected["positions"]]
    low, high = decode_array(expected["minimum"]), decode_array(expected["maximum"])
    top, found_top = decode_array(expected["top_values"]), np.take_along_axis(rows, np.array(expected["top_ids"]), 1)
    values, found = decode_array(expected["values"]), rows[:, expected["columns"]]
    for row, position in enumerate(expected["positions"]):
        allowed = tolerance * float(high[row] - low[row])
        for name, one, other in (
            ("its logits", values[row], found[row]),
            ("its greatest logits", top[row], found_top[row]),
            ("its range", np.array([low[row], high[row]]), _range_of(rows[row])),
        ):
            if difference := number_difference(one, other, allowed):
                return f"position {position}: {name}: {difference}"
    return None
