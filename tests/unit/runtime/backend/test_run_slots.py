"""At most one run more than there are cores computes at a time. Counted with events, without any time."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.toy_models import Toy

from tformer_runtime import DeadlineError, Model, ModelFileError
from tformer_runtime.backend import run_slots
from tformer_runtime.backend.binding import Binding
from tformer_runtime.backend.run_slots import RunSlots, cpu_run_slots
from tformer_runtime.backend.session import Session
from tformer_runtime.engine.engine import Engine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Toy().write(tmp_path_factory.mktemp("slots") / "toy.onnx")


class Held:
    """A session of onnxruntime whose runs wait until they are told to end. `begun` counts the runs that began."""

    def __init__(self, error=None):
        self.begun, self.ends, self.error = threading.Semaphore(0), threading.Semaphore(0), error
        self.active = self.most_active = 0
        self.lock = threading.Lock()

    def run_with_iobinding(self, binding, options=None):
        with self.lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        self.begun.release()
        self.ends.acquire()
        with self.lock:
            self.active -= 1
        if self.error is not None:
            raise self.error


def test_number_of_runs_at_a_time_is_bounded(path):
    session, held = Session(path, "cpu"), Held()
    session._sessions = {"decode": held}
    session.run_slots = RunSlots(2)
    threads = [threading.Thread(target=session.run, args=(Binding(object()), "decode")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        assert held.begun.acquire(timeout=60)
    for _ in range(4):  # each end lets one run begin
        held.ends.release()
        assert held.begun.acquire(timeout=60)
    held.ends.release(2)
    for thread in threads:
        thread.join(60)
    assert held.most_active == 2
    assert held.active == 0


@pytest.mark.parametrize("error", [RuntimeError("it fails"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_slot_is_free_after_an_error(path, error):
    session, held = Session(path, "cpu"), Held(error)
    session._sessions = {"decode": held}
    session.run_slots = RunSlots(1)
    held.ends.release(3)
    for _ in range(3):  # the second run would wait for ever
        with pytest.raises((ModelFileError, KeyboardInterrupt)):
            session.run(Binding(object()), "decode")


def test_deadline_does_not_count_the_time_of_waiting(path):
    """The deadline begins with the run, and its error frees the slot."""
    session, held = Session(path, "cpu", max_run_seconds=60), Held(DeadlineError("late"))
    session._sessions = {"decode": held}
    session.run_slots = RunSlots(1)
    timers = threading.active_count()

    def run():
        with pytest.raises(DeadlineError):
            session.run(Binding(object()), "decode")

    with session.run_slots:
        waiting = threading.Thread(target=run)
        waiting.start()
        assert not held.begun.acquire(blocking=False)
        assert threading.active_count() == timers + 1  # no timer yet
    held.ends.release(2)
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(DeadlineError):
        session.run(Binding(object()), "decode")


def test_slots_of_the_cpu_are_one_more_than_the_cores(path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5}, raising=False)
    assert cpu_run_slots().number == 4
    assert Session(path, "cpu").run_slots.number == 4
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(run_slots.os, "cpu_count", lambda: None)
    assert cpu_run_slots().number == 2


def test_runs_on_cuda_have_no_slots(path):
    """They run at once, and their outputs are synchronized."""
    session, held, synchronized = Session(path, "cpu"), Held(), []
    session._sessions, session.device, session.run_slots = {"decode": held}, "cuda", None
    held.ends.release()
    session.run(Binding(SimpleNamespace(synchronize_outputs=lambda: synchronized.append(True))), "decode")
    assert synchronized == [True]


def test_results_with_one_slot_equal_those_with_many(path):
    rng = np.random.default_rng(0)
    sources = [rng.integers(4, 12, int(rng.integers(1, 6))) for _ in range(24)]
    results = []
    for slots in (1, 99):
        engine = Engine(path, "cpu")
        engine.session.run_slots = RunSlots(slots)
        model, done = Model(engine), {}

        def client(first, model=model, done=done):
            for i in range(first, len(sources), 8):
                done[i] = model.generate(sources[i], max_new_tokens=6, num_beams=1 + i % 3)

        threads = [threading.Thread(target=client, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        results.append([(done[i].token_ids, done[i].score) for i in range(len(sources))])
    assert results[0] == results[1]


def test_cache_that_grows_takes_a_slot_during_its_copy(path):
    """It has its bytes before: a wait for memory must not keep a slot."""
    engine = Engine(path, "cpu")
    session = engine.session
    state = engine.start({"src": [[5, 6]]}, 1)
    engine.step(state, np.array([[3]]))
    events, slots = [], session.run_slots
    share = state.cache._budget
    acquire = share.acquire
    share.acquire = lambda nbytes: (events.append("bytes"), acquire(nbytes))

    class Counted:
        def __enter__(self):
            events.append("begin")
            slots.__enter__()

        def __exit__(self, *error):
            slots.__exit__(*error)
            events.append("end")

    session.run_slots = Counted()
    engine.reorder(state, np.zeros(9, np.int64))
    assert events[-3:] == ["bytes", "begin", "end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_forked_process_has_free_slots():
    slots = RunSlots(1)
    with slots:
        child = os.fork()
        if not child:
            with slots:
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
