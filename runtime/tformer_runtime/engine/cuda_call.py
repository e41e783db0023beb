"""A run of the decode stage as a CUDA graph."""

from __future__ import annotations

from tformer_runtime.backend.cuda_graphs import CapturedStep, DeviceLogits
from tformer_runtime.base.arrays import Array
from tformer_runtime.engine.state import LogitPositions, State


class CudaGraphCall:
    """A `DecodeCall` for steps of one token. It runs a captured step on the buffers that the state's cache borrowed."""

    new_tokens, keeps_logits_on_device, survives_moves = 1, True, True
    logit_positions: LogitPositions = "last"

    def __init__(self, step: CapturedStep) -> None:
        self.step = step

    def ready(self, max_row_length: int) -> bool:
        return self.step.ready(max_row_length)

    def run(self, state: State, tokens: Array, counts: Array | None, total_slots: int) -> Array:
        return self.run_one_token(state, tokens, total_slots).copy()

    def run_one_token(self, state: State, tokens: Array, total_slots: int) -> DeviceLogits:
        logits = self.step.run(tokens, state.lengths, state.cache.buffer_rows)
        state.cache.record_writes(state.lengths, 1)
        state.lengths += 1
        state.max_row_length = total_slots
        return logits
