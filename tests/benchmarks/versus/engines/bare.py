"""A bare onnxruntime session on tformer's file: import, open, one run of each stage on the requested tokens.

It is the least that a start takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from versus.engines import ours
from versus.engines.ours import prepare as prepare
from versus.shapes import Case, Shape

TOTAL, LAST = "decode.total", "decode.last"  # inputs that must not be zero: the number of tokens, and the last position
SLOTS = 16  # slots of the caches, more than there are tokens; their content has no effect


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
            fed = 1 if len(self.stages) > 1 else case.prompt  # a decoder's first token, or its prompt
            free = {"batch": 1, "new": fed, "selected": 1, "slot": case.prompt + SLOTS}
            values = {TOTAL: fed, LAST: fed - 1}
            feeds = {}
            for given in self.session.get_inputs():
                sizes = [size if isinstance(size, int) else free.get(size, case.prompt) for size in given.shape]
                value = stage if given.type == "tensor(bool)" else values.get(given.name, 0)
                feeds[given.name] = np.full(sizes, value, kinds.get(given.type, np.float32))
            self.session.run(None, feeds)
        return None, [[0] * case.new for _ in inputs]
