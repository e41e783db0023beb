"""The class `Case`: a hand-written model, its call, and its reference logits and greedy tokens from PyTorch."""

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
VOCABULARY, BLOCK = 53, 32  # number of ids, and maximum sequence length

DescribedMask = tuple[Mask, Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A hand-written model.

    inputs: the parameters of forward; the last one is the step input.
    time_first: whether inputs and outputs are (time, batch, …).
    exports_file: whether the test exports a file. For the other cases it runs the staged programs in PyTorch.
    seed: a seed for which the greedy tokens vary.
    masks: for each mask of forward, its description for `export` and a function that computes it from the inputs.
    last_position_only: whether forward returns the logits of the last position only.
    refusal: a part of the expected error message, for a model that cannot be traced or decoded step by step.
    known_failure: the reason why a model that ought to export does not.
    thorough: whether the suite leaves it out, because it has others of its kind.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ("idx",)
    time_first: bool = False
    exports_file: bool = False
    seed: int = 0
    masks: Mapping[str, DescribedMask] = field(default_factory=dict)
    last_position_only: bool = False
    refusal: str | None = None
    known_failure: str | None = None
    thorough: bool = False

    @functools.cached_property
    def module(self) -> nn.Module:
        """Return the model, built from the seed.

        Vectors (biases, norms, gates) move away from values that would hide a mistake. Random signs keep a tied output
        projection from choosing its own input repeatedly.
        """
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
        """Return the name of the request input of an encoder-decoder."""
        return self.inputs[0] if len(self.inputs) > 1 else None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `export` and `from_module` for this model."""
        ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
        arguments: dict[str, Any] = {
            "example": dict.fromkeys(self.inputs, ids.T if self.time_first else ids),
            "step_input": self.inputs[-1],
            "masks": {name: description for name, (description, _) in self.masks.items()},
        }
        return arguments | ({"axes": dict.fromkeys(self.inputs, (1, 0))} if self.time_first else {})

    def logits(self, source: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (time, vocabulary) of a single row from one forward pass over the whole row.

        If forward returns the last position only, one pass runs for each prefix of the row.
        """
        if self.last_position_only:
            logits_of_prefixes = [self._forward(source, tokens[: i + 1]) for i in range(len(tokens))]
            return np.concatenate([logits.reshape(1, VOCABULARY) for logits in logits_of_prefixes])
        return self._forward(source, tokens)

    @torch.no_grad()
    def _forward(self, source: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
        axis = 1 if self.time_first else 0
        rows = [tokens] if source is None else [source, tokens]
        arguments = {n: torch.from_numpy(r).unsqueeze(axis) for n, r in zip(self.inputs, rows, strict=True)}
        output = self.module(
            **arguments, **{name: compute_mask(**arguments) for name, (_, compute_mask) in self.masks.items()}
        )
        while not isinstance(output, torch.Tensor):
            output = output["logits"] if isinstance(output, Mapping) else output[0]
        return output.select(axis, 0).numpy() if output.dim() == 3 else output.numpy()  # or (batch · time, vocabulary)

    def greedy(self, row: np.ndarray, max_new_tokens: int) -> list[int]:
        """Return the greedy tokens after the prompt `row`, or for the source `row` of an encoder-decoder."""
        source, tokens = (None, list(row)) if self.request is None else (row, [START])
        generated: list[int] = []
        while len(generated) < max_new_tokens and END not in generated:
            generated.append(int(self.logits(source, np.array([*tokens, *generated]))[-1].argmax()))
        return generated
