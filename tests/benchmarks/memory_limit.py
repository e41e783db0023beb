"""Peak memory of a server whose model has `max_memory`. Run by hand:

    python tests/benchmarks/memory_limit.py [--threads 64] [--seconds 30] [--max-memory 64]

A model with random weights is exported to fp32 and to int8. For each file a process of its own loads it with
`max_memory`, and many threads send requests of random lengths. The resident memory is sampled. Its peak is compared
with the memory after loading, which holds the weights, plus `max_memory`. The rest is what `max_memory` does not count:
activations and logits of the running requests, and freed memory that malloc and onnxruntime keep.
"""

from __future__ import annotations

import json
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

VOCABULARY, LENGTH = 8000, 512
MB = 1e6


@click.command()
@click.option("--threads", default=64, show_default=True)
@click.option("--seconds", default=30.0, show_default=True)
@click.option("--max-memory", default=64.0, show_default=True, help="In MB.")
@click.option("--precision", "precisions", multiple=True, default=("fp32", "int8"), show_default=True)
@click.option("--load", type=click.Path(exists=True), hidden=True)
def main(threads: int, seconds: float, max_memory: float, precisions: tuple[str, ...], load: str | None) -> None:
    if load:
        click.echo(json.dumps(serve(load, threads, seconds, int(max_memory * MB))))
        return
    with tempfile.TemporaryDirectory() as folder:
        for precision in precisions:
            path = Path(folder) / f"{precision}.onnx"
            make(path, precision)
            options = ["--load", path, "--threads", threads, "--seconds", seconds, "--max-memory", max_memory]
            command = [sys.executable, __file__, *map(str, options)]
            facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rest = facts["peak"] - facts["loaded"] - max_memory * MB
            click.echo(
                f"{precision}: file {path.stat().st_size / MB:.0f} MB, loaded {facts['loaded'] / MB:.0f} MB, caches at "
                f"most {facts['caches'] / MB:.0f} of {max_memory:.0f} MB, peak {facts['peak'] / MB:.0f} MB: "
                f"{rest / MB:+.0f} MB besides; {facts['done']} results, {facts['refused']} refused"
            )


def make(path: Path, precision: str) -> None:
    """Export a Llama of some 30 M parameters with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tformer_export import Quantization, export

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    example = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    quantization = Quantization("int8" if precision == "int8" else "none")
    export(LlamaForCausalLM(config).eval(), path, example, step_input="input_ids", quantization=quantization)


def serve(path: str, threads: int, seconds: float, max_memory: int) -> dict[str, float]:
    """Load a file and let threads send requests. Return bytes and the number of results."""
    model = Model.load(path, "cpu", max_memory=max_memory)
    model.generate([3, 4, 5], max_new_tokens=2)
    loaded, end = resident(), time.monotonic() + seconds
    facts = {"loaded": loaded, "peak": loaded, "done": 0, "refused": 0}
    lock = threading.Lock()

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while time.monotonic() < end:
            ids = rng.integers(3, VOCABULARY, int(rng.integers(1, LENGTH // 2))).tolist()
            beams = int(rng.choice([1, 1, 4]))
            try:
                model.generate(ids, max_new_tokens=int(rng.integers(1, 32)), num_beams=beams)
                kind = "done"
            except TformerError:
                kind = "refused"
            with lock:
                facts[kind] += 1

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(threads)]
    for thread in clients:
        thread.start()
    while any(thread.is_alive() for thread in clients):
        facts["peak"] = max(facts["peak"], resident())
        time.sleep(0.01)
    assert not model.memory()["used_bytes"]
    return {**facts, "caches": model.memory()["peak_bytes"]}


if __name__ == "__main__":
    main()
