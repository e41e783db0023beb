"""Export the models of tests/support/export_large_models.py for transformers.js, with the same weights.

    python export_peer.py FOLDER NAME     # with optimum-onnx: make .venv-optimum/.ready

It writes FOLDER/NAME/transformers.js, in the layout of the hub: fp32, "q8" and "q4" of transformers.js. The 8 bits are
onnxruntime's dynamic quantisation with a scale for each column of weights, as in tformer's files. The 4 bits are
MatMulNBits in blocks of 32, as in the files of the hub.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when onnxruntime is imported

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from optimum.exporters.onnx import main_export

TASKS = {"60m": "text2text-generation-with-past", "134m": "text-generation-with-past"}
READ = ("encoder_model", "decoder_model_merged", "model")  # the files that transformers.js reads


def main(folder: Path, name: str) -> None:
    target = folder / name / "transformers.js"
    files = target / "onnx"
    files.mkdir(parents=True, exist_ok=True)
    if not any(files.iterdir()):
        main_export(str(folder / name / "source/hf"), str(target), task=TASKS[name], do_validation=False)
        for file in target.glob("*.onnx*"):
            if file.name.split(".")[0] in READ:
                file.rename(files / file.name)
            else:
                file.unlink()
    for file in sorted(files.glob("*.onnx")):
        if file.stem in READ:
            _quantize(file)


def _quantize(file: Path) -> None:
    eight, four = (file.with_name(f"{file.stem}_{suffix}.onnx") for suffix in ("quantized", "q4"))
    if not eight.exists():
        options = {"EnableSubgraph": True, "MatMulConstBOnly": True}
        quantize_dynamic(file, eight, per_channel=True, weight_type=QuantType.QInt8, extra_options=options)
    if not four.exists():
        quantizer = MatMulNBitsQuantizer(onnx.load(file), block_size=32, is_symmetric=True)
        quantizer.process()
        onnx.save(quantizer.model.model, four)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
