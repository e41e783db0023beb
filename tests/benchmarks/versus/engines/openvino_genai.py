"""openvino-genai: its LLMPipeline, which has paged attention, on the models of `open_vino`.

The cache of prompts is off: every request of a case has the same prompt.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from versus.engines import UnavailableError, open_vino
from versus.shapes import Case, Shape


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    if shape.kind != "continue":
        raise UnavailableError("decoder-only models alone")
    return open_vino.prepare(folder, shape, precision)


class Engine:
    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import openvino_genai

        self.genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        path, settings = open_vino.model_path(folder, precision), open_vino.properties(precision, threads)
        self.model = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", settings)

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        begun = time.perf_counter()
        found = self._generate(inputs, case.new, case.beams)
        first = max(result.perf_metrics.get_ttft().mean for result in found) / 1e3
        return begun + first if case.beams == 1 else None, [result.m_generation_ids[0] for result in found]

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        return [result.m_generation_ids[0] for result in self._generate(inputs, new, 1)]

    def _generate(self, inputs: list[list[int]], new: int, beams: int) -> Any:
        import numpy as np
        import openvino

        options = self.genai.GenerationConfig()
        options.max_new_tokens = options.min_new_tokens = new
        options.num_beams, options.do_sample = beams, False
        tensors = [openvino.Tensor(np.array([ids], np.int64)) for ids in inputs]
        return self.model.generate(tensors, [options] * len(tensors))
