"""generate_batch: it reads inputs lazily with bounded memory, and reports errors in the order of the inputs."""

from __future__ import annotations

import gc
import itertools
import re

import pytest
from support.toy_models import Toy

from tformer_runtime import InputError, MemoryBudgetError, Model, Result
from tformer_runtime.cli.resumed_model import ResumedModel
from tformer_runtime.decoding.ordered import WINDOW_BATCHES
from tformer_runtime.decoding.request import Request
from tformer_runtime.decoding.sequence import SequenceTask

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]
BATCH_ROWS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model.load(Toy(seed=27).write(tmp_path_factory.mktemp("model") / "toy.onnx"), "cpu", threads=1)


def count_live_objects():
    """Return the number of requests, tasks and results in memory."""
    gc.collect()
    return sum(type(value) in (Request, SequenceTask, Result) for value in gc.get_objects())


@pytest.mark.parametrize("workers", [1, 2])
def test_endless_inputs_are_read_lazily_with_bounded_memory(model, workers):
    num_read = 0

    def endless():
        nonlocal num_read
        for word in itertools.cycle(WORDS):
            num_read += 1
            yield word

    results = model.generate_batch(endless(), batch_size=BATCH_ROWS, workers=workers, max_new_tokens=4)
    num_read_ahead, num_live, num_live_before = [], [], count_live_objects()
    for num_results in range(1, 501):
        next(results)
        num_read_ahead.append(num_read - num_results)
        if num_results in (250, 500):
            num_live.append(count_live_objects() - num_live_before)
    results.close()
    assert num_read_ahead[0] < 2 * WINDOW_BATCHES * BATCH_ROWS
    assert max(num_read_ahead) <= 2 * WINDOW_BATCHES * BATCH_ROWS
    assert max(num_live) <= 3 * 2 * WINDOW_BATCHES * BATCH_ROWS
    assert count_live_objects() == num_live_before


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 4, "num_return_sequences": 2}])
def test_resumed_run_matches_the_rest_of_a_whole_run(model, options):
    whole = list(model.generate_batch(WORDS, batch_size=BATCH_ROWS, max_new_tokens=6, **options))
    for done in (0, 3, len(WORDS)):
        rest = list(
            ResumedModel(model, done).generate_batch(WORDS[done:], batch_size=BATCH_ROWS, max_new_tokens=6, **options)
        )
        assert rest == whole[done:]
    with pytest.raises(InputError, match=r"^input 8: 'é'"):
        list(ResumedModel(model, 6).generate_batch(["ab", "é"]))


def bytes_needed(model, text):
    """Return the bytes of cache that a request needs, from the message of its refusal."""
    with pytest.raises(MemoryBudgetError) as refusal:
        next(model.generate_batch([text], max_new_tokens=4))
    return int(re.search(r"need ([\d,]+) bytes of cache", str(refusal.value))[1].replace(",", ""))


@pytest.mark.parametrize("workers", [1, 2])
def test_refused_request_is_reported_after_earlier_results(model, workers):
    """A request that is too large for the memory is third, and the shorter requests before it have results."""
    small = Model(model.engine, max_memory=1)
    with pytest.raises(MemoryBudgetError):
        next(small.generate_batch(["a"], max_new_tokens=2))
    short_bytes, long_bytes = (bytes_needed(small, text) for text in ("ab", "ab" * 20))
    assert short_bytes < long_bytes
    limited = Model(model.engine, max_memory=(short_bytes + long_bytes) // 2)
    results = limited.generate_batch(["ab", "ba", "ab" * 20, "ab"], batch_size=2, workers=workers, max_new_tokens=4)
    assert [len(next(results).token_ids) > 0 for _ in range(2)] == [True, True]
    with pytest.raises(MemoryBudgetError, match="max_memory"):
        next(results)
