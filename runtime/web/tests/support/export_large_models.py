"""Export two models of the size of products, with seeded weights and golden files, for the tests of large models.

    python export_large_models.py FOLDER [NAME …]

The shapes are those of tests/benchmarks/versus: an encoder-decoder of 60 M parameters and a decoder of 134 M.
FOLDER/60m and FOLDER/134m keep the weights, also as folders of transformers, which other engines read. It takes 20
minutes on two cores, 4 GB of memory and 3 GB of disk. Files whose code is still the same are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from export_models import CODE, REPOSITORY

sys.path.append(str(REPOSITORY / "tests/benchmarks"))

from versus.engines import SOURCE, build_once, code_of
from versus.shapes import END, PAD, ROWS, START, Shape

SHAPES = {"60m": "encoder-decoder 60M", "134m": "decoder-only 125M"}  # the latter has 134 M with both its tables
FORMS: dict[str, dict[str, str]] = {
    "": {},
    "-int8": {"quantization": "int8"},
    "-int4": {"quantization": "int4"},
    "-int4-latency": {"quantization": "int4", "optimize_for": "latency"},
    "-web-int8": {"quantization": "int8", "target": "web"},
    "-web-int4": {"quantization": "int4", "target": "web"},
}


def main(folder: Path, names: list[str]) -> None:
    import torch

    torch.set_num_threads(2)
    code = code_of(*(REPOSITORY / each for each in CODE), REPOSITORY / "tests/benchmarks/versus")
    for short, long in SHAPES.items():
        shape = next(row.shape for row in ROWS if row.name == long)
        for suffix, form in FORMS.items():
            name = short + suffix
            if names and name not in names:
                continue
            path, golden = folder / f"{name}.onnx", folder / f"{name}.golden.json"
            _make(path, code, partial(_export, folder, shape, short, path, form))
            _make(golden, code, partial(_write_golden, path, golden))


def _make(path: Path, code: str, make: Callable[[], None]) -> None:
    """Make a file, unless the same code has made it."""
    key = path.with_name(f"{path.name}.code")
    if not (path.exists() and key.exists() and key.read_text() == code):
        make()
        key.write_text(code)
        print(path.name, flush=True)


def _write_golden(path: Path, golden: Path) -> None:
    from tformer_export.verify.golden.record import make_golden, write_golden

    write_golden(make_golden(path), golden)


def _export(folder: Path, shape: Shape, short: str, path: Path, form: dict[str, str]) -> None:
    import torch
    from versus.engines import source

    from tformer_export import export

    def make(path: Path) -> None:
        torch.manual_seed(0)
        with torch.inference_mode():
            source.MAKERS[shape.kind](path, shape)

    build_once(folder / short / SOURCE, make)
    options = {**form, "max_length": min(shape.max_length, 512), "force": True}
    if shape.kind == "translate":
        ids = torch.full((2, 6), 10)
        special = {"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": PAD}
        module = source.encoder_decoder(folder / short / SOURCE, shape)
        export(module, path, {"src": ids, "tgt": ids}, "tgt", special_tokens=special, **options)
    else:
        from transformers import AutoModelForCausalLM

        export(AutoModelForCausalLM.from_pretrained(folder / short / SOURCE / "hf"), path, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
