"""Estimates for requests: bytes of memory, and the padding that lets other rows join."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.engine.kv_cache import buffer_slots, cache_bytes
from tformer_runtime.engine.shortlist import max_columns
from tformer_runtime.engine.state import State
from tformer_runtime.format.dtypes import storage_dtype
from tformer_runtime.format.manifest import BATCH_AXIS, DecodeStage, Manifest
from tformer_runtime.format.sizes import Sizes, input_sizes

UNBOUNDED_PROBE_LENGTH = 256  # positions to test of an input without a maximum length


class MemoryEstimate:
    """Memory that the requests of one file need."""

    def __init__(self, manifest: Manifest, decode: DecodeStage, exact: bool) -> None:
        """exact: whether cache buffers are no larger than the known maximum of tokens (`KVCache`)."""
        self.manifest, self.decode, self._exact = manifest, decode, exact

    def request_sizes(self, sources: Mapping[str, Array]) -> Sizes:
        """Return free axis of the request inputs → length of one request there."""
        return input_sizes(self.manifest.encode.inputs, sources) if self.manifest.encode else {}

    def bytes_needed(
        self,
        slots: int,
        sizes: Mapping[str, int],
        rows: int = 1,
        running: State | None = None,
        num_named_ids: int | None = None,
    ) -> int:
        """Return the bytes of caches, context and gathered columns for `rows` rows.

        slots: the maximum of tokens of a row.
        sizes: free axis of the inputs → length. An output axis that is not an input's (encoders may have fewer
            positions than they read) counts with the longest of these. Rows that share a context may later need one
            each, so each row counts with its own.
        running: the state that the rows will join. Buffers have at least its sizes.
        num_named_ids: the number of ids that are candidates because options name them; None if no request has
            candidates.
        """
        sizes = {**sizes, BATCH_AXIS: rows}
        max_size = max((size for axis, size in sizes.items() if axis != BATCH_AXIS), default=1)
        context = 0
        for i, spec in enumerate(self.manifest.encoded):
            shape = [sizes.get(axis, max_size) if isinstance(axis, str) else axis for axis in spec.shape]
            if running is not None:
                shape = [max(pair) for pair in zip(shape, running.context[i].shape, strict=True)]
            context += math.prod(shape) * storage_dtype(spec.dtype).itemsize
        slots = slots if self._exact else buffer_slots(slots, self.manifest.max_length)
        if num_named_ids is not None:  # while rows join, the columns of both states are in memory
            running_columns = running.candidates.nbytes if running and running.candidates else 0
            context += running_columns + self._max_gathered_bytes(rows * max_size, num_named_ids)
        slots = max(slots, running.cache.slot_capacity if running else 0)
        return context + cache_bytes(self.decode.caches, rows, slots)

    @property
    def column_bytes(self) -> int:
        """Bytes of a column of the output projection; 0 without a shortlist."""
        shortlist = self.decode.shortlist
        return shortlist.inner * np.dtype(shortlist.dtype).itemsize if shortlist else 0

    def _max_gathered_bytes(self, positions: int, num_named_ids: int) -> int:
        """Return the upper limit of the bytes of columns for a number of source positions."""
        shortlist, vocabulary = self.decode.shortlist, int(self.decode.logits.shape[-1])
        if shortlist is None or self.manifest.encode is None:
            return 0
        tables = sum(spec.role == "ids" for spec in self.manifest.encode.inputs)
        candidates = shortlist.common + tables * positions * shortlist.each + num_named_ids
        return min(max_columns(vocabulary), candidates) * self.column_bytes


def join_padding(manifest: Manifest, encode: Callable[..., dict[str, Any]]) -> int:
    """Return the positions of input padding that pad the end of every axis of the context, as `Engine.join` needs.

    This is one position if all axes of the context are axes of the inputs. An axis that follows from an input's by a
    stride may need more positions for one of its own. The function finds the number by encoding inputs of zeros: if it
    adds two positions at one length, it adds at least one at any length.

    encode: `Engine.encode`.
    """
    inputs = [spec for spec in manifest.encode.inputs if spec.role != "mask"] if manifest.encode else []
    min_lengths = manifest.encode.min_lengths if manifest.encode else {}
    input_axes = {BATCH_AXIS, *(axis for spec in inputs for axis in spec.shape)}
    outputs = manifest.encoded
    if all(isinstance(axis, int) or axis in input_axes for output in outputs for axis in output.shape):
        return 1
    limit = min((spec.max_length for spec in inputs if spec.max_length is not None), default=UNBOUNDED_PROBE_LENGTH)

    def output_sizes(length: int) -> Array:
        request = {}
        for spec in inputs:
            first, *others = [min_lengths.get(axis, 1) if isinstance(axis, str) else axis for axis in spec.shape[1:]]
            first = max(first, length) if isinstance(spec.shape[1], str) else first
            request[spec.name] = [np.zeros((first, *others), spec.dtype)]
        encoded = encode(request, 1)
        axes = [(o.name, i) for o in outputs for i, a in enumerate(o.shape) if isinstance(a, str) and a != BATCH_AXIS]
        return np.array([encoded[name].shape()[i] for name, i in axes])

    base, padding = limit // 2, 1
    while base + padding < limit and (output_sizes(base + padding) - output_sizes(base)).min() < 2:
        padding *= 2
    return padding if base + padding < limit else limit
