"""The lowest level of decoding: encode requests, feed tokens, get logits. Everything above it is search.

    engine = Engine("model.onnx", device="cpu")
    state = engine.start({"src": [ids, other_ids]}, rows=2)      # None for a decoder-only model
    logits = engine.step(state, np.array([[1], [1]]))            # (2, vocabulary)
    engine.reorder(state, np.array([1, 1]))                      # beams; or fewer rows, to drop the finished ones
    engine.join(state, engine.start({"src": [more]}, rows=1, joins=True))      # rows that come while others decode

A `State` belongs to one call and one thread; an `Engine` may be shared by any number of them.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tformer_runtime.cache import KVCache, bytes_of, slots_for
from tformer_runtime.context import Context
from tformer_runtime.device import Chosen
from tformer_runtime.errors import InputError, ModelFileError, UnsupportedCallError
from tformer_runtime.graphs import MOST, Replayed, Step
from tformer_runtime.manifest import (
    BATCH,
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
    Manifest,
    TensorSpec,
)
from tformer_runtime.memory import Budget, Share
from tformer_runtime.modelfile import read_metadata
from tformer_runtime.requests import Sizes, lengths_of, own_sizes, request_arrays
from tformer_runtime.session import Array, Session
from tformer_runtime.shortlist import KEY, Candidates, Shortlist, Spread, most_columns

Ints = npt.NDArray[np.int64]
Want = Literal["last", "all"]


class State:
    """What decoding has so far for each row of a batch: its context, its cached tokens, and how many those are.

    lengths: (rows,) int64, the cached tokens of each row; read it, never write it.
    encoded: what encode gave beside the context, as it was asked for, one row for each request.
    extras: what the latest step gave beside its logits, in their layout; overwritten by the next.
    candidates: the ids that may come for each row; None if all may for each.
    """

    def __init__(
        self,
        context: Context,
        cache: KVCache,
        rows: int,
        encoded: Mapping[str, Array],
        wanted: tuple[str, ...],
        candidates: Candidates | None = None,
    ) -> None:
        self.candidates = candidates
        self.lengths: Ints = np.zeros(rows, np.int64)
        self.longest = 0  # the greatest of lengths
        self.cache = cache
        self.held = context
        self.calls: dict[tuple[int, Want], _Call | Replayed] = {}  # the small ones, by their shapes
        self.call: _Call | Replayed | None = None
        self.encoded = encoded
        self.wanted = wanted  # of each step
        self.extras: dict[str, Array] = {}
        self.released = False

    @property
    def call(self) -> _Call | Replayed | None:
        """The latest; None once what calls are bound to has changed."""
        return self._call

    @call.setter
    def call(self, call: _Call | Replayed | None) -> None:
        self._call = call
        if call is None:
            self.calls.clear()

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def room(self) -> int:
        """Rows that there are buffers for."""
        return max(self.cache.room, self.held.room)

    @property
    def context(self) -> list[Array]:
        """What the encode stage gave for each row, or for all that share it, in the order of its outputs."""
        return self.held.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the context and gathered columns."""
        return self.cache.nbytes + self.held.nbytes + (self.candidates.nbytes if self.candidates else 0)

    def rewind(self, length: int) -> None:
        """Forget what each row has beyond its first `length` tokens."""
        np.minimum(self.lengths, length, out=self.lengths)
        self.longest = int(self.lengths.max(initial=0))

    def release(self) -> None:
        """Give the memory back; the state is of no more use. Done too when nobody refers to it any more."""
        self.cache.release()
        self.held.release()
        if self.candidates is not None:
            self.candidates.release()
        self.released = True


class Engine:
    """A model file's stages as functions. See the module's docstring."""

    def __init__(
        self, model: Session | str | os.PathLike[str], device: str = "auto", threads: int | None = None
    ) -> None:
        self.session = model if isinstance(model, Session) else Session(model, device, threads)
        self.manifest: Manifest = self.session.manifest
        self._context_inputs = self._check_context()
        self._slots = np.arange(self.manifest.max_length, dtype=np.int64)
        listed = self.manifest.decode is not None and self.manifest.decode.shortlist is not None
        self._shortlist_text = read_metadata(self.session.path).get(KEY) if listed else None
        self._unread = self._stand_ins()
        self._one_column = self._of_one_column()
        stage = self.session.inputs("decode").get(STAGE, ())
        # Held here: a binding need not keep alive what is bound.
        self._decodes = self.session.tensor(np.ones([size or 1 for size in stage], np.bool_))

    @property
    def decode(self) -> Decode:
        if self.manifest.decode is None:
            raise UnsupportedCallError(f"{self.session.path} is run once for an input and does not decode")
        return self.manifest.decode

    @functools.cached_property
    def shortlist(self) -> Shortlist | None:
        """The file's. ModelFileError if it is damaged."""
        if self.decode.shortlist is None or self._shortlist_text is None:
            return None
        try:
            found = Shortlist.from_text(self._shortlist_text)
        except ModelFileError as error:
            raise ModelFileError(f"{self.session.path}: {error}") from error
        if found.vocabulary != self.decode.logits.shape[-1]:
            raise ModelFileError(f"{self.session.path}: the file's shortlist is of another vocabulary: export it again")
        return found

    def encode(
        self,
        requests: Mapping[str, Sequence[Array]],
        rows: int,
        extras: Sequence[str] = (),
        widen: int = 0,
        gather: Ints | None = None,
    ) -> dict[str, Any]:
        """Run the encode stage: name of each of its outputs → OrtValue on the session's device.

        requests: for each request input that is not derived, `rows` arrays, one a row; ids are 1-D, of any lengths.
        extras: names of the stage's extras to give too, behind the outputs. widen: with so many more positions of
        padding at the end of every row, as far as the model can take them. gather: ids whose columns of the output
        projection are given as GATHERED.
        """
        encode = self.manifest.encode
        if encode is None:
            raise UnsupportedCallError(f"{self.session.path} has no input beside the tokens it continues")
        arrays = request_arrays(encode.inputs, requests, rows, widen)
        io = self.session.binding("encode")
        if gather is not None:
            arrays[GATHER] = gather
        for name in self.session.inputs("encode"):
            read = self.session.tensor(arrays[name]) if name in arrays else self._unread[name]
            io.bind_ortvalue_input(name, self._one_column.get(name, read))
        wanted = [output.name for output in (*encode.outputs, *encode.extras)]
        wanted = [name for i, name in enumerate(wanted) if i < len(encode.outputs) or name in extras]
        if gather is not None:
            wanted.append(GATHERED)
        for name in wanted:
            self.session.give(io, name)
        self.session.run(io, "encode")
        return dict(zip(wanted, io.get_outputs(), strict=True))

    def start(
        self,
        requests: Mapping[str, Sequence[Array]] | None,
        rows: int,
        repeat: int = 1,
        extras: Sequence[str] = (),
        budget: Share | None = None,
        joins: bool = False,
        candidates: Sequence[Ints | None] | None = None,
    ) -> State:
        """Encode `rows` requests and make a state with `repeat` rows for each (row i belongs to i // repeat).

        extras: names of the manifest's extras that are wanted, of either stage. budget: what the state's memory is
        taken from. joins: the state may be joined with others. candidates: of each request, the ids that may come, in
        order, None for all; for a file with a shortlist.
        """
        budget = budget or Budget().share()
        cache = KVCache(self.session, self.decode.caches, self.manifest.max_length, rows, budget)
        arrays: dict[str, Array] = {}
        context: list[Array] = []
        lengths: dict[str, Ints] = {}
        chosen = self._candidates(candidates, budget)
        if self.manifest.encode is not None:
            requests, more = requests or {}, self.slack if joins else 0
            try:
                given = self.encode(requests, rows, extras, more, chosen.wanted if chosen else None)
            except BaseException:
                if chosen is not None:  # whoever keeps the error keeps this frame
                    chosen.release()
                raise
            if chosen is not None and chosen.wanted is not None:
                chosen.hold(given.pop(GATHERED))
            arrays = {name: value.numpy() for name, value in given.items()}
            context = [arrays.pop(output.name) for output in self.manifest.encode.outputs]
            lengths = lengths_of(self.manifest.encode.inputs, requests, rows, more)
        held = Context(self.session, self._contexts, context, lengths, rows, budget, self.decode.shares_context)
        state = State(held, cache, rows, arrays, self._of_steps(extras), chosen)
        if repeat != 1:
            self.reorder(state, np.repeat(np.arange(rows), repeat))
        return state

    def step(self, state: State, tokens: Array, counts: Array | None = None, want: Want = "last") -> Array:
        """Feed new tokens to every row and return the logits that follow them.

        tokens: (rows, N) int64, right-padded; (rows, N, features) float32 for a model that continues a series, whose
        outputs are called logits here. What is beyond a row's count does not matter.
        counts: (rows,) how many of the N are a row's own, at least 1; None: all of them.
        Returns float32 (rows, vocabulary) for each row's last token, or (rows, N, vocabulary) for all with
        want="all"; -inf for ids that are no candidates of a row. The array is not to be written to, and is overwritten
        by the next call, as are the extras that the state then holds.
        InputError if a row would pass the maximum length; MemoryBudgetError. Then nothing has been read.
        """
        rows, new = tokens.shape[:2]
        if rows != state.rows:
            raise ValueError(f"{rows} rows of tokens for a state of {state.rows}")
        _check_held(state)
        if new > 1 and counts is not None:
            new = int(counts.max())  # operators reckon from the row's last token back: no column without a valid one
            tokens = tokens[:, :new]
        total = state.longest + new
        if new > 1 and self._one_at_a_time(state, total):
            return self._columns(state, tokens, counts, want)
        if total > self.manifest.max_length:
            raise InputError(f"{total} tokens are more than the {self.manifest.max_length} that the model can hold")
        if state.cache.reserve(total, state.longest):
            state.call = None
        gathers = state.candidates is not None and state.candidates.due()
        if gathers:
            state.call = None
        call = state.call
        if call is None or call.new != new or call.want != want:
            call = (
                state.calls.get((new, want))
                or self._replayed(state, new, want)
                or _Call(self, state, new, want, gathers)
            )
            state.call = call
            if rows * new <= _KEPT:
                state.calls[new, want] = call
        if isinstance(call, Replayed) and not call.step.ready(state.longest):
            call = _Call(self, state, new, want, gathers)
        return call.run(state, tokens, counts, total)

    def choose(self, state: State, tokens: Array) -> Array | Chosen:
        """As `step`, for one token a row; the logits may stay on the device, with what is likeliest on the host."""
        rows, new = tokens.shape
        call, total = state.call, state.longest + 1
        if not isinstance(call, Replayed) or rows != state.rows or new != 1 or total > state.cache.capacity:
            return self.step(state, tokens)
        _check_held(state)
        if not call.step.ready(state.longest):
            return self.step(state, tokens)
        return call.choose(state, tokens, total)

    def reorder(self, state: State, rows: Array) -> None:
        """Row i becomes what row rows[i] was. Rows may repeat (beams), be fewer (finished ones dropped) or be more."""
        rows = np.asarray(rows, np.int64)
        if len(rows) == state.rows and (rows == np.arange(len(rows))).all():
            return
        _check_held(state)
        lengths = state.lengths[rows]
        if state.held.reorder(rows):
            state.call = None
        if state.cache.reorder(rows, state.lengths):
            state.call = None
        if state.candidates is not None and state.candidates.reorder(rows):
            state.call = None
            if all(own is None for own in state.candidates.rows):
                state.candidates = None
        if len(rows) == state.rows:
            state.lengths[:] = lengths  # bound calls read this very array
        else:
            state.lengths = lengths
            state.call = None
        state.longest = int(lengths.max(initial=0))

    def join(self, state: State, other: State) -> None:
        """Append the other's rows, which were started with `joins`; it is of no more use then.

        Copies the other's rows, and its own where the buffers have no room, or far too much.
        """
        _check_held(state)
        _check_held(other)
        if other.wanted != state.wanted:
            raise ValueError("states are joined that give different extras")
        state.held.join(other.held)
        state.cache.join(other.cache, state.longest, other.longest)
        one, two = state.candidates, other.candidates
        if one is not None or two is not None:
            one, two = one or self._all(two, state.rows), two or self._all(one, other.rows)
            one.join(two)
            state.candidates = one
        other.release()
        state.lengths = np.concatenate([state.lengths, other.lengths])
        state.longest = max(state.longest, other.longest)
        state.call = None

    def copy(
        self, state: State, rows: Array, budget: Share | None = None, extras: Sequence[str] | None = None
    ) -> State:
        """A state of its own, whose row i is what row rows[i] is. budget: what its memory is taken from. extras: as of
        `start`; None: the state's own."""
        _check_held(state)
        budget = budget or Budget().share()
        lengths = state.lengths[rows]
        longest = int(lengths.max(initial=0))
        wanted = state.wanted if extras is None else self._of_steps(extras)
        context = state.held.copy(rows, budget)
        try:
            cache = state.cache.copy(rows, longest, budget)
        except BaseException:
            context.release()
            raise
        finally:
            _check_held(state)  # again: another thread may have released it meanwhile
        candidates = state.candidates.copy(rows, budget) if state.candidates else None
        other = State(context, cache, len(rows), state.encoded, wanted, candidates)
        other.lengths, other.longest = lengths, longest
        return other

    def fit(self, state: State) -> bool:
        """Give back what the buffers have beyond the need of the rows. False if that is nothing to speak of."""
        less = [state.cache.fit(state.longest + 1), state.held.fit()]
        if any(less):
            state.call = None
        return any(less)

    def sizes(self, sources: Mapping[str, Array]) -> Sizes:
        """Free axis of the request inputs → how long one request is there."""
        return own_sizes(self.manifest.encode.inputs, sources) if self.manifest.encode else {}

    def need(
        self, slots: int, sizes: Mapping[str, int], rows: int = 1, beside: State | None = None, named: int | None = None
    ) -> int:
        """Bytes of caches, context and gathered columns for `rows` rows of so many slots, in buffers of no fewer slots
        than `beside` has.

        sizes: free axis of the inputs → length. An axis that is none of theirs (encoders may have fewer positions than
        they read) is taken to be as long as the longest. Rows that share a context may come to have one each.
        named: ids that are candidates because options name them; None if no request has candidates.
        """
        sizes = {**sizes, BATCH: rows}
        longest = max((size for axis, size in sizes.items() if axis != BATCH), default=1)
        context = 0
        for i, spec in enumerate(self._contexts):
            shape = [sizes.get(axis, longest) if isinstance(axis, str) else axis for axis in spec.shape]
            if beside is not None:
                shape = [max(pair) for pair in zip(shape, beside.context[i].shape, strict=True)]
            context += math.prod(shape) * np.dtype(spec.dtype).itemsize
        slots = slots_for(slots, self.manifest.max_length)
        if named is not None:  # while rows join, theirs are held beside those of the rows that they join
            held = beside.candidates.nbytes if beside and beside.candidates else 0
            context += held + self._most_gathered(rows * longest, named)
        return context + bytes_of(self.decode.caches, rows, max(slots, beside.cache.capacity if beside else 0))

    @property
    def _column(self) -> int:
        """Bytes of a column of the output projection."""
        held = self.decode.shortlist
        return held.inner * np.dtype(held.dtype).itemsize if held else 0

    def _most_gathered(self, positions: int, named: int) -> int:
        """Bytes of columns for so many positions of sources, at most."""
        held, vocabulary = self.decode.shortlist, int(self.decode.logits.shape[-1])
        if held is None or self.manifest.encode is None:
            return 0
        tables = sum(spec.role == "ids" for spec in self.manifest.encode.inputs)
        return min(most_columns(vocabulary), held.common + tables * positions * held.each + named) * self._column

    def _candidates(self, rows: Sequence[Ints | None] | None, budget: Share) -> Candidates | None:
        if rows is None or all(own is None for own in rows):
            return None
        if self.decode.shortlist is None:
            raise UnsupportedCallError(f"{self.session.path} holds no shortlist: export the model with --shortlist")
        return Candidates(rows, int(self.decode.logits.shape[-1]), self._column, budget)

    def _all(self, like: Candidates | None, rows: int) -> Candidates:
        """Rows that may have any id, to be beside others that may not."""
        assert like is not None
        return Candidates([None] * rows, like.vocabulary, like.bytes_each, like.budget)

    def _of_steps(self, extras: Sequence[str]) -> tuple[str, ...]:
        return tuple(extra.name for extra in self.decode.extras if extra.name in extras)

    @property
    def _contexts(self) -> Sequence[TensorSpec]:
        return self.manifest.encode.outputs if self.manifest.encode else ()

    @functools.cached_property
    def slack(self) -> int:
        """Positions of padding that give every row some at the end of every axis of the context, for `join`.

        One, where these axes are the inputs' own. What follows from an input's by a stride may need more for one, and
        how many is seen by encoding: if so many more give two at one length, they give one or more at any.
        """
        encode = self.manifest.encode
        inputs = [spec for spec in encode.inputs if spec.role != "mask"] if encode else []
        own = {BATCH, *(axis for spec in inputs for axis in spec.shape)}
        outputs = encode.outputs if encode else ()
        if all(isinstance(axis, int) or axis in own for output in outputs for axis in output.shape):
            return 1
        limit = min((spec.max_length for spec in inputs if spec.max_length is not None), default=_LIMIT)

        def sizes(length: int) -> Array:
            given = {}
            for spec in inputs:
                first, *others = [1 if isinstance(axis, str) else axis for axis in spec.shape[1:]]
                first = length if isinstance(spec.shape[1], str) else first
                given[spec.name] = [np.zeros((first, *others), spec.dtype)]
            found = self.encode(given, 1)
            axes = [(o.name, at) for o in outputs for at, a in enumerate(o.shape) if isinstance(a, str) and a != BATCH]
            return np.array([found[name].shape()[at] for name, at in axes])

        base, more = limit // 2, 1
        while base + more < limit and (sizes(base + more) - sizes(base)).min() < 2:
            more *= 2
        return more if base + more < limit else limit

    def _replayed(self, state: State, new: int, want: Want) -> Replayed | None:
        """A call that replays a CUDA graph, for one token a row in buffers that graphs may be captured with."""
        held = state.cache.pooled
        if held is None or new > 1 or want != "last" or state.wanted or state.candidates is not None:
            return None
        if self.decode.features:  # a graph goes on from the likeliest token
            return None
        state.held.arrange()
        contexts = dict(zip(self._context_inputs, state.context, strict=True))
        key = tuple(array.shape for array in contexts.values())
        step = held.steps.get(key)
        if step is None:
            if len(held.steps) == MOST:
                return None
            others = {**self._unread, STAGE: self._decodes}
            step = Step(self.session, self.decode, held, state.cache.past(0), contexts, others)
            held.steps[key] = step
        else:
            for name, array in contexts.items():
                self.session.write(step.contexts[name], array)
        return Replayed(step)

    def _one_at_a_time(self, state: State, total: int) -> bool:
        """Whether several new tokens must be fed singly: the operators cannot, or the padding would pass the end."""
        return (
            state.longest > 0 and state.rows > 1 and (not self.decode.ragged_chunks or total > self.manifest.max_length)
        )

    def _columns(self, state: State, tokens: Array, counts: Array | None, want: Want) -> Array:
        rows, new = tokens.shape[:2]
        counts = np.full(rows, new) if counts is None else np.asarray(counts)
        total = int((state.lengths + counts).max())
        if total > self.manifest.max_length:
            raise InputError(f"{total} tokens are more than the {self.manifest.max_length} that the model can hold")
        if state.cache.reserve(total, state.longest):
            state.call = None
        every, logits = [], np.empty(0, np.float32)
        extras: dict[str, list[Array]] = {name: [] for name in state.wanted}
        for i in range(new):
            # A row that is through feeds its last token again: the same slot gets the same content.
            through = i >= counts
            state.lengths -= through
            state.longest = int(state.lengths.max())
            logits = self.step(state, tokens[np.arange(rows), np.minimum(i, counts - 1)][:, None])
            if want == "all":
                every.append(logits.copy())
                for name, arrays in extras.items():
                    arrays.append(state.extras[name].copy())
        if want == "all":
            state.extras = {name: np.stack(arrays, 1) for name, arrays in extras.items()}
            return np.stack(every, 1)
        return logits

    def _check_context(self) -> tuple[str, ...]:
        """The decode stage's inputs for the context, in the order of encode's outputs."""
        if self.manifest.decode is None:
            return ()
        names = self.manifest.decode.context
        outputs = self.manifest.encode.outputs if self.manifest.encode else ()
        if len(names) != len(outputs) or any(name not in self.session.inputs("decode") for name in names):
            raise ModelFileError(
                f"{self.session.path}: its manifest lists {len(outputs)} context tensors and its graph does not read "
                "them all: export the model again"
            )
        return names

    def _stand_ins(self) -> dict[str, Any]:
        """For every graph input what is bound where a stage does not read it: nothing. STAGE is false, for encode."""
        manifest = self.manifest
        dtypes = {STAGE: "bool"}
        if manifest.encode:
            dtypes |= {i.name: i.dtype for i in manifest.encode.inputs}
            dtypes |= {name: o.dtype for name, o in zip(self._context_inputs, manifest.encode.outputs, strict=False)}
        if manifest.decode:
            dtypes |= {name: "int32" if name in (LAST, TOTAL) else "int64" for name in manifest.decode.controls}
            dtypes |= {manifest.decode.step.name: manifest.decode.step.dtype}
            dtypes |= {c.past: c.dtype for c in manifest.decode.caches}
            if manifest.decode.shortlist:
                dtypes |= {GATHER: "int64", COLUMNS: "int64", WEIGHT: manifest.decode.shortlist.dtype}
        inputs = {**self.session.inputs("encode"), **self.session.inputs("decode")}
        shapes = {name: [0 if d is None else d for d in shape] for name, shape in inputs.items()}
        try:
            return {name: self.session.tensor(np.zeros(shape, dtypes[name])) for name, shape in shapes.items()}
        except KeyError as error:
            raise ModelFileError(
                f"{self.session.path}: its graph reads {error}, of which its manifest tells nothing: "
                "export the model again"
            ) from error

    def _of_one_column(self) -> dict[str, Any]:
        """What encode reads in the place of columns of the projection."""
        held = self.manifest.decode.shortlist if self.manifest.decode else None
        if held is None:
            return {}
        arrays = {COLUMNS: np.zeros(1, np.int64), WEIGHT: np.zeros((held.inner, 1), held.dtype)}
        return {name: self.session.tensor(array) for name, array in arrays.items()}


_KEPT = 32  # tokens of a call at most, for it to be kept: its logits take memory that nobody counts
_LIMIT = 256  # positions of an input that has no maximum, at which its strides show


class _Call:
    """One shape of decode call with everything bound: a run only writes the few numbers that change.

    It belongs to a state and does not hold it, so that both are freed as soon as nobody uses them.
    """

    def __init__(self, engine: Engine, state: State, new: int, want: Want, gathers: bool = False) -> None:
        decode, rows = engine.decode, state.rows
        self.session, self.new, self.want = engine.session, new, want
        self.controls = frozenset(decode.controls)
        self.slots, self.last_position = engine._slots, engine.manifest.max_length - 1
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
        self.bindings = [self._bound(engine, state, turn) for turn in range(state.cache.turns)]

    def _bound(self, engine: Engine, state: State, turn: int) -> Any:
        session, io = self.session, self.session.binding("decode")
        bound = {name: session.host_tensor(array) for name, array in self.inputs.items()}
        bound |= dict(zip(engine._context_inputs, state.held.values, strict=True))
        bound |= dict(zip((c.past for c in engine.decode.caches), state.cache.past(turn), strict=True))
        if SLOTS in self.controls:
            bound[SLOTS] = session.host_tensor(self.slots)
        if STAGE in session.inputs("decode"):
            bound[STAGE] = engine._decodes
        if self.candidates is not None:
            if len(self.candidates.ids):
                bound[COLUMNS], bound[WEIGHT] = session.tensor(self.candidates.ids), self.candidates.weight
            if self.gathers is not None:
                bound[GATHER] = session.tensor(self.gathers)
        for name in session.inputs("decode"):
            io.bind_ortvalue_input(name, bound[name] if name in bound else engine._unread[name])
        io.bind_ortvalue_output(engine.decode.logits.name, session.host_tensor(self.logits))
        for cache, present in zip(engine.decode.caches, state.cache.present(turn), strict=True):
            io.bind_ortvalue_output(cache.present, present)
        for name in (*state.wanted, *([GATHERED] if self.gathers is not None else ())):
            session.give(io, name)
        return io

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


def _check_held(state: State) -> None:
    if state.released:
        raise UnsupportedCallError("what was read has been released, and nothing can follow it: read it again")
