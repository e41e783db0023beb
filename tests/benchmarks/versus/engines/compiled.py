"""transformers under `torch.compile`, with a cache of fixed size, as its documentation has it."""

from __future__ import annotations

from pathlib import Path

from versus.engines import eager
from versus.engines.eager import prepare as prepare
from versus.shapes import Shape


class Engine(eager.Engine):
    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import torch

        super().__init__(folder, shape, precision, threads)
        self.model.forward = torch.compile(self.model.forward)
        if shape.kind != "embed":
            self.options = {"cache_implementation": "static"}
