"""tformer's files, by the public export."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from versus.client import ROOT
from versus.engines import UnavailableError, build_once, code_of, hugging_face
from versus.shapes import Shape

from quality.distance import compare
from quality.forms import CALIBRATION, TEXT, is_calibrated, weights_of

FILE = "model.onnx"
BITS = " bits"  # the end of a budget that limits the size


def prepare(folder: Path, shape: Shape, form: str) -> int:
    """Export the model, again if the exporter has changed."""
    export = functools.partial(_export, folder, shape, form)
    return build_once(_folder(folder, form), lambda part: export(part / FILE), code_of(ROOT / "tformer_export"))


def _folder(folder: Path, form: str) -> Path:
    return folder / f"tformer-{form.replace(' ', '-')}"


def _export(folder: Path, shape: Shape, form: str, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tformer_export import Quantization, export
    from tformer_runtime import TformerError

    weights, _, budget = weights_of(form).partition(" ")
    bits = budget.removesuffix(BITS) if budget.endswith(BITS) else None
    quantization = Quantization(
        "none" if weights == "fp32" else weights,
        calibration=folder / TEXT / CALIBRATION if is_calibrated(form) else None,
        max_degradation=budget if budget and bits is None else None,
        max_bits=None if bits is None else float(bits),
    )
    model = AutoModelForCausalLM.from_pretrained(hugging_face(folder, shape))
    try:
        export(model, path, quantization=quantization, max_length=shape.max_length)
    except TformerError as error:
        raise UnavailableError(str(error)) from error


def measure(folder: str, compared: str, form: str, threads: int) -> dict[str, Any]:
    """Return the bytes of the file and its initializers, and the figures of `compare`.

    Initializers are weights and constants: a file in fp32 tells how many bytes are constants.
    """
    import onnx_ir as ir

    from tformer_runtime.engine.engine import Engine

    path = _folder(Path(folder), form) / FILE
    tensors = [value.const_value for graph in ir.load(path).graphs() for value in graph.initializers.values()]
    engine = Engine(path, device="cpu", threads=threads)

    def logits_of(ids: np.ndarray) -> np.ndarray:
        state = engine.start(None, 1)
        return engine.step(state, ids[None], logit_positions="all")[0]

    return {
        "file": sum(file.stat().st_size for file in path.parent.glob(f"{FILE}*")),
        "weights": sum(tensor.nbytes for tensor in tensors if tensor is not None),
        **compare(Path(compared), logits_of),
    }
