"""Peak memory of a server whose model has `max_memory`, and its bound. Run by hand:

    python tests/benchmarks/memory_limit.py [--threads 64] [--seconds 8] [--max-memory 64]

A model with random weights is exported to fp32 and to int8. For each file a process of its own loads it with
`max_memory`, and many threads send requests of random lengths. The resident memory is sampled. Its peak is compared
with the memory after loading, which holds the weights, plus `max_memory`, plus what `max_memory` does not count
(`uncounted`; docs/guarantees.md). The exit status is 1 if the peak exceeds this bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import click
import numpy as np
from soak import resident

from tformer_runtime import Model, TformerError
from tformer_runtime.backend.run_slots import cpu_run_slots
from tformer_runtime.engine.engine import PREFILL_CHUNK_TOKENS

VOCABULARY, LENGTH = 8000, 512
WIDTH, INNER, LAYERS, HEADS = 512, 1376, 8, 8
MAX_PROMPT, MAX_NEW_TOKENS = 255, 31
MB = 1e6


@click.command()
@click.option("--threads", default=64, show_default=True)
@click.option("--seconds", default=8.0, show_default=True)
@click.option("--max-memory", default=64.0, show_default=True, help="In MB.")
@click.option("--precision", "precisions", multiple=True, default=("fp32", "int8"), show_default=True)
@click.option("--load", type=click.Path(exists=True), hidden=True)
def main(threads: int, seconds: float, max_memory: float, precisions: tuple[str, ...], load: str | None) -> None:
    if load:
        click.echo(json.dumps(serve(load, threads, seconds, int(max_memory * MB))))
        return
    bound_holds = True
    click.echo(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for precision in precisions:
            path = Path(folder) / f"{precision}.onnx"
            make(path, precision)
            options = ["--load", path, "--threads", threads, "--seconds", seconds, "--max-memory", max_memory]
            command = [sys.executable, __file__, *map(str, options)]
            facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            allowed = uncounted(threads)
            rest = facts["peak"] - facts["loaded"] - max_memory * MB
            click.echo(
                f"{precision}: file {path.stat().st_size / MB:.0f} MB, loaded {facts['loaded'] / MB:.0f} MB, caches at "
                f"most {facts['caches'] / MB:.0f} of {max_memory:.0f} MB, peak {facts['peak'] / MB:.0f} MB: "
                f"{rest / MB:+.0f} MB besides, of {allowed / MB:.0f} MB allowed; {facts['done']} results, "
                f"{facts['tokens'] / facts['seconds']:.0f} tokens/s, {facts['refused']} refused"
            )
            bound_holds &= rest <= allowed
    if not bound_holds:
        click.echo("the bound is exceeded", err=True)
        sys.exit(1)


def uncounted(threads: int) -> float:
    """Return the bytes that the process may take besides the weights and `max_memory`: C of docs/guarantees.md."""
    positions = min(MAX_PROMPT, PREFILL_CHUNK_TOKENS)
    activations = 4 * positions * (6 * WIDTH + 3 * INNER + 2 * HEADS * MAX_PROMPT)
    earlier_copy = 4 * 2 * LAYERS * WIDTH * (MAX_PROMPT + MAX_NEW_TOKENS)  # of one row, before it is copied to beams
    return cpu_run_slots().number * (2 * activations + earlier_copy) + 16 * MB + threads * 0.25 * MB


def make(path: Path, precision: str) -> None:
    """Export a Llama of some 30 M parameters with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tformer_export import Quantization, export

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=LENGTH,
    )  # fmt: skip
    example = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    quantization = Quantization("int8" if precision == "int8" else "none")
    export(LlamaForCausalLM(config).eval(), path, example, step_input="input_ids", quantization=quantization)


def serve(path: str, threads: int, seconds: float, max_memory: int) -> dict[str, float]:
    """Load a file and let threads send requests. Return bytes and the number of results."""
    model = Model.load(path, "cpu", max_memory=max_memory)
    model.generate([3, 4, 5], max_new_tokens=2)
    loaded, start = resident(), time.monotonic()
    facts = {"loaded": loaded, "peak": loaded, "done": 0, "refused": 0, "tokens": 0}
    lock = threading.Lock()

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while time.monotonic() < start + seconds:
            ids = rng.integers(3, VOCABULARY, int(rng.integers(1, MAX_PROMPT + 1))).tolist()
            beams = int(rng.choice([1, 1, 4]))
            try:
                result = model.generate(ids, max_new_tokens=int(rng.integers(1, MAX_NEW_TOKENS + 1)), num_beams=beams)
                kind, tokens = "done", len(result.token_ids)
            except TformerError:
                kind, tokens = "refused", 0
            with lock:
                facts[kind] += 1
                facts["tokens"] += tokens

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(threads)]
    for thread in clients:
        thread.start()
    while any(thread.is_alive() for thread in clients):
        facts["peak"] = max(facts["peak"], resident())
        time.sleep(0.01)
    assert not model.memory()["used_bytes"]
    return {**facts, "seconds": time.monotonic() - start, "caches": model.memory()["peak_bytes"]}


if __name__ == "__main__":
    main()
