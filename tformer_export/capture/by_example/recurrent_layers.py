"""Recurrent layers of torch as loops over positions, by torch's own decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

from tformer_export.common.fx_nodes import aten

_LAYERS = (aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_CELLS = (aten.gru_cell.default, aten.lstm_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default)


def _without_kernel(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition that does not take the one kernel that some CPUs have for a whole layer."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return decomposition(*args, **kwargs)

    return run


RECURRENT_LAYERS: dict[Any, Callable[..., Any]] = {
    **{layer: _without_kernel(found) for layer, found in get_decompositions([*_LAYERS]).items()},
    **{cell: cell.decompose for cell in _CELLS},
}
