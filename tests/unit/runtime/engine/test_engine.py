"""The engine against plain numpy over the whole sequence, on files of every cache layout."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from msgspec import structs
from support.concurrent_calls import side_by_side
from support.toy_models import WIDTH, Toy, with_manifest, write_encoder

from tformer_runtime import InputError, ModelFileError, UnsupportedCallError
from tformer_runtime.engine import engine as engine_module
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import POSITIONS, SELECTED_TOKENS, TOTAL_SLOTS

KINDS = [
    Toy(encoder=encoder, attention=attention, select=select, layers=2)
    for encoder in (True, False)
    for attention in ("gqa", "scatter", "scatter-pair")
    for select in (True, False)
] + [Toy(attention=attention, carries=True) for attention in ("gqa", "scatter")]
TOLERANCE = 3e-5


class Rows:
    """Rows of random tokens, fed to an engine in parts. Every logit is compared with the full computation."""

    def __init__(self, toy: Toy, engine: Engine, rows: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.engine = engine
        self.targets = [rng.integers(3, toy.vocabulary, toy.max_length) for _ in range(rows)]
        sources = [rng.integers(3, toy.vocabulary, rng.integers(1, 12)) for _ in range(rows)]
        self.expected = [toy.logits(t, s if toy.encoder else None) for t, s in zip(self.targets, sources, strict=True)]
        self.state = engine.start({"src": sources} if toy.encoder else None, rows)
        self.rows = list(range(rows))

    def feed(self, counts: list[int], logit_positions: str = "last", counted: bool = True) -> None:
        before = self.state.lengths.copy()
        tokens = np.zeros((len(counts), max(counts)), np.int64)
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            tokens[i, :count] = self.targets[row][before[i] : before[i] + count]
        logits = self.engine.step(self.state, tokens, np.array(counts) if counted else None, logit_positions)
        assert logits.dtype == np.float32
        np.testing.assert_array_equal(self.state.lengths, before + counts)
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            end = before[i] + count
            got, first = (logits[i, :count], before[i]) if logit_positions == "all" else (logits[i : i + 1], end - 1)
            np.testing.assert_allclose(got, self.expected[row][first:end], atol=TOLERANCE)

    def reorder(self, rows: list[int]) -> None:
        self.engine.reorder(self.state, np.array(rows))
        self.rows = [self.rows[r] for r in rows]


@pytest.fixture(scope="module", params=KINDS, ids=lambda t: f"{t.encoder}-{t.attention}-{t.select}-{t.carries}")
def toy_and_engine(request, tmp_path_factory):
    path = request.param.write(tmp_path_factory.mktemp("engine") / "toy.onnx")
    return request.param, Engine(path, device="cpu", threads=1)


def test_ragged_prompts_and_steps_equal_the_full_computation(toy_and_engine):
    rows = Rows(*toy_and_engine, rows=3)
    rows.feed([4, 1, 7], "all")
    for _ in range(30):  # until the buffers have grown
        rows.feed([1, 1, 1], counted=False)


def test_last_logits_of_ragged_prompts_equal_the_full_computation(toy_and_engine):
    Rows(*toy_and_engine, rows=3).feed([2, 9, 5])


def test_chunks_after_a_past_equal_the_full_computation(toy_and_engine):
    rows = Rows(*toy_and_engine, rows=3)
    rows.feed([3, 5, 1])
    rows.feed([4, 1, 6], "all")
    rows.feed([2, 2, 2], counted=False)
    rows.feed([1, 3, 5])


def test_one_row_in_chunks_reaches_the_maximum_length(toy_and_engine):
    rows = Rows(*toy_and_engine, rows=1)
    for count in (20, 1, 30, 13):
        rows.feed([count], "all")
    with pytest.raises(InputError, match="65 tokens are more than the 64"):
        rows.engine.step(rows.state, np.array([[5]]))


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("size", [4, 16, 39, 40])
def test_prompt_in_parts_equals_the_full_computation(toy_and_engine, monkeypatch, past, size):
    """No call has more tokens than allowed, the parts have about equal lengths, and the buffers grow once."""
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK_TOKENS", size)
    rows, engine = Rows(*toy_and_engine, rows=1), toy_and_engine[1]
    if past:
        rows.feed([past])
    lengths, buffers, step = [], set(), engine.step

    def counted_step(state, tokens):
        lengths.append(tokens.shape[1])
        buffers.add(state.cache.slot_capacity)
        return step(state, tokens)

    monkeypatch.setattr(engine, "step", counted_step)
    logits = engine.step_in_parts(rows.state, rows.targets[0][None, past : past + 40])
    np.testing.assert_allclose(logits, rows.expected[0][past + 39 : past + 40], atol=TOLERANCE)
    assert sum(lengths) == 40
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    if len(lengths) > 1:
        assert buffers == {rows.state.cache.slot_capacity}
    monkeypatch.undo()
    rows.feed([3])
    with pytest.raises(InputError, match="more than the 64"):
        engine.step_in_parts(rows.state, np.full((1, 60), 5))
    assert rows.state.max_row_length == past + 43


def test_short_row_reads_a_chunk_in_a_batch_with_a_full_row(toy_and_engine):
    rows = Rows(*toy_and_engine, rows=2)
    rows.feed([62, 3])
    rows.feed([2, 9], "all")
    with pytest.raises(InputError, match="more than the 64"):
        rows.engine.step(rows.state, np.full((2, 9), 5), np.array([1, 9]))


def test_rewound_row_continues_in_calls_of_many_shapes(toy_and_engine):
    if toy_and_engine[0].carries:
        pytest.skip("rows with carries lose more than asked: test_state.py")
    rows, random = Rows(*toy_and_engine, rows=1), np.random.default_rng(3)
    rows.feed([9])
    shapes = set()
    for _ in range(60):
        rows.state.rewind(int(random.integers(max(1, rows.state.max_row_length - 4), rows.state.max_row_length + 1)))
        room = 64 - rows.state.max_row_length
        count = int(random.integers(1, min(6, room) + 1)) if room > 0 else 0
        if not count:
            break
        rows.feed([count], "all", counted=False)
        shapes.add(count)
    assert len(shapes) > 4
    assert {new for new, _ in rows.state.calls} <= shapes | {9}


def test_reordered_rows_equal_the_full_computation(toy_and_engine):
    rows = Rows(*toy_and_engine, rows=4)
    rows.feed([4, 2, 7, 3])
    rows.reorder([0, 3, 2])
    rows.feed([1, 1, 1])
    rows.reorder([2, 0, 2])
    rows.feed([1, 1, 1])
    rows.reorder([1, 1, 0, 2, 0])
    rows.feed([1, 1, 1, 1, 1])
    rows.reorder([4])
    for _ in range(30):
        rows.feed([1])


def test_rows_of_a_request_may_repeat(toy_and_engine):
    toy, engine = toy_and_engine
    rows = Rows(toy, engine, rows=2)
    sources = {"src": [np.array([5, 6]), np.array([7])]} if toy.encoder else None
    state = engine.start(sources, rows=2)
    engine.reorder(state, np.array([0, 0, 1, 1]))
    tokens = np.array([[4], [4], [9], [9]])
    logits = engine.step(state, tokens)
    np.testing.assert_array_equal(logits[0], logits[1])
    for row, source in enumerate([np.array([5, 6]), np.array([7])]):
        expected = toy.logits(tokens[2 * row], source if toy.encoder else None)
        np.testing.assert_allclose(logits[2 * row], expected[-1], atol=TOLERANCE)
    assert rows.state.rows == 2


def test_memory_follows_the_number_of_rows_and_tokens(toy_and_engine):
    rows = Rows(*toy_and_engine, rows=2)
    rows.feed([3, 1])
    carries = sum(2 * 2 * 4 * WIDTH for _ in range(toy_and_engine[0].carries))  # two rows on two sides, at any length
    small = rows.state.cache.nbytes - carries
    for _ in range(32):
        rows.feed([1, 1])
    assert rows.state.cache.nbytes == 2 * small + carries
    assert rows.state.nbytes >= rows.state.cache.nbytes


def test_row_is_the_same_alone_and_in_a_batch(toy_and_engine):
    toy, engine = toy_and_engine
    together = Rows(toy, engine, rows=3)
    together.feed([3, 8, 5])
    for _ in range(5):
        together.feed([1, 1, 1])
    logits = engine.step(together.state, np.array([[4], [5], [6]])).copy()
    alone = Rows(toy, engine, rows=3)
    alone.reorder([1])
    alone.feed([8])
    for _ in range(5):
        alone.feed([1])
    np.testing.assert_allclose(engine.step(alone.state, np.array([[5]]))[0], logits[1], atol=TOLERANCE)


def test_threads_share_an_engine(toy_and_engine):
    toy, engine = toy_and_engine

    def work(seed: int) -> None:
        rows = Rows(toy, engine, rows=2, seed=seed)
        rows.feed([5, 3])
        for _ in range(20):
            rows.feed([1, 1])

    side_by_side(work, range(6))


def test_engine_is_freed_with_its_last_reference(toy_and_engine):
    """The session holds the weights. They must not wait for the garbage collector."""
    toy, engine = toy_and_engine
    gc.collect()
    gc.disable()
    try:
        engine_copy = Engine(engine.session)
        rows = Rows(toy, engine_copy, rows=2)
        rows.feed([5, 3])
        rows.feed([1, 1])
        assert engine_copy.memory_estimate.bytes_needed(8, {"source": 4 + engine_copy.join_padding}) > 0
        gone = weakref.ref(engine_copy)
        del engine_copy, rows
        assert gone() is None
    finally:
        gc.enable()


def test_logits_array_is_reused_from_step_to_step(toy_and_engine):
    rows = Rows(*toy_and_engine, rows=1)
    rows.feed([2])
    first = rows.engine.step(rows.state, np.array([[5]]))
    second = rows.engine.step(rows.state, np.array([[6]]))
    assert np.shares_memory(first, second)


def test_wrong_numbers_of_rows_and_inputs_are_refused(toy_and_engine):
    toy, engine = toy_and_engine
    with pytest.raises(ValueError, match="2 rows of tokens for a state of 1"):
        engine.step(Rows(toy, engine, rows=1).state, np.zeros((2, 1), np.int64))
    if toy.encoder:
        with pytest.raises(InputError, match="reads the inputs src, not none"):
            engine.start(None, 1)
        with pytest.raises(InputError, match="reads the inputs src, not image"):
            engine.start({"image": [np.array([1])]}, 1)
        with pytest.raises(InputError, match="41 long and the model takes at most 40"):
            engine.start({"src": [np.full(41, 5)]}, 1)
        with pytest.raises(InputError, match="src is empty"):
            engine.start({"src": [np.array([], np.int64)]}, 1)
        with pytest.raises(InputError, match="1 rows where 2"):
            engine.start({"src": [np.array([5])]}, 2)
    else:
        with pytest.raises(UnsupportedCallError, match="no input other than the tokens"):
            engine.encode({}, 1)


def test_ids_outside_the_embedding_are_an_input_error(toy_and_engine):
    toy, engine = toy_and_engine
    with pytest.raises(InputError, match="99 is beyond one of the model's tables, which ends at 28"):
        engine.step(Rows(toy, engine, rows=1).state, np.array([[99]]))


def test_manifest_that_does_not_match_its_graph_is_refused(tmp_path):
    path = Toy().write(tmp_path / "toy.onnx")
    manifest = Toy().manifest()
    fewer = type(manifest.encode)(manifest.encode.inputs, manifest.encode.outputs[:1])
    with pytest.raises(ModelFileError, match="decode reads 3 context tensors and encode has 1"):
        Engine(with_manifest(path, tmp_path / "other.onnx", encode=fewer), device="cpu")


def test_single_pass_file_has_no_steps(tmp_path):
    engine = Engine(write_encoder(tmp_path / "toy.onnx"), device="cpu")
    outputs = engine.encode({"src": [np.array([5, 6, 7]), np.array([8])]}, 2)
    assert outputs["context.k"].numpy().shape == (2, 2, 3, 8)
    assert outputs["context.bias"].numpy()[1, 0, 0].tolist() == [0, np.float32(-1e9), np.float32(-1e9)]
    with pytest.raises(UnsupportedCallError, match="single-pass model"):
        engine.start({"src": [np.array([5])]}, 1)


def test_input_missing_from_the_manifest_is_refused(tmp_path):
    toy = Toy(encoder=False)
    decode = structs.replace(toy.manifest().decode, controls=(POSITIONS, TOTAL_SLOTS, SELECTED_TOKENS))
    other = with_manifest(toy.write(tmp_path / "toy.onnx"), tmp_path / "other.onnx", decode=decode)
    with pytest.raises(ModelFileError, match=r"the graph has an input 'decode\.last' that it does not describe"):
        Engine(other, device="cpu")
