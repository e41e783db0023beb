"""A factory, `package.module:function`, alone or with a state dict for its module; and pickled modules.

A factory is called with the keyword arguments of `--config`, and returns one of

module                         an nn.Module whose forward takes token ids, (batch, time) each, or a transformers model
(module, example)              example: inputs by name
(module, example, options)     options: keyword arguments of `export`, such as step_input, masks or special_tokens
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tformer_export.common.checkpoint import import_callable, load_weights
from tformer_export.sources.base import Source
from tformer_export.sources.finish import SourceOverrides, finish
from tformer_export.sources.hugging_face.folder import from_transformers, is_transformers_model
from tformer_export.sources.state_dict import read_weights
from tformer_export.sources.torch_module import example_ids, from_module
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.base.factory_arguments import wrong_arguments
from tformer_runtime.cli.errors import TERMINATED

# Arguments of `export` that a factory may return with its module and example: how the module is called, and the others.
CALL_OPTIONS = {"step_input", "masks", "axes", "fixed_arguments", "output", "head"}
OPTIONS = CALL_OPTIONS | {
    "task", "special_tokens", "tokenizer", "generation_defaults", "max_length", "series", "chat_template",
    "preprocessor",
}  # fmt: skip
Head = Sequence[str] | None


def from_factory(spec: str, config: Path | None = None, step_input: str | None = None, head: Head = None) -> Source:
    """Call a factory and read its module, which keeps the weights that the factory gave it."""
    return _source(_call(spec, _arguments(config)), spec, step_input, head)


def from_state(
    path: Path, factory: str, config: Path | None = None, step_input: str | None = None, head: Head = None
) -> Source:
    """Load the weights of a file into the module that a factory makes (see `state_dict.read_weights`)."""
    result = _call(factory, _arguments(config))
    module = result[0] if isinstance(result, tuple) and result else result
    if isinstance(module, nn.Module):
        load_weights(module, read_weights(path, module.state_dict().keys()), path.name, factory)
    return replace(_source(result, factory, step_input, head), name=path.name)


def from_pickle(path: Path, step_input: str | None = None, head: Head = None) -> Source:
    """Load a module that was pickled as a whole. This runs the code that the file names."""
    see_current_folder()
    try:
        result = torch.load(path, weights_only=False, map_location="cpu")
    except Exception as error:  # unpickling runs any code, which raises anything
        raise SourceError(
            f"{path} cannot be unpickled: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if not isinstance(result, nn.Module):
        raise SourceError(f"{path} holds a {type(result).__name__}, not a module: save it with save_checkpoint")
    return replace(_source(result, str(path), step_input, head), name=path.name)


def _call(spec: str, arguments: Mapping[str, Any]) -> Any:
    see_current_folder()
    make = import_callable(spec)
    if (reason := wrong_arguments(make, arguments)) is not None:
        names = ", ".join(arguments) or "no arguments"
        raise SourceError(f"the factory {spec} cannot be called with {names}: {reason}")
    try:
        return make(**arguments)
    except (Exception, SystemExit) as error:  # user code: whatever it raises means that there is nothing to export
        if isinstance(error, SystemExit) and error.code == TERMINATED:
            raise
        raise SourceError(f"the factory {spec} failed: {type(error).__name__}: {error}") from error


def _source(result: Any, spec: str, step_input: str | None, head: Head) -> Source:
    """Read the result of a factory. spec: the factory or file, for messages."""
    parts = result if isinstance(result, tuple) else (result,)
    module, example, options = (*parts, None, None)[:3]
    if is_transformers_model(module) and example is None:
        if options or head:
            raise SourceError(
                f"{spec} returned a transformers model and options: pass the options to the export itself"
            )
        return from_transformers(module)
    if not isinstance(module, nn.Module) or len(parts) > 3 or not isinstance(options or {}, Mapping):
        raise SourceError(
            f"{spec} returned {type(result).__name__}: a factory returns a module, (module, example of its inputs by "
            "name) or (module, example, options of the export)"
        )
    options = dict(options or {})
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise SourceError(f"{spec} returned the options {', '.join(unknown)}: it may say {', '.join(sorted(OPTIONS))}")
    call = {name: options.pop(name) for name in CALL_OPTIONS if name in options}
    step_input = step_input or call.pop("step_input", None)
    call.pop("step_input", None)
    call |= {"head": head} if head else {}
    made = example is None
    example = example_ids(module) if example is None else example
    limits = {name: options.get(name) for name in ("series", "max_length")}
    source = from_module(module, example, step_input, **call, **limits)
    return finish(replace(source, made_example=made), SourceOverrides.of(**options))


def _arguments(config: Path | None) -> dict[str, Any]:
    """Read the keyword arguments of a factory: a JSON object in a file."""
    if config is None:
        return {}
    try:
        arguments = json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {config} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--config {config} is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise OptionError(
            f"--config {config} must hold a JSON object, the factory's keyword arguments by name, not "
            f"{type(arguments).__name__}"
        )
    return arguments


def see_current_folder() -> None:
    """Add the current folder, which may hold the user's model, to the import path. A console script lacks it."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
