"""AsyncModel: requests that join and leave the batch that is running, and whatever may go wrong with one of them.

Where the order of things matters, a `Gate` stops the thread that decodes until the test has done its part.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from support.toy_models import END_ID, Toy, assert_alike, write_encoder

from tformer_runtime import (
    AsyncModel,
    DeadlineError,
    InputError,
    MemoryBudgetError,
    Model,
    OptionError,
    UnsupportedCallError,
)
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.preprocess.tokenizer import Detokenizer

TOYS = {"encoder-decoder": Toy(seed=27, extras=True), "decoder-only": Toy(seed=5, encoder=False)}
WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]
WAYS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 20, "stop_strings": "e"},
    {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2},
    {"max_new_tokens": 15, "temperature": 1.3, "seed": 4, "num_return_sequences": 2},
    {"max_new_tokens": 25, "repetition_penalty": 1.4, "top_logprobs": 2},
    {"max_new_tokens": 7, "choices": ["abc", "abd", "zz"]},
]
LONG = {"suppress_tokens": [END_ID], "max_new_tokens": 20}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aio")
    return {name: toy.write(folder / f"{name}.onnx") for name, toy in TOYS.items()}


@pytest.fixture(params=sorted(TOYS))
def model(files, request):
    return Model.load(files[request.param], "cpu", threads=1)


@pytest.fixture
def toy(files):
    return Model.load(files["encoder-decoder"], "cpu", threads=1)


class Gate:
    """A logits_processor that stops the thread that decodes, at its calls of these numbers, until it is opened."""

    def __init__(self, *at: int) -> None:
        self._at, self._calls, self._loop = at, 0, asyncio.get_running_loop()
        self._open, self._reached = threading.Semaphore(0), asyncio.Semaphore(0)

    def __call__(self, ids, logits):
        self._calls += 1
        if self._calls in self._at:
            self._loop.call_soon_threadsafe(self._reached.release)
            self._open.acquire()
        return logits

    async def reached(self) -> None:
        await self._reached.acquire()

    def open(self) -> None:
        self._open.release()


def rows_of_steps(model: Model, monkeypatch) -> list[int]:
    """Grows by the rows of each step, of one token a row, that the engine makes."""
    rows, step = [], model.engine.step

    def counted(state, tokens, *args, **kwargs):
        if state.max_row_length:
            rows.append(len(tokens))
        return step(state, tokens, *args, **kwargs)

    monkeypatch.setattr(model.engine, "step", counted)
    return rows


async def started(*requests):
    """Tasks of requests that have been submitted, or wait for room."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    await asyncio.sleep(0)  # each runs until it has to wait
    return tasks


async def gated(model: AsyncModel, *at: int, **options):
    """A request that runs and stands at the first of these of its steps, and what lets it go on to the next."""
    gate = Gate(*at)
    (task,) = await started(model.generate("hello", logits_processor=gate, **{**LONG, **options}))
    await gate.reached()
    return task, gate


async def text_of(stream) -> str:
    pieces = [piece async for piece in stream]
    assert all(pieces)
    return "".join(pieces)


def requests(count: int) -> list[tuple[str, dict]]:
    return [(WORDS[i % len(WORDS)], WAYS[i * 5 % len(WAYS)]) for i in range(count)]


def test_requests_yield_what_they_yield_alone(model):
    expected = [model.generate(word, **way) for word, way in requests(48)]

    async def run():
        async with AsyncModel(model, max_batch_size=8) as aio:
            return await asyncio.gather(*(aio.generate(word, **way) for word, way in requests(48)))

    for result, alone in zip(asyncio.run(run()), expected, strict=True):
        assert_alike(result, alone)
    assert model.memory()["held"] == 0


def test_streams_are_the_texts_in_pieces(model):
    plan = [(word, way) for word, way in requests(36) if "num_return_sequences" not in way]
    plan += [("hello", {"num_beams": 2, "max_new_tokens": 8}), ("hello", {"forced_prefix": "ab", "max_new_tokens": 8})]
    expected = [model.generate(word, **way).text for word, way in plan]

    async def run():
        async with AsyncModel(model, max_batch_size=8) as aio:
            return await asyncio.gather(*(text_of(aio.stream(word, **way)) for word, way in plan))

    assert asyncio.run(run()) == expected


def test_a_request_joins_those_that_run(model, monkeypatch):
    rows = rows_of_steps(model, monkeypatch)

    async def run():
        async with AsyncModel(model) as aio:
            first, gate = await gated(aio, 5)
            others = await started(aio.generate("ab", **LONG), aio.generate("onnx", **LONG))
            gate.open()
            return await asyncio.gather(first, *others)

    results = asyncio.run(run())
    assert [len(result.token_ids) for result in results] == [20] * 3
    assert rows == [1] * 4 + [1] + [3] * 14 + [2] * 5
    for result, word in zip(results, ("hello", "ab", "onnx"), strict=True):
        assert_alike(result, model.generate(word, **LONG))


def test_pieces_come_while_the_text_grows(toy):
    async def run():
        async with AsyncModel(toy) as aio:
            gate = Gate(10)
            stream = aio.stream("hello", logits_processor=gate, **LONG)
            pieces = [await anext(stream)]
            await gate.reached()
            gate.open()
            return pieces + [piece async for piece in stream]

    pieces = asyncio.run(run())
    assert len(pieces) > 5
    assert "".join(pieces) == toy.generate("hello", **LONG).text


def test_what_is_chosen_is_told_before_the_model_runs_on(toy, monkeypatch):
    """Each step of the model waits until the test has been told what was chosen before it."""
    chosen, push = [0], Detokenizer.push
    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "push", lambda self, token: chosen.append(token) or push(self, token))
        expected = [(piece, len(chosen) - 1) for piece in toy.stream("hello", **LONG)]
    room, step = threading.Semaphore(0), toy.engine.step

    def waits(state, *args, **kwargs):
        assert not state.max_row_length or room.acquire()
        return step(state, *args, **kwargs)

    monkeypatch.setattr(toy.engine, "step", waits)

    async def run():
        async with AsyncModel(toy) as aio:
            gate = Gate(1)
            stream = aio.stream("hello", logits_processor=gate, **LONG)
            (first,) = await started(anext(stream))
            await gate.reached()
            (short,) = await started(aio.generate("ab", max_new_tokens=1))
            gate.open()
            room.release()  # one step, behind which the other joins
            steps = 1
            assert len((await short).token_ids) == 1
            for piece, tokens in expected:
                for _ in range(tokens - 1 - steps):
                    room.release()
                    steps += 1
                assert await (anext(stream) if first is None else first) == piece
                first = None
            return [piece async for piece in stream]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == []


def test_more_requests_than_the_queue_holds_wait_outside(toy):
    async def run():
        async with AsyncModel(toy, max_pending=2) as aio:
            first, gate = await gated(aio, 1)
            others = await started(*(aio.generate(word, max_new_tokens=5) for word in WORDS))
            taken = [len(aio._worker._jobs) + len(aio._worker._new_jobs)]
            others[0].cancel()
            await asyncio.wait(others[:1])
            await asyncio.sleep(0)
            taken.append(len(aio._worker._new_jobs))  # one more came, in the place of the one that left
            gate.open()
            return taken, await asyncio.gather(first, *others[1:])

    taken, results = asyncio.run(run())
    assert taken == [2, 2]
    for result, word in zip(results[1:], WORDS[1:], strict=True):
        assert_alike(result, toy.generate(word, max_new_tokens=5))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "num_return_sequences": 3}])
def test_what_is_cancelled_gives_its_rows_back_at_once(toy, monkeypatch, options):
    rows = rows_of_steps(toy, monkeypatch)

    async def run():
        async with AsyncModel(toy) as aio:
            first, gate = await gated(aio, 1, 4)
            (other,) = await started(aio.generate("ab", **LONG, **options))
            gate.open()
            await gate.reached()
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other
            del rows[:]
            gate.open()
            return await first

    result = asyncio.run(run())
    assert rows == [1] * 16
    assert_alike(result, toy.generate("hello", **LONG))
    assert toy.memory()["held"] == 0


def test_what_is_cancelled_before_its_turn_never_begins(toy, monkeypatch):
    """One waits in the scheduler, one has not even come there."""
    begun, start = [], toy.engine.start
    monkeypatch.setattr(toy.engine, "start", lambda *args, **kw: begun.append(args[0]) or start(*args, **kw))

    async def run():
        async with AsyncModel(toy, max_batch_size=1) as aio:
            first, gate = await gated(aio, 1, 3)
            waiting = await started(aio.generate("ab"))
            gate.open()
            await gate.reached()
            waiting += await started(aio.generate("ab"))
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            gate.open()
            return await first, waiting

    result, waiting = asyncio.run(run())
    assert len(begun) == 1
    assert all(task.cancelled() for task in waiting)
    assert_alike(result, toy.generate("hello", **LONG))


def test_leaving_a_stream_ends_its_request(toy, monkeypatch):
    rows = rows_of_steps(toy, monkeypatch)

    async def run():
        async with AsyncModel(toy, max_pending=2) as aio:
            first, gate = await gated(aio, 1, 12)
            stream = aio.stream("ab", **LONG)
            (piece,) = await started(anext(stream))
            gate.open()
            assert await piece
            await gate.reached()
            await stream.aclose()
            del rows[:]
            gate.open()
            return await first

    result = asyncio.run(run())
    assert rows == [1] * 8
    assert_alike(result, toy.generate("hello", **LONG))
    assert toy.memory()["held"] == 0


def test_a_stream_that_is_not_read_takes_no_room(toy):
    async def run():
        async with AsyncModel(toy, max_pending=1) as aio:
            never = aio.stream("ab")
            assert (await aio.generate("a")).token_ids
            await never.aclose()

    asyncio.run(run())


def test_deadlines(toy, monkeypatch):
    """Of a request that runs, and of one that waits for its turn; by a clock that only the test moves."""
    clock = [1000.0]
    for module in ("async_model", "decoding.scheduler", "decoding.worker_pool"):
        monkeypatch.setattr(f"tformer_runtime.{module}.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def run():
        async with AsyncModel(toy, max_batch_size=1) as aio:
            runs, gate = await gated(aio, 1, deadline=10)
            waits = await started(aio.generate("ab", deadline=5), aio.generate("ab", deadline=100), aio.generate("q"))
            stream = asyncio.ensure_future(text_of(aio.stream("ab", deadline=7)))
            await asyncio.sleep(0)
            clock[0] += 20
            gate.open()
            return await asyncio.gather(runs, *waits, stream, return_exceptions=True)

    runs, late, *timely, stream = asyncio.run(run())
    for error in (runs, late, stream):
        assert isinstance(error, DeadlineError)
        assert str(error) == "the deadline passed before the request was finished"
    for result, word in zip(timely, ("ab", "q"), strict=True):
        assert_alike(result, toy.generate(word))


def test_a_deadline_counts_while_a_request_waits_outside(toy):
    async def run():
        async with AsyncModel(toy, max_pending=1) as aio:
            first, gate = await gated(aio, 1)
            with pytest.raises(DeadlineError):
                await aio.generate("ab", deadline=0.01)
            gate.open()
            await first
            assert (await aio.generate("ab", deadline=1e9)).token_ids

    asyncio.run(run())


def test_a_request_that_fails_fails_alone(files):
    free = Model.load(files["encoder-decoder"], "cpu", threads=1)
    model = Model.load(files["encoder-decoder"], "cpu", threads=1, max_memory=200_000)

    def fails(ids, logits):
        if len(ids) == 4:
            raise ZeroDivisionError("of the caller's")
        return logits

    bad = [
        (InputError, "hé", {}),
        (InputError, "a" * 41, {}),
        (OptionError, "ab", {"temperature": -1}),
        (OptionError, "ab", {"nonsense": 1}),
        (OptionError, "ab", {"suppress_tokens": [999]}),
        (OptionError, "ab", {"regex": "["}),
        (OptionError, "ab", {"deadline": 0}),
        (OptionError, "ab", {"deadline": "soon"}),
        (OptionError, "ab", {"suppress_tokens": list(range(29)), "max_new_tokens": 3}),
        (ZeroDivisionError, "ab", {"logits_processor": fails, **LONG}),
        (ZeroDivisionError, "ab", {"logits_processor": fails, "num_beams": 2, **LONG}),
        (OptionError, "ab", {"logits_processor": lambda ids, logits: "nonsense"}),
        (MemoryBudgetError, "ab", {"num_beams": 32}),
    ]

    async def run():
        async with AsyncModel(model, max_batch_size=4) as aio:
            good = [aio.generate(word, **way) for word, way in requests(24)]
            every = [
                call for word, way in ((w, o) for _, w, o in bad) for call in (aio.generate(word, **way), good.pop())
            ]
            every += [text_of(aio.stream("ab", logits_processor=fails, **LONG)), *good]
            return await asyncio.gather(*every, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [type(error) for error in outcomes[: 2 * len(bad) : 2]] == [error for error, *_ in bad]
    assert isinstance(outcomes.pop(2 * len(bad)), ZeroDivisionError)
    good = [*outcomes[2 * len(bad) :], *outcomes[1 : 2 * len(bad) : 2][::-1]]
    for result, (word, way) in zip(good, requests(24), strict=True):
        assert_alike(result, free.generate(word, **way))
    assert model.memory()["held"] == 0


def test_results_have_what_was_asked_for_besides(toy):
    """Alignments and hidden states, of requests that run beside others without."""
    ways = [{}, {"cross_attentions": True}, {"hidden_states": True}, {"cross_attentions": True, "num_beams": 2}]
    plan = [(word, way) for word in WORDS[:4] for way in ways]

    async def run():
        async with AsyncModel(toy, max_batch_size=4) as aio:
            return await asyncio.gather(*(aio.generate(word, **way) for word, way in plan))

    for result, (word, way) in zip(asyncio.run(run()), plan, strict=True):
        alone = toy.generate(word, **way)
        assert_alike(result, alone)
        assert (result.cross_attentions is not None) == ("cross_attentions" in way)
        if result.cross_attentions is not None:
            np.testing.assert_allclose(result.cross_attentions, alone.cross_attentions, atol=1e-5)
        assert result.hidden_states.keys() == alone.hidden_states.keys()
        for name, value in result.hidden_states.items():
            np.testing.assert_allclose(value, alone.hidden_states[name], atol=1e-4)


def test_memory_is_shared_with_all_who_use_the_model(files):
    """Requests of three kinds, which are three batches, and threads of their own, where one request fits at a time."""
    free = Model.load(files["encoder-decoder"], "cpu", threads=1)
    free.generate("onnx", num_beams=2)
    model = Model.load(files["encoder-decoder"], "cpu", threads=1, max_memory=free.memory()["peak"] * 2)
    ways = [{"num_beams": 2}, {"cross_attentions": True}, {"hidden_states": True}]
    plan = [(word, ways[i % 3]) for i, word in enumerate(WORDS * 3)]

    async def run():
        async with AsyncModel(model) as aio:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(3) as threads:
                beside = [loop.run_in_executor(threads, lambda w=w: model.generate(w, num_beams=2)) for w in WORDS]
                return await asyncio.gather(*(aio.generate(word, **way) for word, way in plan), *beside)

    expected = [free.generate(word, **way) for word, way in plan] + [free.generate(w, num_beams=2) for w in WORDS]
    for result, alone in zip(asyncio.run(run()), expected, strict=True):
        assert_alike(result, alone)
    assert model.memory()["held"] == 0


def test_a_request_waits_for_memory_without_turning(files):
    """A stream of the model's own holds it all: its deadline ends one that waits, and the stream's end lets one run."""
    free = Model.load(files["encoder-decoder"], "cpu", threads=1)
    expected = free.generate("hello", **LONG)
    model = Model.load(files["encoder-decoder"], "cpu", threads=1, max_memory=free.memory()["peak"] * 3 // 2)

    async def run():
        async with AsyncModel(model) as aio:
            stream = model.stream("hello", **LONG)
            next(stream)
            with pytest.raises(DeadlineError):
                await aio.generate("hello", deadline=0.02, **LONG)
            (task,) = await started(aio.generate("hello", **LONG))
            gone = await started(aio.generate("ab", **LONG))
            gone[0].cancel()
            await asyncio.wait(gone)
            assert not task.done()
            stream.close()
            return await task

    assert_alike(asyncio.run(run()), expected)
    assert model.memory()["held"] == 0


def test_close_ends_what_runs_and_what_waits(toy):
    async def run():
        aio = AsyncModel(toy, max_batch_size=1, max_pending=3)
        runs, gate = await gated(aio, 1)
        stream = asyncio.ensure_future(text_of(aio.stream("hello")))
        waits = await started(*(aio.generate(word) for word in WORDS))
        closing = asyncio.ensure_future(aio.close())
        while not aio._worker._closing:
            await asyncio.sleep(0)
        gate.open()
        await closing
        outcomes = await asyncio.gather(runs, stream, *waits, return_exceptions=True)
        for call in (aio.generate("a"), anext(aio.stream("a"))):
            with pytest.raises(UnsupportedCallError, match="the model is closed: make another AsyncModel"):
                await call
        await aio.close()
        assert not aio._worker._thread.is_alive()
        return outcomes

    for error in asyncio.run(run()):
        assert isinstance(error, UnsupportedCallError)
        assert "closed" in str(error)
    assert toy.memory()["held"] == 0
    assert toy.generate("hello").token_ids  # the Model itself is as it was


def test_a_step_that_raises_ends_what_ran_in_it_and_no_more(toy, monkeypatch):
    step, broken = toy.engine.step, []
    monkeypatch.setattr(toy.engine, "step", lambda *args, **kw: 1 / broken.pop() if broken else step(*args, **kw))

    async def run():
        async with AsyncModel(toy) as aio:
            first, gate = await gated(aio, 1, 3)
            (other,) = await started(aio.generate("ab", **LONG))
            gate.open()
            await gate.reached()
            late = await started(aio.generate("a", cross_attentions=True))
            broken.append(0)
            gate.open()
            outcomes = await asyncio.gather(first, other, return_exceptions=True)
            assert_alike(await late[0], toy.generate("a"))
            assert_alike(await aio.generate("hello"), toy.generate("hello"))
            return outcomes

    assert [type(error) for error in asyncio.run(run())] == [ZeroDivisionError] * 2
    assert toy.memory()["held"] == 0


def test_a_result_that_cannot_be_made_is_its_requests_error(toy, monkeypatch):
    async def run():
        async with AsyncModel(toy) as aio:
            result = toy.generator.make_result
            monkeypatch.setattr(toy.generator, "make_result", lambda task: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await text_of(aio.stream("hello", num_beams=2))
            monkeypatch.setattr(toy.generator, "make_result", result)
            assert_alike(await aio.generate("hello"), toy.generate("hello"))

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died(toy, monkeypatch):
    async def run():
        async with AsyncModel(toy, max_batch_size=1) as aio:
            first, gate = await gated(aio, 1)
            waits = await started(aio.generate("ab"), aio.generate("q"))
            monkeypatch.setattr(Scheduler, "step_or_fail", lambda scheduler: 1 / 0)
            gate.open()
            outcomes = await asyncio.gather(first, *waits, return_exceptions=True)
            with pytest.raises(UnsupportedCallError):
                await aio.generate("hello")
            return outcomes

    for error in asyncio.run(run())[1:]:
        assert isinstance(error, UnsupportedCallError)
    assert toy.memory()["held"] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_gone_leaves_the_thread_alive(toy):
    loop = asyncio.new_event_loop()

    async def begin():
        aio = AsyncModel(toy)
        return (aio, *await gated(aio, 1))

    aio, task, gate = loop.run_until_complete(begin())
    loop.close()  # nobody has cancelled the task: it ends in a loop that is closed
    gate.open()

    async def end():
        result = await aio.generate("ab")
        await aio.close()
        return result

    assert_alike(asyncio.run(end()), toy.generate("ab"))
    assert not task.done()
    assert toy.memory()["held"] == 0


def test_a_model_that_nobody_has_any_more_ends_its_thread(toy):
    thread = AsyncModel(toy)._worker._thread
    gc.collect()
    thread.join()
    assert not thread.is_alive()


PROGRAM = """
import asyncio, sys
from tformer_runtime import AsyncModel, Model

async def main():
    global aio
    aio = AsyncModel(Model.load(sys.argv[1], "cpu"))
    async for piece in aio.stream("hello", suppress_tokens=[2]):
        for _ in range(20):
            asyncio.ensure_future(aio.generate("ab", suppress_tokens=[2]))
        await asyncio.sleep(0)
        break
    print("end")
    if sys.argv[2] == "exit":
        sys.exit()

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["exit", "return"])
def test_the_interpreter_may_end_at_any_time(files, way):
    command = [sys.executable, "-c", PROGRAM, str(files["encoder-decoder"]), way]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_what_it_is_made_of(toy, tmp_path):
    for options in ({"max_batch_size": 0}, {"max_pending": 0}, {"max_batch_size": 1.5}, {"max_pending": True}):
        with pytest.raises(OptionError, match="must be a whole number of at least 1"):
            AsyncModel(toy, **options)

    async def run():
        once = Model.load(write_encoder(tmp_path / "toy.onnx"), "cpu")
        async with AsyncModel(once) as aio:
            for call in (aio.generate("a"), anext(aio.stream("a"))):
                with pytest.raises(UnsupportedCallError, match="is run once for an input: it cannot generate"):
                    await call

    asyncio.run(run())
