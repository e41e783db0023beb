"""max_memory: a started request never runs out, a waiting request runs, and a request that never fits is refused."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.toy_models import END_ID, Toy, assert_alike

from tformer_runtime import MemoryBudgetError, Model, UnsupportedCallError
from tformer_runtime.decoding.generator import Generator
from tformer_runtime.decoding.request import make_request
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.engine.encoder_context import EncoderContext
from tformer_runtime.engine.kv_cache import KVCache
from tformer_runtime.engine.memory_budget import MemoryBudget, MemoryShare
from tformer_runtime.engine.shortlist import Candidates

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx" * 8]
WAYS = [
    {},
    {"num_beams": 3},
    {"temperature": 1.0, "seed": 1, "num_return_sequences": 2},
    {"max_new_tokens": 3},
    {"suppress_tokens": [END_ID], "max_new_tokens": 20},
]
TOYS = {
    "encoder-decoder": Toy(seed=27, layers=2, extras=True),
    "decoder-only": Toy(seed=5, encoder=False),
    "portable": Toy(seed=27, attention="scatter-pair"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    return {name: toy.write(folder / f"{name}.onnx") for name, toy in TOYS.items()}


def loaded(files, name="decoder-only", limit=None):
    return Model.load(files[name], "cpu", threads=1, max_memory=limit)


def bytes_of_batch(model: Model, words: list[str], **options) -> int:
    """Return the bytes that are reserved for one batch of words."""
    generator, settings = model.generator, model.settings(None, options)
    tasks = [
        generator.make_task(make_request(model.manifest, model.inputs, word, 0, settings), settings) for word in words
    ]
    return generator.new_scheduler(settings, 32).starter.bytes_needed((), tasks)


def of_length(model: Model, length: int) -> SequenceTask:
    settings = model.settings(None, {"max_new_tokens": length, "suppress_tokens": [END_ID]})
    return model.generator.make_task(make_request(model.manifest, model.inputs, "hello", 0, settings), settings)


def has_waiting_share(budget: MemoryBudget) -> bool:
    """Return whether a share waits: then no other share gets a turn, not even for no bytes."""
    return not budget.new_share(blocking=False).reserve(0, idle=False)


def wait_for_waiting_share(budget: MemoryBudget) -> None:
    with budget.changed:
        assert budget.changed.wait_for(lambda: has_waiting_share(budget))


@pytest.fixture
def checked_reservations(monkeypatch):
    """Let a batch fail that acquires more bytes than it has reserved, even if bytes are free."""
    take = MemoryShare.acquire

    def checked(share: MemoryShare, count: int) -> None:
        assert share.persistent or share.limit is None or share.used_bytes + count <= share.reserved_bytes
        take(share, count)

    monkeypatch.setattr(MemoryShare, "acquire", checked)


@pytest.mark.parametrize("name", sorted(TOYS))
@pytest.mark.parametrize("tightness", [1.0, 2.5, 6.0])
def test_started_tasks_never_run_out_of_memory(files, name, tightness, checked_reservations):
    """Tasks of all kinds join two batches with one budget at random, and leave at random."""
    free, alone = loaded(files, name), {}
    limit = int(tightness * max(bytes_of_batch(free, [word], **way) for word in WORDS for way in WAYS))
    model = loaded(files, name, limit)
    generator, budget = model.generator, model.budget
    schedulers = [generator.new_scheduler(None, 16, waits=False) for _ in range(2)]
    rng = np.random.default_rng(3)
    tasks, peak_bytes = [], 0
    while len(tasks) < 60 or not all(s.idle for s in schedulers):
        if len(tasks) < 60 and rng.random() < 0.6:
            word, way = int(rng.integers(len(WORDS))), int(rng.choice(len(WAYS), p=[0.1, 0.1, 0.1, 0.35, 0.35]))
            settings = model.settings(None, WAYS[way])
            task = generator.make_task(make_request(model.manifest, model.inputs, WORDS[word], 0, settings), settings)
            tasks.append((task, word, way))
            schedulers[rng.integers(2)].submit(task)
        for scheduler in schedulers:
            if rng.random() < 0.9:
                if scheduler.running and rng.random() < 0.03:
                    scheduler.cancel(scheduler.running[0], KeyError("cancelled"))
                scheduler.step()
                assert budget.used_bytes <= limit
                peak_bytes = max(peak_bytes, budget.reserved_bytes)
                assert peak_bytes <= limit
    assert peak_bytes > limit / 2
    assert model.memory()["used_bytes"] == budget.reserved_bytes == 0
    for task, word, way in tasks:
        if isinstance(task.error, KeyError):
            continue
        if (word, way) not in alone:
            alone[word, way] = free.generate(WORDS[word], **WAYS[way])
        assert_alike(generator.make_result(task), alone[word, way])
    assert sum(isinstance(task.error, KeyError) for task, *_ in tasks) < 30


def test_threads_share_the_memory_of_one_request(files):
    """All requests start at once, and the memory suffices for one."""
    free = loaded(files, "encoder-decoder")
    expected = [free.generate(word) for word in WORDS]
    model = loaded(files, "encoder-decoder", max(bytes_of_batch(free, [word]) for word in WORDS))
    barrier = threading.Barrier(len(WORDS))

    def run(word):
        barrier.wait()
        return [model.generate(word) for _ in range(3)]

    with ThreadPoolExecutor(len(WORDS)) as threads:
        assert list(threads.map(run, WORDS)) == [[result] * 3 for result in expected]
    assert model.memory()["used_bytes"] == 0
    assert 0 < model.memory()["peak_bytes"] <= model.memory()["limit_bytes"]


def test_batch_larger_than_the_limit_runs_in_parts(files, checked_reservations):
    free = loaded(files, "decoder-only")
    expected = list(free.generate_batch(WORDS * 3))
    model = loaded(files, "decoder-only", 3 * bytes_of_batch(free, ["onnx" * 8]))
    for result, reference in zip(model.generate_batch(WORDS * 3), expected, strict=True):
        assert_alike(result, reference)
    assert model.memory()["used_bytes"] == 0


def test_finished_rows_make_room_for_waiting_rows(files, checked_reservations):
    """The memory suffices for four rows. Two finish early, and the next two start while the other two run."""
    model = loaded(
        files, "encoder-decoder", bytes_of_batch(loaded(files, "encoder-decoder"), ["hello"] * 4, max_new_tokens=30)
    )
    scheduler = model.generator.new_scheduler(None, 32)
    tasks = [of_length(model, length) for length in (2, 30, 2, 30, 2, 30)]
    for task in tasks:
        scheduler.submit(task)
    assert [len(scheduler.running) for _ in range(4) if scheduler.step() is not None] == [4, 2, 4, 3]
    while not scheduler.idle:
        scheduler.step()
    assert all(task.hypotheses for task in tasks)


def test_buffers_of_a_finished_long_row_are_counted(files, checked_reservations):
    """A finished row of 50 tokens leaves buffers for 50, with a row of 30, which another row joins."""
    model = loaded(files, "encoder-decoder", 2**20)
    scheduler = model.generator.new_scheduler(None, 32)
    tasks = [of_length(model, length) for length in (50, 30, 30)]
    for task, steps in zip(tasks, (25, 27, 30), strict=True):
        scheduler.submit(task)
        for _ in range(steps):
            scheduler.step()
    assert scheduler.idle
    assert all(task.hypotheses for task in tasks)


def test_request_that_never_fits_is_refused_with_its_bytes(files):
    options = {"num_beams": 2, "max_new_tokens": 5}
    need = bytes_of_batch(loaded(files), ["hello"], **options)
    model = loaded(files, limit=need - 1)
    said = rf"may need {need:,} bytes of cache, but max_memory allows {need - 1:,}"
    with pytest.raises(MemoryBudgetError, match=said):
        model.generate("hello", **options)
    assert loaded(files, limit=need).generate("hello", **options).token_ids
    assert model.generate("hello", max_new_tokens=5).token_ids


def test_request_does_not_wait_for_prefixes_and_open_streams(files):
    """The caller of this thread owns the prefix and the stream, so waiting would never end."""
    model = loaded(files, limit=bytes_of_batch(loaded(files), ["hello"]))
    prefix = model.cache_prefix("ab")
    for word in ("hello", "a"):
        with pytest.raises(MemoryBudgetError, match=r"hold 384 of max_memory=8,192 until they are released"):
            model.generate(word)
    assert len(model.generate("hello", max_new_tokens=3).token_ids) <= 3
    prefix.release()
    stream = model.stream("hello", suppress_tokens=[END_ID])
    next(stream)
    with pytest.raises(MemoryBudgetError, match="unfinished streams"):
        model.generate("hello")
    with pytest.raises(MemoryBudgetError):
        model.cache_prefix("hello")
    stream.close()
    assert model.generate("hello") == loaded(files).generate("hello")


def test_unreferenced_prefix_and_chat_release_their_memory(files):
    model = loaded(files)
    prefix = model.cache_prefix("hello")
    chat = model.chat()
    chat.send("hello", max_new_tokens=3)
    assert (
        model.memory()["used_bytes"] == 6 * 128 + 4096
    )  # of a prefix, which has its final size, and a chat, which grows
    assert_alike(model.generate("a", prefix=prefix), model.generate("helloa"))
    del prefix
    assert model.memory()["used_bytes"] == 4096
    del chat
    gc.collect()
    assert model.memory()["used_bytes"] == 0


def test_released_prefix_and_chat_are_refused(files):
    model = loaded(files)
    prefix, chat = model.cache_prefix("hello"), model.chat()
    chat.send("ab", max_new_tokens=3)
    prefix.release()
    chat.release()
    for call in (lambda: model.generate("a", prefix=prefix), lambda: chat.send("c")):
        with pytest.raises(UnsupportedCallError, match="has been released and cannot be continued"):
            call()
    assert model.memory()["used_bytes"] == 0


@pytest.mark.parametrize("words", [["ab"], ["ab", "cd"]])
def test_request_that_fails_at_its_start_releases_its_memory(files, words, monkeypatch):
    """The traceback of a caught error, whose frames refer to the arrays, keeps no memory."""
    model = loaded(files, "encoder-decoder")
    before = model.generate(words[-1])
    step = model.engine.step
    monkeypatch.setattr(model.engine, "step", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        list(model.generate_batch(words))
    assert model.memory()["used_bytes"] == 0
    assert caught.value.__traceback__ is not None
    monkeypatch.setattr(model.engine, "step", step)
    assert model.generate(words[-1]) == before


def test_reservations_are_granted_in_order_of_arrival():
    budget = MemoryBudget(10)
    large, small, running = (budget.new_share(blocking=False) for _ in range(3))
    assert running.reserve(6)
    assert not large.reserve(8)
    assert not small.reserve(2)  # would fit, but waits behind `large`
    assert not running.reserve(7, idle=False)  # a running share waits as well
    running.release_reservation()
    assert large.reserve(8)
    assert small.reserve(2)
    large.release_reservation()
    small.release_reservation()
    assert not has_waiting_share(budget)


def test_withdrawn_reservation_lets_the_next_one_pass():
    budget = MemoryBudget(10)
    first, second, running = (budget.new_share(blocking=False) for _ in range(3))
    assert running.reserve(6)
    assert not first.reserve(8)
    assert not second.reserve(4)
    changes = budget.change_count
    first.withdraw()
    assert budget.change_count > changes
    assert second.reserve(4)


def test_thread_with_reserved_bytes_passes_waiting_threads():
    budget = MemoryBudget(10)
    mine, more = budget.new_share(), budget.new_share()
    assert mine.reserve(4)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(budget.new_share().reserve, 8)
        wait_for_waiting_share(budget)
        assert more.reserve(5)
        more.release_reservation()
        mine.release_reservation()
        assert waiting.result()


def test_deadlock_between_threads_is_refused():
    """Two threads are in the middle of a stream and need as much again: one waits, and the other is refused."""
    budget = MemoryBudget(10)
    mine, more = budget.new_share(), budget.new_share()
    assert mine.reserve(4)

    def other():
        held = budget.new_share()
        assert held.reserve(4)
        ready.set()
        assert budget.new_share().reserve(5)  # free when the other thread releases its four
        held.release_reservation()

    ready = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        over = threads.submit(other)
        assert ready.wait()
        wait_for_waiting_share(budget)
        with pytest.raises(MemoryBudgetError):
            more.reserve(5)
        mine.release_reservation()
        over.result()


def test_persistent_share_grows_when_memory_is_free():
    budget = MemoryBudget(10)
    kept, running = budget.new_share(persistent=True), budget.new_share(blocking=False)
    kept.acquire(3)
    assert running.reserve(6)
    with ThreadPoolExecutor(1) as threads:
        growing = threads.submit(kept.acquire, 3)
        wait_for_waiting_share(budget)
        running.release_reservation()
        growing.result()
    assert budget.used_bytes == kept.used_bytes == 6
    with pytest.raises(MemoryBudgetError):
        running.reserve(5)
    kept.release(6)
    assert running.reserve(10)
    assert budget.used_bytes == 0


def test_model_without_a_limit_refuses_nothing(files):
    model = loaded(files)
    assert isinstance(model.generator, Generator)
    scheduler = model.generator.new_scheduler(None, 4)
    assert isinstance(scheduler, Scheduler)
    list(model.generate_batch(WORDS))
    assert model.memory()["limit_bytes"] is None
    assert model.memory()["used_bytes"] == 0 < model.memory()["peak_bytes"]


@pytest.mark.parametrize("kind", [KVCache, EncoderContext, Candidates])
def test_partially_constructed_object_is_deleted_without_error(kind):
    kind.__new__(kind).__del__()
