"""What a case is: a model as someone wrote it, how it is called, and what PyTorch says of it, a row at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

PAD, START, END = 0, 1, 2
VOCABULARY, BLOCK = 53, 32  # ids, and the longest sequence that the models have positions for


@dataclass(frozen=True)
class Case:
    """time_first: inputs and outputs are (time, batch, …). full: exported in full; the others' programs run in PyTorch.

    masks: how forward's masks are described to export, and how they are made to ask the module itself.
    fails: why it does not work yet.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ("idx",)
    time_first: bool = False
    full: bool = False
    fails: str | None = None
    special: Mapping[str, Any] = field(default_factory=lambda: {"start": [START], "end": [END], "pad": PAD})
    masks: Mapping[str, tuple[Any, Callable[..., torch.Tensor]]] = field(default_factory=dict)
    spread: float = 1.0

    @functools.cached_property
    def module(self) -> nn.Module:
        return lively(self.build, self.spread)

    @property
    def step(self) -> str:
        return self.inputs[-1]

    @property
    def arguments(self) -> dict[str, Any]:
        """What `export` and `from_module` take beside the module."""
        ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
        example = ids.T if self.time_first else ids
        given: dict[str, Any] = {"example": dict.fromkeys(self.inputs, example), "step": self.step}
        if self.time_first:
            given["dynamic"] = dict.fromkeys(self.inputs, (1, 0))
        if self.masks:
            given["masks"] = {name: described for name, (described, _) in self.masks.items()}
        return given

    @torch.no_grad()
    def logits(self, source: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
        """(time, vocabulary) of one row alone, from one forward pass over all of it."""
        axis = 1 if self.time_first else 0
        rows = [tokens] if source is None else [source, tokens]
        given = {n: torch.from_numpy(r).unsqueeze(axis) for n, r in zip(self.inputs, rows, strict=True)}
        masks = {name: made(**given) for name, (_, made) in self.masks.items()}
        output = self.module(**given, **masks)
        while not isinstance(output, torch.Tensor):
            output = output["logits"] if isinstance(output, Mapping) else output[0]
        return output.select(axis, 0).numpy()

    def greedy(self, row: np.ndarray, most: int) -> list[int]:
        """The best token of the growing sequence's logits, again and again, until the end token: of a decoder after the
        prompt `row`, else for the source `row`."""
        alone = len(self.inputs) == 1
        tokens = list(row) if alone else [START]
        found: list[int] = []
        while len(found) < most and END not in found:
            logits = self.logits(None if alone else row, np.array([*tokens, *found]))
            found.append(int(logits[-1].argmax()))
        return found


def lively(build: Callable[[], nn.Module], spread: float = 1.0) -> nn.Module:
    """Built from a seed, biases and norms moved away from values that would hide a mistake, embeddings by `spread`."""
    torch.manual_seed(0)
    module = build().eval()
    with torch.no_grad():
        for owner in module.modules():
            for parameter in owner.parameters(recurse=False):
                if parameter.dim() < 2:
                    parameter += 0.3 * torch.randn_like(parameter)
                elif parameter.dim() >= 2 and isinstance(owner, nn.Embedding):
                    parameter *= spread
    return module
