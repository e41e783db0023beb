"""Vectors of sentences on a GPU: tformer next to transformers, eager and under `torch.compile`, in half precision.

    python tests/benchmarks/gpu_encoder.py [--precision fp16|bf16] [--cases 1x16,32x128,256x128] [--out results.json]

The model has the shape of BERT base (110 M) and random weights. A case is rows × tokens. Each engine gets lists of ids
and returns means of hidden states on the host. Time is the median of `--repeats` calls, interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tformer_export import Task, export
from tformer_runtime import Model
from tformer_runtime.backend.session import find_missing_cuda
from tformer_runtime.base.extras import import_onnxruntime

onnxruntime = import_onnxruntime()

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
Embed = Callable[[list[list[int]]], np.ndarray]


def build() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


def transformers_engine(module: Any) -> Embed:
    def embed(inputs: list[list[int]]) -> np.ndarray:
        with torch.inference_mode():
            ids = torch.tensor(inputs, device="cuda")
            hidden = module(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            return hidden.float().mean(1).cpu().numpy()

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=HALVES, default="fp16")
    parser.add_argument("--cases", default="1x16,32x128,256x128")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    missing = find_missing_cuda()
    if missing:
        sys.exit(f"gpu_encoder.py: there is nothing to measure on: {missing}")
    module = build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        report = export(module, path, target="cuda", precision=options.precision, task=Task(pooling="mean"))
        print(f"exported: {dict(report.rows())['parity']}", file=sys.stderr)
        model = Model.load(path, device="cuda")
    half = module.to("cuda", HALVES[options.precision])
    engines: dict[str, Embed] = {
        "tformer": lambda inputs: model.embed(inputs, batch_size=len(inputs)),
        "transformers": transformers_engine(half),
        "transformers, compiled": transformers_engine(torch.compile(half)),
    }
    random = np.random.default_rng(0)
    results: dict[str, dict[str, float]] = {}
    print(f"{'rows x tokens':16}{'engine':26}{'ms':>10}{'sentences/s':>14}{'tformer is faster':>20}")
    for case in options.cases.split(","):
        rows, tokens = (int(n) for n in case.split("x"))
        inputs = random.integers(1000, 30000, (rows, tokens)).tolist()
        vectors = {name: embed(inputs) for name, embed in engines.items()}  # compiles
        scale = np.abs(vectors["transformers"]).max()
        difference = np.abs(vectors["tformer"] - vectors["transformers"]).max() / scale
        assert difference < 0.02, f"the vectors differ by {difference:.1e} of the largest number"
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.repeats):
            for name, embed in engines.items():
                begin = time.perf_counter()
                embed(inputs)
                seconds[name].append(time.perf_counter() - begin)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            ratio = median / medians["tformer"]
            print(f"{case:16}{name:26}{median * 1e3:10.2f}{rows / median:14.0f}{ratio:19.2f}x")
        results[case] = {**medians, "difference": float(difference)}
    if options.out:
        versions = {package.__name__: package.__version__ for package in (onnxruntime, torch, transformers)}
        options.out.write_text(
            json.dumps({"precision": options.precision, **versions, "cases": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
