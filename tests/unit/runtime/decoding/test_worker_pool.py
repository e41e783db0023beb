"""Batches in parallel threads end with an abandoned iterator, and never wait for memory that cannot be freed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest
from support.toy_models import END_ID, Toy, assert_alike

from tformer_runtime import MemoryBudgetError, Model
from tformer_runtime.decoding.request import make_request

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]
LONG = {"suppress_tokens": [END_ID], "max_new_tokens": 20}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Toy(seed=27).write(tmp_path_factory.mktemp("workers") / "toy.onnx")


@pytest.fixture(scope="module")
def free(path):
    return Model.load(path, "cpu", threads=1)


def limited(path, free: Model, requests: float) -> Model:
    """Return a model with memory for `count` of the largest requests at a time."""
    settings = free.settings(None, LONG)
    task = free.generator.make_task(make_request(free.manifest, free.inputs, "mississippi", 0, settings), settings)
    need = free.generator.new_scheduler(settings, 1).starter.bytes_needed((), [task])
    return Model.load(path, "cpu", threads=1, max_memory=int(requests * need))


def ours() -> int:
    return sum(thread.name == "tformer-worker" for thread in threading.enumerate())


@pytest.mark.parametrize("requests", [1, 3])
def test_workers_take_turns_under_a_memory_limit(path, free, requests):
    model = limited(path, free, requests)
    expected = list(free.generate_batch(WORDS * 4, **LONG))
    for result, alone in zip(model.generate_batch(WORDS * 4, batch_size=2, workers=3, **LONG), expected, strict=True):
        assert_alike(result, alone)
    assert model.memory()["used_bytes"] == 0
    assert model.memory()["peak_bytes"] <= model.memory()["limit_bytes"]
    assert not ours()


def test_workers_do_not_wait_for_an_open_stream_of_the_caller(path, free):
    """The caller is in the middle of a stream, which it reads only after the workers have finished."""
    model = limited(path, free, 1.5)
    stream = model.stream("hello", **LONG)
    next(stream)
    with pytest.raises(MemoryBudgetError, match=r"^input 1: .* unfinished streams hold"):
        list(model.generate_batch(WORDS, workers=2, **LONG))
    stream.close()
    assert len(list(model.generate_batch(WORDS, workers=2, **LONG))) == len(WORDS)


def test_workers_wait_for_memory_that_the_caller_releases(path, free):
    """The caller reads a stream to its end between two results."""
    model = limited(path, free, 1.5)
    results = model.generate_batch(WORDS * 4, batch_size=2, workers=2, **LONG)
    texts = [(next(results).text, "".join(model.stream("zebra", **LONG))) for _ in WORDS * 4]
    assert texts == [(free.generate(word, **LONG).text, free.generate("zebra", **LONG).text) for word in WORDS * 4]


def test_waiting_workers_end_with_an_abandoned_iterator(path, free):
    model = limited(path, free, 1.5)
    results = model.generate_batch(itertools.cycle(WORDS), batch_size=2, workers=2, **LONG)
    next(results)
    held = model.budget.new_share()
    assert held.reserve(model.memory()["limit_bytes"] // 2)  # and releases it only afterwards
    results.close()
    assert not ours()
    held.release_reservation()
    assert model.memory()["used_bytes"] == 0
    assert_alike(model.generate("hello", **LONG), free.generate("hello", **LONG))


@pytest.mark.parametrize("error", [SystemExit, ZeroDivisionError])
def test_errors_of_a_worker_reach_the_caller(free, error):
    def fails(ids, logits):
        raise error("of the caller's")

    with pytest.raises(error, match="of the caller's"):
        list(free.generate_batch(WORDS, workers=2, logits_processor=fails))
    assert not ours()
    assert free.memory()["used_bytes"] == 0


PROGRAM = """
import itertools, sys
from tformer_runtime import Model
sys.modules["kept"] = results = Model.load(sys.argv[1], "cpu", threads=1).generate_batch(
    itertools.cycle(["hello", "transformer"]), batch_size=4, workers=2, suppress_tokens=[2]
)
print(len(next(results).token_ids) > 1)
sys.exit()
"""


def test_interrupt_at_the_start_of_workers_is_the_only_error(free, monkeypatch):
    """The second thread has not started when the interrupt comes."""
    at_exit, started, start = [], [], threading.Thread.start

    def interrupted(thread):
        if started:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    monkeypatch.setattr("tformer_runtime.decoding.worker_pool.atexit.register", at_exit.append)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(free.generate_batch(WORDS, workers=2))
    monkeypatch.undo()
    (release,) = at_exit
    release()
    assert not started[0].is_alive()


def test_interpreter_may_exit_at_any_time(path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
