"""SOURCE of the command line → `Source`."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import torch

from tformer_export.checkpoint import import_callable, load_checkpoint, load_weights
from tformer_export.source.base import Source
from tformer_export.source.from_checkpoint import from_checkpoint
from tformer_export.source.hugging_face import from_folder, from_transformers, is_transformers_model
from tformer_export.source.module import from_module
from tformer_runtime.errors import SourceError


def load_source(
    spec: str | os.PathLike[str],
    *,
    step: str | None = None,
    factory: str | None = None,
    trust_pickle: bool = False,
) -> Source:
    """A checkpoint of save_checkpoint, a Hugging Face folder, a state dict with a `factory`, or a factory alone.

    A pickled module is loaded only with `trust_pickle`, because loading one runs the code that it names. A factory,
    `package.module:function`, takes nothing and returns a module and an example of its inputs by name, or a
    transformers model. SourceError says what is wrong.
    """
    text = os.fspath(spec)
    path = Path(text)
    if path.is_dir():
        return from_folder(path)
    if not path.exists():
        if ":" in text:
            return _from_factory(text, step)[1]
        raise SourceError(
            f"there is no file or folder {text}: name a checkpoint, a Hugging Face folder or module:factory"
        )
    if factory is not None:
        return _from_state(path, factory, step)
    if trust_pickle:
        try:
            load_checkpoint(path)
        except SourceError:
            return _from_pickle(path, step)
    return from_checkpoint(path, step)


def _from_factory(spec: str, step: str | None) -> tuple[torch.nn.Module, Source]:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not see the current folder, where a user's model is
    make = import_callable(spec)
    try:
        made = make()
    except Exception as error:  # user code: whatever it raises means that there is nothing to export
        raise SourceError(f"the factory {spec} failed: {type(error).__name__}: {error}") from error
    if is_transformers_model(made):
        return made, from_transformers(made)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        module, example = made
        return module, from_module(module, example, step)
    raise SourceError(
        f"{spec} returned {type(made).__name__}: a factory returns (module, example of its inputs by name) or a "
        "transformers model"
    )


def _from_state(path: Path, factory: str, step: str | None) -> Source:
    """A plain state dict, loaded into what the factory makes."""
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many types, with no common base
        raise SourceError(f"{path} is not a state dict that can be read without running code") from error
    module, source = _from_factory(factory, step)
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise SourceError(f"{path} does not hold a state dict: save model.state_dict(), or use save_checkpoint")
    load_weights(module, state, path.name, factory)
    return source


def _from_pickle(path: Path, step: str | None) -> Source:
    try:
        module = torch.load(path, weights_only=False, map_location="cpu")
    except Exception as error:  # unpickling runs any code, which raises anything
        raise SourceError(
            f"{path} cannot be unpickled: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if is_transformers_model(module):
        return from_transformers(module)
    if not isinstance(module, torch.nn.Module):
        raise SourceError(f"{path} holds a {type(module).__name__}, not a module: save it with save_checkpoint")
    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    ids = torch.arange(1, 7).reshape(2, 3) % 3
    return from_module(module, dict.fromkeys(names, ids), step or names[-1])
