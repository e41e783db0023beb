"""Throughput of many inputs of mixed lengths, and latency of single inputs, compared with CTranslate2 in one run.

    python tests/benchmarks/batches.py [--inputs 2000] [--threads 2] [--beams 1 4] [--precision int8] [--out F.json]

The model is an encoder-decoder of d=512, 6 + 6 layers and 32,000 tokens, with the same random weights in both engines.
Both must generate the same tokens in fp32 before anything is measured. Source lengths follow those of sentences
(log-normal, 4 to 80, median 18). An end token has a chance of about 1 in 20 at each step, so lengths of results vary
too. A rate counts the generated tokens of the engine, without end tokens. Each engine runs with a few batch sizes
(CTranslate2 with both batch types), and with one worker of all threads or one worker per thread, on a part of the
inputs; the best setting then runs on all inputs. The engines alternate, and medians of the ratios count. A single
request has all threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from versus.engines.ctranslate import ctranslate2_model, to_ctranslate2

from tformer_export import export
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import GenerationOptions, Model

VOCABULARY, START, END = 32000, 1, 2
MAX_NEW_TOKENS = 64  # generated tokens
QUIET = 0.3  # seconds before a measurement, in which the threads of the other engine stop spinning
SINGLES = 40  # requests of the measurement of latency

Run = Callable[[list[list[int]]], list[tuple[int, ...]]]


def module() -> Seq2SeqTransformer:
    """Return a module with random weights whose greedy output neither repeats itself nor ends at once."""
    torch.manual_seed(0)
    model = Seq2SeqTransformer(VOCABULARY, VOCABULARY, tie_output=False, dropout=0.0, max_length=256).eval()
    with torch.no_grad():
        model.output.weight.normal_(0, 512**-0.5)
        model.output.bias.zero_()
        for layer in model.decoder:  # attention changes slowly over positions, and so does the next token
            for attention in (layer.self_attention, layer.cross_attention):
                attention.output.weight *= 0.2
        random = np.random.default_rng(0)
        source, target = (torch.from_numpy(random.integers(10, VOCABULARY, (16, 20))) for _ in range(2))
        logits = model(source, target)
        behind = (logits.max(-1).values - logits[..., END]).flatten().sort().values
        model.output.bias[:END] = -100
        model.output.bias[END] = behind[len(behind) // 20]
    return model


def sources(count: int, seed: int = 1) -> list[list[int]]:
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(np.log(18), 0.6, count)), 4, 80).astype(int)
    return [random.integers(10, VOCABULARY, n).tolist() for n in lengths]


def ours(path: Path, threads: int, beams: int, batch_size: int, workers: int = 1) -> Run:
    model = Model.load(path, device="cpu", threads=threads // workers)
    options = GenerationOptions(num_beams=beams, max_new_tokens=MAX_NEW_TOKENS)

    def run(inputs: list[list[int]]) -> list[tuple[int, ...]]:
        results = model.generate_batch(inputs, options, batch_size, workers=workers)
        return [r.token_ids[:-1] if r.finish_reason == "end" else r.token_ids for r in results]

    return run


def theirs(folder: Path, precision: str, threads: int, beams: int, size: int, kind: str, inter: int = 1) -> Run:
    engine = ctranslate2_model(folder, precision, threads // inter, inter)

    def run(inputs: list[list[int]]) -> list[tuple[int, ...]]:
        tokens = [[str(i) for i in ids] for ids in inputs]
        results = engine.translate_batch(
            tokens, num_beams=beams, max_decoding_length=MAX_NEW_TOKENS, max_batch_size=size, batch_type=kind
        )
        return [tuple(map(int, result.hypotheses[0])) for result in results]

    return run


def rate(run: Run, inputs: list[list[int]]) -> float:
    """Return the rate in tokens per second."""
    time.sleep(QUIET)
    begun = time.perf_counter()
    results = run(inputs)
    return sum(map(len, results)) / (time.perf_counter() - begun)


def best(name: str, runs: dict[str, Run], inputs: list[list[int]]) -> Run:
    rates = {}
    for setting, run in runs.items():
        run(inputs[:8])
        rates[setting] = rate(run, inputs)
    print(f"  {name}: " + ", ".join(f"{k} {v:.0f}" for k, v in rates.items()), flush=True)
    return runs[max(rates, key=lambda k: rates[k])]


def latency(run: Run, inputs: Sequence[list[int]]) -> float:
    """Return the milliseconds per token of single requests, one after another."""
    spent, count = 0.0, 0
    for ids in inputs:
        begun = time.perf_counter()
        (result,) = run([ids])
        spent += time.perf_counter() - begun
        count += len(result) + 1
    return spent / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--precision", default="int8", choices=["int8", "float32"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--models", type=Path, help="keep the models in this folder, or take them from it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.models or Path(scratch)
        prepare(folder)
        rows = [measure(folder, beams, args) for beams in args.beams]
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


def prepare(folder: Path) -> None:
    if not (folder / "float32").exists():
        folder.mkdir(exist_ok=True)
        model = module()
        ids = torch.randint(10, 100, (2, 6))
        special = {"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": 0}
        for quantize, name in (("none", "float32"), ("int8", "int8")):
            export(
                model,
                folder / f"{name}.onnx",
                {"src": ids, "tgt": ids},
                "tgt",
                quantization=quantize,
                special_tokens=special,
            )
            to_ctranslate2(model, folder / name, quantize if quantize != "none" else None, END)
    few = sources(6)
    one = ours(folder / "float32.onnx", 2, 1, 8)(few)
    other = theirs(folder / "float32", "float32", 2, 1, 8, "examples")(few)
    assert one == other, "the engines' tokens differ in fp32: their weights are not the same"


def measure(folder: Path, beams: int, args: argparse.Namespace) -> dict[str, float]:
    threads, precision = args.threads, args.precision
    path, peer = folder / f"{precision}.onnx", folder / precision
    some, every = sources(max(8, args.inputs // 8), seed=2), sources(args.inputs)
    print(f"beam {beams}, {precision}, {threads} threads; tokens/s on {len(some)} inputs:", flush=True)
    workers = sorted({1, threads})
    sizes = (16, 32, 64, 128) if beams == 1 else (8, 16, 32)
    mine = {f"{n} × {w}": ours(path, threads, beams, n, w) for w in workers for n in sizes[:3]}
    settings = [*((n, "examples") for n in sizes[1:]), (1024, "tokens"), (4096, "tokens")]
    yours = {
        f"{n} {kind} × {w}": theirs(peer, precision, threads, beams, n, kind, w)
        for w in workers
        for n, kind in settings
    }
    quick, other = (best(name, runs, some) for name, runs in (("tformer", mine), ("CTranslate2", yours)))
    pairs = [(rate(quick, every), rate(other, every)) for _ in range(args.repeats)]
    one, lone = ours(path, threads, beams, 1), theirs(peer, precision, threads, beams, 1, "examples")
    alone = [(latency(one, every[:SINGLES]), latency(lone, every[:SINGLES])) for _ in range(args.repeats + 1)][1:]
    row = {
        "beams": beams,
        "tformer tokens/s": statistics.median(a for a, _ in pairs),
        "CTranslate2 tokens/s": statistics.median(b for _, b in pairs),
        "rate": statistics.median(a / b for a, b in pairs),
        "tformer ms/token": statistics.median(a for a, _ in alone),
        "CTranslate2 ms/token": statistics.median(b for _, b in alone),
        "latency": statistics.median(b / a for a, b in alone),
    }
    print("  " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
