"""A run of the decode stage: what is bound for it, once for each of its shapes, and what is written before each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.engine.shortlist import Spread
from tformer_runtime.engine.state import State, Want
from tformer_runtime.engine.static_inputs import Feeds
from tformer_runtime.format.manifest import (
    COLUMNS,
    GATHER,
    GATHERED,
    LAST,
    POSITIONS,
    SELECT,
    SLOTS,
    STAGE,
    START,
    TOTAL,
    WEIGHT,
    Decode,
)


class Call:
    """One shape of decode call with everything bound: a run only writes the few numbers that change.

    It belongs to a state and does not hold it, so that both are freed as soon as nobody uses them.
    """

    chooses = False

    def __init__(self, feeds: Feeds, decode: Decode, state: State, new: int, want: Want, gathers: bool = False) -> None:
        """new: tokens a row. gathers: whether columns of the output projection are given too, for the candidates."""
        rows = state.rows
        self.session, self.new, self.want = feeds.session, new, want
        self.controls = frozenset(decode.controls)
        self.slots, self.last_position = feeds.slots, len(feeds.slots) - 1
        self.selects = SELECT in self.controls
        self.tokens: Array = np.zeros((rows, new, *decode.features), decode.step.dtype)
        self.ahead = np.arange(new)
        # With one new token the positions are the lengths: the graph reads the state's own array.
        self.positions: Ints = state.lengths[:, None] if new == 1 else np.zeros((rows, new), np.int64)
        self.last = np.zeros(rows, np.int32)
        self.total = np.zeros((), np.int32)
        self.select: Ints = np.tile(self.ahead, (rows, 1)) if want == "all" else np.full((rows, 1), new - 1)
        wanted = self.select.shape[1] if self.selects else new
        vocabulary = int(decode.logits.shape[-1])
        self.candidates = state.candidates
        self.gathers = self.candidates.wanted if self.candidates and gathers else None
        self.columns: Ints = self.candidates.ids if self.candidates else np.zeros(0, np.int64)
        self.logits = np.zeros((rows, wanted, len(self.columns) or vocabulary), np.float32)
        self.spread = Spread(rows, wanted, vocabulary) if self.candidates else None
        self.inputs: dict[str, Array] = {
            decode.step.name: self.tokens, POSITIONS: self.positions, LAST: self.last, TOTAL: self.total,
            START: state.lengths, SELECT: self.select,
        }  # fmt: skip
        self.inputs = {n: a for n, a in self.inputs.items() if n in self.controls or n == decode.step.name}
        self.bindings = [self._bound(feeds, decode, state, turn) for turn in range(state.cache.turns)]

    def _bound(self, feeds: Feeds, decode: Decode, state: State, turn: int) -> Any:
        session, io = self.session, self.session.binding("decode")
        bound = {name: session.host_tensor(array) for name, array in self.inputs.items()}
        bound |= dict(zip(feeds.context, state.held.values, strict=True))
        bound |= dict(zip((c.past for c in decode.caches), state.cache.past(turn), strict=True))
        if SLOTS in self.controls:
            bound[SLOTS] = session.host_tensor(self.slots)
        if STAGE in session.inputs("decode"):
            bound[STAGE] = feeds.decodes
        if self.candidates is not None:
            if len(self.candidates.ids):
                bound[COLUMNS], bound[WEIGHT] = session.tensor(self.candidates.ids), self.candidates.weight
            if self.gathers is not None:
                bound[GATHER] = session.tensor(self.gathers)
        for name in session.inputs("decode"):
            session.bind_input(io, name, bound[name] if name in bound else feeds.unread[name])
        io.bind_ortvalue_output(decode.logits.name, session.host_tensor(self.logits))
        for cache, present in zip(decode.caches, state.cache.present(turn), strict=True):
            session.bind_output(io, cache.present, present)
        for name in (*state.wanted, *([GATHERED] if self.gathers is not None else ())):
            session.give(io, name)
        return io

    def ready(self, longest: int) -> bool:
        return True

    def choose(self, state: State, tokens: Array, total: int) -> Array:
        return self.run(state, tokens, None, total)

    def run(self, state: State, tokens: Array, counts: Array | None, total: int) -> Array:
        new, lengths = self.new, state.lengths
        self.tokens[:] = tokens
        if counts is not None and new > 1 and self.tokens.ndim > 2:
            self.tokens[self.ahead >= counts[:, None]] = 0  # attention hides these, but a weight of 0 hides no NaN
        self.total[()] = total
        if new == 1:
            self.last[:] = lengths
        else:
            own = new if counts is None else counts
            np.minimum(lengths[:, None] + self.ahead, self.last_position, out=self.positions)
            self.last[:] = lengths + own - 1
            if self.want == "last":
                self.select[:, 0] = np.subtract(own, 1)
        io = self.bindings[state.cache.turn]
        if SLOTS in self.controls:
            io.bind_ortvalue_input(SLOTS, self.session.host_tensor(self.slots[:total]))
        if self.session.device != "cpu":  # binding copies to the device, so what changed is bound again
            for name, array in self.inputs.items():
                io.bind_ortvalue_input(name, self.session.host_tensor(array))
        self.session.run(io, "decode")
        state.cache.turn = (state.cache.turn + 1) % state.cache.turns
        state.cache.wrote(lengths, new)
        if counts is None or new == 1:
            lengths += new
            state.longest = total
        else:
            lengths += counts
            state.longest = int(lengths.max())
        given = io.get_outputs() if state.wanted or self.gathers is not None else []
        if self.gathers is not None:
            assert self.candidates is not None
            self.candidates.hold(given.pop())
            state.call = None
        if state.wanted:
            values = given[-len(state.wanted) :]
            state.extras = {n: self._wanted(v.numpy()) for n, v in zip(state.wanted, values, strict=True)}
        if self.spread is not None and self.candidates is not None:
            return self._wanted(self.spread(self.logits, self.columns, self.candidates.rows))
        return self._wanted(self.logits)

    def _wanted(self, values: Array) -> Array:
        """Of what the graph gives for each row, what was asked for: every position, or the last token's."""
        if self.want == "all":
            return values
        return values[:, 0] if self.selects or self.new == 1 else values[np.arange(len(values)), self.select[:, 0]]
