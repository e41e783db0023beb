"""The bits of the weights of a model, counted from the constants that its file stores.

A float constant stands for its own numbers. A constant of integers, and the scales that belong to it, are described
where they are made, because their shapes do not tell how many weights they stand for.
"""

from __future__ import annotations

import onnx_ir as ir

_KEY = "tformer.weight_bits"  # in the metadata of a value, which a file does not store
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}


def describe(value: ir.Value, bits: int = 0, count: int = 0) -> ir.Value:
    """Say for how many weights of how many bits a constant stands, and return it. Scales stand for none."""
    value.meta[_KEY] = bits, count
    return value


def count_weights(model: ir.Model) -> dict[int, int]:
    """Return bits → the number of weights that the file stores in so many bits, the fewest bits first."""
    counts: dict[int, int] = {}
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            bits, count = value.meta.get(_KEY) or _own(value.const_value)
            if count:
                counts[bits] = counts.get(bits, 0) + count
    return dict(sorted(counts.items()))


def _own(tensor: ir.TensorProtocol | None) -> tuple[int, int]:
    """Return the bits and the count of the numbers of a constant that nothing has described."""
    return (tensor.dtype.bitwidth, tensor.size) if tensor is not None and tensor.dtype in _FLOATS else (0, 0)
