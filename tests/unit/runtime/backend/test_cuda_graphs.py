"""One session per stage, decode steps in fixed buffers, and the greedy choice on a device.

The tests run on the CPU, with a session whose tensors are copies, as on a device. Capturing CUDA graphs needs a GPU.
"""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from support.toy_models import Toy

from tformer_runtime import Model
from tformer_runtime.backend import cuda_graphs
from tformer_runtime.backend.cuda_graphs import DeviceLogits, padded_rows
from tformer_runtime.backend.sampling_graph import TOP_LOGITS_COUNT
from tformer_runtime.backend.session import Session, find_missing_cuda
from tformer_runtime.base.errors import ModelFileError, UnsupportedCallError
from tformer_runtime.decoding.request import make_request
from tformer_runtime.decoding.sampling import DEVICE_SUM_TOLERANCE, Sampler
from tformer_runtime.engine.cuda_call import CudaGraphCall
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.kv_cache import KVCache, cache_bytes
from tformer_runtime.format.manifest import POSITIONS
from tformer_runtime.format.model_file import read_mapped_model
from tformer_runtime.format.stage_split import extract_stage

TOYS = {
    "encoder-decoder": Toy(seed=3, layers=2),
    "decoder-only": Toy(seed=4, encoder=False, layers=2, end=()),
    "plain": Toy(seed=5, attention="scatter"),
    "shared": Toy(seed=6, shares=True),
    "bfloat16": Toy(seed=8, layers=2, half=True),
}
toys = pytest.mark.parametrize("name", TOYS)
# CUDA has no GroupQueryAttention in float32, and onnxruntime captures no file that has a node on the CPU.
GPU_TOYS = {
    "encoder-decoder": replace(TOYS["encoder-decoder"], attention="scatter"),
    "decoder-only": replace(TOYS["decoder-only"], attention="scatter"),
    "shared": replace(TOYS["shared"], attention="scatter"),
}
on_gpu = pytest.mark.skipif(find_missing_cuda() is not None, reason=f"no CUDA here: {find_missing_cuda()}")


class Apart(Session):
    """A CPU in the place of a device: its tensors are copies at fixed addresses."""

    def __init__(self, path):
        super().__init__(path, "cpu", threads=1, split_stages=True)
        self.device = "cuda"
        self.runs: list[int | None] = []
        self.writes = 0

    _adds_greedy_choice = keeps_buffers = True

    def write_tensor(self, tensor, array):
        self.writes += 1
        super().write_tensor(tensor, array)

    def device_tensor(self, array):
        return onnxruntime.OrtValue.ortvalue_from_numpy(array.copy())

    def bind_new_outputs(self, binding, outputs):
        for output in outputs:
            binding.native.bind_output(output, "cpu")

    def run(self, binding, stage, graph=None):
        self.runs.append(graph)
        super().run(binding, stage, graph)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    return {name: toy.write(folder / f"{name}.onnx") for name, toy in TOYS.items()}


def rows_of(seed, lengths, max_id=20):
    random = np.random.default_rng(seed)
    return [random.integers(3, max_id, length) for length in lengths]


def steps(engine, sources, prompts, count):
    """Return the logits after the prompts, and after each of `count` greedy tokens."""
    requests = {"src": sources} if engine.manifest.encode else None
    state = engine.start(requests, len(sources))
    counts = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), counts.max()), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    actual = [engine.step(state, tokens, counts).copy()]
    calls = []
    for _ in range(count):
        actual.append(engine.step(state, actual[-1].argmax(-1)[:, None]).copy())
        calls.append(state.call)
    return np.stack(actual), calls


@toys
def test_stage_session_has_only_the_inputs_and_outputs_of_its_stage(files, name):
    manifest = TOYS[name].manifest()
    if not manifest.staged:
        with pytest.raises(ModelFileError, match="not the branches of one If"):
            extract_stage(read_mapped_model(files[name])[0], "decode")
        return
    model, _ = read_mapped_model(files[name])
    decode, encode = (onnx.load_from_string(extract_stage(model, stage)) for stage in ("decode", "encode"))
    given = {value.name for value in decode.graph.output}
    assert given == {manifest.decode.logits.name, *(cache.present for cache in manifest.decode.caches)}
    assert {value.name for value in encode.graph.output} == {output.name for output in manifest.encode.outputs}
    assert not [node for stage in (decode, encode) for node in stage.graph.node if node.op_type == "If"]
    read = {name for node in decode.graph.node for name in node.input}
    bound = {tensor.name for tensor in decode.graph.initializer} | {value.name for value in decode.graph.input}
    computed = {name for node in decode.graph.node for name in node.output} | {""}
    assert bound <= read <= bound | computed


@toys
def test_separate_stage_sessions_equal_one_session(files, name):
    """The results are equal bit for bit: the same kernels compute the same numbers."""
    sources, prompts = rows_of(1, (7, 2, 5)), rows_of(2, (3, 1, 6))
    one, _ = steps(Engine(files[name], "cpu", threads=1), sources, prompts, 12)
    other, _ = steps(Engine(Session(files[name], "cpu", threads=1, split_stages=True)), sources, prompts, 12)
    np.testing.assert_array_equal(one, other)


@toys
def test_steps_in_fixed_buffers_equal_other_steps(files, name):
    """The buffers take three lengths. A graph computes as if its longest row filled them, which may add zeros to the
    sums of plain attention and must change nothing else."""
    engine = Engine(Apart(files[name]))
    sources, prompts = rows_of(1, (7, 2, 5)), rows_of(2, (9, 1, 14))
    expected, _ = steps(Engine(files[name], "cpu", threads=1), sources, prompts, 40)
    actual, calls = steps(engine, sources, prompts, 40)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.ptp(expected))
    assert all(isinstance(call, CudaGraphCall) for call in calls)
    numbers = [graph for graph in engine.session.runs if graph is not None]
    assert len(numbers) == 40 + 2  # the first step of each graph runs twice, from the same state
    assert len(set(numbers)) == 2  # 32 slots, then 64
    # Another batch of the same shape replays the same graphs, in the same buffers.
    step = calls[-1].step
    again, calls = steps(engine, sources, prompts, 40)
    np.testing.assert_array_equal(again, actual)
    assert calls[-1].step is step
    assert {graph for graph in engine.session.runs if graph is not None} == set(numbers)


def test_closed_engine_frees_the_buffers_of_its_graphs(files):
    engine = Engine(Apart(files["decoder-only"]))
    _, calls = steps(engine, [None], rows_of(2, (3,)), 4)
    step = weakref.ref(calls.pop().step)
    del calls[:]
    gc.collect()
    assert step() is not None  # in the pool, for the next batch
    engine.close()
    gc.collect()
    assert step() is None
    with pytest.raises(UnsupportedCallError, match="the model is closed"):
        steps(engine, [None], rows_of(2, (3,)), 4)


def test_no_graph_is_captured_near_the_end_of_the_buffers(files):
    """Capturing may run a step eight times, each one slot further. Each thread captures its own graphs."""
    engine, plain = Engine(Apart(files["decoder-only"])), Engine(files["decoder-only"], "cpu", threads=1)
    prompt = rows_of(4, (26,))[0]
    actual, expected = (steps(e, [prompt], [prompt], 14)[0] for e in (engine, plain))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.ptp(expected))
    assert sum(graph is not None for graph in engine.session.runs) == 14 - 6 + 1  # 6 with 32 slots; 8 with 64, 1 twice
    state = engine.start(None, 1)
    engine.step(state, prompt[None, :20])
    engine.step(state, np.array([[5]]))  # captures a graph
    begun = len([graph for graph in engine.session.runs if graph is not None])
    thread = threading.Thread(target=engine.step, args=(state, np.array([[6]])))
    thread.start()
    thread.join()
    assert len([graph for graph in engine.session.runs if graph is not None]) == begun + 2
    whole = _after(plain, [*prompt[:20], 5, 6, 7])
    np.testing.assert_allclose(engine.step(state, np.array([[7]])), whole, rtol=0, atol=2e-6 * np.ptp(whole))


def test_pooled_buffers_have_one_user_at_a_time(files):
    engine = Engine(Apart(files["decoder-only"]))
    plain = Engine(files["decoder-only"], "cpu", threads=1)
    first, second = (engine.start(None, 1) for _ in range(2))
    for state, token in ((first, 5), (second, 9)):
        engine.step(state, np.array([[token, 4, 3]]))
    for token in (6, 7, 8):
        for state, begin in ((first, 5), (second, 9)):
            actual = engine.step(state, np.array([[token]]))
            whole = plain.start(None, 1)
            expected = plain.step(whole, np.array([[begin, 4, 3, *range(6, token + 1)]]))
            np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.ptp(expected))
    assert isinstance(first.call, CudaGraphCall)
    assert not isinstance(second.call, CudaGraphCall)
    first.release()
    third = engine.start(None, 1)
    engine.step(third, np.array([[9, 4, 3]]))
    expected = _after(plain, [9, 4, 3, 6])
    np.testing.assert_allclose(engine.step(third, np.array([[6]])), expected, rtol=0, atol=2e-6 * np.ptp(expected))
    assert isinstance(third.call, CudaGraphCall)


def test_rows_of_buffers_are_few_numbers_and_at_most_double():
    sizes = [padded_rows(rows) for rows in range(1, 257)]
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(rows <= size < 2 * rows for rows, size in enumerate(sizes, 1))


@toys
def test_rows_that_end_leave_the_graph_and_the_other_rows_in_place(files, name, monkeypatch):
    """The rows that stay keep their buffers and their graph, nothing is copied, and the results are the CPU's."""
    engine, plain = Engine(Apart(files[name])), Engine(files[name], "cpu", threads=1)
    copies = []
    reallocate = KVCache._reallocate
    monkeypatch.setattr(KVCache, "_reallocate", lambda cache, *given: (copies.append(cache), reallocate(cache, *given)))
    states = []
    for each in (engine, plain):
        sources = {"src": rows_of(1, (7, 2, 5, 9, 4))} if each.manifest.encode else None
        states.append(each.start(sources, 5, joins=True))
        each.step(states[-1], np.array([[5, 6], [7, 8], [9, 3], [4, 4], [6, 5]]), np.array([2, 1, 2, 1, 2]))
    tokens = np.array([[4], [5], [6], [7], [8]])
    state = states[0]
    engine.step(state, tokens)
    plain.step(states[1], tokens)
    del copies[:]
    graphs = []
    # Rows leave from the middle, the end and the beginning, and swap their places.
    for order in ([0, 4, 2, 3], [3, 1, 0, 2], [2, 0], [1, 0]):
        for each, its_state in zip((engine, plain), states, strict=True):
            each.reorder(its_state, np.array(order))
        tokens = tokens[order]
        for _ in range(3):
            actual, expected = engine.step_one_token(state, tokens), plain.step(states[1], tokens)
            np.testing.assert_allclose(actual.copy(), expected, rtol=0, atol=2e-6 * np.ptp(expected))
            np.testing.assert_array_equal(actual.tokens, expected.argmax(-1))
            tokens = actual.tokens[:, None]
            graphs.append(state.call.step.graph_id)
            written = state.call.step.host_inputs.get(POSITIONS)
            assert written is None or written.max() == state.max_row_length  # unused rows are no longer
    assert len(set(graphs)) == 1
    assert all(cache is not state.cache for cache in copies)
    assert state.cache.row_capacity == 8
    for positions in ("all", "last"):  # no graph gives all logits, so the rows move to their places
        actual, expected = engine.step(state, tokens, None, positions), plain.step(states[1], tokens, None, positions)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.ptp(expected))
    assert [cache for cache in copies if cache is state.cache] == [state.cache]
    assert isinstance(state.call, CudaGraphCall)


@toys
def test_unused_rows_change_no_bit_of_the_others(files, name):
    """Whatever the unused rows hold, even NaN, the results of the used rows are the same bits."""
    engine = Engine(Apart(files[name]))

    def logits(poison):
        requests = {"src": rows_of(1, (7, 2, 5))} if engine.manifest.encode else None
        state = engine.start(requests, 3, joins=True)
        tokens = engine.step(state, np.array([[5, 6], [7, 8], [9, 3]])).argmax(-1)[:, None]
        results = [engine.step(state, tokens).copy()]
        step, unused = state.call.step, 3
        assert state.cache.row_capacity == 4
        if poison is not None:
            values = [v for group in state.cache.pooled_buffers.values for v in group] + list(step.contexts.values())
            for value in values:
                array = value.numpy().copy()
                if array.shape[0] == 4:
                    if array.dtype.kind == "f":
                        array[unused] = poison
                    elif array.dtype == np.uint16:  # the bits of bfloat16
                        array[unused] = np.float32(poison).view(np.uint32) >> 16
                    value.update_inplace(array)
        for _ in range(12):
            results.append(engine.step(state, results[-1].argmax(-1)[:, None]).copy())
        state.release()
        return np.stack(results)

    expected = logits(None)
    assert np.isfinite(expected).all()
    for poison in (1e3, np.nan):
        np.testing.assert_array_equal(logits(poison), expected)


@toys
def test_rows_that_join_take_the_places_of_rows_that_ended(files, name, monkeypatch):
    """The other rows are not copied, their graph is replayed, and the results are the CPU's."""
    engine, plain = Engine(Apart(files[name])), Engine(files[name], "cpu", threads=1)
    copies = []
    reallocate = KVCache._reallocate
    monkeypatch.setattr(KVCache, "_reallocate", lambda cache, *given: (copies.append(cache), reallocate(cache, *given)))
    requests = {"src": rows_of(1, (7, 2, 5, 8, 4))} if engine.manifest.encode else None
    others = {"src": rows_of(2, (3, 6))} if engine.manifest.encode else None
    states, graphs = [], []
    for each in (engine, plain):
        state = each.start(requests, 5, joins=True)
        each.step(state, np.array([[5, 6], [7, 8], [9, 3], [4, 4], [6, 5]]), np.array([2, 1, 2, 1, 2]))
        each.step(state, np.array([[4], [5], [6], [7], [8]]))
        states.append(state)
    graphs.append(states[0].call.step.graph_id)
    del copies[:]
    for each, state in zip((engine, plain), states, strict=True):
        each.reorder(state, np.array([0, 4, 2]))
        for _ in range(2):  # two rows, then others in the places that are left: of 8, three are not neighbours
            new = each.start(others, 2, joins=True)
            each.step(new, np.array([[9, 6, 3], [7, 8, 5]]), np.array([3, 2]))
            each.join(state, new)
    assert all(cache is not states[0].cache for cache in copies)
    tokens = np.array([[4], [5], [6], [7], [8], [9], [3]])
    for _ in range(12):
        actual, expected = engine.step_one_token(states[0], tokens), plain.step(states[1], tokens)
        actual = actual.copy()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.ptp(expected))
        tokens = expected.argmax(-1)[:, None]
        graphs.append(states[0].call.step.graph_id)
    assert len(set(graphs)) == 1


def test_a_long_row_that_ends_does_not_write_beyond_the_buffers(files):
    """The unused row of a row that ended near the end of the buffers begins again at their beginning."""
    engine, plain = Engine(Apart(files["decoder-only"])), Engine(files["decoder-only"], "cpu", threads=1)
    prompts = rows_of(2, (22, 3))
    tokens = np.zeros((2, 22), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    state = engine.start(None, 2)
    chosen = engine.step(state, tokens, np.array([22, 3])).argmax(-1)[:, None]
    for _ in range(8):
        chosen = engine.step(state, chosen).argmax(-1)[:, None]
    assert state.max_row_length == 30 == state.cache.slot_capacity - 2
    engine.reorder(state, np.array([1]))
    expected, _ = steps(plain, [None], prompts[1:], 29)
    chosen = chosen[1:]
    for step in range(9, 29):
        actual = engine.step(state, chosen)
        np.testing.assert_allclose(actual, expected[step], rtol=0, atol=2e-6 * np.ptp(expected))
        chosen = actual.argmax(-1)[:, None]
        captured = state.call.step
        inputs = [array for name, array in captured.host_inputs.items() if name != captured.token_input]
        assert max(array.max() for array in inputs) == state.max_row_length
    assert state.cache.slot_capacity == 32


def test_batches_of_words_of_all_lengths_capture_few_graphs(files):
    """Numbers of rows and lengths of sources are rounded up, so that most batches replay the graphs of others."""
    engine, plain = Engine(Apart(files["encoder-decoder"])), Engine(files["encoder-decoder"], "cpu", threads=1)
    random = np.random.default_rng(3)
    inputs = rows_of(8, random.integers(1, 24, 120))
    actual, expected = (
        [r.token_ids for r in Model(each).generate_batch(inputs, max_new_tokens=24, batch_size=16)]
        for each in (engine, plain)
    )
    assert actual == expected
    assert len({len(ids) for ids in actual}) > 10  # they end at different times
    graphs = {graph for graph in engine.session.runs if graph is not None}
    assert len(graphs) == engine.session.captures <= 12


def test_pool_frees_buffers_that_were_not_used_for_the_longest_time(files, monkeypatch):
    engine = Engine(Apart(files["decoder-only"]))
    pool = engine.pool
    _, calls = steps(engine, [None], rows_of(2, (3,)), 1)
    first = weakref.ref(calls.pop().step)
    del calls[:]
    size = sum(free.nbytes for free in pool._free.values())
    assert size == cache_bytes(engine.decode.caches, 1, 32)
    monkeypatch.setattr(cuda_graphs, "MAX_FREE_BYTES", 5 * size)
    for rows in (2, 1, 3, 2):  # of 1, 2 and 4 rows
        steps(engine, [None] * rows, rows_of(2, (3,) * rows), 1)
    gc.collect()
    assert first() is None  # 1, 2 and 4 rows are too much
    assert [rows for rows, _ in pool._free] == [2]
    assert sum(free.nbytes for free in pool._free.values()) <= 5 * size
    monkeypatch.setattr(cuda_graphs, "MAX_FREE_BYTES", 100 * size)
    monkeypatch.setattr(cuda_graphs, "MAX_BUFFER_SHAPES", 2)
    for rows in (1, 2, 4, 8):
        steps(engine, [None] * rows, rows_of(2, (3,) * rows), 1)
    assert [rows for rows, _ in pool._free] == [4, 8]


def test_pool_keeps_the_last_buffers_however_large(files, monkeypatch):
    """Otherwise each batch would capture a graph, which onnxruntime never frees."""
    monkeypatch.setattr(cuda_graphs, "MAX_FREE_BYTES", 1)
    engine = Engine(Apart(files["decoder-only"]))
    for _ in range(3):
        steps(engine, [None, None], rows_of(2, (3, 3)), 3)
    assert engine.session.captures == 1


def test_buffers_whose_filling_fails_can_be_used_again(files, monkeypatch):
    engine = Engine(Apart(files["decoder-only"]))
    steps(engine, [None], rows_of(2, (3,)), 1)

    def fail(tensor, array):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.session, "write_tensor", fail)
        with pytest.raises(MemoryError):
            steps(engine, [None], rows_of(2, (3,)), 1)
    steps(engine, [None], rows_of(2, (3,)), 2)
    assert engine.session.captures == 1


@pytest.mark.parametrize("source_max", [40, 42])
@pytest.mark.parametrize("lengths", [(40, 7), (39, 40), (42, 5), (41, 42)])
def test_sources_of_the_maximum_length_have_no_padding_to_extend(source_max, lengths, tmp_path):
    """Free axes are extended to few sizes by repeating their end, which must be padding."""
    path = Toy(seed=3, layers=2, source_max=source_max).write(tmp_path / "toy.onnx")
    engine, plain = Engine(Apart(path)), Engine(path, "cpu", threads=1)
    results = []
    for each in (engine, plain):
        state = each.start({"src": rows_of(1, [min(length, source_max) for length in lengths])}, 2, joins=True)
        each.step(state, np.array([[5, 6], [7, 8]]))
        results.append(each.step(state, np.array([[4], [5]])).copy())
    assert engine.session.captures == 1
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=2e-6 * np.ptp(results[1]))


def test_no_graphs_beyond_the_maximum_are_captured(files, monkeypatch):
    """onnxruntime never frees them. Steps without a graph give the same logits."""
    monkeypatch.setattr(cuda_graphs, "MAX_CAPTURES", 2)
    engine, plain = Engine(Apart(files["decoder-only"])), Engine(files["decoder-only"], "cpu", threads=1)
    bound = []
    new_binding = engine.session.new_binding
    monkeypatch.setattr(engine.session, "new_binding", lambda stage: (bound.append(stage), new_binding(stage))[1])
    for rows in (1, 2, 4, 1):
        prompts = rows_of(rows, (3,) * rows)
        actual, expected = (steps(each, prompts, prompts, 5)[0] for each in (engine, plain))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.ptp(expected))
    assert engine.session.captures == 2
    assert len({graph for graph in engine.session.runs if graph is not None}) == 2
    assert len(bound) <= 2 * 4  # a prompt and a step for each batch: later steps bind nothing


@toys
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.5, "top_k": 9, "seed": 5}])
def test_generation_on_a_device_equals_generation_on_the_cpu(files, name, options):
    """Rows finish, beams move and caches grow, all in the buffers of the device."""
    inputs = rows_of(8, (4, 9, 2, 6, 3))
    actual, expected = (
        [
            (r.token_ids, r.score)
            for r in Model(engine).generate_batch(inputs, max_new_tokens=30, batch_size=3, **options)
        ]
        for engine in (Engine(Apart(files[name])), Engine(files[name], "cpu", threads=1))
    )
    assert [ids for ids, _ in actual] == [ids for ids, _ in expected]
    np.testing.assert_allclose([score for _, score in actual], [score for _, score in expected], rtol=1e-4, atol=1e-5)


@toys
def test_greedy_token_is_chosen_on_the_device_and_fed_from_there(files, name):
    """Tokens and log-probabilities equal numpy's. After the first step nothing is written to the device."""
    engine = Engine(Apart(files[name]))
    state = engine.start({"src": rows_of(1, (7, 2))} if engine.manifest.encode else None, 2)
    tokens = engine.step(state, np.array([[5, 6], [7, 8]]), np.array([2, 1])).argmax(-1)[:, None]
    tokens = engine.step(state, tokens).argmax(-1)[:, None]
    begun = engine.session.writes
    for _ in range(20):
        chosen = engine.step_one_token(state, tokens)
        assert isinstance(chosen, DeviceLogits)
        logits = chosen.copy().astype(np.float64)
        np.testing.assert_array_equal(chosen.tokens, logits.argmax(-1))
        expected = logits.max(-1) - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(chosen.logprobs, expected, rtol=0, atol=1e-5)
        tokens = chosen.tokens[:, None]
    assert engine.session.writes == begun
    other = np.array([[9], [4]])  # not the greedy choice: the tokens are written to the device
    actual = engine.step_one_token(state, other).copy()
    assert engine.session.writes == begun + 1
    plain = Engine(files[name], "cpu", threads=1)
    again = plain.start({"src": rows_of(1, (7, 2))} if engine.manifest.encode else None, 2)
    tokens = plain.step(again, np.array([[5, 6], [7, 8]]), np.array([2, 1])).argmax(-1)[:, None]
    for _ in range(21):
        tokens = plain.step(again, tokens).argmax(-1)[:, None]
    expected = plain.step(again, other)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.ptp(expected))


WIDE = Toy(seed=7, encoder=False, vocabulary=900, tokenizer=False, end=(), sharpness=6.0)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return a file with a vocabulary larger than the top logits."""
    return WIDE.write(tmp_path_factory.mktemp("wide") / "wide.onnx")


class Counted:
    """Counts the whole rows and the top logits that are read from the device."""

    def __init__(self, monkeypatch):
        self.whole = self.heads = 0
        copy, heads = DeviceLogits.copy, DeviceLogits.top_logits

        def counted_copy(chosen):
            self.whole += 1
            return copy(chosen)

        def counted_heads(chosen, temperatures):
            self.heads += 1
            return heads(chosen, temperatures)

        monkeypatch.setattr(DeviceLogits, "copy", counted_copy)
        monkeypatch.setattr(DeviceLogits, "top_logits", counted_heads)


def test_top_logits_have_the_best_tokens_and_the_normaliser_of_each_row(wide):
    engine = Engine(Apart(wide))
    state = engine.start(None, 3)
    engine.step(state, np.array([[5, 6], [7, 8], [9, 3]]))
    engine.step(state, np.array([[4], [5], [6]]))
    for temperatures in ([1.0, 0.5, 3.0], [1.0, 0.5, 3.0], [2.0, 1e-3, 40.0]):
        chosen = engine.step_one_token(state, np.array([[4], [5], [6]]))
        logits = chosen.copy()
        for row, temperature, head in zip(
            logits, temperatures, chosen.top_logits(np.float32(temperatures)), strict=True
        ):
            assert len(head.tokens) == TOP_LOGITS_COUNT
            assert not head.complete
            np.testing.assert_array_equal(head.tokens, np.sort(np.argsort(-row, kind="stable")[:TOP_LOGITS_COUNT]))
            np.testing.assert_array_equal(head.logits, row[head.tokens])
            total = np.exp((row.astype(np.float64) - row.max()) / temperature).sum()
            assert head.total == pytest.approx(total, rel=DEVICE_SUM_TOLERANCE / 10)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"top_k": 40}, "none"),
        ({"temperature": 1.6, "top_k": 12, "top_p": 0.8, "min_p": 0.02}, "none"),
        ({"temperature": 0.6, "top_p": 0.9}, "few"),
        ({"min_p": 0.05, "num_return_sequences": 3}, "few"),
        ({"temperature": 3.0, "top_p": 0.93}, "some"),
        ({"temperature": 1.2}, "all"),
        ({"top_k": 40, "repetition_penalty": 1.2}, "all"),
        ({"top_k": 40, "suppress_tokens": (5, 6)}, "all"),
        ({"top_p": 0.9, "top_logprobs": 3}, "all"),
        ({"top_k": 300}, "all"),
    ],
)
def test_samples_from_top_logits_equal_samples_from_whole_rows(wide, monkeypatch, options, rows):
    """The tokens are equal. Whole rows are read from the device only if the top logits do not suffice."""
    inputs = rows_of(8, (4, 9, 2, 6, 3), 900)

    def generated():
        results = Model(Engine(Apart(wide))).generate_batch(inputs, max_new_tokens=24, batch_size=9, seed=5, **options)
        actual = [result for first in results for result in (first, *first.alternatives)]
        return [r.token_ids for r in actual], [logprob for r in actual for logprob in r.token_logprobs]

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "draws_from_few", False)
        expected, logprobs = generated()
    counted = Counted(monkeypatch)
    actual, actual_logprobs = generated()
    assert actual == expected
    assert len(set(actual)) > 3
    np.testing.assert_allclose(actual_logprobs, logprobs, rtol=1e-5, atol=1e-5)
    # Of 23 steps one copies, when it begins to use the fixed buffers.
    min_count, max_count = {"none": (1, 1), "few": (1, 5), "some": (6, 22), "all": (23, 23)}[rows]
    assert min_count <= counted.whole <= max_count
    assert counted.heads == (0 if rows == "all" else 22)


def test_batch_of_greedy_sampled_and_ruled_rows_equals_each_row_alone(wide, monkeypatch):
    """Each row equals the row alone on the host."""
    asked = [{}, {"top_k": 30, "seed": 1}, {"repetition_penalty": 1.3}, {"temperature": 0.8, "top_p": 0.9, "seed": 2}]
    inputs = rows_of(9, (4, 9, 2, 6), 900)
    plain = Model(Engine(wide, "cpu", threads=1))
    expected = [plain.generate_batch(inputs[: i + 1], max_new_tokens=20, **options) for i, options in enumerate(asked)]
    model = Model(Engine(Apart(wide)))
    counted = Counted(monkeypatch)
    generator, tasks = model.generator, []
    scheduler = generator.new_scheduler(None, 4)
    for i, (row, options) in enumerate(zip(inputs, asked, strict=True)):
        settings = model.settings(None, {"max_new_tokens": 20, **options})
        tasks.append(generator.make_task(make_request(model.manifest, model.inputs, row, i, settings), settings))
        scheduler.submit(tasks[-1])
    while not scheduler.idle:
        scheduler.step()
    assert [generator.make_result(task).token_ids for task in tasks] == [
        list(results)[-1].token_ids for results in expected
    ]
    assert counted.whole > 15  # of the rows with rules
    assert counted.heads > 15


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("options", [{"top_k": 40}, {"temperature": 0.6, "top_p": 0.9}, {"min_p": 0.05}])
def test_samples_on_a_gpu_equal_samples_from_whole_rows(tmp_path, monkeypatch, options):
    path = replace(WIDE, attention="scatter").write(tmp_path / "wide.onnx")
    model, inputs = Model(Engine(path, "cuda")), rows_of(8, (4, 9, 2, 6, 3), 900)

    def generated():
        return [r.token_ids for r in model.generate_batch(inputs, max_new_tokens=24, seed=5, **options)]

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "draws_from_few", False)
        expected = generated()
    counted = Counted(monkeypatch)
    assert generated() == expected
    assert counted.heads > counted.whole


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("name", GPU_TOYS)
def test_captured_graphs_on_a_gpu_equal_the_cpu(tmp_path, name):
    path = GPU_TOYS[name].write(tmp_path / "model.onnx")
    engine = Engine(path, "cuda")
    assert engine.session.captures_graphs
    sources, prompts = rows_of(1, (7, 2, 5)), rows_of(2, (9, 1, 14))
    expected, _ = steps(Engine(path, "cpu"), sources, prompts, 40)
    for _ in range(2):  # captured, then replayed
        actual, calls = steps(engine, sources, prompts, 40)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-3 * np.ptp(expected))  # TF32 has 10 bits
        assert all(isinstance(call, CudaGraphCall) for call in calls)


def _after(engine, tokens):
    return engine.step(engine.start(None, 1), np.array([tokens])).copy()
