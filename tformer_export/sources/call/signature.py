"""The parameters of forward, and calls by their names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


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


def takes_any_name(module: nn.Module) -> bool:
    """Return whether forward takes arguments beside those that it names, as `**inputs` or `*inputs`."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.kind in variable for p in parameters_of(module).values())


def call_by_name(module: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Call a module with arguments by name. Those that it takes by position only are passed by position.

    Arguments of `*inputs` have its name or names of the caller's choice, and are passed in their order.
    """
    by_name = dict(arguments)
    parameters = parameters_of(module)
    kinds = {parameter.kind: name for name, parameter in parameters.items()}
    positional = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD not in kinds:
        variable = kinds[inspect.Parameter.VAR_POSITIONAL]
        before = list(parameters)[: list(parameters).index(variable)]
        positional = [*before, *(name for name in by_name if name == variable or name not in parameters)]
    by_position = [by_name.pop(name) for name in positional if name in by_name]
    return module(*by_position, **by_name)
