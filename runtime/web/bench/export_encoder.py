"""Export an encoder of texts for transformers.js, in fp32 and in the layout of the hub.

python export_encoder.py HUGGING_FACE_FOLDER FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModel

NAMES = ("input_ids", "attention_mask", "token_type_ids")
OUTPUT = "last_hidden_state"


class Encoder(torch.nn.Module):
    """A BERT whose inputs are in one order."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(NAMES, inputs, strict=True))).last_hidden_state


def main(source: Path, target: Path) -> None:
    (target / "onnx").mkdir(parents=True, exist_ok=True)
    model = AutoModel.from_pretrained(source, attn_implementation="eager").eval()
    ids = torch.ones(2, 4, dtype=torch.int64)
    torch.onnx.export(
        Encoder(model),
        (ids, ids, ids - ids),
        str(target / "onnx" / "model.onnx"),
        dynamo=False,
        opset_version=18,
        input_names=[*NAMES],
        output_names=[OUTPUT],
        dynamic_axes={name: {0: "batch", 1: "position"} for name in (*NAMES, OUTPUT)},
    )
    for file in source.glob("*.json"):
        shutil.copy(file, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
