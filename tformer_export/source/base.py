"""`Source`: a module whose forward takes its inputs one by one and returns logits, and what else an export needs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tformer_runtime.errors import OptionError, SourceError
from tformer_runtime.manifest import SpecialTokens


@dataclass(frozen=True)
class Mask:
    """A mask that forward takes as an argument: described, so that nobody has to pass one.

    of: the input whose positions it speaks of. keep: what the mask holds where a position may be read; "additive" means
    0 where it may and −inf where it may not. A padding mask is (batch, time) with the dtype given; a causal one is
    (time, time).
    """

    kind: str
    of: str
    keep: bool | str = True
    dtype: torch.dtype = torch.bool


def padding(of: str, keep: bool | str = True, dtype: torch.dtype = torch.bool) -> Mask:
    """Which positions of the input `of` are valid, (batch, time)."""
    return Mask("padding", of, keep, dtype)


def causal(of: str, keep: bool | str = True, dtype: torch.dtype = torch.bool) -> Mask:
    """Which positions each position of the input `of` may attend to: itself and those before it, (time, time)."""
    return Mask("causal", of, keep, dtype)


@dataclass
class Source:
    """module(*example.values()) gives logits (batch, time, vocabulary), or the outputs of a model that is run once.

    masks: inputs of the module that the runtime derives from the lengths of another, by name; each is in `example` too.
    step: the autoregressive input. tokenizers: input name → text in tokenizers' JSON format.
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

    def __post_init__(self) -> None:
        if self.step is not None and self.step not in self.example:
            raise SourceError(
                f"the step input {self.step!r} is not among the inputs {', '.join(self.example)}: name one of them"
            )

    @property
    def owner(self) -> nn.Module:
        """The user's own module, whose submodules' names users know."""
        return self.module.module if isinstance(self.module, Adapter) else self.module

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The module in eval mode for a while: what the caller had set is set again afterwards."""
        training = [part for part in self.module.modules() if part.training]
        self.module.eval()
        try:
            yield
        finally:
            for part in training:
                part.training = True

    def digest(self) -> str:
        """SHA-256 over the names and bytes of the weights. One pass over them."""
        total = hashlib.sha256()
        for name, value in sorted(self.module.state_dict().items()):
            total.update(name.encode())
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


class Adapter(nn.Module):
    """Calls `module` with keyword arguments and returns its logits: the first output, or the one with that name.

    constant: arguments that are always the same. built: masks that follow from the length of an input alone.
    layouts: input → its batch and time axis in the module, where they are not 0 and 1. step: the input in whose layout
    the logits are.
    """

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        constant: Mapping[str, Any] | None = None,
        built: Mapping[str, Mask] | None = None,
        layouts: Mapping[str, tuple[int, int]] | None = None,
        step: str | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.names, self.constant, self.built = names, dict(constant or {}), dict(built or {})
        self.layouts, self.step = dict(layouts or {}), step

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        masks = {name: build_mask(mask, given[mask.of]) for name, mask in self.built.items()}
        for name, axes in self.layouts.items():
            given[name] = given[name].movedim((0, 1), axes)
        output = first_output(self.module(**given, **masks, **self.constant))
        return output.movedim(self.layouts[self.step], (0, 1)) if self.step in self.layouts else output


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

    pad = ids("pad") or (0,)
    return SpecialTokens(ids("start"), ids("end"), pad[0])


def as_float32(module: nn.Module) -> nn.Module:
    """The module, or a copy of it in float32 if some of its weights are not: no kernel of the CPU's is faster in
    another precision, and the comparison would be with rounding."""
    tensors = (*module.parameters(), *module.buffers())
    if all(t.dtype == torch.float32 or not t.is_floating_point() for t in tensors):
        return module
    return copy.deepcopy(module).float()


def build_mask(mask: Mask, value: torch.Tensor) -> torch.Tensor:
    """The mask for an input all of whose positions are valid."""
    batch, time = value.shape[0], value.shape[1]
    shape = (time, time) if mask.kind == "causal" else (batch, time)
    keep = torch.ones(shape, dtype=torch.bool)
    keep = keep.tril() if mask.kind == "causal" else keep
    if mask.keep == "additive":
        return torch.zeros(shape).masked_fill(~keep, float("-inf"))
    return (keep if mask.keep else ~keep).to(mask.dtype)


def first_output(output: Any) -> torch.Tensor:
    """The logits among what forward returns: `.logits`, "logits", or the first tensor."""
    if isinstance(output, torch.Tensor):
        return output
    named = getattr(output, "logits", None)
    if named is None and isinstance(output, Mapping):
        named = output.get("logits")
    if isinstance(named, torch.Tensor):
        return named
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(values, (list, tuple)) or isinstance(output, Mapping):
        for value in values:
            if isinstance(value, torch.Tensor):
                return value
    raise SourceError(f"forward returned {type(output).__name__}, which holds no tensor to export")
