"""SOURCE of the command line → `Source`."""

from __future__ import annotations

import os
from pathlib import Path

from tformer_export.common.checkpoint import load_checkpoint
from tformer_export.sources.base import Source
from tformer_export.sources.checkpoint_source import from_checkpoint
from tformer_export.sources.exported_program import from_file, is_program
from tformer_export.sources.factory import from_factory, from_pickle, from_state
from tformer_export.sources.hugging_face import from_folder
from tformer_runtime.base.errors import OptionError, SourceError


def load_source(
    spec: str | os.PathLike[str],
    *,
    step: str | None = None,
    factory: str | None = None,
    config: str | os.PathLike[str] | None = None,
    trust_pickle: bool = False,
    tokenizer: bool = True,
    task: str | None = None,
) -> Source:
    """A checkpoint of save_checkpoint, a state dict with a `factory`, a factory alone, a `.pt2` of torch.export, a
    Hugging Face folder, or, with `trust_pickle`, a pickled module: loading one runs the code that it names.

    config: a JSON file with the factory's keyword arguments. tokenizer: whether a folder's own is wanted. task: what a
    folder is to be loaded for, if not what it was saved as. SourceError and OptionError say what is wrong.
    """
    text, path = os.fspath(spec), Path(spec)
    settings = None if config is None else Path(config)
    alone = not path.exists() and ":" in text
    if settings is not None and factory is None and not alone:
        raise OptionError("--config holds the arguments of a factory: name one with --factory package.module:function")
    if factory is not None and (alone or path.is_dir() or is_program(path)):
        raise OptionError(f"--factory makes the module for a state dict, which {text} is not")
    if alone:
        return from_factory(text, settings, step)
    if not path.exists():
        raise SourceError(
            f"there is no file or folder {text}: name a checkpoint, a Hugging Face folder or module:factory"
        )
    if path.is_dir():
        return from_folder(path, step, tokenizer, task)
    if is_program(path):
        return from_file(path, step, trust_pickle)
    if factory is not None:
        return from_state(path, factory, settings, step)
    if trust_pickle:
        try:
            load_checkpoint(path)
        except SourceError:
            return from_pickle(path, step)
    return from_checkpoint(path, step)
