"""Hidden states on request: the outputs of named submodules, beside what forward returns."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tformer_runtime.base.errors import OptionError


@contextmanager
def watched(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Name → the first tensor that the module's latest call returned, filled in as forward runs."""
    held: dict[str, torch.Tensor] = {}

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def keep(called: nn.Module, arguments: object, output: object) -> None:
            first = next((x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)), None)
            if first is not None:
                held[name] = first

        return module.register_forward_hook(keep)

    handles = [watch(name, module) for name, module in modules.items()]
    try:
        yield held
    finally:
        for handle in handles:
            handle.remove()


class WithHidden(nn.Module):
    """forward gives the module's first outputs, and then what the watched modules gave, in their order.

    outputs: how many. OptionError if it does not call one of them, or gets no tensor from it.
    """

    def __init__(self, module: nn.Module, modules: Mapping[str, nn.Module], outputs: int = 1) -> None:
        super().__init__()
        self.module, self.outputs = module, outputs
        self.watched = dict(modules)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with watched(self.watched) as held:
            first = pytree.tree_leaves(self.module(*inputs))[: self.outputs]
        for name in self.watched:
            if name not in held:
                raise OptionError(f"forward gets no tensor from the submodule {name!r}, so it cannot be given")
        return *first, *(held[name] for name in self.watched)


def find_modules(owner: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Submodules by their qualified names; OptionError with close matches for a name that there is not."""
    known = dict(owner.named_modules(remove_duplicate=False))
    known.pop("", None)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 5, 0.5) or [n for n, _ in owner.named_children()]
            raise OptionError(f"the model has no submodule {name!r}: there are {', '.join(close)}, and others")
    return {name: known[name] for name in names}
