"""A factory, `package.module:function`, alone or with the state dict that belongs into what it makes; pickled modules.

A factory is called with the keyword arguments of `--config`, and returns one of

module                         an nn.Module whose forward takes token ids, (batch, time) each, or a transformers model
(module, example)              example: inputs by name
(module, example, options)     options: keyword arguments of `export`, such as step, masks or special
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tformer_export.common.checkpoint import import_callable, load_weights
from tformer_export.sources.base import Source, special_tokens
from tformer_export.sources.chat_template import with_template
from tformer_export.sources.hugging_face import from_transformers, is_transformers_model
from tformer_export.sources.torch_module import from_module, ids_for
from tformer_runtime.base.errors import OptionError, SourceError

OPTIONS = {  # what a factory may say beside its module and example
    "step", "masks", "dynamic", "constants", "output", "task", "special", "tokenizer", "defaults", "max_length",
    "series", "chat_template",
}  # fmt: skip


def from_factory(spec: str, config: Path | None = None, step: str | None = None) -> Source:
    """The module that a factory makes, with the weights that it gives it."""
    return _source(_call(spec, _arguments(config)), spec, step)


def from_state(path: Path, factory: str, config: Path | None = None, step: str | None = None) -> Source:
    """A plain state dict, loaded into what the factory makes."""
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many types, with no common base
        raise SourceError(f"{path} is not a state dict that can be read without running code") from error
    made = _call(factory, _arguments(config))
    module = made[0] if isinstance(made, tuple) and made else made
    others = [str(n) for n, v in state.items() if not isinstance(v, torch.Tensor)] if isinstance(state, dict) else []
    if not isinstance(state, dict) or others:
        held = f"{', '.join(others)} in it are no tensors" if others else f"it is a {type(state).__name__}"
        raise SourceError(f"{path} does not hold a state dict: {held}; save model.state_dict(), or use save_checkpoint")
    if isinstance(module, nn.Module):
        load_weights(module, state, path.name, factory)
    return _named(_source(made, factory, step), path)


def from_pickle(path: Path, step: str | None = None) -> Source:
    """A module that was saved whole. Loading it runs the code that it names."""
    _see_current_folder()
    try:
        made = torch.load(path, weights_only=False, map_location="cpu")
    except Exception as error:  # unpickling runs any code, which raises anything
        raise SourceError(
            f"{path} cannot be unpickled: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if not isinstance(made, nn.Module):
        raise SourceError(f"{path} holds a {type(made).__name__}, not a module: save it with save_checkpoint")
    return _named(_source(made, str(path), step), path)


def _call(spec: str, arguments: Mapping[str, Any]) -> Any:
    _see_current_folder()
    make = import_callable(spec)
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "no arguments"
        raise SourceError(f"the factory {spec} cannot be called with {given}: {error}") from error
    except ValueError:  # a callable that tells nothing of its parameters
        pass
    try:
        return make(**arguments)
    except Exception as error:  # user code: whatever it raises means that there is nothing to export
        raise SourceError(f"the factory {spec} failed: {type(error).__name__}: {error}") from error


def _source(made: Any, spec: str, step: str | None) -> Source:
    parts = made if isinstance(made, tuple) else (made,)
    module, example, options = (*parts, None, None)[:3]
    if is_transformers_model(module) and example is None:
        if options:
            raise SourceError(f"{spec} returned options beside a transformers model: give them to the export itself")
        return from_transformers(module)
    if not isinstance(module, nn.Module) or len(parts) > 3 or not isinstance(options or {}, Mapping):
        raise SourceError(
            f"{spec} returned {type(made).__name__}: a factory returns a module, (module, example of its inputs by "
            "name) or (module, example, options of the export)"
        )
    options = dict(options or {})
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise SourceError(f"{spec} returned the options {', '.join(unknown)}: it may say {', '.join(sorted(OPTIONS))}")
    step = step or options.pop("step", None)
    options.pop("step", None)
    if isinstance(options.get("special"), Mapping):
        options["special"] = special_tokens(options["special"])
    tokenizer = options.pop("tokenizer", None)
    example = ids_for(module) if example is None else example
    if tokenizer is not None:
        options["tokenizers"] = dict.fromkeys(example, tokenizer) if isinstance(tokenizer, str) else tokenizer
    template = options.pop("chat_template", None)
    source = from_module(module, example, step, **options)
    return source if template is None else with_template(source, template)


def _arguments(config: Path | None) -> dict[str, Any]:
    """The JSON object in a file: keyword arguments."""
    if config is None:
        return {}
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {config} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"--config {config} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(
            f"--config {config} must hold a JSON object, the factory's keyword arguments by name, not "
            f"{type(found).__name__}"
        )
    return found


def _named(source: Source, path: Path) -> Source:
    source.name = path.name
    return source


def _see_current_folder() -> None:
    """A console script does not see the current folder, where a user's model is."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
