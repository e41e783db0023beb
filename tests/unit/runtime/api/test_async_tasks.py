"""AsyncModel's calls of all tasks: results equal those of `Model`, and calls that wait share batches.

Where the order of events matters, `Held` stops the computing thread until the test lets it go on.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import asdict
from support.toy_models import END_ID, Toy, assert_alike
from support.toy_tasks import TEXT_TASKS, write

from tformer_runtime import (
    AsyncModel,
    DeadlineError,
    InputError,
    MemoryBudgetError,
    Model,
    ModelFileError,
    OptionError,
    UnsupportedCallError,
)
from tformer_runtime.decoding.batch_queue import BatchQueue
from tformer_runtime.model_calls import ENTITIES
from tformer_runtime.tasks import given_tokens

HANG = 120  # seconds, of a machine under any load
TEXTS = ["a good day", "bad", "the old film", "good " * 8, "a snow night", "", "the bad old film", "day"]
LONG_OPTIONS = {"suppress_tokens": [END_ID], "max_new_tokens": 20}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    kinds = {**TEXT_TASKS, "one length": {"output": "vector", "ragged": False}}
    paths = {name: write(folder / f"{name}.onnx", **how) for name, how in kinds.items()}
    return {**paths, "toy": Toy(seed=27, extras=True).write(folder / "toy.onnx")}


@pytest.fixture
def load(files):
    return lambda name, **options: Model.load(files[name], "cpu", threads=1, **options)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, HANG))


async def started(*calls):
    """Return the asyncio tasks of calls that have been submitted, or wait for a place."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


class Held:
    """Stops the computing thread at each batch of a single-pass model until it is let go on. batches: their rows."""

    def __init__(self, model, monkeypatch):
        self.batches, self._begun, self._open = [], threading.Semaphore(0), threading.Semaphore(0)
        encode = model.engine.encode

        def held_encode(requests, rows, **options):
            self.batches.append([tuple(ids.tolist()) for ids in requests["ids"]])
            self._begun.release()
            assert self._open.acquire(timeout=HANG)
            return encode(requests, rows, **options)

        monkeypatch.setattr(model.engine, "encode", held_encode)

    async def begun(self):
        assert await asyncio.to_thread(self._begun.acquire, timeout=HANG)  # asyncio.run waits for the thread

    def go_on(self, batches=1):
        self._open.release(batches)


def ids_of(model, text):
    return tuple(model.inputs.single_pass_arrays(text)["ids"].tolist())


def assert_same(actual, expected):
    """Numbers are equal but for the order of sums next to other rows; everything else is equal."""
    assert type(actual) is type(expected)
    if isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=2e-6)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same([*actual.values()], [*expected.values()])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Struct):
        assert type(actual) is type(expected)
        assert_same(asdict(actual), asdict(expected))
    else:
        assert actual == expected


CALLS = {  # file: a name of a call, and its input and options for a text
    "vector": [
        ("embed", lambda text: (text, {})),
        ("predict", lambda text: (text, {})),
        ("embed", lambda text: (text + " good" * 9, {"truncate": True})),
    ],
    "states": [("predict", lambda text: (text, {}))],
    "one length": [("embed", lambda text: (text, {}))],
    "scores": [
        ("classify", lambda text: (text, {})),
        ("classify", lambda text: (text, {"top_k": 3})),
        ("predict", lambda text: ((text, "bad"), {"top_k": 2})),
    ],
    "spans": [
        ("entities", lambda text: (text, {"ignore_labels": ()})),
        ("entities", lambda text: (text + " a day" * 9, {"doc_stride": 2})),
        ("predict", lambda text: (text, {"aggregation": "none"})),
    ],
    "answers": [
        ("answer", lambda text: (("a good", "the " + text), {})),
        ("answer", lambda text: (("good", "old day " * 9 + text), {"top_k": 3, "max_seq_len": 10, "doc_stride": 2})),
    ],
    "masks": [
        ("fill", lambda text: ("old " + text[:20], {})),
        ("fill", lambda text: ("old", {"top_k": 2, "candidate_tokens": ["good", "bad"]})),
    ],
    "toy": [
        ("score", lambda text: ("ab", {"target": text.replace(" ", "") or "c"})),
        ("align", lambda text: ("zebra", {"target": "onnx"})),
        ("hidden_states", lambda text: ("hello", {})),
        ("hidden_states", lambda text: ("hello", {"target": "ab"})),
    ],
}


def result_of_model(model, name, input, options):
    """Return the result of a call of Model, which takes a list of inputs but for the calls of the toy."""
    if name in ("score", "align", "hidden_states"):
        return getattr(model, name)(input, **options)
    return next(iter(getattr(model, name)([input], **options)))


@pytest.mark.parametrize("name", CALLS)
def test_fifty_concurrent_calls_equal_those_of_model(load, name):
    model = load(name)
    calls = [CALLS[name][i % len(CALLS[name])] for i in range(50)]
    plan = [(call, *arguments(TEXTS[i * 3 % len(TEXTS)])) for i, (call, arguments) in enumerate(calls)]
    expected = [result_of_model(model, call, input, options) for call, input, options in plan]

    async def ask():
        async with AsyncModel(model, max_batch_size=8) as aio:
            return await asyncio.gather(*(getattr(aio, call)(input, **options) for call, input, options in plan))

    for actual, wanted in zip(run(ask()), expected, strict=True):
        assert_same(actual, wanted)
    assert model.memory()["used_bytes"] == model.budget.reserved_bytes == 0


def test_call_runs_on_many_inputs_and_counts_their_ids(load):
    """Windows of a text share ids, which are counted in each."""
    model = load("spans")
    call = model.calls.single_pass(ENTITIES, {"doc_stride": 2})
    texts = [*TEXTS, "day " * 19]
    expected = model.entities(texts, doc_stride=2)

    async def ask():
        async with AsyncModel(model) as aio:
            return await asyncio.gather(*(aio.run(call, text) for text in texts))

    results = run(ask())
    assert_same([spans for spans, _ in results], expected)
    counts = [count for _, count in results]
    assert counts[: len(TEXTS)] == [len(text.split()) + 2 for text in TEXTS]
    assert counts[-1] == (10 + 2) + (10 + 2) + (3 + 2)  # windows of 10 words, of which two are shared


@pytest.mark.parametrize("memory", [None, 2])
def test_generation_and_other_calls_of_one_model_run_together(load, memory):
    """With a limit of memory, too, which fits few of the requests."""
    unlimited = load("toy")
    words = ["hello", "a", "transformer", "ab", "zebra"] * 10
    expected = [unlimited.generate(word, num_beams=2) for word in words[:15]]
    scores = [unlimited.score(word, "onnx") for word in words]
    model = load("toy", max_memory=memory and unlimited.memory()["peak_bytes"] * memory)

    async def text(stream):
        return "".join([piece async for piece in stream])

    async def ask():
        async with AsyncModel(model, max_batch_size=8, max_pending=40) as aio:
            return await asyncio.gather(
                asyncio.gather(*(aio.generate(word, num_beams=2) for word in words[:15])),
                asyncio.gather(*(aio.score(word, "onnx") for word in words)),
                asyncio.gather(*(text(aio.stream(word)) for word in words[:10])),
            )

    results, actual_scores, texts = run(ask())
    for result, wanted in zip(results, expected, strict=True):
        assert_alike(result, wanted)
    assert_same(actual_scores, scores)
    assert texts == [unlimited.generate(word).text for word in words[:10]]
    assert model.memory()["used_bytes"] == model.budget.reserved_bytes == 0


def test_calls_that_arrive_while_a_batch_runs_are_the_next_batch(load, monkeypatch):
    """Batches are of similar lengths, have at most max_batch_size rows, and the oldest call is in the first."""
    model = load("vector")
    held = Held(model, monkeypatch)
    lengths = [1, 7, 6, 1, 1, 7]
    texts = ["good", *(" ".join(["day"] * length) for length in lengths)]

    async def ask():
        async with AsyncModel(model, max_batch_size=3) as aio:
            first = await started(aio.embed(texts[0]))
            await held.begun()
            others = await started(*(aio.embed(text) for text in texts[1:]))
            held.go_on(3)
            return await asyncio.gather(*first, *others)

    run(ask())
    assert held.batches[0] == [ids_of(model, "good")]
    assert [sorted(len(ids) - 2 for ids in batch) for batch in held.batches[1:]] == [[1, 1, 1], [6, 7, 7]]


def test_generation_steps_between_two_parts_of_other_calls(load, monkeypatch):
    """A part of `score` has one token here. While a request is generated, a step of it follows each part."""
    model, events = load("toy"), []
    step = model.engine.step
    monkeypatch.setattr(given_tokens, "CHUNK_TOKENS", 1)

    def recorded_step(state, tokens, *arguments, **more):
        if state.max_row_length or more.get("logit_positions") == "all":
            events.append("score" if more.get("logit_positions") == "all" else "token")
        return step(state, tokens, *arguments, **more)

    monkeypatch.setattr(model.engine, "step", recorded_step)

    async def ask():
        async with AsyncModel(model) as aio:
            gate, reached = threading.Semaphore(0), asyncio.Event()
            loop = asyncio.get_running_loop()

            def wait_once(ids, logits):
                if not reached.is_set():
                    loop.call_soon_threadsafe(reached.set)
                    gate.acquire()
                return logits

            (request,) = await started(aio.generate("hello", logits_processor=wait_once, **LONG_OPTIONS))
            await reached.wait()
            scores = await started(aio.score("ab", "onnxonnx"), aio.score("ab", "zebra"))
            del events[:]
            gate.release()
            return await asyncio.gather(request, *scores)

    run(ask())
    assert events.count("score") == len("onnxonnx") + len("zebra")
    parts = [i for i, event in enumerate(events) if event == "score"]
    assert all(second - first == 2 for first, second in itertools.pairwise(parts))
    assert events.count("token") == 19


def test_cancelled_call_leaves_the_queue_and_a_running_one_spares_its_batch(load, monkeypatch):
    model = load("vector")
    expected = model.embed(TEXTS)
    held = Held(model, monkeypatch)

    async def ask():
        async with AsyncModel(model) as aio:
            first = await started(aio.embed(TEXTS[0]))
            await held.begun()
            queued = await started(*(aio.embed(text) for text in TEXTS[1:4]))
            queued[0].cancel()
            await asyncio.wait(queued[:1])
            held.go_on()
            await held.begun()  # the batch of the two others
            queued[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued[1]
            held.go_on()
            return await first[0], await queued[2], aio.stats()

    one, other, stats = run(ask())
    np.testing.assert_allclose([one, other], expected[[0, 3]], atol=2e-6)
    assert sorted(held.batches[1]) == sorted([ids_of(model, TEXTS[2]), ids_of(model, TEXTS[3])])
    assert len(held.batches) == 2
    assert stats.running_rows == stats.waiting_requests == 0


def test_deadline_ends_queued_and_running_calls(load, monkeypatch):
    """The test replaces the clock, so that the result does not depend on time."""
    model, clock = load("vector"), [1000.0]
    for module in ("async_model", "decoding.batch_queue", "decoding.worker_pool"):
        monkeypatch.setattr(f"tformer_runtime.{module}.time", SimpleNamespace(monotonic=lambda: clock[0]))
    held = Held(model, monkeypatch)

    async def ask():
        async with AsyncModel(model, max_batch_size=1) as aio:
            running = await started(aio.embed(TEXTS[0], deadline=10))
            await held.begun()
            queued = await started(aio.embed(TEXTS[1], deadline=15), aio.embed(TEXTS[2], deadline=100))
            clock[0] += 20
            held.go_on(2)
            return await asyncio.gather(*running, *queued, return_exceptions=True)

    *late, timely = run(ask())
    for error in late:
        assert isinstance(error, DeadlineError)
        assert str(error) == "the deadline passed before the request was finished"
    monkeypatch.undo()
    np.testing.assert_allclose(timely, model.embed([TEXTS[2]])[0], atol=2e-6)
    assert [batch for batch in held.batches if ids_of(model, TEXTS[1]) in batch] == []


def test_deadline_includes_the_reading_of_an_input(load, monkeypatch):
    model, opened = load("vector"), threading.Event()
    read = model.inputs.single_pass_arrays
    monkeypatch.setattr(model.inputs, "single_pass_arrays", lambda *arguments: opened.wait() and read(*arguments))

    async def ask():
        async with AsyncModel(model) as aio:
            with pytest.raises(DeadlineError):
                await aio.embed(("a pair is", "read in a thread"), deadline=0.01)
            opened.set()
            return await aio.embed(("a pair is", "read in a thread"), deadline=1e6)

    np.testing.assert_allclose(run(ask()), model.embed([("a pair is", "read in a thread")])[0], atol=2e-6)


def test_bad_inputs_fail_their_own_callers_only(load):
    model = load("scores")
    bad = [
        (InputError, lambda a: a.classify("good " * 30)),
        (InputError, lambda a: a.classify([1, 2, 99])),
        (InputError, lambda a: a.classify(7.5)),
        (OptionError, lambda a: a.classify("a", top_k=0)),
        (OptionError, lambda a: a.predict("a", nonsense=1)),
        (OptionError, lambda a: a.classify("a", deadline=-1)),
        (OptionError, lambda a: a.classify("a", adapter="none")),
        (UnsupportedCallError, lambda a: a.embed("a")),
        (UnsupportedCallError, lambda a: a.entities("a")),
        (UnsupportedCallError, lambda a: a.answer(("a", "b"))),
        (UnsupportedCallError, lambda a: a.fill("a")),
        (UnsupportedCallError, lambda a: a.transcribe(np.zeros(9))),
        (UnsupportedCallError, lambda a: a.forecast([[1.0]])),
        (UnsupportedCallError, lambda a: a.score("a")),
        (UnsupportedCallError, lambda a: a.align("a", "b")),
        (UnsupportedCallError, lambda a: a.hidden_states("a")),
        (UnsupportedCallError, lambda a: a.attentions("a")),
    ]

    async def ask():
        async with AsyncModel(model, max_batch_size=4) as aio:
            pairs = [(call(aio), aio.classify(TEXTS[i % 8])) for i, (_, call) in enumerate(bad)]
            calls = itertools.chain.from_iterable(pairs)
            return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = run(ask())
    assert [type(error) for error in outcomes[::2]] == [error for error, _ in bad]
    assert not any(str(error).startswith("input 1") for error in outcomes[::2])
    assert all(outcome.label in outcome.scores for outcome in outcomes[1::2])


def test_rows_of_a_failed_batch_are_computed_alone(load, monkeypatch):
    """onnxruntime fails for every batch with one of the rows."""
    model = load("vector")
    expected, bad = model.embed(TEXTS), ids_of(model, TEXTS[2])
    held, ort_run = Held(model, monkeypatch), type(model.engine.session).run

    def failing_run(session, binding, stage, graph=None):
        if bad in held.batches[-1]:
            raise ModelFileError("onnxruntime cannot run the file: it fails")
        ort_run(session, binding, stage, graph)

    monkeypatch.setattr(type(model.engine.session), "run", failing_run)

    async def ask():
        async with AsyncModel(model) as aio:
            first = await started(aio.embed("day"))
            await held.begun()
            calls = await started(*(aio.embed(text) for text in TEXTS))
            held.go_on(1 + 1 + len(TEXTS))
            return await asyncio.gather(*first, *calls, return_exceptions=True)

    _, *outcomes = run(ask())
    assert isinstance(outcomes[2], ModelFileError)
    for i, outcome in enumerate(outcomes):
        if i != 2:
            np.testing.assert_allclose(outcome, expected[i], atol=2e-6)
    assert [len(batch) for batch in held.batches] == [1, len(TEXTS), *[1] * len(TEXTS)]


def test_unforeseen_error_of_a_batch_reaches_each_of_its_callers_alone(load, monkeypatch):
    model = load("vector")
    encode, left = model.engine.encode, [3]

    def failing_encode(*arguments, **options):
        if left[0] and not left.insert(0, left.pop(0) - 1):
            raise ZeroDivisionError("unforeseen")
        return encode(*arguments, **options)

    monkeypatch.setattr(model.engine, "encode", failing_encode)

    async def ask():
        async with AsyncModel(model) as aio:
            errors = [await asyncio.gather(aio.embed("day"), return_exceptions=True) for _ in range(3)]
            return errors, await aio.embed("day")

    errors, vector = run(ask())
    assert [type(error) for (error,) in errors] == [ZeroDivisionError] * 3
    np.testing.assert_allclose(vector, model.embed(["day"])[0], atol=2e-6)


def test_close_ends_calls_in_flight(load, monkeypatch):
    model = load("vector")
    held, stop = Held(model, monkeypatch), threading.Event()
    stopped = BatchQueue.cancel

    def recorded_cancel(queue, call, error):
        stop.set()
        stopped(queue, call, error)

    monkeypatch.setattr(BatchQueue, "cancel", recorded_cancel)

    async def ask():
        aio = AsyncModel(model, max_batch_size=2, max_pending=5)
        running = await started(aio.embed(TEXTS[0]))
        await held.begun()
        waiting = await started(*(aio.embed(text) for text in TEXTS))
        notified, notify_all = asyncio.Event(), model.budget.changed.notify_all
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            model.budget.changed, "notify_all", lambda: (loop.call_soon_threadsafe(notified.set), notify_all())
        )
        closing = asyncio.ensure_future(aio.close())
        await notified.wait()
        held.go_on()
        await closing
        outcomes = await asyncio.gather(*running, *waiting, return_exceptions=True)
        with pytest.raises(UnsupportedCallError, match="the model is closed: make another AsyncModel"):
            await aio.embed("day")
        return outcomes

    first, *others = run(ask())
    assert isinstance(first, (np.ndarray, UnsupportedCallError))  # its batch was computed
    assert all(isinstance(error, UnsupportedCallError) and "closed" in str(error) for error in others)
    assert stop.is_set()
    monkeypatch.undo()
    assert model.embed(["day"]).shape == (1, 6)  # the Model is not closed


def test_closed_model_ends_the_calls_of_its_async_model(load, monkeypatch):
    model = load("vector")
    held = Held(model, monkeypatch)

    async def ask():
        async with AsyncModel(model) as aio:
            first = await started(aio.embed(TEXTS[0]))
            await held.begun()
            others = await started(*(aio.embed(text) for text in TEXTS[1:4]))
            model.close()
            held.go_on(9)
            outcomes = await asyncio.gather(*first, *others, return_exceptions=True)
            outcomes += await asyncio.gather(aio.embed("day"), aio.transcribe("x"), return_exceptions=True)
            return outcomes

    for error in run(ask()):
        assert isinstance(error, UnsupportedCallError)
        assert str(error) == "the model is closed: load the file again with Model.load()"
    with pytest.raises(UnsupportedCallError, match="the model is closed"):
        AsyncModel(model)


def test_max_pending_bounds_all_kinds_together(load, monkeypatch):
    model = load("toy")
    made = []
    for owner, name in ((model, "request"), (model.calls, "score"), (model.calls, "align")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, make=make, name=name: made.append(name) or make(*a))

    async def ask():
        async with AsyncModel(model, max_pending=2) as aio:
            gate, reached, loop = threading.Semaphore(0), asyncio.Event(), asyncio.get_running_loop()

            def wait(ids, logits):
                loop.call_soon_threadsafe(reached.set)
                gate.acquire()
                return logits

            first = await started(aio.generate("hello", logits_processor=wait, max_new_tokens=1))
            await reached.wait()
            others = await started(aio.score("ab", "c"), aio.align("ab", "c"), aio.score("ab", "d"))
            before, stats = list(made), aio.stats()
            gate.release()
            await asyncio.gather(*first, *others)
            return before, stats

    before, stats = run(ask())
    assert before == ["request", "score"]
    assert sorted(made) == ["align", "request", "score", "score"]
    assert (stats.running_requests, stats.waiting_requests) == (1, 3)


def test_call_that_waits_for_memory_meets_its_deadline_and_its_turn(load):
    """A stream of another thread holds the memory. The computing thread does not block meanwhile."""
    unlimited = load("toy")
    expected = unlimited.score("hello", "onnx")
    list(unlimited.stream("hello", **LONG_OPTIONS))
    model = load("toy", max_memory=unlimited.memory()["peak_bytes"] * 5 // 4)

    async def ask():
        async with AsyncModel(model) as aio:
            stream = model.stream("hello", **LONG_OPTIONS)
            next(stream)
            with pytest.raises(DeadlineError):
                await aio.score("hello", "onnx", deadline=0.02)
            (waiting,) = await started(aio.score("hello", "onnx"))
            cancelled = await started(aio.score("hello", "ab"))
            cancelled[0].cancel()
            await asyncio.wait(cancelled)
            assert not waiting.done()
            stream.close()
            return await waiting

    assert_same(run(ask()), expected)
    assert model.memory()["used_bytes"] == model.budget.reserved_bytes == 0
    tiny = load("toy", max_memory=10)

    async def refused():
        async with AsyncModel(tiny) as aio:
            await aio.score("hello", "onnx")

    with pytest.raises(MemoryBudgetError, match="max_memory allows 10"):
        run(refused())


def test_stats_follow_the_work(load):
    model = load("toy", max_memory=1 << 30)

    async def ask():
        async with AsyncModel(model, max_batch_size=5, max_pending=9) as aio:
            before = aio.stats()
            gate, reached, loop = threading.Semaphore(0), asyncio.Event(), asyncio.get_running_loop()

            def wait(ids, logits):
                if len(ids) == 4:
                    loop.call_soon_threadsafe(reached.set)
                    gate.acquire()
                return logits

            calls = await started(aio.generate("hello", logits_processor=wait, **LONG_OPTIONS))
            await reached.wait()
            calls += await started(aio.generate("ab", num_beams=3, max_new_tokens=4, suppress_tokens=[END_ID]))
            during = await asyncio.to_thread(aio.stats)
            gate.release()
            await asyncio.gather(*calls)
            return before, during, aio.stats()

    before, during, after = run(ask())
    assert (before.max_batch_size, before.max_pending, before.cache_limit_bytes) == (5, 9, 1 << 30)
    assert (before.running_rows, before.generated_tokens, before.cache_bytes) == (0, 0, 0)
    assert (during.running_rows, during.running_requests, during.waiting_requests) == (1, 1, 1)
    assert during.generated_tokens == 4  # the fourth is being chosen
    assert during.cache_bytes > 0
    assert (after.running_rows, after.running_requests, after.waiting_requests) == (0, 0, 0)
    assert after.generated_tokens == 20 + 4
    with pytest.raises(AttributeError):
        after.running_rows = 1


def test_collected_async_model_ends_its_thread_after_other_calls_too(load):
    model, threads = load("vector"), {*threading.enumerate()}

    async def ask():
        aio = AsyncModel(model)
        await aio.embed("day")
        return next(thread for thread in {*threading.enumerate()} - threads if thread.name == "tformer")

    thread = run(ask())
    gc.collect()
    thread.join(HANG)
    assert not thread.is_alive()
