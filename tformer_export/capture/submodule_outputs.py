"""Hidden states on request: the outputs of named submodules, in addition to the results of forward."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tformer_runtime.base.errors import OptionError


@contextmanager
def record_outputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Record name → the first tensor that the latest call of the module returned, while forward runs."""
    outputs: dict[str, torch.Tensor] = {}

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def record(called: nn.Module, arguments: object, output: object) -> None:
            first = next((x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)), None)
            if first is not None:
                outputs[name] = first

        return module.register_forward_hook(record)

    handles = [watch(name, module) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class WithSubmoduleOutputs(nn.Module):
    """A module whose forward returns the first outputs of another module, then outputs of watched submodules.

    outputs: the number of outputs of the other module. forward raises OptionError if a watched submodule is not called,
    or returns no tensor.
    """

    def __init__(self, module: nn.Module, modules: Mapping[str, nn.Module], outputs: int = 1) -> None:
        super().__init__()
        self.module, self.outputs = module, outputs
        self.watched = dict(modules)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with record_outputs(self.watched) as recorded:
            first = pytree.tree_leaves(self.module(*inputs))[: self.outputs]
        for name in self.watched:
            if name not in recorded:
                raise OptionError(f"forward gets no tensor from the submodule {name!r}, so it cannot be given")
        return *first, *(recorded[name] for name in self.watched)


def find_modules(owner: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return submodules by their qualified names. Raises OptionError with close matches for an unknown name."""
    known = dict(owner.named_modules(remove_duplicate=False))
    known.pop("", None)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 5, 0.5) or [n for n, _ in owner.named_children()]
            raise OptionError(f"the model has no submodule {name!r}: there are {', '.join(close)}, and others")
    return {name: known[name] for name in names}
