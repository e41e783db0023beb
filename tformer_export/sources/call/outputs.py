"""The results of forward: which of them are the logits, and their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from tformer_runtime.base.errors import SourceError

MAX_NAMED, MAX_DEPTH = 8, 3  # outputs that an error names, and containers in containers


def choose_output(output: Any, which: str | int | None = None) -> torch.Tensor:
    """Return the logits among the results of forward.

    which: name or index of the output; by default `.logits`, "logits" or the first tensor. "1.0" is the first tensor of
        a list that is the second result. Raises SourceError if there is no such tensor.
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
        tensor = named.get(which, dict(_by_path(output)).get(which))
    if isinstance(tensor, torch.Tensor):
        return tensor
    paths = [path for path, _ in _by_path(output)]
    if which is None and not paths:
        raise SourceError(f"forward returned {type(output).__name__}, which holds no tensor to export")
    names = ", ".join(map(repr, paths[:MAX_NAMED])) + (f" and {len(paths) - MAX_NAMED} more" * (len(paths) > MAX_NAMED))
    if which is None:
        raise SourceError(f"forward returns its tensors in containers: name one of {names} (output=…)")
    raise SourceError(f"forward has no tensor {which!r} among its outputs, which are {names or 'no tensors'}")


def _by_path(output: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Find the tensors in containers, with the names and indices that lead to each, joined by dots."""
    if isinstance(output, torch.Tensor):
        yield path or "0", output
        return
    parts = _by_name(output) or (enumerate(output) if isinstance(output, (list, tuple)) else {})
    for name, value in parts.items() if isinstance(parts, dict) else parts:
        if path.count(".") < MAX_DEPTH:
            yield from _by_path(value, f"{path}.{name}".lstrip("."))


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
