"""Run the source model on one row at a time. Files are compared with its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from tformer_export.analysis.interpreter import run
from tformer_export.capture.submodule_outputs import find_modules, record_outputs
from tformer_export.common.source_lines import line_of_error
from tformer_export.sources import Source
from tformer_export.sources.base import build_mask
from tformer_export.sources.forward_errors import explain_relations
from tformer_export.staging.difference_locator import DifferenceLocator
from tformer_runtime.base.errors import UnsupportedModelError, error_summary

MAX_RUNS = 16  # of a source that returns one position for each run; at least the number of compared steps


class Reference:
    """The source model on one row at a time: nothing is padded, so nothing can be masked wrongly.

    Rows of an input of one size that has a mask are padded to that size, as the model needs it.

    gives_last: whether it returns logits of the last position only. It then runs for each compared position.
    """

    def __init__(self, source: Source, gives_last: bool = False) -> None:
        self.source, self.gives_last = source, gives_last

    def logits_at(
        self,
        requests: Mapping[str, np.ndarray],
        tokens: np.ndarray,
        first: int = 0,
        left_out: Collection[str] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return positions from `first` on, and their logits: all positions, or MAX_RUNS if each costs a run."""
        if not self.gives_last:
            positions = np.arange(first, len(tokens))
            return positions, self.logits(requests, tokens, left_out)[positions]
        positions = np.unique(np.linspace(first, len(tokens) - 1, MAX_RUNS).round().astype(int))
        return positions, np.concatenate([self.logits(requests, tokens[: p + 1], left_out) for p in positions])

    def logits(
        self, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None, left_out: Collection[str] = ()
    ) -> np.ndarray:
        """Return the logits of one row, (time, vocabulary); time is 1 if the source returns the last position only.

        requests: each request input without its batch axis.
        tokens: the step input, if there is one.
        left_out: inputs that forward is called without.
        """
        (logits, *_) = self.outputs(requests, tokens, left_out)
        return logits.reshape(1, -1) if self.gives_last else logits

    def outputs(
        self, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None, left_out: Collection[str] = ()
    ) -> list[np.ndarray]:
        """Return all outputs of the source for one row, without the batch axis. Arguments as of `logits`.

        Raises UnsupportedModelError if forward fails, or if an output has no finite number.
        """
        inputs = {n: v for n, v in self.inputs(requests, tokens).items() if n not in left_out}
        try:
            with torch.no_grad():
                returned = self.source.module(*map(inputs.get, self.source.example))
            returned_values = returned if self.source.outputs else (returned,)
            outputs: list[np.ndarray] = [value[0].float().numpy() for value in returned_values]
        except Exception as error:  # the user's code may raise anything
            sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            raise UnsupportedModelError(
                f"forward runs on the example but not at other sizes ({sizes}), at {line_of_error(error)}: "
                f"{error_summary(error)}. The file has to run at any size up to the maximum length: let forward do so "
                f"too{explain_relations(self.source)}"
            ) from error
        if not all(values.size for values in outputs):
            sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            raise UnsupportedModelError(
                f"forward returns no numbers for inputs of these sizes: {sizes}. The file has to run at any size: let "
                "forward return a result for a short input too"
            )
        if not all(np.isfinite(values).any() for values in outputs):
            raise UnsupportedModelError("the source model's logits are not finite: there is nothing to compare with")
        return outputs

    def extras(
        self, locator: DifferenceLocator, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Return the extra outputs for one row.

        Hidden states are the results of the source's own submodules, and cross-attentions come from the traced graph.
        """
        inputs, extras = self.inputs(requests, tokens), locator.extras
        modules = find_modules(self.source.users_module, [e.module for e in extras if e.module])
        with torch.no_grad(), record_outputs(modules) as recorded:
            self.source.module(*inputs.values())
        values = run(locator.captured, inputs) if len(modules) < len(extras) else {}
        return {e.name: e.rows(recorded[e.module] if e.module else values[e.node])[0].numpy() for e in extras}

    def inputs(self, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None) -> dict[str, torch.Tensor]:
        """Return one row's inputs of the module, in forward's order, with their batch axis and the masks."""
        values: dict[str, torch.Tensor] = {
            name: torch.from_numpy(np.require(self._padded(name, value), requirements="C"))[None]
            for name, value in requests.items()
        }
        if self.source.step_input is not None and tokens is not None:
            values[self.source.step_input] = torch.from_numpy(tokens)[None]
        masks = self.source.masks
        lengths = {name: len(value) for name, value in requests.items() if value.ndim}  # an adapter's number has none
        return {
            name: build_mask(mask, values[mask.of], lengths.get(mask.of)) if (mask := masks.get(name)) else values[name]
            for name in self.source.example
        }

    def _padded(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return a row of an input with a mask, padded with zeros to its size if it has one."""
        if 1 in self.source.axes.get(name, (0, 1)) or all(mask.of != name for mask in self.source.masks.values()):
            return value
        padding = self.source.example[name].shape[1] - len(value)
        return np.pad(value, ((0, padding), *[(0, 0)] * (value.ndim - 1)))


@contextmanager
def rounded_weights(module: torch.nn.Module, round_weight: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Round the parameters of a module for the time of the `with` block. Buffers stay.

    Positions are multiplied with buffers, and tables of positions are computed from them, so they stay float32 in the
    file.
    """
    originals = {w: w.detach().clone() for w in module.parameters() if w.is_floating_point()}
    try:
        with torch.no_grad():
            for weight in originals:
                weight.copy_(round_weight(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, original in originals.items():
                weight.copy_(original)
