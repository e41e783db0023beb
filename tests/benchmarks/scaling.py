"""Rows per second of `tformer-run --ray` with one and with several workers on this machine, in turn.

    python tests/benchmarks/scaling.py FILE.onnx WORDS.txt [--workers 1 2] [--rounds 3]

A worker has one CPU. The start of Ray and the loading of models are not counted: the time is from the first finished
part to the last. On a machine with other work the rows for each second of the workers' processors say more: they stay
the same if workers do not disturb each other.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import click
import psutil
import ray

from tformer_runtime.distributed.job import TableJob, Watcher, run_job
from tformer_runtime.format.info import file_fingerprint


class _Clock(Watcher):
    """Counts the rows after the first part, their seconds, and the seconds of the processors of the workers."""

    def __init__(self) -> None:
        self.rows, self.first, self.last = 0, (0.0, 0.0), (0.0, 0.0)

    def advanced(self, rows: int) -> None:
        self.last = time.monotonic(), _worker_seconds()
        if self.first[0]:
            self.rows += rows
        else:
            self.first = self.last

    def rates(self) -> tuple[float, float]:
        """Return the rows per second, and per second of a processor."""
        seconds, processors = (last - first for last, first in zip(self.last, self.first, strict=True))
        return self.rows / seconds, self.rows / processors


def _worker_seconds() -> float:
    """Return the processor time of all workers."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::PartWorker"):
                times = process.cpu_times()
                seconds += times.user + times.system
    return seconds


def _rates(model: Path, words: Path, workers: int, part_rows: int) -> tuple[float, float]:
    folder, clock = tempfile.mkdtemp(), _Clock()
    job = TableJob(
        str(model.absolute()),
        str(words),
        f"{folder}/out",
        workers=workers,
        part_rows=part_rows,
        fingerprint=file_fingerprint(model),
    )
    run_job(job, False, False, clock)
    shutil.rmtree(folder)
    return clock.rates()


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("words", type=click.Path(path_type=Path))
@click.option("--workers", type=int, multiple=True, default=(1, 2))
@click.option("--rounds", type=int, default=3)
@click.option("--part-rows", type=int, default=250)
def main(model: Path, words: Path, workers: tuple[int, ...], rounds: int, part_rows: int) -> None:
    """Print the rates of each number of workers."""
    ray.init(log_to_driver=False, logging_level="error", include_dashboard=False)
    rates: dict[int, list[tuple[float, float]]] = {count: [] for count in workers}
    for _ in range(rounds):
        for count in workers:
            rates[count].append(_rates(model, words, count, part_rows))
    for count, found in rates.items():
        for unit, values in zip(("second", "second of a processor"), zip(*found, strict=True), strict=True):
            each = " ".join(f"{value:.0f}" for value in values)
            print(f"{count} workers: {statistics.median(values):8.0f} rows per {unit} ({each})")


if __name__ == "__main__":
    main()
