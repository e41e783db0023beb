"""transformers under `torch.compile`, with a static cache, as in its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from versus.engines import UnavailableError, eager
from versus.engines.eager import prepare as prepare
from versus.shapes import Case, Shape


class Engine(eager.Engine):
    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import torch

        super().__init__(folder, shape, precision, threads)
        torch._dynamo.config.cache_size_limit = 64  # each case has other sizes
        self.model.forward = torch.compile(self.model.forward)
        if shape.kind != "embed":
            self.options = {"cache_implementation": "static"}

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        if self.kind == "continue" and case.beams > 1:
            raise UnavailableError("beams with a static cache are compiled again step after step: 8 rows took 78 s")
        # Otherwise the cache keeps the size of the longest request so far.
        self.model._previous_max_cache_length = -1
        return super().run(case, inputs)

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        raise UnavailableError("batches of mixed lengths are compiled again for each length")
