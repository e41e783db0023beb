"""A run of the decode stage in an onnxruntime session: inputs and outputs are bound once for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer_runtime.backend.resident_pages import mapped_zeros
from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.engine.shortlist import LogitScatter
from tformer_runtime.engine.state import LogitPositions, State
from tformer_runtime.engine.static_inputs import StaticInputs
from tformer_runtime.format.manifest import (
    ADAPTER_ROWS,
    COLUMN_IDS,
    COLUMN_WEIGHT,
    GATHER_IDS,
    GATHERED_COLUMNS,
    GREEDY_PLAN,
    LAST_POSITION,
    NEW_COUNTS,
    POSITIONS,
    SELECTED_TOKENS,
    SLOT_INDICES,
    STAGE_INPUT,
    START_SLOT,
    TOTAL_SLOTS,
    DecodeStage,
)


class SessionCall:
    """A `DecodeCall` with inputs and outputs bound once. A run only writes the few numbers that change.

    It belongs to a state but has no reference to it, so that both are freed without a garbage collection.
    """

    keeps_logits_on_device = survives_moves = False

    def __init__(
        self,
        static_inputs: StaticInputs,
        decode: DecodeStage,
        state: State,
        new_tokens: int,
        logit_positions: LogitPositions,
        gathers_columns: bool = False,
    ) -> None:
        """Bind the call.

        new_tokens: the new tokens of each row.
        gathers_columns: whether the call also gathers the pending columns of the state's candidates.
        """
        rows = state.rows
        self.session, self.new_tokens, self.logit_positions = static_inputs.session, new_tokens, logit_positions
        self.controls = frozenset(decode.controls)
        self.slot_indices, self.max_position = static_inputs.slot_indices, self.session.manifest.max_length - 1
        self.has_select_input = SELECTED_TOKENS in self.controls
        self.tokens: Array = np.zeros((rows, new_tokens, *decode.features), decode.step.dtype)
        self.token_offsets = np.arange(new_tokens)
        # With one new token the positions are the lengths: the graph reads the state's array itself.
        self.positions: Ints = state.lengths[:, None] if new_tokens == 1 else np.zeros((rows, new_tokens), np.int64)
        self.last_positions = np.zeros(rows, np.int32)
        self.total_slots = np.zeros((), np.int32)
        self.new_counts: Ints = np.zeros(rows, np.int64)
        self.selected_tokens: Ints = (
            np.tile(self.token_offsets, (rows, 1)) if logit_positions == "all" else np.full((rows, 1), new_tokens - 1)
        )
        num_positions = self.selected_tokens.shape[1] if self.has_select_input else new_tokens
        vocabulary = int(decode.logits.shape[-1])
        self.candidates = state.candidates
        self.gather_ids = self.candidates.pending_ids if self.candidates and gathers_columns else None
        self.column_ids: Ints = self.candidates.ids if self.candidates else np.zeros(0, np.int64)
        self.logits = mapped_zeros((rows, num_positions, len(self.column_ids) or vocabulary), np.dtype(np.float32))
        self.loop_logits: F32 = self.logits[:0]  # of the steps of a greedy loop, one after the other
        self.plan: Ints | None = None  # of the loop that is bound, with as many of its logits; None for a single step
        self.bound_loop_logits = 0
        self.logits_name, self.no_plan = decode.logits.name, static_inputs.placeholders.get(GREEDY_PLAN)
        self.logit_scatter = LogitScatter(rows, num_positions, vocabulary) if self.candidates else None
        inputs: dict[str, Array] = {
            decode.step.name: self.tokens,
            POSITIONS: self.positions,
            LAST_POSITION: self.last_positions,
            TOTAL_SLOTS: self.total_slots,
            START_SLOT: state.lengths,
            NEW_COUNTS: self.new_counts,
            SELECTED_TOKENS: self.selected_tokens,
        }
        if state.adapters is not None:
            inputs[ADAPTER_ROWS] = state.adapters
        self.inputs = {n: a for n, a in inputs.items() if n in self.controls or n == decode.step.name}
        self.bindings = [self._bind(static_inputs, decode, state, side) for side in range(state.cache.num_sides)]

    def _bind(self, static_inputs: StaticInputs, decode: DecodeStage, state: State, side: int) -> Any:
        """Return an IOBinding with all inputs and outputs. side: the side of the caches that holds the past."""
        session, binding = self.session, self.session.new_binding("decode")
        cached_rows = None if state.cache.pooled_buffers is None else state.rows  # others have the rows of the state
        bound = {name: session.host_tensor(array) for name, array in self.inputs.items()}
        bound |= dict(zip(static_inputs.context, state.encoder_context.values, strict=True))
        past = dict(zip((c.past for c in decode.caches), state.cache.past(side), strict=True))
        bound |= past
        if STAGE_INPUT in session.input_shapes("decode"):
            bound[STAGE_INPUT] = static_inputs.decode_flag
        if self.candidates is not None:
            if len(self.candidates.ids):
                bound[COLUMN_IDS] = session.device_tensor(self.candidates.ids)
                bound[COLUMN_WEIGHT] = self.candidates.weight
            if self.gather_ids is not None:
                bound[GATHER_IDS] = session.device_tensor(self.gather_ids)
        for name in session.input_shapes("decode"):
            tensor = bound[name] if name in bound else static_inputs.placeholders[name]
            session.bind_input(binding, name, tensor, cached_rows if name in past else None)
        binding.native.bind_ortvalue_output(decode.logits.name, session.host_tensor(self.logits))
        for cache, present in zip(decode.caches, state.cache.present(side), strict=True):
            session.bind_output(binding, cache.present, present, cached_rows)
        gathered = () if self.gather_ids is None else (GATHERED_COLUMNS,)
        session.bind_new_outputs(binding, (*state.step_extras, *gathered))
        return binding

    def ready(self, max_row_length: int) -> bool:
        return True

    def bind_context(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Bind another context. The call then serves another state, whose other buffers are those of the first one."""
        for binding in self.bindings:
            self.session.bind_inputs(binding, names, values)

    def run_greedy(self, state: State, tokens: Array, plan: Ints, max_steps: int) -> F32:
        """Run a greedy loop. Return the logits (max_steps, rows, vocabulary). The state stays as it is.

        tokens: (rows, 1). plan: of GREEDY_PLAN.
        """
        rows, _, vocabulary = self.logits.shape
        self._bind_loop(plan, max_steps * rows)
        self._write_inputs(state.lengths, tokens, None, state.max_row_length + 1)
        self.session.run(self.bindings[0], "decode")
        return self.loop_logits[: max_steps * rows].reshape(max_steps, rows, vocabulary)

    def _bind_loop(self, plan: Ints, count: int) -> None:
        """Bind a plan, and the buffer of `count` logits. Buffers that the last loop has bound stay bound."""
        (binding,) = self.bindings
        if self.plan is not None and len(self.plan) == len(plan):
            self.plan[:] = plan
        else:
            self.plan = plan[:0]  # until it is bound: neither this plan nor that of a single step
            binding.native.bind_ortvalue_input(GREEDY_PLAN, self.session.host_tensor(plan))
            self.plan = plan
        if count == self.bound_loop_logits:
            return
        self.bound_loop_logits = 0  # until they are bound: memory may run out
        if len(self.loop_logits) < count:
            self.loop_logits = mapped_zeros((count, 1, self.logits.shape[-1]), np.dtype(np.float32))
        logits = self.session.host_tensor(self.loop_logits[:count])
        binding.native.bind_ortvalue_output(self.logits_name, logits)
        self.bound_loop_logits = count

    def _bind_single_step(self) -> None:
        """Bind what a run without a loop reads and writes, after a loop."""
        if self.plan is None:
            return
        (binding,) = self.bindings
        binding.native.bind_ortvalue_input(GREEDY_PLAN, self.no_plan)
        binding.native.bind_ortvalue_output(self.logits_name, self.session.host_tensor(self.logits))
        self.bound_loop_logits, self.plan = 0, None

    def drop_loop(self) -> None:
        """Free the buffers of loops."""
        self._bind_single_step()
        self.loop_logits = self.logits[:0]

    def run_one_token(self, state: State, tokens: Array, total_slots: int) -> Array:
        return self.run(state, tokens, None, total_slots)

    def run(self, state: State, tokens: Array, counts: Array | None, total_slots: int) -> Array:
        new_tokens, lengths = self.new_tokens, state.lengths
        self._bind_single_step()
        self._write_inputs(lengths, tokens, counts, total_slots)
        binding = self.bindings[state.cache.side]
        if SLOT_INDICES in self.controls:
            binding.native.bind_ortvalue_input(SLOT_INDICES, self.session.host_tensor(self.slot_indices(total_slots)))
        if self.session.device != "cpu":  # binding copies to the device, so changed inputs are bound again
            for name, array in self.inputs.items():
                binding.native.bind_ortvalue_input(name, self.session.host_tensor(array))
        self.session.run(binding, "decode")
        state.record_step()
        state.cache.side = (state.cache.side + 1) % state.cache.num_sides
        state.cache.record_writes(lengths, new_tokens)
        if counts is None or new_tokens == 1:
            lengths += new_tokens
            state.max_row_length = total_slots
        else:
            lengths += counts
            state.max_row_length = int(lengths.max())
        outputs = binding.native.get_outputs() if state.step_extras or self.gather_ids is not None else []
        if self.gather_ids is not None:
            assert self.candidates is not None
            self.candidates.set_gathered(outputs.pop())
            state.call = None
        if state.step_extras:
            values = outputs[-len(state.step_extras) :]
            state.extras = {
                name: self._select_positions(value.numpy())
                for name, value in zip(state.step_extras, values, strict=True)
            }
        if self.logit_scatter is not None and self.candidates is not None:
            return self._select_positions(self.logit_scatter(self.logits, self.column_ids, self.candidates.rows))
        return self._select_positions(self.logits)

    def _write_inputs(self, lengths: Ints, tokens: Array, counts: Array | None, total_slots: int) -> None:
        """Write the tokens and control inputs of a run into the bound arrays. lengths: (rows,), cached tokens."""
        new_tokens = self.new_tokens
        self.tokens[:] = tokens
        if counts is not None and new_tokens > 1 and self.tokens.ndim > 2:
            # Attention gives padding a weight of 0, but 0 times NaN is NaN.
            self.tokens[self.token_offsets >= counts[:, None]] = 0
        self.total_slots[()] = total_slots
        self.new_counts[:] = new_tokens if counts is None else counts
        if new_tokens == 1:
            self.last_positions[:] = lengths
        else:
            row_counts = new_tokens if counts is None else counts
            np.minimum(lengths[:, None] + self.token_offsets, self.max_position, out=self.positions)
            self.last_positions[:] = lengths + row_counts - 1
            if self.logit_positions == "last":
                self.selected_tokens[:, 0] = np.subtract(row_counts, 1)

    def _select_positions(self, values: Array) -> Array:
        """Return the values of the requested positions: all of them, or only each row's last token."""
        if self.logit_positions == "all":
            return values
        if self.has_select_input or self.new_tokens == 1:
            return values[:, 0]
        return values[np.arange(len(values)), self.selected_tokens[:, 0]]
