"""Constants that rewrites put into a graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def constant(model: ir.Model, name: str, numbers: np.ndarray | np.generic) -> ir.Value:
    """The model's constant of that name, which holds these numbers; made when it is first asked for."""
    if name not in model.graph.initializers:
        array = np.asarray(numbers)
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        model.graph.initializers[name] = value
    return model.graph.initializers[name]
