"""A bare onnxruntime session on tformer's file: import, open, one run of each stage. What a start cannot be without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from versus.engines import ours
from versus.engines.ours import prepare as prepare
from versus.shapes import Case, Shape

TOTAL = "decode.total"  # the one input that must not be zero
SLOTS = 16  # of caches and contexts, whose content is no matter


class Engine:
    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        path = str(ours.model_path(folder, precision))
        self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.stages = (False, True) if shape.kind == "translate" else (True,)

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        import numpy as np

        kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
        for stage in self.stages:
            feeds = {}
            for given in self.session.get_inputs():
                free = 1 if len(given.shape) < 4 else SLOTS
                sizes = [size if isinstance(size, int) else free for size in given.shape]
                sizes = [1, *sizes[1:]] if sizes else []
                ones = stage and (given.type == "tensor(bool)" or given.name == TOTAL)
                feeds[given.name] = np.full(sizes, ones, kinds.get(given.type, np.float32))
            self.session.run(None, feeds)
        return None, [[0] * case.new for _ in inputs]
