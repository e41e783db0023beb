"""Arguments of forward that hold several tensors: a dict, a list, a tuple, a dataclass or an object with attributes.

Each tensor in them becomes an input of its own. Its name is its key or attribute, or the whole path, such as `batch.0`,
where the key is a number or two inputs would have one name. Other values in a container are always the same.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from tformer_export.sources.call.signature import call_by_name, parameters_of

Path = tuple[Any, ...]  # the name of a parameter, then the keys, indices or attributes that lead to a value
_MAX_DEPTH = 4  # of containers in containers


class WithContainers(nn.Module):
    """A module that takes the values of containers one by one, by name, and calls `module` with the containers.

    containers: name of a parameter → its example, which holds the values that are always the same.
    paths: name of an input → its place.
    """

    def __init__(self, module: nn.Module, containers: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
        super().__init__()
        self.module, self.containers, self.paths = module, dict(containers), dict(paths)
        others = {name: p for name, p in parameters_of(module).items() if name not in containers}
        self.parameters_by_name = {
            **{name: inspect.Parameter("value", inspect.Parameter.KEYWORD_ONLY) for name in paths},
            **others,
        }

    def forward(self, **arguments: Any) -> Any:
        given = {path: arguments.pop(name) for name, path in self.paths.items() if name in arguments}
        rebuilt = {name: _replaced(value, (name,), given) for name, value in self.containers.items()}
        returned = call_by_name(self.module, {**rebuilt, **arguments})
        return _written(rebuilt, given) if returned is None else returned


def _written(containers: Mapping[str, Any], given: Mapping[Path, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that forward wrote into its containers, if it returns nothing, by key or attribute."""
    before = [id(value) for value in given.values()]
    return {
        str(key): value
        for container in containers.values()
        for key, value in _parts(container).items()
        if isinstance(value, torch.Tensor) and id(value) not in before
    }


def open_containers(
    module: nn.Module, example: Mapping[str, Any], described: set[str]
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a module whose parameters are tensors, and its example: the module itself if no argument is a container.

    described: names of arguments that are not inputs. A value of that name in a container is not in the example.
    """
    found = {name: dict(_tensors(value, (name,), described)) for name, value in example.items()}
    containers = {name: example[name] for name, values in found.items() if values and (name,) not in values}
    if not containers:
        return module, dict(example)
    values = {path: value for name in containers for path, value in found[name].items()}
    others = Counter(name for name in parameters_of(module) if name not in containers)
    used = others + Counter(path[-1] for path in values)
    names = {
        path: path[-1] if isinstance(path[-1], str) and used[path[-1]] == 1 else ".".join(map(str, path))
        for path in values
    }
    opened: dict[str, torch.Tensor] = {}
    for name, value in example.items():
        inner = {names[path]: v for path, v in values.items() if path[0] == name}
        opened |= {n: v for n, v in inner.items() if n not in described} if name in containers else {name: value}
    return WithContainers(module, containers, {name: path for path, name in names.items()}), opened


def _parts(value: Any) -> dict[Any, Any]:
    """Return the values in a container by key, index or attribute; {} for any other value."""
    if isinstance(value, (torch.Tensor, nn.Module, type, str)):
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return {} if callable(value) else dict(getattr(value, "__dict__", {}))


def _tensors(value: Any, path: Path, described: set[str]) -> Iterator[tuple[Path, Any]]:
    """Find the tensors, and the values with described names, each with its path."""
    if isinstance(value, torch.Tensor) or (len(path) > 1 and {path[-1], ".".join(map(str, path))} & described):
        yield path, value
    elif len(path) <= _MAX_DEPTH:
        for key, part in _parts(value).items():
            yield from _tensors(part, (*path, key), described)


def _replaced(value: Any, path: Path, given: Mapping[Path, Any]) -> Any:
    """Return a copy of a container with the given values in their places."""
    if path in given:
        return given[path]
    if not any(other[: len(path)] == path for other in given):
        return value
    parts = {key: _replaced(part, (*path, key), given) for key, part in _parts(value).items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(**parts)
    if isinstance(value, (list, tuple)):
        return type(value)(parts.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return parts
    rebuilt = copy.copy(value)
    for key, part in parts.items():
        if isinstance(rebuilt, MutableMapping):
            rebuilt[key] = part
        else:
            object.__setattr__(rebuilt, key, part)  # of a frozen dataclass, too
    return rebuilt
