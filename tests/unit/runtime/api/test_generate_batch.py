"""generate_batch on many inputs: what it reads, keeps and gives back while it runs."""

from __future__ import annotations

import gc
import itertools

import pytest
from support.toy_models import Toy

from tformer_runtime import InputError, MemoryBudgetError, Model, Result
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.ordered import WINDOW_BATCHES
from tformer_runtime.decoding.request import Request, make_request
from tformer_runtime.decoding.sequence import SequenceTask

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]
ROWS = 2
S = Settings(max_new_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model.load(Toy(seed=27).write(tmp_path_factory.mktemp("model") / "toy.onnx"), "cpu", threads=1)


def alive():
    gc.collect()
    return sum(type(thing) in (Request, SequenceTask, Result) for thing in gc.get_objects())


@pytest.mark.parametrize("workers", [1, 2])
def test_of_endless_inputs_a_bounded_number_is_held(model, workers):
    read = 0

    def endless():
        nonlocal read
        for word in itertools.cycle(WORDS):
            read += 1
            yield word

    results = model.generate_batch(endless(), batch_size=ROWS, workers=workers, max_new_tokens=4)
    ahead, held, before = [], [], alive()
    for given in range(1, 501):
        next(results)
        ahead.append(read - given)
        if given in (250, 500):
            held.append(alive() - before)
    results.close()
    assert ahead[0] < 2 * WINDOW_BATCHES * ROWS
    assert max(ahead) <= 2 * WINDOW_BATCHES * ROWS
    assert max(held) <= 3 * 2 * WINDOW_BATCHES * ROWS
    assert alive() == before


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 4, "num_return_sequences": 2}])
def test_a_run_that_goes_on_with_another(model, options):
    whole = list(model.generate_batch(WORDS, batch_size=ROWS, max_new_tokens=6, **options))
    for done in (0, 3, len(WORDS)):
        rest = list(
            model.numbered_from(done).generate_batch(WORDS[done:], batch_size=ROWS, max_new_tokens=6, **options)
        )
        assert rest == whole[done:]
    with pytest.raises(InputError, match=r"^input 8: 'é'"):
        list(model.numbered_from(6).generate_batch(["ab", "é"]))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_request_that_is_refused_is_refused_in_its_turn(model, workers):
    """One too large for the memory, behind shorter ones that are begun after it."""
    small = Model(model.engine, max_memory=1)
    with pytest.raises(MemoryBudgetError):
        next(small.generate_batch(["a"], max_new_tokens=2))
    needs = [
        model.generator.make_task(make_request(model.manifest, model.inputs, t, 0, S), S) for t in ("ab", "ab" * 20)
    ]
    least, most = (model.generator.new_scheduler(None, 1)._starter.bytes_needed((), [task]) for task in needs)
    assert least < most
    limited = Model(model.engine, max_memory=(least + most) // 2)
    results = limited.generate_batch(["ab", "ba", "ab" * 20, "ab"], batch_size=2, workers=workers, max_new_tokens=4)
    assert [len(next(results).token_ids) > 0 for _ in range(2)] == [True, True]
    with pytest.raises(MemoryBudgetError, match="max_memory"):
        next(results)
