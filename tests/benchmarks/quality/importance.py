"""The mean square of each input of a product on the calibration data, by the names of GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from versus.engines.gguf_weights import OF_LAYER

IMPORTANCE = "importance.npz"


def write(model: Any, windows: np.ndarray, path: Path) -> None:
    """Run a Llama of transformers on windows of ids and write the mean squares."""
    import torch

    sums: dict[str, Any] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            squares = inputs[0].double().square().flatten(0, -2)
            sums[name] = sums.get(name, 0) + squares.sum(0)

        return add

    layers = model.model.layers
    hooks = [
        layer.get_submodule(part).register_forward_hook(hook(f"blk.{number}.{name}.weight"))
        for number, layer in enumerate(layers)
        for part, name in OF_LAYER.items()
        if part.endswith("_proj")
    ]
    with torch.inference_mode():
        for ids in windows:
            model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    for one in hooks:
        one.remove()
    np.savez(path, **{name: (total / windows.size).numpy() for name, total in sums.items()})
