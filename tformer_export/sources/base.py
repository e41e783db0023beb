"""`Source`: a module whose forward takes its inputs one by one and returns logits, and what else an export needs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import Mask
from tformer_export.sources.adapter import Adapter, EncodeDecode
from tformer_export.sources.pooled_module import Answer, Pooled
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.format.manifest import Outcome, Preparation, SpecialTokens


@dataclass
class Source:
    """module(*example.values()) gives logits (batch, time, vocabulary), or the outputs of a model that is run once.

    masks: inputs that the runtime derives from the lengths of another, by name: padding masks, (batch, time); each is
    in `example` too.
    types: inputs that the runtime has from the tokenizer beside another's ids, by name.
    step: the autoregressive input, of ids or of numbers. series: what is said of a series, as `analysis.series`
    reads it; None if nothing is. tokenizers: input name → text in tokenizers' JSON format. chat_tokens: the special
    tokens that the chat template may name, and their texts.
    outcome: what the outputs of a model that is run once stand for. outputs: their names in the file, if `module` gives
    several, as a tuple. answer: its own way from a text, or a pair, cut to so many tokens, to its output without a
    batch axis, or, for tasks of `reference_pipelines`, to its result; by default its tokenizer and `module`. pairs:
    whether it takes pairs of texts. preparation: how inputs are made of what a user has, such as pictures or sounds.
    shortest: positions that an input has at least, where one is not enough, by name. written: the model's own way from
    an output to a text; dictated: its own from samples to the ids that it writes, with times among them or without, of
    each window at most so many.
    """

    module: nn.Module
    example: dict[str, torch.Tensor]
    step: str | None
    name: str
    task: str
    masks: dict[str, Mask] = field(default_factory=dict)
    dynamic: dict[str, tuple[int, ...]] = field(default_factory=dict)
    special: SpecialTokens = field(default_factory=SpecialTokens)
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    chat_template: str | None = None
    chat_tokens: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)
    outputs: tuple[str, ...] = ()
    answer: Answer | None = None
    pairs: bool = True
    series: Mapping[str, Any] | None = None
    preparation: Mapping[str, Preparation] = field(default_factory=dict)
    shortest: Mapping[str, int] = field(default_factory=dict)
    written: Callable[[torch.Tensor], str] | None = None
    dictated: Callable[[Any, bool, int], list[int]] | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.step not in self.example:
            raise SourceError(
                f"the step input {self.step!r} is not among the inputs {', '.join(self.example)}: name one of them"
            )

    @property
    def given(self) -> list[str]:
        """The inputs that a caller gives: neither derived from another's lengths nor by the tokenizer."""
        return [name for name in self.example if name not in self.masks and name not in self.types]

    @property
    def owner(self) -> nn.Module:
        """The user's own module, whose submodules' names users know."""
        module = self.module
        while isinstance(module, (Adapter, EncodeDecode, Pooled)):
            module = module.module
        return module

    @property
    def least(self) -> int:
        """What sizes that are drawn go beyond; 0 where any will do."""
        return max(self.shortest.values(), default=0)

    def ready(self) -> AbstractContextManager[None]:
        """The module in eval mode for a while."""
        return evaluating(self.module)

    def digest(self) -> str:
        """SHA-256 over the names and bytes of the weights. One pass over them."""
        total = hashlib.sha256()
        for name, value in sorted(self.module.state_dict().items()):
            if not isinstance(value, torch.Tensor):  # what a module keeps besides, by get_extra_state
                continue
            total.update(name.encode())
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode for a while: what the caller had set, of each part, is set again afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def special_tokens(given: Mapping[str, Any]) -> SpecialTokens:
    """start and end (ids or lists of them) and pad, by name; OptionError for anything else."""
    unknown = set(given) - {"start", "end", "pad"}
    if unknown:
        raise OptionError(f"special ids are start, end and pad, not {', '.join(sorted(unknown))}")

    def ids(name: str) -> tuple[int, ...]:
        value = given.get(name, ())
        value = (value,) if isinstance(value, int) else tuple(value)
        if not all(isinstance(i, int) and i >= 0 for i in value):
            raise OptionError(f"the special id {name} must be a whole number or a list of them, not {given[name]!r}")
        return value

    return SpecialTokens(ids("start"), ids("end"), next(iter(ids("pad")), None))


def as_float32(module: nn.Module) -> nn.Module:
    """The module, or a copy of it in float32 if some of its weights are not: no kernel of the CPU's is faster in
    another precision, and the comparison would be with rounding."""
    tensors = (*module.parameters(), *module.buffers())
    if all(t.dtype == torch.float32 or not t.is_floating_point() for t in tensors):
        return module
    return copy.deepcopy(module).float()


def build_mask(mask: Mask, value: torch.Tensor) -> torch.Tensor:
    """A mask among the inputs of a `Source`, for an input all of whose positions are valid."""
    return mask.build(torch.ones(value.shape[:2], dtype=torch.bool), {}, padded=False)
