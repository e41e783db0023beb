"""Buffers of finished requests serve later ones without a trace of the earlier request; no other memory is kept."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from support.concurrent_calls import side_by_side
from support.toy_models import END_ID, Toy

from tformer_runtime import Model, UnsupportedCallError
from tformer_runtime.engine import spare_buffers
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.kv_cache import KVCache
from tformer_runtime.engine.memory_budget import MemoryBudget

TOYS = {
    "encoder-decoder": Toy(layers=2),
    "shared context": Toy(layers=2, shares=True),
    "decoder-only": Toy(encoder=False),
    "portable": Toy(attention="scatter"),
    "two sides": Toy(attention="scatter-pair"),
    "carries": Toy(carries=True),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spare")
    return {name: toy.write(folder / f"{name}.onnx") for name, toy in TOYS.items()}


def opened(files, name="encoder-decoder"):
    return Engine(files[name], device="cpu", threads=1)


def start(engine, rows=1, tokens=12, seed=0, budget=None):
    random = np.random.default_rng(seed)
    sources = {"src": [random.integers(3, 20, 1 + seed % 9) for _ in range(rows)]}
    requests = sources if engine.manifest.encode is not None else None
    return engine.start(requests, rows, max_tokens=[tokens] * rows, budget=budget)


def decode(engine, state, steps, seed=0):
    """Feed random tokens, and return all logits."""
    random = np.random.default_rng(seed)
    tokens = random.integers(3, 20, (steps, state.rows, 1))
    return np.stack([engine.step(state, step).copy() for step in tokens])


@pytest.mark.parametrize("name", TOYS)
def test_requests_after_each_other_have_the_results_of_an_engine_of_their_own(files, name):
    engine, random = opened(files, name), np.random.default_rng(0)
    for seed in range(40):
        rows, tokens = int(random.integers(1, 4)), int(random.integers(2, 40))
        state, own_engine = start(engine, rows, tokens, seed), opened(files, name)
        own = start(own_engine, rows, tokens, seed)
        assert state.max_row_length == 0
        steps = int(random.integers(1, tokens + 1))
        np.testing.assert_array_equal(decode(engine, state, steps, seed), decode(own_engine, own, steps, seed))
        if seed % 3 == 0:  # rows move in buffers that were used before
            order = random.integers(0, rows, rows + seed % 2)
            engine.reorder(state, order)
            own_engine.reorder(own, order)
            found, expected = (decode(e, s, 1, seed) for e, s in ((engine, state), (own_engine, own)))
            np.testing.assert_array_equal(found, expected)
        engine.release(state)


def test_buffers_of_a_released_state_serve_the_next_one(files, monkeypatch):
    engine = opened(files)
    allocated = []
    allocate = KVCache._reallocate
    monkeypatch.setattr(
        KVCache, "_reallocate", lambda self, *arguments: (allocated.append(self), allocate(self, *arguments))
    )
    for seed in range(5):
        state = start(engine, seed=seed)
        decode(engine, state, 12)
        engine.release(state)
    assert len(allocated) == 1


def test_release_of_a_state_again_leaves_the_next_one_as_it_is(files):
    engine, own_engine = opened(files), opened(files)
    first = start(engine)
    decode(engine, first, 3)
    engine.release(first)
    second, own = start(engine, seed=4), start(own_engine, seed=4)
    decode(engine, second, 3)
    decode(own_engine, own, 3)
    engine.release(first)
    first.release()
    del first
    gc.collect()
    third = start(engine, seed=5)
    decode(engine, third, 3)
    np.testing.assert_array_equal(decode(engine, second, 6, seed=1), decode(own_engine, own, 6, seed=1))
    engine.release(second)
    with pytest.raises(UnsupportedCallError, match="released"):
        decode(engine, second, 1)


def test_threads_never_share_buffers(files):
    engine = opened(files)
    expected = {seed: decode(opened(files), start(opened(files), seed=seed), 9, seed) for seed in range(4)}

    def run(seed):
        for _ in range(60):
            state = start(engine, seed=seed)
            np.testing.assert_array_equal(decode(engine, state, 9, seed), expected[seed])
            engine.release(state)

    side_by_side(run, range(4))


def test_budget_counts_spare_buffers_while_a_state_has_them_alone(files):
    engine, budget = opened(files), MemoryBudget(1 << 20)
    for tokens in (30, 12, 30, 3):
        share = budget.new_share()
        assert share.reserve(1 << 19)
        state = start(engine, tokens=tokens, budget=share)
        decode(engine, state, tokens)
        # With a limit the buffers are no larger than new ones.
        assert state.cache.slot_capacity == tokens
        assert share.used_bytes == state.nbytes
        engine.release(state)
        assert share.used_bytes == 0
        share.release_reservation()
    assert budget.used_bytes == 0


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only", "portable"])
def test_rows_without_numbers_leave_none_to_later_rows(files, name):
    """Standard attention multiplies the unused slots of a shorter row by 0, and 0 times NaN is NaN."""
    engine = opened(files, name)
    results = []
    for value in (0, np.nan, np.inf):
        state = start(engine, 2, seed=1)
        decode(engine, state, 6)
        for array in state.cache.buffers:
            array[...] = value  # as of a request whose numbers overflow
        engine.release(state)
        state = start(engine, 2, seed=1)
        engine.step(state, np.full((2, 3), 4), np.array([3, 1]))
        results.append(decode(engine, state, 3))
        del state  # which keeps no buffers
    np.testing.assert_array_equal(results[1:], [results[0]] * 2)
    assert np.isfinite(results[0]).all()


def test_large_buffers_are_freed(files, monkeypatch):
    engine = opened(files)
    monkeypatch.setattr(spare_buffers, "MAX_SPARE_BYTES", 1000)
    state = start(engine)
    decode(engine, state, 3)
    buffers = [weakref.ref(array) for array in state.cache.buffers]
    engine.release(state)
    del state
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)


def test_few_spare_buffers_are_kept_and_none_after_close(files):
    engine = opened(files)
    states = [start(engine, seed=seed) for seed in range(9)]
    for state in states:
        decode(engine, state, 2)
    buffers = [weakref.ref(array) for state in states for array in state.cache.buffers]
    for state in states:
        engine.release(state)
    del state, states
    gc.collect()
    assert sum(buffer() is not None for buffer in buffers) == spare_buffers.MAX_SPARES * len(buffers) // 9
    left = start(engine)
    decode(engine, left, 2)
    buffers += [weakref.ref(array) for array in left.cache.buffers]
    engine.close()
    engine.release(left)
    del left
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)


def test_encode_keeps_no_array_of_a_request(files):
    engine = opened(files)
    source = np.array([5, 6, 7])
    outputs = engine.encode({"src": [source]}, 1)
    arrays = [weakref.ref(engine.session.read_array(value)) for value in outputs.values()]
    addresses = {name: value.data_ptr() for name, value in outputs.items()}
    again = engine.encode({"src": [source + 1]}, 1)
    assert all(again[name].data_ptr() != address for name, address in addresses.items())
    del outputs, again
    gc.collect()
    assert not any(array() is not None for array in arrays)


def test_error_of_encode_leaves_it_usable(files):
    engine = opened(files)
    expected = engine.encode({"src": [np.array([5, 6])]}, 1)["context.k"].numpy()
    for _ in range(3):
        with pytest.raises(Exception, match="tables"):
            engine.encode({"src": [np.array([5, 10**6])]}, 1)
        np.testing.assert_array_equal(engine.encode({"src": [np.array([5, 6])]}, 1)["context.k"].numpy(), expected)


def test_streams_that_end_early_leave_no_trace(files):
    model, plain = (Model.load(files["encoder-decoder"], device="cpu", threads=1) for _ in range(2))
    options = {"suppress_tokens": [END_ID], "max_new_tokens": 30}
    expected = plain.generate("transformer", **options)
    for taken in (1, 2, 5):
        stream = model.stream("zebra", **options)
        for _ in range(taken):
            next(stream)
        stream.close()
        found = model.generate("transformer", **options)
        assert (found.token_ids, found.score) == (expected.token_ids, expected.score)
