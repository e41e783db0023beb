"""A module that is called by its methods encode and decode, in place of a forward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tformer_runtime.base.errors import SourceError


class EncodeDecode(nn.Module):
    """A module without forward, called as logits = decode(…, memory=encode(…)).

    Arguments are bound by name. The memory is the parameter of decode that is neither an input, a mask nor fixed.
    """

    def __init__(self, module: nn.Module, given_names: set[str]) -> None:
        super().__init__()
        self.module = module
        encode = dict(inspect.signature(module.encode).parameters)  # type: ignore[arg-type]
        decode = dict(inspect.signature(module.decode).parameters)  # type: ignore[arg-type]
        self.of_encode, self.of_decode = list(encode), list(decode)
        free = [n for n, p in decode.items() if n not in given_names and p.default is inspect.Parameter.empty]
        if len(free) != 1:
            raise SourceError(
                f"decode({', '.join(decode)}) must have one parameter besides inputs, masks and fixed arguments, for "
                f"the result of encode({', '.join(encode)}), but it has {', '.join(free) or 'none'}: name all others"
            )
        (self.memory,) = free
        self.parameters_by_name = {**encode, **{n: p for n, p in decode.items() if n != self.memory}}

    def forward(self, **arguments: Any) -> Any:
        memory = self.module.encode(**{n: arguments[n] for n in self.of_encode if n in arguments})  # type: ignore[operator]
        rest = {n: arguments[n] for n in self.of_decode if n in arguments}
        return self.module.decode(**{self.memory: memory}, **rest)  # type: ignore[operator]


def callable_module(module: nn.Module, given_names: set[str]) -> nn.Module:
    """Return a module that can be called by the names of its parameters.

    It is the module itself, or the module that torch.compile compiled, or an `EncodeDecode` of a module that has the
    methods encode and decode and no forward. Raises SourceError for any other.
    """
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    if isinstance(module, torch.jit.ScriptModule):  # noqa: TID251 (to refuse it)
        raise SourceError(
            "the model is TorchScript, which torch.export cannot trace: give the nn.Module that it was made of"
        )
    if type(module).forward is not nn.Module.forward:
        return module
    if callable(getattr(module, "encode", None)) and callable(getattr(module, "decode", None)):
        return EncodeDecode(module, given_names)
    raise SourceError(
        f"{type(module).__name__} has no forward, and no encode(…) and decode(memory, …) that could stand for it"
    )
