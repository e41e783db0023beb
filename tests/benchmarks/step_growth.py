"""Growth of a step's time with the cached positions, compared with reading the cache. Run by hand, on a quiet machine:

    python tests/benchmarks/step_growth.py model.onnx [other.onnx ...] [--rows 1,8] [--positions 16,256,1024,2000]

A step reads each key and value of its rows' past once: bytes per token · rows · positions. These bytes over the
measured bandwidth of the machine are the least growth of a step. The files alternate, so that background load slows all
of them; the medians are compared.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import numpy as np

from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.kv_cache import cache_bytes
from tformer_runtime.engine.state import State

ROUNDS, STEPS, SOURCE = 9, 4, 24


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--rows", default="1,8", show_default=True)
@click.option("--positions", default="16,256,1024,2000", show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(models: tuple[str, ...], rows: str, positions: str, threads: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from versus.engines.rates import bandwidth

    bytes_per_second = bandwidth(threads)
    click.echo(f"{threads} threads, {bytes_per_second / 1e9:.1f} GB/s")
    engines = [Engine(model, device="cpu", threads=threads) for model in models]
    for count in map(int, rows.split(",")):
        first_ms: dict[int, float] = {}
        for cached in map(int, positions.split(",")):
            times = _milliseconds([_started(engine, count, cached) for engine in engines], engines)
            for i, (model, engine, step_ms) in enumerate(zip(models, engines, times, strict=True)):
                first_ms.setdefault(i, step_ms)
                reading = cache_bytes(engine.decode.caches, count, cached) / bytes_per_second * 1e3
                growth = f"{(step_ms - first_ms[i]) / reading:.2f} × the {reading:.2f} ms of reading"
                click.echo(f"{Path(model).name}: {count} rows, {cached} cached: {step_ms:.2f} ms; grown by {growth}")


def _started(engine: Engine, rows: int, cached: int) -> State:
    """Return a state with cached positions in memory that was written: untouched pages are faster to read."""
    inputs = engine.manifest.encode.inputs if engine.manifest.encode else ()
    sources = {i.name: [np.full(SOURCE, 5, np.int64)] * rows for i in inputs if i.role == "ids"}
    state = engine.start(sources or None, rows)
    state.cache.reserve(cached + 1, 0)
    for value in state.cache.past(0):
        value.numpy()[...] = 1
    state.lengths[:] = state.max_row_length = cached
    return state


def _milliseconds(states: list[State], engines: list[Engine]) -> list[float]:
    times: list[list[float]] = [[] for _ in states]
    for _ in range(ROUNDS):
        for engine, state, round_ms in zip(engines, states, times, strict=True):
            cached, tokens = state.max_row_length, np.full((state.rows, 1), 5, np.int64)
            begun = time.perf_counter()
            for _ in range(STEPS):
                engine.step(state, tokens)
                state.rewind(cached)
            round_ms.append((time.perf_counter() - begun) / STEPS * 1e3)
    return [float(np.median(round_ms)) for round_ms in times]


if __name__ == "__main__":
    main()
