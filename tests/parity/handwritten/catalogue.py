"""What a case is: a model as someone wrote it, how it is called, and what PyTorch says of it, a row at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tformer_export.sources import Mask

PAD, START, END = 0, 1, 2
SPECIAL = {"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": PAD}
VOCABULARY, BLOCK = 53, 32  # ids, and the longest sequence that the models have positions for

MadeMask = tuple[Mask, Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """inputs: forward's parameters, the step input last. time_first: inputs and outputs are (time, batch, …).

    full: exported in full; the programs of the others are run in PyTorch. seed: one with which it decodes lively rows.
    masks: forward's masks, each as it is described to `export` and as it is made from the inputs for the module itself.
    refused: what the refusal says, for what cannot be decoded step by step or cannot be traced.
    last: forward gives logits of the last position alone.
    fails: what stands in the way of a model that ought to export.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ("idx",)
    time_first: bool = False
    full: bool = False
    seed: int = 0
    masks: Mapping[str, MadeMask] = field(default_factory=dict)
    last: bool = False
    refused: str | None = None
    fails: str | None = None

    @functools.cached_property
    def module(self) -> nn.Module:
        """Built from a seed. Vectors (biases, norms, gates) are moved away from values that would hide a mistake, and
        change signs, which keeps a tied output projection from choosing its own input again and again."""
        torch.manual_seed(self.seed)
        module = self.build().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() < 2:
                    parameter += 0.3 * torch.randn_like(parameter)
                    parameter *= torch.randint_like(parameter, 2) * 2 - 1
        return module

    @property
    def request(self) -> str | None:
        """The name of the request input of an encoder-decoder."""
        return self.inputs[0] if len(self.inputs) > 1 else None

    @property
    def arguments(self) -> dict[str, Any]:
        """What `export` and `from_module` take beside the module."""
        ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
        given: dict[str, Any] = {
            "example": dict.fromkeys(self.inputs, ids.T if self.time_first else ids),
            "step_input": self.inputs[-1],
            "masks": {name: described for name, (described, _) in self.masks.items()},
        }
        return given | ({"axes": dict.fromkeys(self.inputs, (1, 0))} if self.time_first else {})

    def logits(self, source: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
        """(time, vocabulary) of one row alone, from one forward pass over all of it; if forward gives the last position
        alone, from one over each of its beginnings."""
        if self.last:
            each = [self._forward(source, tokens[: i + 1]) for i in range(len(tokens))]
            return np.concatenate([logits.reshape(1, VOCABULARY) for logits in each])
        return self._forward(source, tokens)

    @torch.no_grad()
    def _forward(self, source: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
        axis = 1 if self.time_first else 0
        rows = [tokens] if source is None else [source, tokens]
        given = {n: torch.from_numpy(r).unsqueeze(axis) for n, r in zip(self.inputs, rows, strict=True)}
        output = self.module(**given, **{name: made(**given) for name, (_, made) in self.masks.items()})
        while not isinstance(output, torch.Tensor):
            output = output["logits"] if isinstance(output, Mapping) else output[0]
        return output.select(axis, 0).numpy()

    def greedy(self, row: np.ndarray, most: int) -> list[int]:
        """The best token of the growing sequence's logits, again and again, until the end token: of a decoder after the
        prompt `row`, else for the source `row`."""
        source, tokens = (None, list(row)) if self.request is None else (row, [START])
        found: list[int] = []
        while len(found) < most and END not in found:
            found.append(int(self.logits(source, np.array([*tokens, *found]))[-1].argmax()))
        return found
