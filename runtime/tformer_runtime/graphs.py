"""Decode steps as CUDA graphs: launched as a whole, where a step of a small batch is mostly waiting for launches.

A graph is captured for one shape, reads and writes the very buffers that it was captured with, and is never given back
by onnxruntime. So the buffers are kept, by rows and slots: a batch borrows those of its shape, if no other batch has
them, and its steps of one token replay the graph that belongs to them. What a stage reads on the host is as it was when
it was captured, so that the longest row is said to fill the buffers; what each row really has is on the device.
Everything else (prompts, several tokens, extras, shapes beyond MOST) runs as it would without this.

On a session that captures nothing, such as the CPU's, the same calls run on the same buffers, uncaptured.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.device import LOGPROB, NEXT, Chosen, Heads
from tformer_runtime.manifest import LAST, POSITIONS, SELECT, SLOTS, START, TOTAL

if TYPE_CHECKING:
    from tformer_runtime.manifest import Decode
    from tformer_runtime.sampling import Floats, Head
    from tformer_runtime.session import Array, Session
    from tformer_runtime.state import State

CAPTURING = 8  # runs at most that onnxruntime makes of a first one
MOST = 32  # shapes of caches that are kept, and shapes of context for each


class Held:
    """The cache buffers of one shape, [slab][tensor], and the steps that were bound to them, by their context."""

    def __init__(self, rows: int, slots: int, values: list[list[Any]]) -> None:
        self.rows, self.slots, self.values = rows, slots, values
        self.steps: dict[tuple[tuple[int, ...], ...], Step] = {}


class Pool:
    """Cache buffers that stay where they are. Safe to share between threads."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.RLock()  # a cache that is collected in here gives its buffers back
        self._every: dict[tuple[int, int], Held] = {}
        self._free: set[tuple[int, int]] = set()

    def take(self, rows: int, slots: int, arrays: Sequence[Array]) -> Held | None:
        """Buffers for so many rows and slots, with the numbers of `arrays`, (tensors, room, …) each; None if another
        batch has them, or too many others are kept."""
        key = rows, slots
        with self._lock:
            held = self._every.get(key)
            if held is None and len(self._every) < MOST:
                values = [[self.session.tensor(tensor[:rows]) for tensor in array] for array in arrays]
                self._every[key] = held = Held(rows, slots, values)
                return held
            if held is None or key not in self._free:
                return None
            self._free.remove(key)
        for array, values in zip(arrays, held.values, strict=True):
            for tensor, value in zip(array, values, strict=True):
                self.session.write(value, tensor[:rows])
        return held

    def give(self, held: Held) -> None:
        """The batch is over, or has grown out of them."""
        with self._lock:
            self._free.add((held.rows, held.slots))


class Step:
    """One token for each row, bound for good.

    A run writes what has changed into the device's buffers; a step that goes on from the likeliest tokens changes
    nothing, for they are written there by the step before. Cost of such a step beside the graph's own: a copy of some
    bytes a row from the device, twice. Of any other: as many to it, and one of the logits.

    told: what the inputs that change hold, on the host. token: which of them the tokens are. outputs: what else is
    given, by name.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        session: Session,
        decode: Decode,
        held: Held,
        caches: Sequence[Any],
        contexts: Mapping[str, Array],
        others: Mapping[str, Any],
    ) -> None:
        """caches: the buffers, in the manifest's order. others: what else the stage reads, and is never changed."""
        rows = held.rows
        self.session, self.number, self.token = session, next(self._numbers), decode.step.name
        told = {
            self.token: np.zeros((rows, 1), decode.step.dtype), POSITIONS: np.zeros((rows, 1), np.int64),
            LAST: np.zeros(rows, np.int32), START: np.zeros(rows, np.int64),
        }  # fmt: skip
        self.told: dict[str, Array] = {n: a for n, a in told.items() if n in {self.token, *decode.controls}}
        self.inputs = {name: session.tensor(array) for name, array in self.told.items()}
        self.contexts = {name: session.tensor(array) for name, array in contexts.items()}
        self.logits = session.tensor(np.zeros((rows, 1, int(decode.logits.shape[-1])), np.float32))
        self.outputs = {NEXT + name: value for name, value in self.inputs.items()}
        self.outputs[LOGPROB] = session.tensor(np.zeros((rows, 1), np.float32))
        self.slots = held.slots
        self._thread = threading.local()  # onnxruntime has the graphs of each thread apart
        self._heads: Heads | None = None
        bound = {**others, **self.inputs, **self.contexts}
        bound |= dict(zip((cache.past for cache in decode.caches), caches, strict=True))
        bound[TOTAL] = session.host_tensor(np.array(held.slots, np.int32))
        bound[SLOTS] = session.tensor(np.arange(held.slots))
        bound[SELECT] = session.tensor(np.zeros((rows, 1), np.int64))
        self._bound = {name: bound[name] for name in session.inputs("decode")}
        self.binding = session.binding("decode")
        for name, value in self._bound.items():
            session.bind_input(self.binding, name, value)
        for cache, value in zip(decode.caches, caches, strict=True):
            session.bind_output(self.binding, cache.present, value)
        for name, value in {decode.logits.name: self.logits, **self.outputs}.items():
            self.binding.bind_ortvalue_output(name, value)

    def run(self, tokens: Array, lengths: Array) -> Chosen:
        """tokens: (rows, 1), lengths: (rows,) what each row has before."""
        self._tell(tokens, lengths)
        self.session.run(self.binding, "decode", self.number)
        if not self._captured:  # the stage has run several times, each of which went on from the one before
            self._thread.captured = True
            for name, array in self.told.items():
                self.session.write(self.inputs[name], array)
            self.session.run(self.binding, "decode", self.number)
        for name, array in self.told.items():
            if name == self.token:
                array[...] = self.inputs[name].numpy()
            else:
                array += 1
        return Chosen(self)

    def heads(self, temperatures: Floats) -> list[Head]:
        """The head of each row of the latest logits, for sampling."""
        if self._heads is None:
            self._heads = Heads(self.session, self.logits)
        return self._heads(temperatures)

    def ready(self, longest: int) -> bool:
        """Whether this thread may run it, with so many tokens in the longest row: capturing writes behind these."""
        return self._captured or longest + CAPTURING <= self.slots

    @property
    def _captured(self) -> bool:
        return hasattr(self._thread, "captured")

    def _tell(self, tokens: Array, lengths: Array) -> None:
        for name, array in self.told.items():
            wanted = tokens if name == self.token else lengths[:, None] if name == POSITIONS else lengths
            if not np.array_equal(array, wanted):
                array[...] = wanted
                self.session.write(self.inputs[name], array)


class Replayed:
    """A state's steps of one token, through a Step that it has borrowed with its buffers. As `call.Call`."""

    new, want = 1, "last"

    def __init__(self, step: Step) -> None:
        self.step = step

    def run(self, state: State, tokens: Array, counts: Array | None, total: int) -> Array:
        return self.choose(state, tokens, total).copy()

    def choose(self, state: State, tokens: Array, total: int) -> Chosen:
        """The logits stay where they are."""
        chosen = self.step.run(tokens, state.lengths)
        state.cache.wrote(state.lengths, 1)
        state.lengths += 1
        state.longest = total
        return chosen
