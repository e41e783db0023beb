"""Seconds and memory of an export and of loading its file. Run by hand, on a quiet machine:

    python tests/benchmarks/exporting.py [60M] [1.1B] [--quantize int8]

60M: encoder-decoder, 6+6 layers, d = 512, ff = 2048, one table of 32,000 tokens for source, target and output. 1.1B:
Llama-shaped, 22 layers, d = 2048, with its weights in a second file. Weights are random. Each export and each loading
runs in a process of its own. "libraries" is the memory after all imports of an export, before there is a model; the
peak contains it. Loading is compared with the size of the file.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from tformer_export import export
from tformer_export.common.clock import peak_memory
from tformer_export.sources import Source
from tformer_export.sources.hugging_face.folder import from_transformers
from tformer_export.sources.torch_module import from_module
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import Model
from tformer_runtime.base.extras import import_onnxruntime
from tformer_runtime.format.manifest import SpecialTokens

USED_BY_AN_EXPORT = ("torch._dynamo", "onnxscript", "torch.onnx._internal.exporter._core")


@click.command()
@click.argument("sizes", nargs=-1, type=click.Choice(["60M", "1.1B"]))
@click.option("--quantize", type=click.Choice(["none", "int8"]), default="none", show_default=True)
@click.option("--measure", hidden=True, type=click.Path(path_type=Path))
@click.option("--load", hidden=True, is_flag=True)
def main(sizes: tuple[str, ...], quantize: str, measure: Path | None, load: bool) -> None:
    if measure is not None:
        click.echo(json.dumps(_load(measure) if load else _export(sizes[0], quantize, measure)))
        return
    table = Table("", *(sizes or ("60M",)), title=f"exporting, {quantize}")
    columns = [_measured(size, quantize) for size in sizes or ("60M",)]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    Console().print(table)


def _measured(size: str, quantize: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        figures = _in_a_process(size, "--quantize", quantize, "--measure", str(file))
        loaded = _in_a_process("--load", "--measure", str(file))
    weights, peak, libraries = figures["weights"], figures["peak"], figures["libraries"]
    return {
        "float32 weights": f"{weights / 1e6:.0f} MB",
        "export": f"{figures['seconds']:.0f} s",
        "peak resident": f"{peak / 1e6:.0f} MB, {peak / weights:.2f} × the weights",
        "of it libraries": f"{libraries / 1e6:.0f} MB; without them {(peak - libraries) / weights:.2f} ×",
        "file": f"{figures['size'] / 1e6:.0f} MB",
        "loaded": f"{loaded['held'] / figures['size']:.2f} × the file, peak {loaded['peak'] / figures['size']:.2f} ×",
        "after a request": f"{loaded['used'] / figures['size']:.2f} ×",
    }


def _in_a_process(*arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _export(size: str, quantize: str, file: Path) -> dict[str, float]:
    for name in USED_BY_AN_EXPORT:
        importlib.import_module(name)
    if size == "1.1B":
        importlib.import_module("transformers.models.llama.modeling_llama")
    libraries = _resident()
    torch.manual_seed(0)
    source = _encoder_decoder() if size == "60M" else _llama()
    begin = time.perf_counter()
    report = export(source, file, quantization=quantize)
    seconds = time.perf_counter() - begin
    weights = 4 * report.parameters
    return {
        "weights": weights, "seconds": seconds, "peak": report.peak_memory, "libraries": libraries, "size": report.size
    }  # fmt: skip


def _encoder_decoder() -> Source:
    shape = {"width": 512, "heads": 8, "encoder_layers": 6, "decoder_layers": 6, "feedforward": 2048}
    module = Seq2SeqTransformer(32000, 32000, **shape, max_length=128).eval()
    module.source.tokens.weight = module.target.tokens.weight
    ids = torch.randint(3, 40, (2, 6))
    return from_module(
        module,
        {"src": ids, "tgt": ids},
        "tgt",
        special_tokens=SpecialTokens(bos_token_ids=(1,), eos_token_ids=(2,), pad_token_id=0),
    )


def _llama() -> Source:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    config = LlamaConfig(vocab_size=32000, num_key_value_heads=4, max_position_embeddings=2048, **shape)
    with torch.no_grad():
        return from_transformers(LlamaForCausalLM(config).eval())


def _load(file: Path) -> dict[str, float]:
    """Return the memory of a loaded model without the libraries, before and after a first request."""
    import_onnxruntime()
    before = _resident()
    model = Model.load(file, device="cpu")
    held = _resident() - before
    model.generate([5, 6, 7, 8], max_new_tokens=8)
    return {"held": held, "used": _resident() - before, "peak": peak_memory() - before}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


if __name__ == "__main__":
    main()
