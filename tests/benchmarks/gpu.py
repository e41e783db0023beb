"""Decoding on a GPU: tformer, transformers with a static cache and torch.compile, and the floor of memory.

    python tests/benchmarks/gpu.py [--size 1.1B|60M] [--precision fp16|bf16] [--rows 1,32] [--out results.json]
                                   [--model FILE.onnx]

The model has the shape of a Llama of that size and random weights, so nothing is downloaded. A step must read the cache
and every weight once, except the rows of the embedding that it does not look up. The floor is the time for these bytes
at the speed of a copy on the device. tformer is timed as `Model.generate_batch`, as `Engine.step_one_token` without the
code around a step, and as sampling, from top logits and from whole rows. All rows of a batch have prompts of the same
length. Each time is the difference of a long and a short run over the steps between them, the median of `--repeats`,
after a run that captures and compiles.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from onnx import TensorProto, helper

from tformer_export import export
from tformer_runtime import Model
from tformer_runtime.backend.session import find_missing_cuda
from tformer_runtime.base.extras import import_onnxruntime
from tformer_runtime.decoding.sampling import Sampler

onnxruntime = import_onnxruntime()

SIZES: dict[str, dict[str, int]] = {
    "1.1B": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32_000,
    },
    "60M": {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 32_000,
    },
}  # fmt: skip
MAX_LENGTH = 1024
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 0}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PROMPT, SHORT, LONG = 128, 64, 320  # tokens
COPIED = 2**30  # bytes


def build(size: str) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES[size], max_position_embeddings=MAX_LENGTH, tie_word_embeddings=False, eos_token_id=None, bos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def bandwidth() -> float:
    """Return the bytes per second that the device reads and writes, by the fastest of some copies of a gigabyte.

    The copy is a sum with 1 in half precision, because ONNX has no operator that must copy.
    """
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        "copy",
        [helper.make_tensor_value_info("x", half, ["n"])],
        [helper.make_tensor_value_info("y", half, ["n"])],
        [onnx.numpy_helper.from_array(np.ones((), np.float16), "one")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CUDAExecutionProvider"])
    io = session.io_binding()
    for name, bind in (("x", io.bind_ortvalue_input), ("y", io.bind_ortvalue_output)):
        bind(name, onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(COPIED // 2, np.float16), "cuda"))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        session.run_with_iobinding(io)
        io.synchronize_outputs()
        times.append(time.perf_counter() - begin)
    return 2 * COPIED / min(times)


def read_by_a_step(size: str, width: int, rows: int) -> int:
    """Return the bytes of weights and caches that a step in the middle of the measured lengths reads.

    width: bytes of a number.
    """
    shape = SIZES[size]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    cached = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * cached + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    weights = layers * layer + shape["vocab_size"] * hidden
    positions = PROMPT + (SHORT + LONG) // 2
    return (weights + rows * layers * 2 * cached * positions) * width


def per_step(run: Callable[[int], object], repeats: int) -> float:
    """Return seconds per step. run: generates a number of tokens in each row."""
    for count in (LONG, SHORT):
        run(count)  # captures, compiles
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(SHORT)
        middle = time.perf_counter()
        run(LONG)
        seconds.append((time.perf_counter() - 2 * middle + begin) / (LONG - SHORT))
    return statistics.median(seconds)


def prompts(rows: int) -> np.ndarray:
    return np.arange(5, 5 + PROMPT) + 7 * np.arange(rows)[:, None]


def time_tformer(model: Model, rows: int, repeats: int) -> dict[str, float]:
    engine, ids = model.engine, prompts(rows)

    def steps(count: int) -> None:
        state = engine.start(None, rows)
        tokens = engine.step(state, ids).argmax(-1)[:, None]
        for _ in range(count):
            chosen = engine.step_one_token(state, tokens)
            tokens = chosen.argmax(-1)[:, None] if isinstance(chosen, np.ndarray) else chosen.tokens[:, None]
        state.release()

    def generate(count: int, **options: Any) -> None:
        for result in model.generate_batch(list(ids), max_new_tokens=count, batch_size=rows, **options):
            assert len(result.token_ids) == count

    def sample(count: int) -> None:
        generate(count, **SAMPLING)

    results = {
        "generate": per_step(generate, repeats),
        "steps": per_step(steps, repeats),
        "sampled": per_step(sample, repeats),
    }
    of_few, Sampler.draws_from_few = Sampler.draws_from_few, property(lambda sampler: False)  # type: ignore[method-assign]
    try:
        return {**results, "sampled from whole rows": per_step(sample, repeats)}
    finally:
        Sampler.draws_from_few = of_few  # type: ignore[method-assign]


def time_transformers(module: Any, rows: int, repeats: int) -> dict[str, float]:
    """Return the time of transformers' generate with a static cache and a forward compiled for CUDA graphs."""
    ids = torch.from_numpy(prompts(rows)).to("cuda")

    def run(count: int, **options: Any) -> None:
        module.generate(ids, cache_implementation="static", min_new_tokens=count, max_new_tokens=count, **options)
        torch.cuda.synchronize()

    way = {name: value for name, value in SAMPLING.items() if name != "seed"}
    return {
        "generate": per_step(lambda count: run(count, do_sample=False), repeats),
        "sampled": per_step(lambda count: run(count, do_sample=True, **way), repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.1B")
    parser.add_argument("--precision", choices=HALVES, default="fp16")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", type=Path, help="A file that was exported before, of the same size.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    missing = find_missing_cuda()
    if missing:
        sys.exit(f"gpu.py: there is nothing to measure on: {missing}")
    copied = bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model.onnx"
        if options.model is None:
            report = export(
                build(options.size), path, target="cuda", precision=options.precision, max_length=MAX_LENGTH
            )
            print(f"exported: {dict(report.rows())['parity']}", file=sys.stderr)
        model = Model.load(path, device="cuda")
        captured = model.engine.session.captures_graphs
        ours = {}
        for rows in options.rows:
            ours[rows] = time_tformer(model, rows, options.repeats)
            print(f"{rows} rows: {ours[rows]}", file=sys.stderr, flush=True)
        model.close()
    theirs: dict[int, dict[str, float]] = {}
    if torch.cuda.is_available():
        module = build(options.size).to("cuda", HALVES[options.precision])
        module.forward = torch.compile(module.forward, mode="reduce-overhead", fullgraph=True)
        theirs = {rows: time_transformers(module, rows, options.repeats) for rows in options.rows}
    else:
        print("transformers is not measured: this PyTorch is built without CUDA", file=sys.stderr)
    print(f"{copied / 1e12:.2f} TB/s copied, CUDA graphs {'captured' if captured else 'NOT captured'}")
    print(f"{'':50}{'ms a step':>12}{'of the floor':>14}{'× as fast as transformers':>28}")
    result: dict[str, Any] = {}
    for rows in options.rows:
        floor = read_by_a_step(options.size, 2, rows) / copied
        times = {"floor": floor} | {f"tformer, {what}": seconds for what, seconds in ours[rows].items()}
        times |= {f"transformers, static, compiled, {what}": s for what, s in theirs.get(rows, {}).items()}
        for name, seconds in times.items():
            other = theirs.get(rows, {}).get("sampled" if "sampled" in name else "generate", math.nan)
            print(f"{f'{rows} rows: {name}':50}{seconds * 1e3:12.3f}{floor / seconds:13.0%} {other / seconds:27.2f}")
        result[str(rows)] = times
    if options.out:
        figures = {
            "size": options.size, "precision": options.precision, "bandwidth": copied, "seconds": result,
            "captured": captured, "onnxruntime": onnxruntime.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__,
        }  # fmt: skip
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
