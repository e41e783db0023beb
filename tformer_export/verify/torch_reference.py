"""The source model on one row at a time, which is what a file is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from tformer_export.analysis.interpreter import run
from tformer_export.capture.submodule_outputs import find_modules, watched
from tformer_export.common.source_lines import line_of_error, said
from tformer_export.sources import Source
from tformer_export.sources.base import build_mask
from tformer_export.staging.landmarks import Landmarks
from tformer_runtime.base.errors import UnsupportedModelError

MOST_RUNS = 16  # of a source that gives one position a run; no less than the steps that are compared


class Reference:
    """The source model on one row at a time: nothing is padded, so nothing can be masked wrongly.

    gives_last: it gives logits of the last position alone, and is run for each position that is asked for.
    """

    def __init__(self, source: Source, gives_last: bool = False) -> None:
        self.source, self.gives_last = source, gives_last

    def logits_at(
        self, requests: Mapping[str, np.ndarray], tokens: np.ndarray, first: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions from `first` on, all or, where each costs a run, up to MOST_RUNS; and the logits at these."""
        if not self.gives_last:
            positions = np.arange(first, len(tokens))
            return positions, self.logits(requests, tokens)[positions]
        positions = np.unique(np.linspace(first, len(tokens) - 1, MOST_RUNS).round().astype(int))
        return positions, np.concatenate([self.logits(requests, tokens[: p + 1]) for p in positions])

    def logits(self, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None) -> np.ndarray:
        """(time, vocabulary) for one row; time is 1 if the source gives the last position alone.

        requests: each request input without its batch axis; tokens: the step input, if there is one.
        """
        (logits, *_) = self.outputs(requests, tokens)
        return logits.reshape(1, -1) if self.gives_last else logits

    def outputs(self, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None) -> list[np.ndarray]:
        """All that the source gives for one row, without its batch axis."""
        inputs = self.inputs(requests, tokens)
        try:
            with torch.no_grad():
                returned = self.source.module(*inputs.values())
            given = returned if self.source.outputs else (returned,)
            outputs: list[np.ndarray] = [value[0].float().numpy() for value in given]
        except Exception as error:  # whatever the user's code raises
            sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            raise UnsupportedModelError(
                f"forward runs on the example but not at other sizes ({sizes}), at {line_of_error(error)}: "
                f"{said(error)}. The file has to run at any size up to the maximum length: let forward do so too"
            ) from error
        if not all(np.isfinite(values).any() for values in outputs):
            raise UnsupportedModelError("the source model's logits are not finite: there is nothing to compare with")
        return outputs

    def extras(
        self, landmarks: Landmarks, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """What the file gives beside logits, for one row: hidden states as the source's own submodules return them,
        alignments from the traced graph."""
        inputs, extras = self.inputs(requests, tokens), landmarks.extras
        modules = find_modules(self.source.owner, [e.module for e in extras if e.module])
        with torch.no_grad(), watched(modules) as held:
            self.source.module(*inputs.values())
        values = run(landmarks.captured, inputs) if len(modules) < len(extras) else {}
        return {e.name: e.rows(held[e.module] if e.module else values[e.node])[0].numpy() for e in extras}

    def inputs(self, requests: Mapping[str, np.ndarray], tokens: np.ndarray | None) -> dict[str, torch.Tensor]:
        """One row's inputs of the module, in forward's order, with their batch axis and the masks."""
        given: dict[str, torch.Tensor] = {
            name: torch.from_numpy(np.ascontiguousarray(value))[None] for name, value in requests.items()
        }
        if self.source.step is not None and tokens is not None:
            given[self.source.step] = torch.from_numpy(tokens)[None]
        masks = self.source.masks
        return {
            name: build_mask(masks[name], given[masks[name].of]) if name in masks else given[name]
            for name in self.source.example
        }


@contextmanager
def rounded_weights(module: torch.nn.Module, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """The module with other parameters, for a while. Not with other buffers: what positions are multiplied with, and
    tables of positions are made of, stays float32 in the file."""
    held = {w: w.detach().clone() for w in module.parameters() if w.is_floating_point()}
    try:
        with torch.no_grad():
            for weight in held:
                weight.copy_(rounded(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, own in held.items():
                weight.copy_(own)
