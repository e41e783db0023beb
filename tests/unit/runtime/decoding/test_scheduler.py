"""Tasks join and leave a batch: the results and errors of a task do not depend on other tasks."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hf_models as hf
from test_generate import decoded, run, tasks_for

from tformer_runtime.base.errors import DeadlineError, MemoryBudgetError
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.engine.memory_budget import MemoryBudget

WAYS = [
    {"max_new_tokens": 7},
    {"max_new_tokens": 12, "repetition_penalty": 1.3},
    {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 3},
    {"max_new_tokens": 9, "num_beams": 2},
    {"max_new_tokens": 8, "temperature": 1.5, "seed": 4, "num_return_sequences": 2},
    {"max_new_tokens": 5, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
]


def task(way, row, index):
    ((only,), _) = tasks_for("gpt2", [row], **WAYS[way])
    only.index = index
    return only


def outcome(task):
    return [h.ids for h in task.hypotheses]


@given(
    st.lists(st.tuples(st.integers(0, len(WAYS) - 1), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=9),
    st.sampled_from([4, 7, 32]),
)
@settings(max_examples=25)
def test_task_yields_the_same_in_any_batch(plan, rows):
    """Greedy, sampled and beam tasks, some submitted while others decode."""
    model = hf.gpt2(4)
    scheduler = Scheduler(hf.HfStarter(model), rows)
    tasks = [(task(way, row, i), wait) for i, (way, row, wait) in enumerate(plan)]
    step = 0
    over = []
    while not scheduler.idle or any(not t.finished for t, _ in tasks):
        for t, wait in tasks:
            if wait == step:
                scheduler.submit(t)
        over += scheduler.step()
        step += 1
    assert len(over) == len(set(map(id, over))) == len(tasks)
    for (together, _), (way, row, _) in zip(tasks, plan, strict=True):
        alone = task(way, row, together.index)
        decoded(model, [alone])
        assert outcome(together) == outcome(alone)


def test_free_rows_are_used():
    """The batch never exceeds its rows, and finished rows make room at once."""
    starter = hf.HfStarter(hf.marian(1))
    scheduler = Scheduler(starter, rows=8)
    limits = [2, 20, 2, 20, 2, 20, 2, 20, 5, 5, 5, 5]
    tasks, _ = tasks_for("marian", [0, 1, 2, 3] * 3, max_tokens=limits, suppress_tokens=[hf.END])
    for t in tasks:
        scheduler.submit(t)
    steps = 0
    while not scheduler.idle:
        scheduler.step()
        steps += 1
        assert len(scheduler.running) <= 8
    assert starter.begun == [8, 4]
    assert steps == 20
    assert max(max(batch.calls, default=0) for batch in starter.batches) == 8


def test_finished_rows_leave_at_once():
    limits = [3, 9, 5, 7]
    tasks, _ = tasks_for("marian", [0, 1, 2, 3], max_tokens=limits, suppress_tokens=[hf.END])
    _, starter = decoded(hf.marian(1), tasks)
    assert starter.batches[0].calls == [sum(n > i + 1 for n in limits) for i in range(max(limits) - 1)]


def test_failing_task_fails_alone():
    """A logits processor raises at some step, in a greedy row and in beams."""

    def fails(ids, prompt, scores):
        if len(ids) - prompt == 3:
            raise ZeroDivisionError("of the caller's")

    for options in ({"max_new_tokens": 8}, {"max_new_tokens": 8, "num_beams": 2}):
        tasks, _ = tasks_for("gpt2", [0, 1, 2], **options)
        tasks[1].rules = [fails]
        run(Scheduler(hf.HfStarter(hf.gpt2(4))), tasks)
        assert isinstance(tasks[1].error, ZeroDivisionError)
        for i in (0, 2):
            ((alone,), _) = tasks_for("gpt2", [i], **options)
            decoded(hf.gpt2(4), [alone])
            assert outcome(tasks[i]) == outcome(alone)


class Picky(hf.HfStarter):
    """A starter that fails for prompts with the id 20."""

    def begin(self, tasks):
        if any(20 in t.prompt for t in tasks):
            raise ValueError("20")
        return super().begin(tasks)


def test_task_that_cannot_begin_does_not_block_others():
    tasks, _ = tasks_for("gpt2", [0, 1, 2, 3], max_new_tokens=4)
    run(Scheduler(Picky(hf.gpt2(4))), tasks)
    assert [t.error is None for t in tasks] == [True, True, False, True]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "num_return_sequences": 3, "seed": 1}])
def test_cancelled_or_late_tasks_free_their_rows(options):
    model = hf.gpt2(4)
    tasks, _ = tasks_for("gpt2", [0, 1, 2, 3], max_new_tokens=12, suppress_tokens=[hf.END], **options)
    tasks[2].deadline = time.monotonic() - 1
    scheduler = Scheduler(hf.HfStarter(model), rows=9)
    for t in tasks:
        scheduler.submit(t)
    over = scheduler.step()
    assert over == [tasks[2]]
    assert isinstance(tasks[2].error, DeadlineError)
    scheduler.cancel(tasks[0], KeyError("cancelled"))
    assert scheduler.step() == [tasks[0]]
    while not scheduler.idle:
        scheduler.step()
    for i in (1, 3):
        ((alone,), _) = tasks_for("gpt2", [i], max_new_tokens=12, suppress_tokens=[hf.END], **options)
        alone.index = tasks[i].index
        decoded(model, [alone])
        assert outcome(tasks[i]) == outcome(alone)


@pytest.mark.parametrize("steps", range(1, 8))
def test_beams_keep_their_rows_after_others_finish(steps):
    model = hf.gpt2(0)
    options = {"max_new_tokens": 10, "num_beams": 2, "suppress_tokens": [hf.END]}
    tasks, _ = tasks_for("gpt2", [0, 1, 2], **options)
    scheduler = Scheduler(hf.HfStarter(model))
    for t in tasks:
        scheduler.submit(t)
    for _ in range(steps):
        scheduler.step()
    scheduler.cancel(tasks[0], KeyError("cancelled"))
    run(scheduler, [])
    for i in (1, 2):
        ((alone,), _) = tasks_for("gpt2", [i], **options)
        decoded(model, [alone])
        assert outcome(tasks[i]) == outcome(alone)


def test_long_prompt_begins_while_other_tasks_run():
    starter = hf.HfStarter(hf.gpt2(4))
    tasks, _ = tasks_for("gpt2", [0, 1, 2], max_new_tokens=6, suppress_tokens=[hf.END])
    scheduler = Scheduler(starter, positions=1)
    scheduler.submit(tasks[0])
    scheduler.step()
    for t in tasks[1:]:
        scheduler.submit(t)
    scheduler.step()
    assert scheduler.running == tasks[:2]  # the next task waits for a step
    scheduler.step()
    assert scheduler.running == tasks
    assert starter.begun == [1, 1, 1]


def test_memory_limit_bounds_the_running_rows():
    """With `HfStarter` a task needs one byte per row."""
    scheduler = Scheduler(hf.HfStarter(hf.gpt2(4)), memory=MemoryBudget(5).new_share())
    ((wide,), _) = tasks_for("gpt2", [0], max_new_tokens=3, num_beams=6)
    with pytest.raises(MemoryBudgetError, match="may need 6 bytes of cache, but max_memory allows 5"):
        scheduler.submit(wide)
    tasks = [*tasks_for("gpt2", [0, 1], max_new_tokens=6, num_beams=3)[0], *tasks_for("gpt2", [2], max_new_tokens=3)[0]]
    for t in tasks:
        scheduler.submit(t)
    while not scheduler.idle:
        scheduler.step()
        assert sum(t.width for t in scheduler.running) <= 5
    assert all(t.hypotheses for t in tasks)


def test_failing_step_ends_all_tasks_and_later_tasks_run():
    class Broken(hf.HfStarter):
        def begin(self, tasks):
            rows, logits = super().begin(tasks)
            if broken:
                rows.step = lambda tokens: 1 / 0
            return rows, logits

    broken = True
    scheduler = Scheduler(Broken(hf.gpt2(4)))
    tasks, _ = tasks_for("gpt2", [0, 1], max_new_tokens=6, suppress_tokens=[hf.END])
    for t in tasks:
        scheduler.submit(t)
    assert scheduler.step() == []  # the first tokens are chosen
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    assert scheduler.fail(ZeroDivisionError()) == tasks
    assert scheduler.idle
    broken = False
    again, _ = tasks_for("gpt2", [0], max_new_tokens=6, suppress_tokens=[hf.END])
    run(scheduler, again)
    assert len(again[0].hypotheses[0].ids) == 6


def test_long_prompts_are_read_in_chunks():
    starter = hf.HfStarter(hf.gpt2(4))
    tasks, _ = tasks_for("gpt2", [0, 0, 0, 1, 1], max_tokens=[3] * 5, suppress_tokens=[hf.END])
    run(Scheduler(starter, rows=32, positions=12), tasks)
    assert starter.begun[0] == 2  # prompts of five tokens
    assert sum(starter.begun) == 5
    assert all(len(t.hypotheses[0].ids) == 3 for t in tasks)
    assert np.array_equal(tasks[0].prompt, tasks[1].prompt)


@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "num_return_sequences": 2, "seed": 3}])
def test_token_is_reported_before_the_model_reads_it(way):
    notified = []
    tasks, _ = tasks_for("gpt2", [0, 1, 2], max_tokens=[3, 6, 6], max_new_tokens=6, suppress_tokens=[hf.END], **way)
    for t in tasks:
        t.on_token = lambda token, index=t.index: notified.append((index, token.copy, sum(map(len, calls()))))
    starter = hf.HfStarter(hf.gpt2(4))
    scheduler = Scheduler(starter)

    def calls():
        return [batch.calls for batch in starter.batches]

    for t in tasks:
        scheduler.submit(t)
    for steps in range(6):
        over = scheduler.step()
        assert over == {2: tasks[:1], 5: tasks[1:]}.get(steps, [])
        assert sum(map(len, calls())) == steps
    assert scheduler.idle
    copies = way.get("num_return_sequences", 1)
    assert sorted(notified) == [(t.index, c, n) for t in tasks for c in range(copies) for n in range(t.max_tokens)]


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"temperature": 1.0, "num_return_sequences": 2, "seed": 3}])
def test_timing_follows_the_clock_of_the_model(way, monkeypatch):
    """Only the model advances the clock: 10 seconds for prompts, 1 for each step."""
    clock = [0.0]
    monkeypatch.setattr("tformer_runtime.decoding.scheduler.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Timed(hf.HfStarter):
        def begin(self, tasks):
            clock[0] += 10
            rows, logits = super().begin(tasks)
            step = rows.step

            def timed(tokens):
                clock[0] += 1
                return step(tokens)

            rows.step = timed
            return rows, logits

    tasks, _ = tasks_for("gpt2", [0, 1, 2], max_tokens=[1, 5, 8], max_new_tokens=8, suppress_tokens=[hf.END], **way)
    for t in tasks:
        t.began = 0.0
    run(Scheduler(Timed(hf.gpt2(4))), tasks)
    assert [t.first_token_at for t in tasks] == [10.0] * 3
    assert [t.ended_at - t.first_token_at for t in tasks] == [0.0, 4.0, 7.0]


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}])
def test_tasks_join_and_leave_while_the_model_runs(way):
    """A joining task gets its first token with the next tokens of the others. A cancelled or late task gets no more."""
    model, starter = hf.gpt2(4), hf.HfStarter(hf.gpt2(4))
    tasks, _ = tasks_for("gpt2", [0, 1, 2, 3], max_new_tokens=6, suppress_tokens=[hf.END], **way)
    scheduler = Scheduler(starter)
    for t in tasks[:3]:
        scheduler.submit(t)
    assert scheduler.step() == []

    def come():
        scheduler.submit(tasks[3])
        scheduler.cancel(tasks[0], KeyError("cancelled"))
        tasks[1].deadline = time.monotonic() - 1

    assert scheduler.step(come) == tasks[:2]
    width = way.get("num_beams", 1)
    assert starter.batches[0].calls == [3 * width]
    assert scheduler.running == tasks[2:]
    assert all(t.first_token_at for t in tasks)
    scheduler.cancel(tasks[3], KeyError("cancelled"))  # before the model has read its first token
    assert scheduler.step() == [tasks[3]]
    assert starter.batches[0].calls == [3 * width, width]
    while not scheduler.idle:
        scheduler.step()
    (alone,), _ = tasks_for("gpt2", [2], max_new_tokens=6, suppress_tokens=[hf.END], **way)
    decoded(model, [alone])
    assert outcome(tasks[2]) == outcome(alone)
    assert [type(t.error) for t in tasks] == [KeyError, DeadlineError, type(None), KeyError]
