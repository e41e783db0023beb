"""AsyncModel: results and streams equal the results of `Model`. Cancellation, deadlines and errors end single requests.

If the order of events matters, a `Gate` stops the decoding thread until the test opens it.
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
from support.servers import write_chat_model
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
OPTION_SETS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 20, "stop_strings": "e"},
    {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2},
    {"max_new_tokens": 15, "temperature": 1.3, "seed": 4, "num_return_sequences": 2},
    {"max_new_tokens": 25, "repetition_penalty": 1.4, "top_logprobs": 2},
    {"max_new_tokens": 7, "choices": ["abc", "abd", "zz"]},
]
LONG_OPTIONS = {"suppress_tokens": [END_ID], "max_new_tokens": 20}


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
    """A logits processor that stops the decoding thread at some calls, counted from 1, until the gate is opened."""

    def __init__(self, *call_numbers: int) -> None:
        self._call_numbers, self._num_calls, self._loop = call_numbers, 0, asyncio.get_running_loop()
        self._open, self._reached = threading.Semaphore(0), asyncio.Semaphore(0)

    def __call__(self, ids, logits):
        self._num_calls += 1
        if self._num_calls in self._call_numbers:
            self._loop.call_soon_threadsafe(self._reached.release)
            self._open.acquire()
        return logits

    async def reached(self) -> None:
        await self._reached.acquire()

    def open(self) -> None:
        self._open.release()


def record_rows_per_step(model: Model, monkeypatch) -> list[int]:
    """Return a list to which each decode step of the engine appends its number of rows."""
    num_rows, step = [], model.engine.step

    def recorded_step(state, tokens, *args, **kwargs):
        if state.max_row_length:
            num_rows.append(len(tokens))
        return step(state, tokens, *args, **kwargs)

    monkeypatch.setattr(model.engine, "step", recorded_step)
    return num_rows


async def started(*requests):
    """Return the asyncio tasks of requests after each has been submitted or waits for a place."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    await asyncio.sleep(0)  # each task runs until it waits
    return tasks


async def start_gated(model: AsyncModel, *call_numbers: int, **options):
    """Start a request that stops at the first of some steps. Return its asyncio task and its gate."""
    gate = Gate(*call_numbers)
    (task,) = await started(model.generate("hello", logits_processor=gate, **{**LONG_OPTIONS, **options}))
    await gate.reached()
    return task, gate


async def text_of(stream) -> str:
    """Return the joined pieces of a stream, none of which is empty."""
    pieces = [piece async for piece in stream]
    assert all(pieces)
    return "".join(pieces)


def make_requests(count: int) -> list[tuple[str, dict]]:
    return [(WORDS[i % len(WORDS)], OPTION_SETS[i * 5 % len(OPTION_SETS)]) for i in range(count)]


def test_concurrent_requests_match_single_calls(model):
    expected = [model.generate(word, **options) for word, options in make_requests(48)]

    async def run():
        async with AsyncModel(model, max_batch_size=8) as aio:
            return await asyncio.gather(*(aio.generate(word, **options) for word, options in make_requests(48)))

    for result, expected_result in zip(asyncio.run(run()), expected, strict=True):
        assert_alike(result, expected_result)
    assert model.memory()["used_bytes"] == 0


def test_stream_pieces_join_to_the_text(model):
    plan = [(word, options) for word, options in make_requests(36) if "num_return_sequences" not in options]
    plan += [("hello", {"num_beams": 2, "max_new_tokens": 8}), ("hello", {"forced_prefix": "ab", "max_new_tokens": 8})]
    expected = [model.generate(word, **options).text for word, options in plan]

    async def run():
        async with AsyncModel(model, max_batch_size=8) as aio:
            return await asyncio.gather(*(text_of(aio.stream(word, **options)) for word, options in plan))

    assert asyncio.run(run()) == expected


def joined(pieces, number: int) -> SimpleNamespace:
    """Return what the pieces of one result have, put together."""
    own = [piece for piece in pieces if piece.number == number]
    assert all(piece.finish_reason is None for piece in own[:-1])
    together = {
        name: sum((getattr(p, name) for p in own), ()) for name in ("token_ids", "token_logprobs", "top_logprobs")
    }
    return SimpleNamespace(text="".join(p.text for p in own), finish_reason=own[-1].finish_reason, **together)


def test_pieces_of_an_open_request_join_to_its_results(model):
    plan = make_requests(36)
    plan += [("hello", {"num_beams": 2, "max_new_tokens": 8}), ("hello", {"forced_prefix": "ab", "max_new_tokens": 8})]

    async def all_pieces(aio, word, options):
        async with aio.open(word, **options) as request:
            assert request.prompt_tokens == len(word) + 1
            pieces = [piece async for piece in request]
            assert [piece async for piece in request] == []
            return pieces, await request.result()

    async def run():
        async with AsyncModel(model, max_batch_size=8) as aio:
            return await asyncio.gather(*(all_pieces(aio, word, options) for word, options in plan))

    for (pieces, result), (word, options) in zip(asyncio.run(run()), plan, strict=True):
        assert_alike(result, model.generate(word, **options))
        for number, one in enumerate((result, *result.alternatives)):
            whole = joined(pieces, number)
            assert (whole.text, whole.token_ids, whole.finish_reason) == (one.text, one.token_ids, one.finish_reason)
            prefix = len(options.get("forced_prefix", ""))  # one token a letter, without log-probabilities
            assert whole.token_logprobs == one.token_logprobs[prefix:]
            assert whole.top_logprobs == one.top_logprobs
    assert model.memory()["used_bytes"] == 0


def test_open_request_of_a_file_without_a_tokenizer_has_ids(tmp_path):
    model = Model.load(Toy(encoder=False, seed=5, tokenizer=False).write(tmp_path / "ids.onnx"), "cpu", threads=1)

    async def run():
        async with AsyncModel(model) as aio, aio.open([5, 6, 7], max_new_tokens=6) as request:
            return [piece async for piece in request]

    pieces = asyncio.run(run())
    assert joined(pieces, 0).token_ids == model.generate([5, 6, 7], max_new_tokens=6).token_ids
    assert joined(pieces, 0).text == ""


def test_open_request_without_pieces_has_its_result(model):
    async def run():
        async with AsyncModel(model) as aio, aio.open("hello", max_new_tokens=9, in_pieces=False) as request:
            return await request.result(), [piece async for piece in request]

    result, pieces = asyncio.run(run())
    assert pieces == []
    assert_alike(result, model.generate("hello", max_new_tokens=9))


def test_settings_of_the_model_are_options_of_an_open_request(model):
    settings = model.settings(None, {"max_new_tokens": 5, "num_beams": 2})

    async def run():
        async with AsyncModel(model) as aio:
            async with aio.open("hello", settings) as request:
                result = await request.result()
            with pytest.raises(OptionError, match="settings already have no overrides"):
                async with aio.open("hello", settings, max_new_tokens=3):
                    pass
            return result

    assert_alike(asyncio.run(run()), model.generate("hello", max_new_tokens=5, num_beams=2))


def test_step_wakes_the_event_loop_once_for_all_rows(toy, monkeypatch):
    """Each wake is a system call, in which the computing thread loses the interpreter."""
    rows = record_rows_per_step(toy, monkeypatch)

    async def run():
        async with AsyncModel(toy) as aio:
            first, gate = await start_gated(aio, 1)
            texts = [text_of(aio.stream(word, **LONG_OPTIONS)) for word in ("ab", "onnx", "zebra")]
            others = await started(*texts)
            wakes, wake = [], asyncio.get_running_loop().call_soon_threadsafe
            monkeypatch.setattr(
                asyncio.get_running_loop(), "call_soon_threadsafe", lambda *a: wakes.append(a) or wake(*a)
            )
            gate.open()
            await asyncio.gather(first, *others)
            return len(wakes)

    steps = 1 + asyncio.run(run())
    assert max(rows) == 4
    assert steps <= len(rows) + 3  # the first tokens, and the end of the last step


def test_leaving_an_open_request_ends_it(toy, monkeypatch):
    rows = record_rows_per_step(toy, monkeypatch)

    async def run():
        async with AsyncModel(toy) as aio:
            async with aio.open("ab", logits_processor=(gate := Gate(4)), **LONG_OPTIONS) as request:
                assert (await anext(request)).token_ids
                await gate.reached()
                assert aio.stats().running_rows == 1
            gate.open()
            with pytest.raises(UnsupportedCallError, match="the request was cancelled"):
                await request.result()
            with pytest.raises(UnsupportedCallError, match="the request was cancelled"):
                [piece async for piece in request]
            assert aio.stats().running_rows == 0

    asyncio.run(run())
    assert len(rows) == 3
    assert toy.memory()["used_bytes"] == 0


def test_errors_of_an_open_request_are_raised_before_it_runs(toy):
    async def run():
        async with AsyncModel(toy) as aio:
            for error, word, options in ((InputError, "é", {}), (OptionError, "a", {"top_k": -1})):
                with pytest.raises(error):
                    async with aio.open(word, **options):
                        raise AssertionError("the request was opened")

    asyncio.run(run())


def test_new_request_joins_the_running_batch(model, monkeypatch):
    rows = record_rows_per_step(model, monkeypatch)

    async def run():
        async with AsyncModel(model) as aio:
            first, gate = await start_gated(aio, 5)
            others = await started(aio.generate("ab", **LONG_OPTIONS), aio.generate("onnx", **LONG_OPTIONS))
            gate.open()
            return await asyncio.gather(first, *others)

    results = asyncio.run(run())
    assert [len(result.token_ids) for result in results] == [20] * 3
    assert rows == [1] * 4 + [1] + [3] * 14 + [2] * 5
    for result, word in zip(results, ("hello", "ab", "onnx"), strict=True):
        assert_alike(result, model.generate(word, **LONG_OPTIONS))


def test_pieces_arrive_before_the_text_is_complete(toy):
    async def run():
        async with AsyncModel(toy) as aio:
            gate = Gate(10)
            stream = aio.stream("hello", logits_processor=gate, **LONG_OPTIONS)
            pieces = [await anext(stream)]
            await gate.reached()
            gate.open()
            return pieces + [piece async for piece in stream]

    pieces = asyncio.run(run())
    assert len(pieces) > 5
    assert "".join(pieces) == toy.generate("hello", **LONG_OPTIONS).text


def test_stream_yields_each_token_before_the_next_step(toy, monkeypatch):
    """Each step of the engine waits until the test has received the piece of the step before."""
    tokens, push = [0], Detokenizer.push
    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "push", lambda self, token: tokens.append(token) or push(self, token))
        expected = [(piece, len(tokens) - 1) for piece in toy.stream("hello", **LONG_OPTIONS)]
    permitted_steps, step = threading.Semaphore(0), toy.engine.step

    def wait_for_permission(state, *args, **kwargs):
        assert not state.max_row_length or permitted_steps.acquire()
        return step(state, *args, **kwargs)

    monkeypatch.setattr(toy.engine, "step", wait_for_permission)

    async def run():
        async with AsyncModel(toy) as aio:
            gate = Gate(1)
            stream = aio.stream("hello", logits_processor=gate, **LONG_OPTIONS)
            (first,) = await started(anext(stream))
            await gate.reached()
            (short,) = await started(aio.generate("ab", max_new_tokens=1))
            gate.open()
            permitted_steps.release()  # one step, after which the other request joins
            num_steps = 1
            assert len((await short).token_ids) == 1
            for piece, num_tokens in expected:
                for _ in range(num_tokens - 1 - num_steps):
                    permitted_steps.release()
                    num_steps += 1
                assert await (anext(stream) if first is None else first) == piece
                first = None
            return [piece async for piece in stream]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == []


def test_requests_above_max_pending_are_not_submitted(toy, monkeypatch):
    submitted, request = [], toy.request

    def record_request(input_, *arguments):
        submitted.append(input_)
        return request(input_, *arguments)

    monkeypatch.setattr(toy, "request", record_request)

    async def run():
        async with AsyncModel(toy, max_pending=2) as aio:
            first, gate = await start_gated(aio, 1)
            others = await started(*(aio.generate(word, max_new_tokens=5) for word in WORDS))
            assert submitted == ["hello", WORDS[0]]
            others[0].cancel()
            await asyncio.wait(others[:1])
            await asyncio.sleep(0)
            assert submitted == ["hello", *WORDS[:2]]  # the next request has the place of the cancelled one
            gate.open()
            return await asyncio.gather(first, *others[1:])

    results = asyncio.run(run())
    for result, word in zip(results[1:], WORDS[1:], strict=True):
        assert_alike(result, toy.generate(word, max_new_tokens=5))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "num_return_sequences": 3}])
def test_cancelled_request_frees_its_rows_at_the_next_step(toy, monkeypatch, options):
    rows = record_rows_per_step(toy, monkeypatch)

    async def run():
        async with AsyncModel(toy) as aio:
            first, gate = await start_gated(aio, 1, 4)
            (other,) = await started(aio.generate("ab", **LONG_OPTIONS, **options))
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
    assert_alike(result, toy.generate("hello", **LONG_OPTIONS))
    assert toy.memory()["used_bytes"] == 0


def test_request_cancelled_while_it_waits_is_not_started(toy, monkeypatch):
    """One request waits in the scheduler, and one is not submitted to the scheduler yet."""
    started_inputs, start = [], toy.engine.start
    monkeypatch.setattr(toy.engine, "start", lambda *args, **kw: started_inputs.append(args[0]) or start(*args, **kw))

    async def run():
        async with AsyncModel(toy, max_batch_size=1) as aio:
            first, gate = await start_gated(aio, 1, 3)
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
    assert len(started_inputs) == 1
    assert all(task.cancelled() for task in waiting)
    assert_alike(result, toy.generate("hello", **LONG_OPTIONS))


def test_closing_a_stream_ends_its_request(toy, monkeypatch):
    rows = record_rows_per_step(toy, monkeypatch)

    async def run():
        async with AsyncModel(toy, max_pending=2) as aio:
            first, gate = await start_gated(aio, 1, 12)
            stream = aio.stream("ab", **LONG_OPTIONS)
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
    assert_alike(result, toy.generate("hello", **LONG_OPTIONS))
    assert toy.memory()["used_bytes"] == 0


def test_unread_stream_takes_no_place(toy):
    async def run():
        async with AsyncModel(toy, max_pending=1) as aio:
            unread = aio.stream("ab")
            assert (await aio.generate("a")).token_ids
            await unread.aclose()

    asyncio.run(run())


def test_deadline_ends_running_and_waiting_requests(toy, monkeypatch):
    """The test replaces the clock, so that the result does not depend on time."""
    clock = [1000.0]
    for module in ("async_model", "decoding.scheduler", "decoding.worker_pool"):
        monkeypatch.setattr(f"tformer_runtime.{module}.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def run():
        async with AsyncModel(toy, max_batch_size=1) as aio:
            running, gate = await start_gated(aio, 1, deadline=10)
            waiting = await started(aio.generate("ab", deadline=5), aio.generate("ab", deadline=100), aio.generate("q"))
            stream = asyncio.ensure_future(text_of(aio.stream("ab", deadline=7)))
            await asyncio.sleep(0)
            clock[0] += 20
            gate.open()
            return await asyncio.gather(running, *waiting, stream, return_exceptions=True)

    running, late, *timely, stream = asyncio.run(run())
    for error in (running, late, stream):
        assert isinstance(error, DeadlineError)
        assert str(error) == "the deadline passed before the request was finished"
    for result, word in zip(timely, ("ab", "q"), strict=True):
        assert_alike(result, toy.generate(word))


def test_deadline_includes_the_wait_for_a_place(toy):
    async def run():
        async with AsyncModel(toy, max_pending=1) as aio:
            first, gate = await start_gated(aio, 1)
            with pytest.raises(DeadlineError):
                await aio.generate("ab", deadline=0.01)
            gate.open()
            await first
            assert (await aio.generate("ab", deadline=1e9)).token_ids

    asyncio.run(run())


def test_error_of_one_request_does_not_affect_other_requests(files):
    unlimited = Model.load(files["encoder-decoder"], "cpu", threads=1)
    model = Model.load(files["encoder-decoder"], "cpu", threads=1, max_memory=200_000)

    def fail_at_four_ids(ids, logits):
        if len(ids) == 4:
            raise ZeroDivisionError("caller's error")
        return logits

    invalid = [
        (InputError, "hé", {}),
        (InputError, "a" * 41, {}),
        (OptionError, "ab", {"temperature": -1}),
        (OptionError, "ab", {"nonsense": 1}),
        (OptionError, "ab", {"suppress_tokens": [999]}),
        (OptionError, "ab", {"regex": "["}),
        (OptionError, "ab", {"deadline": 0}),
        (OptionError, "ab", {"deadline": "soon"}),
        (OptionError, "ab", {"suppress_tokens": list(range(29)), "max_new_tokens": 3}),
        (ZeroDivisionError, "ab", {"logits_processor": fail_at_four_ids, **LONG_OPTIONS}),
        (ZeroDivisionError, "ab", {"logits_processor": fail_at_four_ids, "num_beams": 2, **LONG_OPTIONS}),
        (OptionError, "ab", {"logits_processor": lambda ids, logits: "nonsense"}),
        (MemoryBudgetError, "ab", {"num_beams": 32}),
    ]

    async def run():
        async with AsyncModel(model, max_batch_size=4) as aio:
            valid = [aio.generate(word, **options) for word, options in make_requests(24)]
            calls = [
                call
                for word, options in ((w, o) for _, w, o in invalid)
                for call in (aio.generate(word, **options), valid.pop())
            ]
            calls += [text_of(aio.stream("ab", logits_processor=fail_at_four_ids, **LONG_OPTIONS)), *valid]
            return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [type(error) for error in outcomes[: 2 * len(invalid) : 2]] == [error for error, *_ in invalid]
    assert isinstance(outcomes.pop(2 * len(invalid)), ZeroDivisionError)
    valid = [*outcomes[2 * len(invalid) :], *outcomes[1 : 2 * len(invalid) : 2][::-1]]
    for result, (word, options) in zip(valid, make_requests(24), strict=True):
        assert_alike(result, unlimited.generate(word, **options))
    assert model.memory()["used_bytes"] == 0


def test_requests_with_and_without_extra_outputs_run_together(toy):
    option_sets = [{}, {"cross_attentions": True}, {"hidden_states": True}, {"cross_attentions": True, "num_beams": 2}]
    plan = [(word, options) for word in WORDS[:4] for options in option_sets]

    async def run():
        async with AsyncModel(toy, max_batch_size=4) as aio:
            return await asyncio.gather(*(aio.generate(word, **options) for word, options in plan))

    for result, (word, options) in zip(asyncio.run(run()), plan, strict=True):
        expected = toy.generate(word, **options)
        assert_alike(result, expected)
        assert (result.cross_attentions is not None) == ("cross_attentions" in options)
        if result.cross_attentions is not None:
            np.testing.assert_allclose(result.cross_attentions, expected.cross_attentions, atol=1e-5)
        assert result.hidden_states.keys() == expected.hidden_states.keys()
        for name, value in result.hidden_states.items():
            np.testing.assert_allclose(value, expected.hidden_states[name], atol=1e-4)


def test_memory_limit_is_shared_with_other_users_of_the_model(files):
    """Three kinds of requests, in three batches, and three threads run, though the memory fits one request."""
    unlimited = Model.load(files["encoder-decoder"], "cpu", threads=1)
    unlimited.generate("onnx", num_beams=2)
    model = Model.load(files["encoder-decoder"], "cpu", threads=1, max_memory=unlimited.memory()["peak_bytes"] * 2)
    option_sets = [{"num_beams": 2}, {"cross_attentions": True}, {"hidden_states": True}]
    plan = [(word, option_sets[i % 3]) for i, word in enumerate(WORDS * 3)]

    async def run():
        async with AsyncModel(model) as aio:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(3) as threads:
                thread_calls = [
                    loop.run_in_executor(threads, lambda w=w: model.generate(w, num_beams=2)) for w in WORDS
                ]
                return await asyncio.gather(*(aio.generate(word, **options) for word, options in plan), *thread_calls)

    expected = [unlimited.generate(word, **options) for word, options in plan] + [
        unlimited.generate(w, num_beams=2) for w in WORDS
    ]
    for result, expected_result in zip(asyncio.run(run()), expected, strict=True):
        assert_alike(result, expected_result)
    assert model.memory()["used_bytes"] == 0


def test_request_waits_until_memory_is_released(files):
    """A stream has the memory: a deadline ends one waiting request, and the end of the stream starts another."""
    unlimited = Model.load(files["encoder-decoder"], "cpu", threads=1)
    expected = unlimited.generate("hello", **LONG_OPTIONS)
    model = Model.load(files["encoder-decoder"], "cpu", threads=1, max_memory=unlimited.memory()["peak_bytes"] * 3 // 2)

    async def run():
        async with AsyncModel(model) as aio:
            stream = model.stream("hello", **LONG_OPTIONS)
            next(stream)
            with pytest.raises(DeadlineError):
                await aio.generate("hello", deadline=0.02, **LONG_OPTIONS)
            (task,) = await started(aio.generate("hello", **LONG_OPTIONS))
            cancelled = await started(aio.generate("ab", **LONG_OPTIONS))
            cancelled[0].cancel()
            await asyncio.wait(cancelled)
            assert not task.done()
            stream.close()
            return await task

    assert_alike(asyncio.run(run()), expected)
    assert model.memory()["used_bytes"] == 0


def test_close_ends_running_and_waiting_requests(toy, monkeypatch):
    changed, other_threads = toy.generator.budget.changed, {*threading.enumerate()}
    notify_all = changed.notify_all

    async def run():
        aio = AsyncModel(toy, max_batch_size=1, max_pending=3)
        (thread,) = {*threading.enumerate()} - other_threads
        running, gate = await start_gated(aio, 1)
        stream = asyncio.ensure_future(text_of(aio.stream("hello")))
        waiting = await started(*(aio.generate(word) for word in WORDS))
        # `close` notifies the decoding thread. Before that the gate stays closed, so that no request finishes.
        loop, notified = asyncio.get_running_loop(), asyncio.Event()
        monkeypatch.setattr(changed, "notify_all", lambda: (loop.call_soon_threadsafe(notified.set), notify_all()))
        closing = asyncio.ensure_future(aio.close())
        await notified.wait()
        monkeypatch.setattr(changed, "notify_all", notify_all)
        gate.open()
        await closing
        outcomes = await asyncio.gather(running, stream, *waiting, return_exceptions=True)
        for call in (aio.generate("a"), anext(aio.stream("a"))):
            with pytest.raises(UnsupportedCallError, match="the model is closed: make another AsyncModel"):
                await call
        await aio.close()
        assert not thread.is_alive()
        return outcomes

    for error in asyncio.run(run()):
        assert isinstance(error, UnsupportedCallError)
        assert "closed" in str(error)
    assert toy.memory()["used_bytes"] == 0
    assert toy.generate("hello").token_ids  # the Model is not closed


def test_failing_step_ends_only_the_requests_of_its_batch(toy, monkeypatch):
    step, divisors = toy.engine.step, []
    monkeypatch.setattr(toy.engine, "step", lambda *args, **kw: 1 / divisors.pop() if divisors else step(*args, **kw))

    async def run():
        async with AsyncModel(toy) as aio:
            first, gate = await start_gated(aio, 1, 3)
            (other,) = await started(aio.generate("ab", **LONG_OPTIONS))
            gate.open()
            await gate.reached()
            late = await started(aio.generate("a", cross_attentions=True))
            divisors.append(0)
            gate.open()
            outcomes = await asyncio.gather(first, other, return_exceptions=True)
            assert_alike(await late[0], toy.generate("a"))
            assert_alike(await aio.generate("hello"), toy.generate("hello"))
            return outcomes

    assert [type(error) for error in asyncio.run(run())] == [ZeroDivisionError] * 2
    assert toy.memory()["used_bytes"] == 0


def test_error_of_a_result_is_raised_to_its_caller_only(toy, monkeypatch):
    async def run():
        async with AsyncModel(toy) as aio:
            make_result = toy.generator.make_result
            monkeypatch.setattr(toy.generator, "make_result", lambda task: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await text_of(aio.stream("hello", num_beams=2))
            monkeypatch.setattr(toy.generator, "make_result", make_result)
            assert_alike(await aio.generate("hello"), toy.generate("hello"))

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_end_if_the_decoding_thread_dies(toy, monkeypatch):
    async def run():
        async with AsyncModel(toy, max_batch_size=1) as aio:
            first, gate = await start_gated(aio, 1)
            waiting = await started(aio.generate("ab"), aio.generate("q"))
            monkeypatch.setattr(Scheduler, "step_or_fail", lambda scheduler: 1 / 0)
            gate.open()
            outcomes = await asyncio.gather(first, *waiting, return_exceptions=True)
            with pytest.raises(UnsupportedCallError):
                await aio.generate("hello")
            return outcomes

    for error in asyncio.run(run())[1:]:
        assert isinstance(error, UnsupportedCallError)
    assert toy.memory()["used_bytes"] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_decoding_thread_survives_a_closed_event_loop(toy):
    loop = asyncio.new_event_loop()

    async def begin():
        aio = AsyncModel(toy)
        return (aio, *await start_gated(aio, 1))

    aio, task, gate = loop.run_until_complete(begin())
    loop.close()  # the task is not cancelled, and finishes after its loop is closed
    gate.open()

    async def end():
        result = await aio.generate("ab")
        await aio.close()
        return result

    assert_alike(asyncio.run(end()), toy.generate("ab"))
    assert not task.done()
    assert toy.memory()["used_bytes"] == 0


def test_garbage_collection_ends_the_decoding_thread(toy):
    other_threads = {*threading.enumerate()}
    aio = AsyncModel(toy)
    (thread,) = {*threading.enumerate()} - other_threads
    assert aio.model is toy
    del aio
    gc.collect()
    thread.join()
    assert not thread.is_alive()


EXIT_PROGRAM = """
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


@pytest.mark.parametrize("end", ["exit", "return"])
def test_interpreter_exits_while_requests_run(files, end):
    command = [sys.executable, "-c", EXIT_PROGRAM, str(files["encoder-decoder"]), end]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "end\n", "")


def test_invalid_options_and_single_pass_models_are_refused(toy, tmp_path):
    for options in ({"max_batch_size": 0}, {"max_pending": 0}, {"max_batch_size": 1.5}, {"max_pending": True}):
        with pytest.raises(OptionError, match="must be a whole number of at least 1"):
            AsyncModel(toy, **options)

    async def run():
        encoder = Model.load(write_encoder(tmp_path / "toy.onnx"), "cpu")
        async with AsyncModel(encoder) as aio:
            for call in (aio.generate("a"), anext(aio.stream("a"))):
                with pytest.raises(UnsupportedCallError, match="is a single-pass model: it cannot generate"):
                    await call

    asyncio.run(run())


def test_prompt_equals_that_of_the_model_and_leaves_the_loop_free(tmp_path, monkeypatch):
    model = Model.load(write_chat_model(tmp_path / "chat.onnx"), "cpu", threads=1)
    talk = [{"role": "user", "content": "hello"}]
    expected = model.prompt(talk, "be brief")
    original, loop_ran = Model.prompt, threading.Event()

    def waits_for_the_loop(self, *arguments):
        assert loop_ran.wait(60), "the event loop stands still while a template is filled in"
        return original(self, *arguments)

    monkeypatch.setattr(Model, "prompt", waits_for_the_loop)

    async def main():
        async with AsyncModel(model) as shared:
            asyncio.get_running_loop().call_soon(loop_ran.set)
            prompt = await shared.prompt(talk, "be brief")
            with pytest.raises(InputError):
                await shared.prompt([{"role": "user"}])
            return prompt

    np.testing.assert_array_equal(asyncio.run(main()), expected)
