"""A run of the decode stage as a CUDA graph."""

from __future__ import annotations

from tformer_runtime.backend.cuda_graphs import CapturedStep, DeviceLogits
from tformer_runtime.base.arrays import Array
from tformer_runtime.engine.state import State, Want


class CudaGraphCall:
    """A state's steps of one token, through a captured step that it has borrowed with its buffers."""

    new, chooses = 1, True
    want: Want = "last"

    def __init__(self, step: CapturedStep) -> None:
        self.step = step

    def ready(self, longest: int) -> bool:
        return self.step.ready(longest)

    def run(self, state: State, tokens: Array, counts: Array | None, total: int) -> Array:
        return self.choose(state, tokens, total).copy()

    def choose(self, state: State, tokens: Array, total: int) -> DeviceLogits:
        """The logits stay where they are."""
        logits = self.step.run(tokens, state.lengths)
        state.cache.wrote(state.lengths, 1)
        state.lengths += 1
        state.longest = total
        return logits
