"""onnxruntime-genai: its model builder on the same folder, and its Generator as in its examples."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from versus.engines import UnavailableError, build_once, hugging_face, only
from versus.engines.batched import in_batches, left_padded
from versus.shapes import Case, Shape


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    only(precision, "fp32", "int4")
    if shape.kind != "continue":
        raise UnavailableError("decoder-only models alone")
    source = hugging_face(folder, shape)

    def make(path: Path) -> None:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(path)]
        command += ["-p", precision, "-e", "cpu", "-c", str(path / "cache")]
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"its builder failed: {done.stderr.strip().splitlines()[-1][:200]}")

    return build_once(_path(folder, precision), make)


def _path(folder: Path, precision: str) -> Path:
    return folder / f"genai-{precision}"


class Engine:
    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import onnxruntime_genai

        self.genai = onnxruntime_genai
        config = onnxruntime_genai.Config(str(_path(folder, precision)))
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self.model = onnxruntime_genai.Model(config)

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        first, results = self._generate(inputs, case.new, case.beams)
        return first if case.beams == 1 else None, results

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        return in_batches(inputs, lambda rows: self._generate(left_padded(rows)[0], new, 1)[1])

    def _generate(self, inputs: Any, new: int, beams: int) -> tuple[float | None, list[list[int]]]:
        import numpy as np

        rows, length = np.shape(inputs)
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(
            max_length=length + new, min_length=length + new, batch_size=rows, num_beams=beams, do_sample=False
        )
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens(np.array(inputs, np.int32))
        first = None
        while not generator.is_done():
            generator.generate_next_token()
            first = first or time.perf_counter()
        return first, [generator.get_sequence(i)[length:].tolist() for i in range(rows)]
