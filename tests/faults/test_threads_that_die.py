"""A thread that decodes meets an error that nobody foresaw: each request ends, with its result or the error."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading

import pytest
from support.toy_models import Toy
from support.toy_tasks import write

from tformer_runtime import AsyncModel, Model

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"] * 4
HANG = 120  # seconds, of a machine under any load
CALLS = {
    "worker": 800,
    "async": 2500,
    "tasks": 300,
}  # calls of the runtime's functions that a run has at least, in one thread


class Bang(BaseException):
    """An error that no code expects."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model.load(Toy(seed=27).write(tmp_path_factory.mktemp("threads") / "toy.onnx"), "cpu", threads=1)


@pytest.fixture(scope="module")
def expected(model):
    return [model.generate(word).token_ids for word in WORDS]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    return Model.load(write(tmp_path_factory.mktemp("threads") / "vectors.onnx"), "cpu", threads=1)


@pytest.fixture
def bang():
    """Return a function that lets the n-th call of a function of the runtime raise Bang, in a thread of a name."""

    def arm(thread, nth):
        count = [0]

        def trace(frame, event, _argument):
            code = frame.f_code
            if "tformer_runtime" not in code.co_filename or threading.current_thread().name != thread:
                return
            if code.co_name in (
                "_run",
                "__del__",
                "<genexpr>",
            ):  # the outermost function; errors of finalisers are ignored
                return
            count[0] += 1
            if count[0] == nth:
                raise Bang(f"in {code.co_name}")

        threading.settrace(trace)
        return count

    yield arm
    threading.settrace(None)
    sys.settrace(None)


def within(seconds, function):
    """Run a function in a thread, and return its result. Fail if it hangs."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "a call hangs"
    return result[0]


def places(kind, count):
    return [random.Random(f"{kind} {seed}").randrange(1, CALLS[kind]) for seed in range(count)]


def counted(kind):
    return [places(kind, 12), pytest.param(places(kind, 100), marks=pytest.mark.thorough)]


@pytest.mark.parametrize("numbers", counted("worker"), ids=len)
def test_worker_that_dies_ends_the_batch_with_its_error(model, expected, bang, numbers):
    for nth in numbers:

        def results():
            done = []
            try:
                for result in model.generate_batch(WORDS, batch_size=4, workers=2):
                    done.append(result.token_ids)
            except Bang:
                return done, True
            return done, False

        count = bang("tformer-worker", nth)
        done, died = within(HANG, results)
        threading.settrace(None)
        assert done == expected[: len(done)], nth
        assert died or len(done) == len(WORDS), nth
        assert count[0] >= nth, nth
        assert not [thread for thread in threading.enumerate() if thread.name == "tformer-worker"], nth
        gc.collect()  # an error that is dropped may keep buffers alive
        assert model.memory()["used_bytes"] == model.budget.reserved_bytes == 0, nth
    assert [model.generate(word).token_ids for word in WORDS] == expected


@pytest.mark.parametrize("numbers", counted("async"), ids=len)
def test_requests_of_an_async_model_end_with_the_error_of_its_thread(model, expected, bang, numbers):
    async def ask():
        async with AsyncModel(model, max_batch_size=8) as aio:
            first = await asyncio.gather(*(aio.generate(word) for word in WORDS), return_exceptions=True)
            later = await asyncio.gather(aio.generate(WORDS[0]), return_exceptions=True)
            return [*first, *later]

    for nth in numbers:
        count = bang("tformer", nth)
        outcomes = within(HANG, lambda: asyncio.run(ask()))
        threading.settrace(None)
        assert count[0] >= nth, nth
        for outcome, ids in zip(outcomes, [*expected, expected[0]], strict=True):
            if isinstance(outcome, BaseException):
                assert "Bang: in " in str(outcome), (nth, outcome)
            else:
                assert outcome.token_ids == ids, nth
        gc.collect()  # an error that is dropped may keep buffers alive
        assert model.memory()["used_bytes"] == model.budget.reserved_bytes == 0, nth
    assert [model.generate(word).token_ids for word in WORDS] == expected


@pytest.mark.parametrize("numbers", counted("tasks"), ids=len)
def test_calls_of_other_tasks_end_with_the_error_of_their_thread(vectors, bang, numbers):
    texts = ["a good day", "bad", "the old film", "good " * 8, "a snow night", "day"] * 3
    expected = vectors.embed(texts)

    async def ask():
        async with AsyncModel(vectors, max_batch_size=2) as aio:
            first = await asyncio.gather(*(aio.embed(text) for text in texts), return_exceptions=True)
            later = await asyncio.gather(aio.embed(texts[0]), return_exceptions=True)
            return [*first, *later]

    for nth in numbers:
        count = bang("tformer", nth)
        outcomes = within(HANG, lambda: asyncio.run(ask()))
        threading.settrace(None)
        assert count[0] >= nth, nth
        for outcome, vector in zip(outcomes, [*expected, expected[0]], strict=True):
            if isinstance(outcome, BaseException):
                assert "Bang: in " in str(outcome), (nth, outcome)
            else:
                assert abs(outcome - vector).max() < 2e-6, nth
    assert abs(vectors.embed(texts) - expected).max() < 2e-6
