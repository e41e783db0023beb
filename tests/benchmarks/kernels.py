"""Native kernels compared with onnxruntime's operators: whole decode steps and prompts. Run it on a quiet machine:

    python tests/benchmarks/kernels.py model.onnx [other.onnx ...] [--paths avx512vnni] [--rows 1,8,32]
        [--prompts 8x128] [--threads 1] [--rounds 25]

The first line names the processor, its features and the load. Each further line has the milliseconds of a step (or of a
prompt) with onnxruntime's operators, with each path, and how many times as fast each path is. The alternatives run by
turns in one process, so that background load slows all of them: ratios are medians of rounds, ± half the distance
between their quartiles. With one thread the milliseconds are those of the processor, which other work changes less.

Rule: 8 bits use a path on a class of processors only if whole steps gain 1.15 at 8 and at 32 rows, 4 bits if they gain
1.3 at one row, float32 if steps gain as for 8 bits and prompts are not slower. `backend/native_kernels.py` has the
result as BITS_OF_PATH.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from tformer_runtime.backend import native_kernels
from tformer_runtime.base.extras import import_onnxruntime
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.state import State

onnxruntime = import_onnxruntime()

STEPS = 4
SOURCE, CACHED = 24, 16  # tokens of a source, and before a measured step
PROMPT = 128  # tokens of an input of a single-pass model
TOKEN = 5
FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
OPERATORS = native_kernels.OFF  # onnxruntime's


def describe_machine() -> str:
    """Return the processor's name, its features that decide a path, and the load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(part for line in reversed(lines) if len(part := [text.strip() for text in line.split(":", 1)]) == 2)
    flags = fields.get("flags", fields.get("Features", "")).split()
    features = " ".join(name for name in FEATURES if name in flags)
    name = fields.get("model name", platform.processor())
    family = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{name} ({family}; {features}), load {os.getloadavg()[0]:.1f}, onnxruntime {onnxruntime.__version__}"


def load(model: str, kernels: str, threads: int) -> Engine:
    """Load a file with the kernels of a path, or with none."""
    os.environ[native_kernels.VARIABLE] = kernels
    engine = Engine(model, device="cpu", threads=threads)
    if kernels != OPERATORS and engine.session.kernels is None:
        raise click.ClickException(f"{model}: no product runs on {kernels}")
    return engine


def started(engine: Engine, rows: int) -> State:
    """Return a state with some cached tokens."""
    inputs = engine.manifest.encode.inputs if engine.manifest.encode else ()
    sources = {i.name: [np.full(SOURCE, TOKEN, np.int64)] * rows for i in inputs if i.role == "ids"}
    state = engine.start(sources or None, rows)
    engine.step(state, np.full((rows, CACHED), TOKEN, np.int64))
    return state


def stepper(engine: Engine, rows: int, tokens: int) -> Callable[[], None]:
    """Return a function that computes one step of so many tokens of each row."""
    state = started(engine, rows)
    ids = np.random.default_rng(0).integers(2, 20, (rows, tokens))
    cached = state.max_row_length

    def run() -> None:
        engine.step(state, ids)
        state.rewind(cached)

    return run


def by_turns(
    runs: dict[str, Callable[[], None]], repeats: int, rounds: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    """Return the milliseconds of each function in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            begun = clock()
            for _ in range(repeats):
                run()
            times[name].append((clock() - begun) / repeats * 1e3)
    return {name: np.array(values) for name, values in times.items()}


def report(title: str, times: dict[str, np.ndarray]) -> None:
    columns = [f"operators {np.median(times[OPERATORS]):.2f} ms (at least {times[OPERATORS].min():.2f})"]
    for name, values in times.items():
        if name != OPERATORS:
            ratios = times[OPERATORS] / values
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            milliseconds = f"{np.median(values):.2f} ms ({values.min():.2f})"
            columns.append(f"{name} {milliseconds}, {middle:.2f} ± {(high - low) / 2:.2f} times as fast")
    click.echo(f"{title}: " + "; ".join(columns))


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--paths", help="Comma-separated; by default the path that the runtime chooses.")
@click.option("--rows", default="1,8,32", show_default=True)
@click.option("--prompts", default="8x128", show_default=True, help="Prompts and their tokens, comma-separated.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=25, show_default=True)
def main(models: tuple[str, ...], paths: str | None, rows: str, prompts: str, threads: int, rounds: int) -> None:
    click.echo(f"{describe_machine()}, {threads} threads")
    clock = time.process_time if threads == 1 else time.perf_counter
    for model in models:
        names = [OPERATORS, *(paths.split(",") if paths else [""])]
        engines = {name: load(model, name, threads) for name in names}
        engines = {name if name else str(engine.session.kernels): engine for name, engine in engines.items()}
        has_steps = next(iter(engines.values())).manifest.decode is not None
        for count in map(int, rows.split(",")):
            if has_steps:
                runs = {name: stepper(engine, count, 1) for name, engine in engines.items()}
                report(f"{model}, step of {count} rows", by_turns(runs, STEPS, rounds, clock))
            else:
                runs = {name: encoder(engine, count, PROMPT) for name, engine in engines.items()}
                report(f"{model}, {count} inputs of {PROMPT} tokens", by_turns(runs, 1, rounds, clock))
        for size in prompts.split(",") if has_steps else ():
            count, tokens = map(int, size.split("x"))
            runs = {name: prompt_reader(engine, count, tokens) for name, engine in engines.items()}
            report(f"{model}, {count} prompts of {tokens} tokens", by_turns(runs, 1, rounds, clock))


def prompt_reader(engine: Engine, rows: int, tokens: int) -> Callable[[], None]:
    """Return a function that reads prompts: the sources of an encoder, or the first tokens of a decoder."""
    if engine.manifest.encode:
        return encoder(engine, rows, tokens)
    ids = np.random.default_rng(0).integers(2, 20, (rows, _length(engine, tokens)))
    return lambda: (engine.step(engine.start(None, rows), ids), None)[1]


def encoder(engine: Engine, rows: int, tokens: int) -> Callable[[], None]:
    """Return a function that encodes inputs."""
    assert engine.manifest.encode is not None
    ids = [np.ones(_length(engine, tokens), np.int64)] * rows  # 1 is a type of tokens too
    sources = {i.name: ids for i in engine.manifest.encode.inputs if i.role != "mask"}
    return lambda: (engine.encode(sources, rows), None)[1]


def _length(engine: Engine, tokens: int) -> int:
    return min(tokens, engine.manifest.max_length or tokens)


if __name__ == "__main__":
    main()
