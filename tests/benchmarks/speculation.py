"""Gain of speculative decoding, and its cost where there is no gain: requests of one row, with and without guesses.

    python tests/benchmarks/speculation.py [--repeats 7] [--threads 2] [--quantize int8] [--out results.json]

The models have full size (6+6 layers, d=512, 32k vocabulary) and constructed weights, so that their output is known: at
each position the source's token, or a fixed replacement. "edit" replaces one token in eight, as corrections do;
"translate" replaces all. Their drafts (1+1 layers, d=128) agree except for one token in ten, or, as "stranger", never.
Figures are medians over sources of 48 random tokens; the runners alternate.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tformer_export import export
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import GenerationOptions, Model

START, END, FIRST, VOCABULARY = 1, 2, 3, 32_000
SOURCE, LENGTH = 48, 64
QUIET = 0.1  # seconds before a measurement, in which the threads of the other runner stop spinning


def replaced(share: float, seed: int) -> np.ndarray:
    """Return the output token of each token: a share of the tokens is replaced, the others stay."""
    random = np.random.default_rng(seed)
    successors = np.arange(VOCABULARY)
    chosen = FIRST + np.flatnonzero(random.random(VOCABULARY - FIRST) < share)
    successors[chosen] = np.roll(chosen, 1)
    return successors


def but_for(truth: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return the same mapping with a share of its tokens changed."""
    return np.where(np.arange(VOCABULARY) < FIRST, truth, truth[replaced(share, seed)])


def written(becomes: np.ndarray, width: int, heads: int, layers: int, feedforward: int) -> Seq2SeqTransformer:
    """Return a model that generates, at each position, the output token of the source's token there.

    Half of the stream holds a token's code, the other half a position's. The first cross-attention finds the source's
    position and fetches its token. All other parts have almost no effect, but are computed.
    """
    torch.manual_seed(0)
    module = Seq2SeqTransformer(
        VOCABULARY, VOCABULARY, width=width, heads=heads, encoder_layers=layers, decoder_layers=layers,
        feedforward=feedforward, max_length=LENGTH, positions="learned", norm="pre", tie_output=False,
    ).eval()  # fmt: skip
    half, size = width // 2, width // heads
    codes, places = torch.randn(VOCABULARY, half), torch.randn(LENGTH, half)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(("encoder.", "decoder.")) and parameter.dim() > 1:
                parameter *= 1e-3
        for side in (module.source, module.target):
            side.tokens.weight.zero_()
            side.positions.zero_()
            side.positions[:, half:] = places
        module.source.tokens.weight[:, :half] = codes / math.sqrt(width)
        module.target.tokens.weight[:, :half] = codes / math.sqrt(width) * 0.01
        attention = module.decoder[0].cross_attention
        each = torch.arange(width)
        part = each // size * size % half + each % size  # of one half
        for linear in (attention.query, attention.key, attention.value, attention.output):
            linear.weight.zero_()
        attention.query.weight[each, half + part % half] = 8.0
        attention.key.weight[each, half + part % half] = 1.0
        attention.value.weight[each, part % half] = 1.0
        attention.output.weight[part % half, each] = 1.0
        module.output.weight.zero_()
        module.output.weight[torch.from_numpy(becomes), :half] = codes
        module.output.bias.zero_()
    return module


def export_model(folder: Path, name: str, quantize: str, *described: Any) -> Path:
    path = folder / f"{name}.onnx"
    ids = torch.randint(FIRST, 40, (2, 6))
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")).to_str()
    special = {"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": 0}
    export(
        written(*described), path, {"src": ids, "tgt": ids}, "tgt",
        quantization=quantize, special_tokens=special, tokenizer=words, max_length=LENGTH,
    )  # fmt: skip
    print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB", flush=True)
    return path


def measure(folder: Path, quantize: str, repeats: int, threads: int) -> list[dict[str, Any]]:
    tasks = {"edit": replaced(1 / 8, 1), "translate": replaced(1.0, 2)}
    large, small = (512, 8, 6, 2048), (128, 4, 1, 512)
    rows: list[dict[str, Any]] = []
    random = np.random.default_rng(0)
    for task, becomes in tasks.items():
        others = {"draft": but_for(becomes, 0.1, 3), "stranger": but_for(becomes, 1.0, 4)}
        paths = {task: export_model(folder, task, quantize, becomes, *large)}
        paths |= {
            name: export_model(folder, f"{task}-{name}", quantize, other, *small) for name, other in others.items()
        }
        # A draft's own threads would wait for the model's (`GenerationOptions.draft`).
        models = {name: Model.load(path, "cpu", threads if name == task else 1) for name, path in paths.items()}
        model = models.pop(task)
        ways: dict[str, Any] = {"plain": None, "prompt": "prompt", **models}
        times: dict[str, list[float]] = {name: [] for name in ways}
        guessed, accepted = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
        for repeat in range(repeats + 1):
            source = np.append(random.permutation(np.arange(FIRST, VOCABULARY))[:SOURCE], END)
            for name, draft in ways.items():
                time.sleep(QUIET)
                begin = time.perf_counter()
                result = model.generate(source, GenerationOptions(draft_model=draft))
                seconds = time.perf_counter() - begin
                assert list(result.token_ids) == becomes[source].tolist()
                if repeat:
                    times[name].append(seconds / len(result.token_ids) * 1e3)
                    guessed[name] += result.speculation.guessed if result.speculation else 0
                    accepted[name] += result.speculation.accepted if result.speculation else 0
        base = statistics.median(times["plain"])
        for name, values in times.items():
            middle = statistics.median(values)
            row = {"task": task, "guesses": name, "ms": middle, "ratio": base / middle}
            rows.append({**row, "guessed": guessed[name] / repeats, "accepted": accepted[name] / repeats})
            print(
                f"{task:10s} {name:9s} {middle:6.2f} ms/token  {base / middle:5.2f} ×  "
                f"{accepted[name] / repeats:5.1f} of {guessed[name] / repeats:5.1f} guesses came true",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of the model; drafts have one")
    parser.add_argument("--quantize", choices=["none", "int8"], default="none")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.quantize, options.repeats, options.threads)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
