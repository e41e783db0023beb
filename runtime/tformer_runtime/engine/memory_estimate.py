"""What requests will take: bytes of memory, and the padding that lets others join their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.engine.kv_cache import bytes_of, slots_for
from tformer_runtime.engine.shortlist import most_columns
from tformer_runtime.engine.state import State
from tformer_runtime.format.dtypes import held_as
from tformer_runtime.format.manifest import BATCH, Decode, Manifest
from tformer_runtime.format.sizes import Sizes, own_sizes

_LIMIT = 256  # positions of an input that has no maximum, at which its strides show


class Sizing:
    """Of one file's requests."""

    def __init__(self, manifest: Manifest, decode: Decode, exact: bool) -> None:
        """decode: the manifest's. exact: buffers are no larger than rows are known to come to (`KVCache`)."""
        self.manifest, self.decode, self._exact = manifest, decode, exact

    def sizes(self, sources: Mapping[str, Array]) -> Sizes:
        """Free axis of the request inputs → how long one request is there."""
        return own_sizes(self.manifest.encode.inputs, sources) if self.manifest.encode else {}

    def need(
        self, slots: int, sizes: Mapping[str, int], rows: int = 1, beside: State | None = None, named: int | None = None
    ) -> int:
        """Bytes of caches, context and gathered columns for `rows` rows, of which it was said that they come to so many
        slots, in buffers of no fewer slots than `beside` has.

        sizes: free axis of the inputs → length. An axis that is none of theirs (encoders may have fewer positions than
        they read) is taken to be as long as the longest. Rows that share a context may come to have one each.
        named: ids that are candidates because options name them; None if no request has candidates.
        """
        sizes = {**sizes, BATCH: rows}
        longest = max((size for axis, size in sizes.items() if axis != BATCH), default=1)
        context = 0
        for i, spec in enumerate(self.manifest.encoded):
            shape = [sizes.get(axis, longest) if isinstance(axis, str) else axis for axis in spec.shape]
            if beside is not None:
                shape = [max(pair) for pair in zip(shape, beside.context[i].shape, strict=True)]
            context += math.prod(shape) * held_as(spec.dtype).itemsize
        slots = slots if self._exact else slots_for(slots, self.manifest.max_length)
        if named is not None:  # while rows join, theirs are held beside those of the rows that they join
            held = beside.candidates.nbytes if beside and beside.candidates else 0
            context += held + self._most_gathered(rows * longest, named)
        return context + bytes_of(self.decode.caches, rows, max(slots, beside.cache.capacity if beside else 0))

    @property
    def column(self) -> int:
        """Bytes of a column of the output projection."""
        held = self.decode.shortlist
        return held.inner * np.dtype(held.dtype).itemsize if held else 0

    def _most_gathered(self, positions: int, named: int) -> int:
        """Bytes of columns for so many positions of sources, at most."""
        held, vocabulary = self.decode.shortlist, int(self.decode.logits.shape[-1])
        if held is None or self.manifest.encode is None:
            return 0
        tables = sum(spec.role == "ids" for spec in self.manifest.encode.inputs)
        return min(most_columns(vocabulary), held.common + tables * positions * held.each + named) * self.column


def slack(manifest: Manifest, encode: Callable[..., dict[str, Any]]) -> int:
    """Positions of padding that give every row some at the end of every axis of the context, for `join`.

    One, where these axes are the inputs' own. What follows from an input's by a stride may need more for one, and
    how many is seen by encoding: if so many more give two at one length, they give one or more at any.
    encode: `Engine.encode`.
    """
    inputs = [spec for spec in manifest.encode.inputs if spec.role != "mask"] if manifest.encode else []
    own = {BATCH, *(axis for spec in inputs for axis in spec.shape)}
    outputs = manifest.encoded
    if all(isinstance(axis, int) or axis in own for output in outputs for axis in output.shape):
        return 1
    limit = min((spec.max_length for spec in inputs if spec.max_length is not None), default=_LIMIT)

    def sizes(length: int) -> Array:
        given = {}
        for spec in inputs:
            first, *others = [1 if isinstance(axis, str) else axis for axis in spec.shape[1:]]
            first = length if isinstance(spec.shape[1], str) else first
            given[spec.name] = [np.zeros((first, *others), spec.dtype)]
        found = encode(given, 1)
        axes = [(o.name, at) for o in outputs for at, a in enumerate(o.shape) if isinstance(a, str) and a != BATCH]
        return np.array([found[name].shape()[at] for name, at in axes])

    base, more = limit // 2, 1
    while base + more < limit and (sizes(base + more) - sizes(base)).min() < 2:
        more *= 2
    return more if base + more < limit else limit
