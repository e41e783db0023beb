"""tformer, by its public calls."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

from versus.client import ROOT
from versus.engines import HUGGING_FACE, SOURCE, UnavailableError, build_once, code_of
from versus.shapes import END, PAD, START, Case, Shape

QUANTIZE = {"fp32": "none", "int8": "int8", "int4": "int4"}
VARIANTS = ("fixed", "latency")  # static scales of activations, and kernels for latency


def prepare(folder: Path, shape: Shape, precision: str, variant: str | None = None) -> int:
    """Export the model. variant: one of VARIANTS; None for the defaults."""
    path = model_path(folder, precision, variant)
    export = functools.partial(_export, folder, shape, precision, variant)
    return build_once(path.parent, lambda part: export(part / path.name), code_of(ROOT / "tformer_export"))


def model_path(folder: Path, precision: str, variant: str | None = None) -> Path:
    return folder / "-".join(filter(None, ["tformer", precision, variant])) / "model.onnx"


def _export(folder: Path, shape: Shape, precision: str, variant: str | None, path: Path) -> None:
    import torch

    from tformer_export import Quantization, Task, export
    from tformer_runtime import TformerError

    ids = torch.full((2, 6), 10)
    scales = "static" if variant == "fixed" else "per-row"
    options: dict[str, Any] = {
        "quantization": Quantization(QUANTIZE[precision], activation_scales=scales),
        "max_length": shape.max_length,
        "optimize_for": "latency" if variant == "latency" else "throughput",
    }
    try:
        if shape.kind == "translate":
            from versus.engines.source import encoder_decoder

            special = {"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": PAD}
            module = encoder_decoder(folder / SOURCE, shape)
            export(module, path, {"src": ids, "tgt": ids}, "tgt", special_tokens=special, **options)
        elif shape.kind == "continue":
            from transformers import AutoModelForCausalLM

            export(AutoModelForCausalLM.from_pretrained(folder / SOURCE / HUGGING_FACE), path, **options)
        else:
            from transformers import AutoModel

            export(
                AutoModel.from_pretrained(folder / SOURCE / HUGGING_FACE), path, task=Task(pooling="mean"), **options
            )
    except TformerError as error:
        raise UnavailableError(str(error)) from error


def file_command(
    folder: Path, precision: str, threads: int, texts: Path, results: Path, new: int, variant: str | None = None
) -> list[str]:
    """Return the command that a user runs. By default it has one worker for each core, of one thread."""
    command = [str(Path(sys.executable).with_name("tformer-run")), str(model_path(folder, precision, variant))]
    command += ["--ids", "--input-file", str(texts), "--output-file", str(results), "--force", "--quiet"]
    command += ["--max-new-tokens", str(new), "--min-new-tokens", str(new)]
    return [*command, "--device", "cpu", "--workers", str(threads), "--threads", "1"]


class Engine:
    variant: str | None = None

    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        from tformer_runtime import Model

        path = model_path(folder, precision, self.variant)
        self.model = Model.load(path, device="cpu", threads=threads)
        self.kind = shape.kind

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        """Run the requests.

        The time of the first token counts from the call of the model, some microseconds after the beginning.
        """
        begun = time.perf_counter()
        if self.kind == "embed":
            return None, self.model.embed(inputs, batch_size=case.batch).tolist()
        results = self.model.generate_batch(
            inputs, batch_size=case.batch, num_beams=case.beams, max_new_tokens=case.new, min_new_tokens=case.new
        )
        results = list(results)
        first = max(result.timing.first_token for result in results)
        return begun + first if case.beams == 1 else None, [list(result.token_ids) for result in results]

    def score(self, inputs: list[list[int]], last: int) -> list[float]:
        return [float(value) for ids in inputs for value in self.model.score(ids)[-last:]]
