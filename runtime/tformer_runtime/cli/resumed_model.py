"""A model for the rest of an interrupted run."""

from __future__ import annotations

from tformer_runtime.model import Model


class ResumedModel(Model):
    """A model whose first input is not the first of the run. Numbers of inputs in errors, and seeds, continue."""

    def __init__(self, model: Model, num_finished: int) -> None:
        """Share the weights of a loaded model, with an own memory budget of the same limit.

        num_finished: the number of inputs that earlier runs finished.
        """
        super().__init__(model.engine, model.budget.limit)
        self._index_offset = num_finished
