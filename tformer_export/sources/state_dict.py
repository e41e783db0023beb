"""The weights of a module in the file of a training loop.

A training loop writes a state dict, alone or next to the state of its optimiser and its counters. The names of the
weights may have the prefix of a wrapper: `module.` of DistributedDataParallel, `_orig_mod.` of torch.compile, `model.`
of a LightningModule. The names of the module's own weights tell which entries of the file they are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer_export.common.checkpoint import refuse_bomb
from tformer_runtime.base.errors import MissingExtraError, SourceError
from tformer_runtime.base.extras import install_command

logger = logging.getLogger(__name__)

MAX_DEPTH = 2  # of a state dict in the file's dict, as in {"ema": {"model": …}}


def read_weights(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Return the weights in a file of torch.save or safetensors, by the names that a module gives them.

    names: those of the module's own state dict. If the file has the weights of no module that fits, the ones with the
        most of these names are returned.

    Raises SourceError for a file that cannot be read, has no weights, or has several that fit.
    """
    content = _load(path)
    states = dict(_state_dicts(content))
    if not states:
        kind = (
            f"a dict of {', '.join(map(str, content)) or 'nothing'}"
            if isinstance(content, dict)
            else f"a {type(content).__name__}"
        )
        raise SourceError(f"{path} does not hold a state dict: it is {kind}; save model.state_dict()")
    found = [(place, prefix) for place, state in states.items() for prefix in _prefixes(state, names)]
    fitting = [(place, prefix) for place, prefix in found if all(prefix + name in states[place] for name in names)]
    if len(fitting) > 1:
        several = " and ".join(_described(*one) for one in fitting)
        raise SourceError(
            f"{path} holds several state dicts that fit the module, {several}: save the one to export by itself"
        )
    if not found:
        return dict(states[max(states, key=lambda place: len(states[place]))])
    place, prefix = fitting[0] if fitting else max(found, key=lambda one: _count(states[one[0]], one[1], names))
    weights = {name.removeprefix(prefix): w for name, w in states[place].items() if name.startswith(prefix)}
    if place or prefix:
        logger.info("the weights are %s in %s", _described(place, prefix), path)
    if left := [name for name in states[place] if not name.startswith(prefix)]:
        logger.warning("%s: not weights of the module, and left out: %s", path.name, ", ".join(left))
    return weights


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError as error:
            raise MissingExtraError(f"reading .safetensors needs safetensors: {install_command('hf')}") from error
        try:
            return load_file(path)
        except SafetensorError as error:
            raise SourceError(f"{path} is not a file of safetensors: {error}") from error
    refuse_bomb(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many types, with no common base
        raise SourceError(f"{path} is not a state dict that can be read without running code") from error


def _state_dicts(content: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Tensor]]]:
    """Yield the dicts of tensors in a file's dict, with the keys that lead to them."""
    if not isinstance(content, dict):
        return
    if content and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()):
        yield place, content
    elif len(place) < MAX_DEPTH:
        for key, value in content.items():
            yield from _state_dicts(value, (*place, str(key)))


def _prefixes(state: Mapping[str, Tensor], names: Collection[str]) -> set[str]:
    """Return the prefixes with which one of the module's names is a name of the state dict."""
    first = next(iter(names), None)
    ends = [name for name in state if first is not None and (name == first or name.endswith(f".{first}"))]
    return {name.removesuffix(first or "") for name in ends}


def _count(state: Mapping[str, Tensor], prefix: str, names: Collection[str]) -> int:
    return sum(prefix + name in state for name in names)


def _described(place: tuple[str, ...], prefix: str) -> str:
    keys = "".join(f"[{key!r}]" for key in place)
    return " ".join(part for part in (keys and f"at {keys}", prefix and f"with the prefix {prefix!r}") if part)
