"""Worker processes that are forked after loading: same results, and one copy of the weights for all of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.toy_models import Toy

from tformer_runtime import Model
from tformer_runtime.backend import forks

NUM_WORKERS = 4
VOCABULARY = 400_000  # a table and a projection of 26 MB each
MAX_MEMORY_RATIO = 1.3  # of all processes, to one


def in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a fork of this process, as JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def megabytes(field: str) -> float:
    """Return a sum over all memory of this process: Pss shares a page among the processes that have it."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.M)[1]) / 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_worker_gives_the_same_result(threads, tmp_path):
    model = Model.load(Toy(seed=5, layers=2).write(tmp_path / "toy.onnx"), "cpu", threads=threads)
    words = ["hello", "transformer", "ab"]
    expected = [list(each.token_ids) for each in model.generate_batch(words, max_new_tokens=12)]

    def work() -> Any:
        return [list(each.token_ids) for each in model.generate_batch(words, max_new_tokens=12)]

    assert [in_child(work) for _ in range(NUM_WORKERS)] == [expected] * NUM_WORKERS
    assert work() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="the states of threads are read from /proc")
def test_a_fork_waits_for_threads_that_compute(tmp_path, monkeypatch):
    """A thread of onnxruntime that holds a lock while the process forks would hold it in the child for ever."""
    Model.load(Toy(seed=5).write(tmp_path / "toy.onnx"), "cpu", threads=2)
    monkeypatch.setattr(forks, "MAX_WAIT_SECONDS", 600)
    content = bytes(300_000_000)
    computing = threading.Thread(target=lambda: hashlib.sha256(content).digest())  # without Python's lock
    computing.start()
    while not forks._computes() and computing.is_alive():
        pass
    assert in_child(lambda: 1) == 1
    assert not computing.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="the states of threads are read from /proc")
def test_a_fork_does_not_wait_for_ever(monkeypatch):
    ends = threading.Event()

    def compute() -> None:
        while not ends.is_set():
            hashlib.sha256(bytes(1_000_000)).digest()

    monkeypatch.setattr(forks, "MAX_WAIT_SECONDS", 0.01)
    computing = threading.Thread(target=compute)
    computing.start()
    try:
        assert in_child(lambda: 2) == 2
        assert computing.is_alive()
    finally:
        ends.set()
        computing.join()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps_rollup is Linux's")
def test_forked_workers_share_the_weights(tmp_path):
    path = Toy(seed=5, encoder=False, vocabulary=VOCABULARY).write(tmp_path / "toy.onnx")

    def memory_of_a_worker() -> Any:
        before = megabytes("Rss")
        model = Model.load(path, "cpu", threads=1)

        def work() -> float:
            model.generate([5, 6, 7], max_new_tokens=4)
            return megabytes("Private_Dirty") + megabytes("Private_Clean")

        weights = megabytes("Rss") - before
        return weights, in_child(work)

    weights, of_a_worker = in_child(memory_of_a_worker)
    assert weights > 40
    assert weights + NUM_WORKERS * of_a_worker < MAX_MEMORY_RATIO * weights + 4 * 8  # 8 MB are Python's own objects
