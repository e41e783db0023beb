"""Greedy and beam decoding: transformers' cached generate(), our fp32 file and our int8 file, in one run, interleaved.

    python tests/benchmarks/generation.py [--repeats 5] [--threads 2] [--out results.json] [--shape g2p|base]

Random weights of the same size on both sides (transformers' Marian; tformer_models' Seq2SeqTransformer), the same
number of source tokens and steps, end tokens suppressed so that everyone decodes all steps. Figures are the whole
request, encoder included, divided by the steps; medians over the repeats; ratios against transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from tformer_export import export
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import GenerationOptions, Model

SHAPES = {
    "g2p": dict(vocabulary=48, width=128, heads=4, layers=4, feedforward=512, source=8, steps=8),
    "base": dict(vocabulary=32000, width=512, heads=8, layers=6, feedforward=2048, source=24, steps=32),
}
CASES = ((1, 1), (8, 1), (32, 1), (1, 4), (8, 4))  # (batch, beams)
END = 2
QUIET = 0.2  # seconds before a measurement, in which the threads of the runner before stop spinning


def ours(shape: dict[str, int], folder: Path) -> dict[str, Model]:
    torch.manual_seed(0)
    module = Seq2SeqTransformer(
        shape["vocabulary"],
        shape["vocabulary"],
        width=shape["width"],
        heads=shape["heads"],
        encoder_layers=shape["layers"],
        decoder_layers=shape["layers"],
        feedforward=shape["feedforward"],
        max_length=128,
    )
    ids = torch.randint(3, 40, (2, 6))
    special = {"start": [1], "end": [END], "pad": 0}
    models = {}
    for quantize in ("none", "int8"):
        path = folder / f"{quantize}.onnx"
        report = export(module, path, {"src": ids, "tgt": ids}, "tgt", quantize=quantize, special=special)
        print(f"{path.name}: {report.size / 1e6:.0f} MB, {report.seconds}", flush=True)
        models[quantize] = path
    return models


def theirs(shape: dict[str, int]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=shape["vocabulary"],
        d_model=shape["width"],
        encoder_layers=shape["layers"],
        decoder_layers=shape["layers"],
        encoder_attention_heads=shape["heads"],
        decoder_attention_heads=shape["heads"],
        encoder_ffn_dim=shape["feedforward"],
        decoder_ffn_dim=shape["feedforward"],
        activation_function="relu",
        pad_token_id=0,
        eos_token_id=END,
        decoder_start_token_id=1,
        max_position_embeddings=128,
    )
    return transformers.MarianMTModel(config).eval()


def runners(
    shape: dict[str, int], paths: dict[str, Path], threads: int
) -> dict[str, Callable[[np.ndarray, int], None]]:
    peer, steps = theirs(shape), shape["steps"]

    def generate(source: np.ndarray, beams: int) -> None:
        with torch.inference_mode():
            made = peer.generate(
                torch.from_numpy(source),
                attention_mask=torch.ones(source.shape, dtype=torch.long),
                num_beams=beams,
                do_sample=False,
                min_new_tokens=steps,
                max_new_tokens=steps,
            )
        assert made.shape[1] == steps + 1

    def run(model: Model) -> Callable[[np.ndarray, int], None]:
        def call(source: np.ndarray, beams: int) -> None:
            options = GenerationOptions(beam_size=beams, max_new_tokens=steps, min_new_tokens=steps)
            for result in model.generate_batch(list(source), options, batch_size=len(source)):
                assert len(result.token_ids) == steps

        return call

    found = {"transformers fp32": generate}
    for name, path in paths.items():
        found[f"tformer {'fp32' if name == 'none' else name}"] = run(Model.load(path, device="cpu", threads=threads))
    return found


def measure(shape: dict[str, int], repeats: int, threads: int) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        calls = runners(shape, ours(shape, Path(folder)), threads)
        random = np.random.default_rng(0)
        for batch, beams in CASES:
            source = random.integers(3, 40, (batch, shape["source"]))
            times: dict[str, list[float]] = {name: [] for name in calls}
            for repeat in range(repeats + 1):
                for name, call in calls.items():
                    time.sleep(QUIET)
                    begin = time.perf_counter()
                    call(source, beams)
                    if repeat:
                        times[name].append((time.perf_counter() - begin) / shape["steps"] * 1e3)
            base = statistics.median(times["transformers fp32"])
            for name, values in times.items():
                middle = statistics.median(values)
                row = {"batch": batch, "beams": beams, "runner": name, "ms": middle, "ratio": base / middle}
                rows.append({**row, "least": min(values), "most": max(values)})
                print(
                    f"batch {batch:2d} beams {beams} {name:18s} {middle:8.2f} ms/step  {base / middle:5.1f} ×",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    results = {}
    for name in options.shape or SHAPES:
        print(name, SHAPES[name], flush=True)
        results[name] = measure(SHAPES[name], options.repeats, options.threads)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
