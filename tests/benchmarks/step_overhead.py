"""Cost of `Engine.step` over the bare session call, as a ratio. Run by hand, on a quiet machine:

    python tests/benchmarks/step_overhead.py [model.onnx] [--rows 1] [--threads N]

The bare call is `Session.run`, onnxruntime's `run_with_iobinding`, with the binding of the last step. Without a file,
a small random one is built that takes a few hundred microseconds a step. Rounds of both alternate, so that background
load slows both; the medians are compared.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from tformer_runtime.engine.decode_call import SessionCall
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.state import State

STEPS, ROUNDS, SOURCE = 24, 60, 12


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True))
@click.option("--rows", default=1, show_default=True)
@click.option("--threads", type=int)
def main(model: str | None, rows: int, threads: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(model or _toy(Path(folder)), device="cpu", threads=threads)
    stepped, bare = [], []
    for _ in range(ROUNDS):
        state = _started(engine, rows)
        tokens = np.full((rows, 1), 5, np.int64)
        engine.step(state, tokens)
        stepped.append(_microseconds(functools.partial(engine.step, state, tokens)))
        call, state = state.call, _started(engine, rows)
        assert isinstance(call, SessionCall)
        bare.append(_microseconds(functools.partial(engine.session.run, call.bindings[0], "decode")))
    one, other = float(np.median(stepped)), float(np.median(bare))
    click.echo(f"rows {rows}: step {one:.1f} µs, bare session call {other:.1f} µs, ratio {one / other:.3f}")


def _started(engine: Engine, rows: int) -> State:
    inputs = engine.manifest.encode.inputs if engine.manifest.encode else ()
    sources = {i.name: [np.full(SOURCE, 5, np.int64)] * rows for i in inputs if i.role == "ids"}
    return engine.start(sources or None, rows)


def _microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        call()
    return (time.perf_counter() - start) / STEPS * 1e6


def _toy(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.toy_models import Toy

    return Toy(layers=12).write(folder / "toy.onnx")


if __name__ == "__main__":
    main()
