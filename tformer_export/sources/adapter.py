"""`Adapter`: a wrapper that calls any module with its inputs one by one and returns its logits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import Axis, Mask
from tformer_runtime.base.errors import SourceError

_BY_POSITION = inspect.Parameter.POSITIONAL_ONLY


class Adapter(nn.Module):
    """A module that calls `module` by the names of its parameters and returns its logits.

    names: the inputs of the adapter's forward, in their order.
    fixed_arguments: arguments that are always the same.
    derived: arguments that are built from lengths.
    keeps: name of an input → the name of its keep-mask, (batch, time) bool. An input without one holds no padding.
    layouts: name of an input → its batch and time axis in the module, where they are not 0 and 1.
    step: the input whose layout the logits have.
    output: name or index of the logits; several for a single-pass model, which are returned as a tuple.
    flat_logits: whether the module returns logits (batch · time, vocabulary).
    """

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        fixed_arguments: Mapping[str, Any] | None = None,
        derived: Mapping[str, Mask] | None = None,
        keeps: Mapping[str, str] | None = None,
        layouts: Mapping[str, tuple[int, int]] | None = None,
        step: str | None = None,
        output: str | int | Sequence[str | int] | None = None,
        flat_logits: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.flat_logits = module, flat_logits
        self.names, self.fixed_arguments, self.derived = names, dict(fixed_arguments or {}), dict(derived or {})
        self.keeps, self.layouts, self.step, self.output = dict(keeps or {}), dict(layouts or {}), step, output
        self.positional = [n for n, p in parameters_of(module).items() if p.kind is _BY_POSITION]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        returned = self.call_module(*inputs)
        if self.output is not None and not isinstance(self.output, (str, int)):
            return tuple(choose_output(returned, which) for which in self.output)
        output = choose_output(returned, self.output)
        if self.flat_logits and self.step is not None:
            batch, time = inputs[self.names.index(self.step)].shape[:2]
            first = (time, batch) if self.layouts.get(self.step) == (1, 0) else (batch, time)
            output = output.reshape(*first, output.shape[-1])
        return output.movedim(self.layouts[self.step], (0, 1)) if self.step in self.layouts else output

    def call_module(self, *inputs: torch.Tensor) -> Any:
        """Call the module and return all its results."""
        tensors: dict[str, Any] = dict(zip(self.names, inputs, strict=True))
        keeps = {name: tensors.pop(keep) for name, keep in self.keeps.items()}
        lengths: dict[Axis, int] = {name: value.shape[1] for name, value in tensors.items() if value.dim() > 1}
        arguments = {**tensors, **self.fixed_arguments}
        for name, mask in self.derived.items():
            of = tensors[mask.of]
            keep = keeps[mask.of] if mask.of in keeps else torch.ones(of.shape[0], of.shape[1], dtype=torch.bool)
            arguments[name] = mask.build(keep, lengths, padded=mask.of in keeps)
        for name, axes in self.layouts.items():
            arguments[name] = arguments[name].movedim((0, 1), axes)
        by_position = [arguments.pop(name) for name in self.positional if name in arguments]
        return self.module(*by_position, **arguments)


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


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of forward by name."""
    own = getattr(module, "parameters_by_name", None)
    return dict(inspect.signature(module.forward).parameters) if own is None else own


def required_parameters(module: nn.Module) -> list[str]:
    """Return the parameters of forward that have no default."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, p in parameters_of(module).items()
        if p.default is inspect.Parameter.empty and p.kind not in variable
    ]


def choose_output(output: Any, which: str | int | None = None) -> torch.Tensor:
    """Return the logits among the results of forward.

    which: name or index of the output; by default `.logits`, "logits" or the first tensor. Raises SourceError if there
    is no such tensor.
    """
    if isinstance(output, torch.Tensor) and which in (None, 0):
        return output
    named = _by_name(output)
    values = list(named.values()) if named else list(output) if isinstance(output, (list, tuple)) else [output]
    if which is None:
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        tensor = named.get("logits", tensors[0] if tensors else None)
    elif isinstance(which, int):
        tensor = values[which] if -len(values) <= which < len(values) else None
    else:
        tensor = named.get(which)
    if isinstance(tensor, torch.Tensor):
        return tensor
    if which is None:
        raise SourceError(f"forward returned {type(output).__name__}, which holds no tensor to export")
    returned = ", ".join(named) if named else f"{len(values)} of them"
    raise SourceError(f"forward has no tensor {which!r} among its outputs: it returns {returned}")


def all_outputs(output: Any) -> dict[str | int, torch.Tensor]:
    """Return every tensor among the results of forward, by name, or by index if the results have no names."""
    if isinstance(output, torch.Tensor):
        return {0: output}
    named = _by_name(output)
    values: list[Any] = list(output) if isinstance(output, (list, tuple)) else []
    pairs: list[tuple[str | int, Any]] = [*named.items()] or [*enumerate(values)]
    return {name: value for name, value in pairs if isinstance(value, torch.Tensor)}


def _by_name(output: Any) -> dict[str, Any]:
    """Return the outputs of a mapping, dataclass, named tuple or object with attributes; {} if they have no names."""
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if is_dataclass(output) and not isinstance(output, type):
        return {f.name: getattr(output, f.name) for f in fields(output)}
    if isinstance(output, tuple):
        return dict(output._asdict()) if hasattr(output, "_asdict") else {}
    return dict(vars(output)) if hasattr(output, "__dict__") and not isinstance(output, torch.Tensor) else {}
