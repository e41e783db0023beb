"""The class `Entry`: a model of a public package or repository, its call, and what export is told about it."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tformer_export.sources import Mask

START, END, PAD = 1, 2, 0
SPECIAL = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
VOCABULARY = 61


@dataclass(frozen=True)
class Input:
    """One row of an input.

    shape: its axes, None for time. vocabulary: the number of ids; 0 for an input of numbers. first: the lowest id that
    is drawn, by default behind the special tokens.
    """

    shape: tuple[int | None, ...] = (None,)
    vocabulary: int = 0
    first: int = END + 1

    def draw(self, random: np.random.Generator, length: int) -> np.ndarray:
        """Return a row of random numbers or ids."""
        shape = [length if size is None else size for size in self.shape]
        if self.vocabulary:
            return random.integers(self.first, self.vocabulary, shape)
        return random.standard_normal(shape).astype("float32")

    def time_first(self, row: np.ndarray) -> np.ndarray:
        """Return a row as the file reads it: time before channels."""
        return np.moveaxis(row, self.shape.index(None), 0) if None in self.shape else row


def ids(vocabulary: int = VOCABULARY) -> Input:
    return Input((None,), vocabulary)


def numbers(*shape: int | None) -> Input:
    return Input(shape)


@dataclass(frozen=True)
class Entry:
    """A model of a public package or of a public repository.

    package: the name of its distribution, or of its repository on GitHub. model: its class, as the table shows it.
    commit: of the repository; empty for a package. folder: those in the repository that modules are imported from, with
        spaces between them.
    requires: packages of the versions that it names, if others do not do.
    unused: modules that it imports and that the model does not call: they need not be installed.
    inputs: by the names of the file's inputs. step: the one that the model is stepped over; None for a single pass.
    told: further arguments of `export`. masks: for each mask of forward, its description for `export` and a function
        that computes it from the inputs of one row.
    wrap: inputs → the arguments of forward, if it takes them in one container.
    reads: one row of each input → the output of the original module, if it is not called with them by name.
    gain: a factor of all matrices, with which the tokens vary.
    length: of the example; the check uses others. unit: a factor of all lengths.
    refusal: a part of the expected message of a model that is not exported. why: the same in few words.
    """

    package: str
    model: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Input] = field(default_factory=lambda: {"x": ids()})
    step: str | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[str, tuple[Mask, Callable[..., torch.Tensor]]] = field(default_factory=dict)
    wrap: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    reads: Callable[..., Any] | None = None
    gain: float = 1.0
    seed: int = 0
    length: int = 7
    unit: int = 1
    max_length: int | None = 64
    refusal: str = ""
    why: str = ""
    commit: str = ""
    folder: str = "."
    requires: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return self.commit[:7] or importlib.metadata.version(self.package)

    @property
    def name(self) -> str:
        return f"{self.package}: {self.model}"

    def make(self) -> nn.Module:
        """Return the module with seeded weights.

        Vectors and zeros move from values that would hide a mistake. Random signs of vectors keep a tied output
        projection from choosing its own input.
        """
        torch.manual_seed(self.seed)
        random.seed(self.seed)  # some packages draw with it
        module = self.build()
        with torch.no_grad():
            for weight in module.parameters():
                if weight.is_floating_point() and (weight.dim() < 2 or not weight.any()):
                    weight += 0.2 * torch.randn_like(weight)
                    weight *= torch.randint_like(weight, 2) * 2 - 1
                elif weight.is_floating_point():
                    weight *= self.gain
        return module.eval()  # at the end: some modules compute tables of their weights here

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `export`."""
        drawn, length = np.random.default_rng(100), self.length * self.unit
        rows = {name: torch.from_numpy(np.stack([spec.draw(drawn, length)] * 2)) for name, spec in self.inputs.items()}
        arguments: dict[str, Any] = {"example": self.wrap(rows), "step_input": self.step, **self.told}
        if self.masks:
            arguments["masks"] = {name: description for name, (description, _) in self.masks.items()}
        if self.step is not None:
            arguments |= {"special_tokens": SPECIAL, "max_length": self.max_length}
        return arguments

    @torch.no_grad()
    def original(self, module: nn.Module, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the output of the original module for one row, called again."""
        inputs = {name: torch.from_numpy(np.asarray(row))[None] for name, row in rows.items()}
        if self.reads is not None:
            output = self.reads(module, **inputs)
        else:
            masks = {name: compute(**inputs) for name, (_, compute) in self.masks.items()}
            output = module(**self.wrap(inputs), **masks, **self.told.get("fixed_arguments", {}))
        if "output" in self.told:
            output = output[self.told["output"]]
        while not isinstance(output, torch.Tensor):
            output = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", None) or output[0]
        return output[0].float().numpy()

    def said(self) -> str:
        """Return what export was told, for the table."""
        parts = [f"steps over `{self.step}`"] if self.step else ["one pass"]
        parts += [f"`{name}={value}`" for name, value in self.told.get("fixed_arguments", {}).items()]
        parts += [f"{name} `{value}`" for name, value in self.told.items() if name != "fixed_arguments"]
        return ", ".join([*parts, *(f"mask `{name}`" for name in self.masks)])
