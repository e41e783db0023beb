"""How long one row is along the free axes of its inputs, and of what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.manifest import Encode, RequestInput

Sizes = Mapping[str, int]  # name of an input's free axis → how long one row is there


def own_sizes(specs: Sequence[RequestInput], sources: Mapping[str, Array]) -> Sizes:
    """The sizes of one row's inputs, which are given without their batch axis."""
    given = [(spec.shape[1:], sources[spec.name].shape) for spec in specs if spec.name in sources]
    sizes = ((axis, size) for axes, shape in given for axis, size in zip(axes, shape, strict=True))
    return {axis: size for axis, size in sizes if isinstance(axis, str)}


def every_size(encode: Encode, sources: Mapping[str, Array]) -> Sizes:
    """The same, and those of the outputs' axes that follow from them."""
    sizes = dict(own_sizes(encode.inputs, sources))
    made = {name: max(0, (sizes[f.of] - f.least) // f.stride + 1) for name, f in encode.follows.items()}
    return {**sizes, **made}
