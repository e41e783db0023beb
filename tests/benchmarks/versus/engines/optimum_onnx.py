"""optimum-onnx: its export of the same folder, and its dynamic quantisation (the configuration for AVX-512 VNNI)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from versus.engines import build_once, eager, hugging_face, only
from versus.shapes import Shape


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    only(precision, "fp32", "int8")
    source = hugging_face(folder, shape)

    def export(path: Path) -> None:
        _class(shape).from_pretrained(source, export=True).save_pretrained(path)

    def quantize(path: Path) -> None:
        from optimum.onnxruntime import ORTQuantizer
        from optimum.onnxruntime.configuration import AutoQuantizationConfig

        plain = _path(folder, "fp32")
        for file in plain.glob("*.onnx"):
            config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
            ORTQuantizer.from_pretrained(plain, file.name).quantize(config, save_dir=path, file_suffix="")
        for file in plain.glob("*.json"):
            (path / file.name).write_bytes(file.read_bytes())

    bytes = build_once(_path(folder, "fp32"), export)
    return bytes if precision == "fp32" else build_once(_path(folder, "int8"), quantize)


def _path(folder: Path, precision: str) -> Path:
    return folder / f"optimum-{precision}"


def _class(shape: Shape) -> Any:
    from optimum import onnxruntime as ort

    return {
        "translate": ort.ORTModelForSeq2SeqLM,
        "continue": ort.ORTModelForCausalLM,
        "embed": ort.ORTModelForFeatureExtraction,
    }[shape.kind]


class Engine(eager.Engine):
    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import onnxruntime
        import torch

        torch.set_num_threads(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.kind = shape.kind
        self.model = _class(shape).from_pretrained(_path(folder, precision), session_options=options)
