"""States join, split, are copied and rewound. Their logits stay exact, and their bytes are counted exactly."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.toy_models import Toy

from tformer_runtime import InputError, MemoryBudgetError, UnsupportedCallError
from tformer_runtime.engine.encoder_context import _resize_axes
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.kv_cache import FIRST_BUFFER_SLOTS, MAX_BUFFER_RATIO, KVCache, buffer_slots, cache_bytes
from tformer_runtime.engine.memory_budget import MemoryBudget

KINDS = {
    "gqa": Toy(layers=2),
    "gqa-alone": Toy(encoder=False, layers=2),
    "scatter": Toy(attention="scatter"),
    "scatter-alone": Toy(attention="scatter", encoder=False),
    "pair": Toy(attention="scatter-pair"),
    "pair-alone": Toy(attention="scatter-pair", encoder=False, layers=2, select=False),
    "stride": Toy(stride=3),
    "stride-unlimited": Toy(stride=4, source_max=None),
    "shared": Toy(shares=True, layers=2),
    "shared-scatter": Toy(shares=True, attention="scatter", stride=3),
    "carries": Toy(carries=True, layers=2),
    "carries-alone": Toy(carries=True, encoder=False, attention="scatter"),
}
CLOSE = dict(rtol=0, atol=5e-5)  # float32 sums in another order, of logits of about ten


@pytest.fixture(scope="module", params=list(KINDS))
def toy_and_engine(request, tmp_path_factory):
    toy = KINDS[request.param]
    path = toy.write(tmp_path_factory.mktemp("states") / "toy.onnx")
    return toy, Engine(path, device="cpu", threads=1)


class Row:
    """The ids that a row of a state has read."""

    def __init__(self, source, tokens=()):
        self.source, self.tokens = source, list(tokens)

    def copy(self):
        return Row(self.source, self.tokens)


class Group:
    """A state and its rows."""

    def __init__(self, state, rows):
        self.state, self.rows = state, rows


class World:
    """States of one budget and all operations on them, each checked against the full computation."""

    def __init__(self, toy, engine, limit=None):
        self.toy, self.engine, self.budget = toy, engine, MemoryBudget(limit)
        self.share = self.budget.new_share(blocking=False)
        self.groups: list[Group] = []

    def start(self, sources, max_tokens=None):
        """sources: a list of ids for each row. max_tokens: how many tokens each will come to."""
        requests = {"src": [np.array(s) for s in sources]} if self.toy.encoder else None
        state = self.engine.start(requests, len(sources), budget=self.share, joins=True, max_tokens=max_tokens)
        self.groups.append(Group(state, [Row(s) for s in sources]))
        return self.groups[-1]

    def feed(self, group, news, logit_positions="last"):
        """news: the tokens that each row reads."""
        counts = np.array([len(new) for new in news])
        tokens = np.zeros((len(news), counts.max()), np.int64)
        for row, new in enumerate(news):
            tokens[row, : len(new)] = new
        logits = self.engine.step(group.state, tokens, counts, logit_positions)
        for i, (row, new) in enumerate(zip(group.rows, news, strict=True)):
            row.tokens += new
            expected = self.toy.logits(np.array(row.tokens), np.array(row.source) if self.toy.encoder else None)
            got = logits[i, : len(new)] if logit_positions == "all" else logits[i : i + 1]
            np.testing.assert_allclose(got, expected[-len(got) :], **CLOSE)
        self.check(group)

    def reorder(self, group, order):
        self.engine.reorder(group.state, np.array(order))
        group.rows = [group.rows[i].copy() for i in order]
        self.check(group)
        self.fits(group.state)

    def join(self, group, other):
        self.engine.join(group.state, other.state)
        # The next step would arrange the rows. Done here, only the need of the step itself can be refused.
        _ = group.state.encoder_context.values
        group.rows += other.rows
        self.groups.remove(other)
        assert other.state.nbytes == 0
        self.check(group)
        self.fits(group.state)

    def copy(self, group, order):
        state = self.engine.copy(group.state, np.array(order), self.share)
        self.groups.append(Group(state, [group.rows[i].copy() for i in order]))
        self.check(self.groups[-1])
        self.fits(state)
        return self.groups[-1]

    def rewind(self, group, length):
        before = group.state.lengths.copy()
        group.state.rewind(length)
        left = group.state.lengths.tolist()
        if not self.toy.carries or (before <= length).all():  # else rows may lose more, and read it again
            assert left == np.minimum(before, length).tolist()
        assert all(count <= length for count in left)
        lost = [row.tokens[count:length] for row, count in zip(group.rows, left, strict=True)]
        for row, count in zip(group.rows, left, strict=True):
            del row.tokens[count:]
        self.check(group)
        if all(lost):
            self.feed(group, lost)

    def check(self, group):
        lengths = [len(row.tokens) for row in group.rows]
        assert group.state.lengths.tolist() == lengths
        assert group.state.max_row_length == max(lengths)

    def fits(self, state):
        """Check that buffers have at most MAX_BUFFER_RATIO times the needed size after rows join or leave."""
        if state.cache.slot_capacity:
            assert state.rows <= state.cache.row_capacity <= state.row_capacity <= MAX_BUFFER_RATIO * state.rows
        max_slots = MAX_BUFFER_RATIO * max(state.max_row_length, FIRST_BUFFER_SLOTS)
        assert state.max_row_length <= state.cache.slot_capacity <= max_slots

    def count(self):
        """Check that the counted bytes equal the allocated bytes."""
        for group in self.groups:
            assert group.state.nbytes == allocated(group.state)
        assert self.budget.used_bytes == self.share.used_bytes == sum(group.state.nbytes for group in self.groups)
        assert self.budget.used_bytes <= self.budget.peak_bytes

    @contextmanager
    def full(self):
        """Leave no free memory for a while. A refused operation must change nothing."""
        before = self.snapshot()
        self.share.release_reservation()  # the share may hold no more than it holds now
        self.budget.limit = self.budget.used_bytes
        try:
            yield
        except MemoryBudgetError:
            assert self.snapshot() == before
            raise
        finally:
            self.budget.limit = None

    def snapshot(self):
        return self.budget.used_bytes, [
            (g.state.nbytes, allocated(g.state), g.state.rows, g.state.lengths.tolist()) for g in self.groups
        ]


def allocated(state):
    """Return the bytes of the arrays that a state has allocated."""
    return sum(array.nbytes for array in [*state.cache.buffers, *state.encoder_context.buffers])


class Plan(RuleBasedStateMachine):
    """Random operations. Those that allocate are tried without free memory first."""

    def __init__(self, toy, engine):
        super().__init__()
        self.world = World(toy, engine)

    def done(self, operation, *arguments):
        try:
            with self.world.full():
                operation(*arguments)
                return
        except MemoryBudgetError:
            operation(*arguments)

    def ids(self, data, min_tokens, max_tokens):
        return data.draw(st.lists(st.integers(3, 28), min_size=min_tokens, max_size=max_tokens))

    def group(self, data):
        return data.draw(st.sampled_from(self.world.groups))

    @precondition(lambda self: len(self.world.groups) < 4)
    @rule(data=st.data())
    def start(self, data):
        sources = [self.ids(data, 1, 9) for _ in range(data.draw(st.integers(1, 3)))]
        self.done(self.world.start, sources)

    @precondition(lambda self: self.world.groups)
    @rule(data=st.data())
    def read(self, data):
        group = self.group(data)
        room = self.world.toy.max_length - max(len(row.tokens) for row in group.rows)
        if room:
            news = [self.ids(data, 1, min(room, 6)) for _ in group.rows]
            self.done(self.world.feed, group, news, data.draw(st.sampled_from(["last", "all"])))

    @precondition(lambda self: self.world.groups)
    @rule(data=st.data(), steps=st.integers(1, 12))
    def steps(self, data, steps):
        group = self.group(data)
        room = self.world.toy.max_length - max(len(row.tokens) for row in group.rows)
        for _ in range(min(room, steps)):
            self.done(self.world.feed, group, [self.ids(data, 1, 1) for _ in group.rows])

    @precondition(lambda self: self.world.groups)
    @rule(data=st.data())
    def move(self, data):
        group = self.group(data)
        orders = st.lists(st.integers(0, len(group.rows) - 1), min_size=1, max_size=8)
        self.world.reorder(group, data.draw(orders))

    @precondition(lambda self: len(self.world.groups) > 1)
    @rule(data=st.data())
    def unite(self, data):
        group, other = data.draw(st.permutations(self.world.groups))[:2]
        self.world.join(group, other)

    @precondition(lambda self: 0 < len(self.world.groups) < 4)
    @rule(data=st.data())
    def duplicate(self, data):
        group = self.group(data)
        orders = st.lists(st.integers(0, len(group.rows) - 1), min_size=1, max_size=3)
        self.done(self.world.copy, group, data.draw(orders))

    @precondition(lambda self: self.world.groups)
    @rule(data=st.data(), length=st.integers(0, 64))
    def forget(self, data, length):
        self.world.rewind(self.group(data), length)

    @precondition(lambda self: self.world.groups)
    @rule(data=st.data())
    def leave(self, data):
        group = self.group(data)
        group.state.release()
        assert group.state.nbytes == allocated(group.state) == 0
        self.world.groups.remove(group)

    @invariant()
    def counted(self):
        self.world.count()

    def teardown(self):
        for group in self.world.groups:
            group.state.release()
        assert self.world.budget.used_bytes == 0


def test_random_operations_keep_states_exact_and_counted(toy_and_engine):
    once = (Phase.generate,)  # hypothesis takes minutes to shrink a plan
    plan = settings(max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, phases=once)
    run_state_machine_as_test(lambda: Plan(*toy_and_engine), settings=plan)


def test_unreferenced_states_release_their_bytes(toy_and_engine):
    world = World(*toy_and_engine)
    group = world.start([[5, 6], [7]])
    world.feed(group, [[4], [5]])
    world.copy(group, [0])
    gc.disable()
    try:
        held = world.groups.pop().state.nbytes
        assert world.budget.used_bytes == group.state.nbytes > held > 0
        world.groups.clear()
        del group
        assert world.budget.used_bytes == 0
    finally:
        gc.enable()


def test_states_of_different_lengths_join_and_split(toy_and_engine):
    world = World(*toy_and_engine)
    first = world.start([[5, 6, 7, 8], [9]])
    world.feed(first, [[4, 5, 6], [7]])
    second = world.start([list(range(3, 12))])
    world.feed(second, [list(range(3, 25))])
    world.join(first, second)
    for _ in range(12):
        world.feed(first, [[4], [5], [6]])
    third = world.start([[11, 12]])
    world.feed(third, [[13]])
    world.join(first, third)
    world.feed(first, [[4, 5], [6], [7, 8, 9], [10]], "all")
    world.reorder(first, [3, 0])
    world.feed(first, [[4], [5]])
    world.count()


def test_empty_state_joins_and_is_joined(toy_and_engine):
    world = World(*toy_and_engine)
    one, two, three = (world.start([[5, 6], [7]][:n]) for n in (1, 2, 1))
    world.engine.join(one.state, two.state)
    world.groups.remove(two)
    one.rows += two.rows
    world.feed(one, [[4], [5, 6], [7]])
    world.join(one, three)
    world.reorder(one, [3, 0])
    world.feed(one, [[8, 9], [10]])
    world.count()


def test_copy_is_independent_of_its_source(toy_and_engine):
    world = World(*toy_and_engine)
    group = world.start([[5, 6, 7], [8]])
    world.feed(group, [[4, 5, 6], [7]])
    copy = world.copy(group, [1, 1, 0])
    world.feed(group, [[9], [10]])
    world.feed(copy, [[11], [12], [13]])
    world.feed(group, [[14], [15]])
    group.state.release()
    world.groups.remove(group)
    world.feed(copy, [[14], [15], [16]])
    world.count()


def test_copy_of_a_short_row_reaches_the_maximum_length(toy_and_engine):
    """The length of a longer row in the same state does not limit the copy."""
    world = World(*toy_and_engine)
    group = world.start([[5], [6]])
    world.feed(group, [[4] * 60, [7]])
    copy = world.copy(group, [1])
    assert copy.state.nbytes < group.state.nbytes / 2
    world.feed(copy, [[8] * 40])
    world.feed(copy, [[9] * 23], "all")
    with pytest.raises(InputError, match="65 tokens are more than the 64"):
        world.engine.step(copy.state, np.array([[5]]))


def test_rewound_state_equals_a_fresh_one(toy_and_engine):
    world = World(*toy_and_engine)
    group = world.start([[5, 6], [7, 8, 9]])
    world.feed(group, [list(range(3, 28)), [4, 5]])
    world.rewind(group, 3)
    world.feed(group, [[20], [21]])
    world.rewind(group, 0)
    world.feed(group, [[22, 23], [24]], "all")
    world.rewind(group, 64)
    world.feed(group, [[25], [26]])


def test_buffers_grow_and_shrink_with_rows_and_tokens(toy_and_engine):
    world = World(*toy_and_engine)
    group = world.start([[5, 6, 7]])
    world.feed(group, [[4] * 5])
    small = group.state.nbytes
    world.reorder(group, [0] * 12)
    world.feed(group, [[5]] * 12)
    world.reorder(group, [0, 1, 2])
    assert group.state.cache.row_capacity == 12  # within MAX_BUFFER_RATIO
    for _ in range(40):
        world.feed(group, [[6]] * 3)
    assert group.state.cache.row_capacity == 12
    world.reorder(group, [0])
    assert group.state.cache.row_capacity == 1
    world.rewind(group, 5)
    world.feed(group, [[7]])
    assert group.state.nbytes <= 2 * small
    world.count()


@pytest.mark.parametrize("used", ["step", "reorder", "join", "joined", "copy"])
def test_released_state_is_refused(toy_and_engine, used):
    world = World(*toy_and_engine)
    gone, there = world.start([[5]]), world.start([[6]])
    for group in (gone, there):
        world.feed(group, [[4, 5]])
    gone.state.release()
    gone.state.release()
    assert world.budget.used_bytes == there.state.nbytes
    calls = {
        "step": lambda: world.engine.step(gone.state, np.array([[4]])),
        "reorder": lambda: world.engine.reorder(gone.state, np.array([0, 0])),
        "join": lambda: world.engine.join(gone.state, there.state),
        "joined": lambda: world.engine.join(there.state, gone.state),
        "copy": lambda: world.engine.copy(gone.state, np.array([0])),
    }
    with pytest.raises(UnsupportedCallError, match="has been released and cannot be continued: read its inputs again"):
        calls[used]()
    world.feed(there, [[7]])
    assert world.budget.used_bytes == there.state.nbytes


def test_estimated_bytes_are_an_upper_limit_of_allocated_bytes(toy_and_engine):
    """The estimate is made before anything is computed."""
    world = World(*toy_and_engine)
    toy, engine = toy_and_engine
    for length, slots, rows in ((1, 1, 1), (7, 33, 2), (30, 64, 3)):
        group = world.start([[5] * length], max_tokens=[slots])
        world.feed(group, [[4]])
        world.reorder(group, [0] * rows)
        for _ in range(slots - 1):
            world.feed(group, [[6]] * rows)
        sizes = {"source": length + engine.join_padding} if toy.encoder else {}
        need = engine.memory_estimate.bytes_needed(slots, sizes, rows)
        assert group.state.nbytes <= need
        if toy.stride == 1 and not toy.shares:  # rows that share a context may later need one each
            assert need <= group.state.nbytes * 1.1
    assert engine.join_padding == 1 or toy.stride > 1


def test_padding_of_a_context_axis_shorter_than_the_source(tmp_path):
    for stride, min_tokens in ((1, 1), (2, 2), (5, 5)):
        engine = Engine(Toy(stride=stride, source_max=200).write(tmp_path / "toy.onnx"), device="cpu", threads=1)
        assert min_tokens <= engine.join_padding <= 4 * stride
        for length in range(1, 12):
            request = {"src": [np.full(length, 5)]}
            state = engine.start(request, 1, joins=True)
            assert state.context[2][0, 0, 0, -1] == np.float32(-1e9)  # masked
            assert state.context[2][0, 0, 0, (length - 1) // stride] == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "at_first", "in_the_end"),
    [
        (40, 44, 44, 44),  # with room for the known maximum
        (40, 160, 160, 160),
        (40, 300, 64, 300),  # the known maximum is far beyond the present length
        (60, 300, 128, 300),  # 64 slots would soon be too few
        (40, None, 64, 128),
    ],
)
def test_buffers_have_room_for_the_known_maximum_of_tokens(tmp_path, prompt, max_tokens, at_first, in_the_end):
    engine = Engine(Toy(max_length=512).write(tmp_path / "toy.onnx"), device="cpu", threads=1)
    state = engine.start({"src": [np.full(3, 5)] * 2}, 2, max_tokens=max_tokens and [max_tokens, 1])
    engine.step(state, np.ones((2, prompt), np.int64))
    assert state.cache.slot_capacity == at_first
    for _ in range((max_tokens or 100) - prompt):
        engine.step(state, np.ones((2, 1), np.int64))
    assert state.cache.slot_capacity == in_the_end
    assert state.cache.nbytes == cache_bytes(engine.decode.caches, 2, in_the_end)
    engine.step(state, np.ones((2, 1), np.int64))  # beyond the stated maximum
    assert state.cache.slot_capacity == buffer_slots(in_the_end + (max_tokens is not None), 512)


def test_buffers_fit_the_remaining_rows(tmp_path):
    engine = Engine(Toy(max_length=512).write(tmp_path / "toy.onnx"), device="cpu", threads=1)
    request = {"src": [np.full(3, 5)]}
    state = engine.start(request, 1, joins=True, max_tokens=[300])
    engine.step(state, np.ones((1, 40), np.int64))
    assert state.cache.slot_capacity == 64
    engine.join(state, engine.start(request, 1, joins=True, max_tokens=[90]))
    engine.reorder(state, np.array([1]))
    engine.step(state, np.ones((1, 70), np.int64))
    assert state.cache.slot_capacity == 90
    other = engine.copy(state, np.array([0, 0]), max_tokens=[80, 100])
    engine.step(other, np.ones((2, 1), np.int64))
    assert other.cache.slot_capacity == 100


class Device:
    """A session on a device of its own, whose tensors are copies."""

    device, run_slots = "cuda", None
    pool = None

    class Value:
        def __init__(self, array):
            self.array = array.copy()

        def numpy(self):
            return self.array.copy()

    def device_tensor(self, array):
        return self.Value(array)


@pytest.mark.parametrize("attention", ["gqa", "scatter-pair"])
def test_buffers_on_another_device_move_their_present_values(attention):
    """Values that the device has changed are moved."""
    specs = Toy(attention=attention, layers=2).manifest().decode.caches
    caches = [KVCache(Device(), specs, 64, rows) for rows in (2, 1)]

    def step(cache, slot):
        """Write a number of each row into its next slot, as a graph does."""
        rng = np.random.default_rng(slot)
        for past, present in zip(cache.past(cache.side), cache.present(cache.side), strict=True):
            new = past.array.copy()
            new[:, :, slot] = rng.standard_normal(new[:, :, slot].shape)
            present.array = new
        cache.side = (cache.side + 1) % cache.num_sides

    def content(cache, used):
        return np.stack([value.array[:, :, :used] for value in cache.past(cache.side)])

    for cache in caches:
        cache.reserve(3, 0)
        for slot in range(3):
            step(cache, slot)
    first, second = (content(cache, 3) for cache in caches)
    copied = caches[0].copy(np.array([1]), 3)
    np.testing.assert_array_equal(content(copied, 3), first[:, [1]])
    step(caches[0], 3)
    first = content(caches[0], 4)
    again = caches[0].copy(np.array([0, 1]), 4)
    np.testing.assert_array_equal(content(again, 4), first)
    caches[0].reserve(40, 4)
    np.testing.assert_array_equal(content(caches[0], 4), first)
    caches[0].reorder(np.array([1, 1, 0]), np.full(2, 4))
    np.testing.assert_array_equal(content(caches[0], 4), first[:, [1, 1, 0]])
    caches[0].join(caches[1], 4, 3)
    np.testing.assert_array_equal(content(caches[0], 4)[:, :3], first[:, [1, 1, 0]])
    np.testing.assert_array_equal(content(caches[0], 3)[:, 3:], second)
    assert caches[1].nbytes == 0


def test_context_is_cut_and_extended_as_numpy_pads():
    random = np.random.default_rng(0)
    for _ in range(300):
        sizes, wanted = random.integers(1, 5, 3), random.integers(1, 7, 3)
        array = random.standard_normal(sizes)
        cut = array[:, : wanted[1], : wanted[2]]
        padding = [(0, 0), (0, wanted[1] - cut.shape[1]), (0, wanted[2] - cut.shape[2])]
        expected = np.pad(cut, padding, mode="edge")
        np.testing.assert_array_equal(_resize_axes(array, 0, wanted.tolist()), expected)
