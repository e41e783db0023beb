"""Decode steps as CUDA graphs, which are launched as a whole: a step of a small batch mostly waits for kernel launches.

A graph is captured for one shape, reads and writes the buffers that it was captured with, and is never freed by
onnxruntime. A capture takes as long as many steps. So numbers of rows are rounded up (`padded_rows`), and a pool keeps
the buffers, by rows and slots. A batch borrows the buffers of its shape, if no other batch uses them, and its steps of
one token replay the graph of these buffers. The rows of the batch may be any of the buffers' rows: when a row ends, the
others stay where they are. Unused rows are computed like the others, on tokens and lengths that the device made, and
nobody reads their results. Their lengths are below the longest row's, so that they write within the buffers.

A graph reads the host inputs as they were at the capture, so the host input for the number of slots says that the
longest row fills the buffers. The real lengths of the rows are on the device. All other calls (prompts, several tokens,
extra outputs, and all beyond MAX_CAPTURES) run without a graph.

On a session that captures no graphs, such as the CPU's, the same calls run on the same buffers, uncaptured.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer_runtime.backend.sampling_graph import (
    LOGITS_INPUT,
    NEXT_LOGPROB,
    NEXT_PREFIX,
    TEMPERATURES_INPUT,
    TOP_LOGITS_COUNT,
    TOP_TOKENS,
    TOP_VALUES,
    TOTAL_WEIGHT,
    TopLogits,
)
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.format.manifest import (
    LAST_POSITION,
    POSITIONS,
    SELECTED_TOKENS,
    SLOT_INDICES,
    START_SLOT,
    TOTAL_SLOTS,
    DecodeStage,
)

MAX_CAPTURE_RUNS = 8  # upper limit of the runs with which onnxruntime captures a graph
MAX_BUFFER_SHAPES = 32  # shapes of caches that the pool keeps, and shapes of context for each
MAX_FREE_BYTES = 2**31  # caches that the pool keeps while no batch uses them
MAX_CAPTURES = 512  # of a session: their graphs stay until it is closed
TILE_ROWS = 8  # matrix units compute products for a multiple of 8 rows


def padded_rows(rows: int) -> int:
    """Return the rows of buffers for `rows` rows: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, …

    Up to 32 rows, products take the time of reading the weights for any of these numbers. Beyond, at most half of the
    rows are added, to have two numbers for each power of two.
    """
    if rows <= TILE_ROWS:
        return 1 << (rows - 1).bit_length()
    return padded_size(rows, rows.bit_length() - 2)


def padded_size(size: int, bits: int) -> int:
    """Return the smallest multiple of TILE_ROWS and of 2 ** bits that is at least `size`."""
    multiple = max(TILE_ROWS, 1 << max(bits, 0))
    return -(-size // multiple) * multiple


class BufferSet:
    """The cache buffers of one shape, and the steps that are bound to them.

    values: the OrtValues, [group of tensors][tensor].
    steps_by_context: shapes of the context tensors → step.
    """

    def __init__(self, rows: int, slots: int, values: list[list[Any]]) -> None:
        self.rows, self.slots, self.values = rows, slots, values
        self.nbytes = sum(value.tensor_size_in_bytes() for tensors in values for value in tensors)
        self.steps_by_context: dict[tuple[tuple[int, ...], ...], CapturedStep] = {}

    def step(self, key: tuple[tuple[int, ...], ...]) -> CapturedStep | None:
        """Return the step for these shapes of the context, if there is one."""
        step = self.steps_by_context.pop(key, None)
        if step is not None:
            self.steps_by_context[key] = step  # the latest last
        return step

    def add_step(self, key: tuple[tuple[int, ...], ...], step: CapturedStep) -> None:
        """Keep a step. If there are many, drop the step that was not used for the longest time."""
        if len(self.steps_by_context) == MAX_BUFFER_SHAPES:
            del self.steps_by_context[next(iter(self.steps_by_context))]
        self.steps_by_context[key] = step


def may_capture(session: Session) -> bool:
    """Return whether the session may capture another graph. onnxruntime frees none before the session."""
    return session.captures < MAX_CAPTURES


class BufferPool:
    """Cache buffers that keep their addresses. Safe to share between threads.

    Buffers that no batch uses are freed, those of the longest time first, beyond MAX_FREE_BYTES or MAX_BUFFER_SHAPES.
    The last ones are kept, however large they are: their graphs cannot be captured any number of times.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.RLock()  # reentrant: garbage collection may release buffers while the lock is held
        self._used: dict[tuple[int, int], BufferSet] = {}
        self._free: dict[tuple[int, int], BufferSet] = {}  # the latest last

    def acquire(self, rows: int, slots: int, arrays: Sequence[Array]) -> BufferSet | None:
        """Return buffers for `rows` rows and `slots` slots, filled from `arrays`.

        arrays: (tensors, row capacity, …) for each group of tensors.
        None if another batch uses the buffers of this shape, or if batches use MAX_BUFFER_SHAPES other shapes.
        """
        key = rows, slots
        with self._lock:
            if key in self._used or len(self._used) >= MAX_BUFFER_SHAPES:
                return None
            buffers = self._free.pop(key, None)
            if buffers is None:
                values = [[self.session.device_tensor(tensor[:rows]) for tensor in array] for array in arrays]
                self._used[key] = buffers = BufferSet(rows, slots, values)
                return buffers
            self._used[key] = buffers
        try:
            for array, values in zip(arrays, buffers.values, strict=True):
                for tensor, value in zip(array, values, strict=True):
                    self.session.write_tensor(value, tensor[:rows])
        except BaseException:
            self.release(buffers)
            raise
        return buffers

    def release(self, buffers: BufferSet) -> None:
        """Return the buffers to the pool when the batch ends or outgrows them."""
        key = buffers.rows, buffers.slots
        with self._lock:
            if self._used.get(key) is not buffers:
                return  # the pool was closed
            del self._used[key]
            self._free[key] = buffers
            while len(self._free) > 1 and (
                sum(free.nbytes for free in list(self._free.values())) > MAX_FREE_BYTES
                or len(self._free) > MAX_BUFFER_SHAPES
            ):
                self._free.pop(next(iter(self._free)))

    def close(self) -> None:
        """Free the buffers, those of running batches when these end."""
        with self._lock:
            self._used, self._free = {}, {}


class CapturedStep:
    """A decode step of one token a row, with all inputs and outputs bound to fixed buffers.

    A run copies the inputs that have changed to the device. A step that continues from the likeliest tokens copies
    nothing, because the step before has written its inputs. Such a step costs the graph and two copies of a few bytes a
    row from the device. Any other step also copies these bytes to the device and the logits from it.

    host_inputs: copies of the changing inputs on the host, by name, for all rows of the buffers.
    token_input: the name of the input that holds the tokens.
    outputs: the other outputs, by name.
    """

    _graph_ids = itertools.count(1)

    def __init__(
        self,
        session: Session,
        decode: DecodeStage,
        buffers: BufferSet,
        caches: Sequence[Any],
        contexts: Mapping[str, Array],
        others: Mapping[str, Any],
    ) -> None:
        """Bind the step.

        caches: the OrtValues of the caches, in the manifest's order.
        contexts: the arrays of the context, by input.
        others: OrtValues of inputs that never change, by input.
        """
        rows = buffers.rows
        self.session, self.graph_id, self.token_input = session, next(self._graph_ids), decode.step.name
        changing = {
            self.token_input: np.zeros((rows, 1), decode.step.dtype), POSITIONS: np.zeros((rows, 1), np.int64),
            LAST_POSITION: np.zeros(rows, np.int32), START_SLOT: np.zeros(rows, np.int64),
        }  # fmt: skip
        graph_inputs = {self.token_input, *decode.controls}
        self.host_inputs: dict[str, Array] = {n: a for n, a in changing.items() if n in graph_inputs}
        self.inputs = {name: session.device_tensor(array) for name, array in self.host_inputs.items()}
        self.contexts = {name: session.device_tensor(array) for name, array in contexts.items()}
        self.logits = session.device_tensor(np.zeros((rows, 1, int(decode.logits.shape[-1])), np.float32))
        self.outputs = {NEXT_PREFIX + name: value for name, value in self.inputs.items()}
        self.outputs[NEXT_LOGPROB] = session.device_tensor(np.zeros((rows, 1), np.float32))
        self.slots = buffers.slots
        self._thread_state = threading.local()  # onnxruntime captures a graph for each thread
        self._top_logits_finder: TopLogitsFinder | None = None
        self._rows: Ints | None = None  # of the latest run
        bound = {**others, **self.inputs, **self.contexts}
        bound |= dict(zip((cache.past for cache in decode.caches), caches, strict=True))
        bound[TOTAL_SLOTS] = session.host_tensor(np.array(buffers.slots, np.int32))
        bound[SLOT_INDICES] = session.device_tensor(np.arange(buffers.slots))
        bound[SELECTED_TOKENS] = session.device_tensor(np.zeros((rows, 1), np.int64))
        self._bound_inputs = {name: bound[name] for name in session.input_shapes("decode")}
        self.binding = session.new_binding("decode")
        for name, value in self._bound_inputs.items():
            session.bind_input(self.binding, name, value)
        for cache, value in zip(decode.caches, caches, strict=True):
            session.bind_output(self.binding, cache.present, value)
        for name, value in {decode.logits.name: self.logits, **self.outputs}.items():
            self.binding.native.bind_ortvalue_output(name, value)

    def run(self, tokens: Array, lengths: Array, rows: Ints) -> DeviceLogits:
        """Run the step.

        tokens: (rows, 1).
        lengths: (rows,), the cached tokens of each row before the step.
        rows: (rows,), the row of the buffers of each row, all different. The caller never changes the array.
        """
        self._write_inputs(tokens, lengths, rows)
        captured = self.is_captured
        if not captured:
            self.session.captures += 1
        self.session.run(self.binding, "decode", self.graph_id)
        if not captured:  # the capture ran the stage several times, each time on the inputs of the run before
            self._thread_state.captured = True
            for name, array in self.host_inputs.items():
                self.session.write_tensor(self.inputs[name], array)
            self.session.run(self.binding, "decode", self.graph_id)
        for name, array in self.host_inputs.items():
            if name == self.token_input:
                array[...] = self.inputs[name].numpy()
            else:
                array += 1
        return DeviceLogits(self, rows)

    def top_logits(self, temperatures: F32) -> list[TopLogits]:
        """Return the top logits of each row of the buffers, for sampling. temperatures: one for each."""
        if self._top_logits_finder is None:
            self._top_logits_finder = TopLogitsFinder(self.session, self.logits)
        return self._top_logits_finder(temperatures)

    def ready(self, max_row_length: int) -> bool:
        """Return whether this thread may run the step. The runs of a capture write slots behind the longest row."""
        return self.is_captured or (may_capture(self.session) and max_row_length + MAX_CAPTURE_RUNS <= self.slots)

    @property
    def is_captured(self) -> bool:
        """Whether this thread has captured the graph."""
        return hasattr(self._thread_state, "captured")

    def _write_inputs(self, tokens: Array, lengths: Array, rows: Ints) -> None:
        """Write the inputs of `run` that the device does not have.

        Unused rows then continue from no cached tokens, so that no row that is used is shorter.
        """
        moved = self._rows is not rows
        self._rows = rows
        for name, array in self.host_inputs.items():
            value = tokens if name == self.token_input else lengths[:, None] if name == POSITIONS else lengths
            if moved or not np.array_equal(array[rows], value):
                array[...] = tokens[0] if name == self.token_input else 0  # a valid token for unused rows
                array[rows] = value
                self.session.write_tensor(self.inputs[name], array)


class DeviceLogits:
    """The logits of a step, (rows, vocabulary), on the device, and the likeliest tokens, on the host.

    `len` and indexing work as for the array of logits, which is copied from the device only then. The next step
    overwrites the logits.

    tokens: (rows,), the likeliest token of each row.
    logprobs: (rows,), their log-probabilities.
    """

    def __init__(self, step: CapturedStep, rows: Ints) -> None:
        """rows: the row of the step's buffers of each row."""
        self._step, self._rows = step, rows
        self.tokens: Array = step.host_inputs[step.token_input][rows, 0]
        self.logprobs: Array = step.outputs[NEXT_LOGPROB].numpy()[rows, 0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Array) -> Array:
        return self.copy()[index]

    def copy(self) -> Array:
        """Copy all logits to the host, (rows, vocabulary)."""
        logits: Array = self._step.logits.numpy()[:, 0]
        is_whole = len(self._rows) == len(logits) and bool((self._rows == np.arange(len(logits))).all())
        return logits if is_whole else logits[self._rows]

    def top_logits(self, temperatures: F32) -> list[TopLogits]:
        """Return the top logits of each row. temperatures: (rows,), divisors of the logits in the sum of weights."""
        spread = np.ones(self._step.logits.shape()[0], np.float32)
        spread[self._rows] = temperatures
        top_logits = self._step.top_logits(spread)
        return [top_logits[row] for row in self._rows.tolist()]


class TopLogitsFinder:
    """Finds the top logits of each row in a fixed buffer of logits. Only one thread may run it at a time.

    Cost: three passes over the logits on the device, and a copy of TOP_LOGITS_COUNT tokens and logits a row to the
    host.
    """

    def __init__(self, session: Session, logits: Any) -> None:
        """Bind the model. logits: (rows, 1, vocabulary), on the session's device."""
        rows, _, vocabulary = logits.shape()
        self._session, self._complete = session, vocabulary <= TOP_LOGITS_COUNT
        count = min(TOP_LOGITS_COUNT, vocabulary)
        self._host_temperatures = np.ones((rows, 1, 1), np.float32)
        self._temperatures = session.device_tensor(self._host_temperatures)
        empty = {
            TOP_VALUES: np.zeros((rows, 1, count), np.float32),
            TOP_TOKENS: np.zeros((rows, 1, count), np.int64),
            TOTAL_WEIGHT: np.zeros((rows, 1, 1), np.float32),
        }
        self._outputs = {name: session.device_tensor(array) for name, array in empty.items()}
        self._binding = session.new_binding("top_logits")
        self._binding.native.bind_ortvalue_input(LOGITS_INPUT, logits)
        self._binding.native.bind_ortvalue_input(TEMPERATURES_INPUT, self._temperatures)
        for name, value in self._outputs.items():
            self._binding.native.bind_ortvalue_output(name, value)

    def __call__(self, temperatures: F32) -> list[TopLogits]:
        """Return the top logits of each row. temperatures: (rows,), above 0."""
        if not np.array_equal(self._host_temperatures[:, 0, 0], temperatures):
            self._host_temperatures[:, 0, 0] = temperatures
            self._session.write_tensor(self._temperatures, self._host_temperatures)
        self._session.run(self._binding, "top_logits")
        values, tokens, weight = (self._outputs[name].numpy()[:, 0] for name in (TOP_VALUES, TOP_TOKENS, TOTAL_WEIGHT))
        order = tokens.argsort(-1)
        values, tokens = (np.take_along_axis(array, order, -1) for array in (values, tokens))
        return [
            TopLogits(row_tokens, row_logits, total, self._complete)
            for row_tokens, row_logits, total in zip(tokens, values, weight[:, 0].tolist(), strict=True)
        ]
