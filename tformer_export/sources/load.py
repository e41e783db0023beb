"""From SOURCE of the command line to a `Source`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tformer_export.common.checkpoint import load_checkpoint
from tformer_export.common.clock import exits_refused, memory_errors
from tformer_export.sources.base import Source
from tformer_export.sources.checkpoint_source import from_checkpoint
from tformer_export.sources.exported_program import from_file, is_program
from tformer_export.sources.factory import from_factory, from_pickle, from_state
from tformer_export.sources.hugging_face.folder import folder_of_weights, from_folder, is_weights_file
from tformer_export.sources.hugging_face.hub import download, is_hub_id
from tformer_export.sources.untrusted_files import refuse_special_files
from tformer_runtime.base.errors import OptionError, SourceError, TformerError, error_summary
from tformer_runtime.base.validation import named_path


def find_source(spec: str | os.PathLike[str], revision: str | None = None, factory: str | None = None) -> str:
    """Return SOURCE, or the folder to which a model of the Hugging Face hub was downloaded.

    A path that exists is never taken for a hub id, and neither is the state dict of a factory.

    revision: of a model of the hub.

    Raises SourceError if the model cannot be downloaded, OptionError for a revision of anything else.
    """
    named_path(spec, SourceError, "the source")  # which would drop the "./" that tells a folder from a model of the hub
    text = os.fsdecode(spec)
    if factory is None and not Path(text).exists() and is_hub_id(text):
        return str(download(text, revision))
    if revision is not None:
        raise OptionError(
            f"--revision names a version of a model of the Hugging Face hub (org/name), which {text} is not"
        )
    return text


def load_source(
    spec: str | os.PathLike[str],
    *,
    revision: str | None = None,
    step_input: str | None = None,
    factory: str | None = None,
    config: str | os.PathLike[str] | None = None,
    trust_pickle: bool = False,
    trust: Sequence[str] = (),
    tokenizer: bool = True,
    task: str | None = None,
    head: Sequence[str] | None = None,
    image_size: tuple[int, int] | None = None,
) -> Source:
    """Load a model.

    spec: a checkpoint of save_checkpoint, a state dict (with `factory`), a factory, a `.pt2` of torch.export, a Hugging
        Face folder or its file of weights, org/name of the Hugging Face hub, or a pickled module (with `trust_pickle`).
    revision: a branch, tag or commit of a model of the hub.
    config: a JSON file with the factory's keyword arguments.
    trust_pickle: load pickled objects, which runs the code that they name.
    trust: packages or modules of which a checkpoint may name any factory, which runs its code.
    tokenizer: whether to read the tokenizer of a folder.
    head: submodules that are applied to the first output of forward.
    task: the task for which to load a folder; by default that of its class.
    image_size: height and width of the images of a prompt, for a folder whose model reads them at their own size.

    Raises SourceError for a model that cannot be loaded, OptionError for arguments that do not fit it.
    """
    text = find_source(spec, revision, factory)
    try:
        with memory_errors(), exits_refused():
            return _load(text, step_input, factory, config, trust_pickle, trust, tokenizer, task, head, image_size)
    except TformerError:
        raise
    except Exception as error:  # a damaged file leads the code that reads it into any error
        raise SourceError(f"{text} cannot be read as a model: {error_summary(error)}") from error


def _load(
    text: str,
    step_input: str | None,
    factory: str | None,
    config: str | os.PathLike[str] | None,
    trust_pickle: bool,
    trust: Sequence[str],
    tokenizer: bool,
    task: str | None,
    head: Sequence[str] | None,
    image_size: tuple[int, int] | None,
) -> Source:
    path = Path(text)
    settings = None if config is None else Path(config)
    is_factory = not path.exists() and ":" in text
    if settings is not None and factory is None and not is_factory:
        raise OptionError("--config holds the arguments of a factory: name one with --factory package.module:function")
    if factory is not None and (is_factory or path.is_dir() or is_program(path)):
        raise OptionError(f"--factory makes the module for a state dict, which {text} is not")
    if head and (path.is_dir() or is_program(path)):
        raise OptionError(f"--head names a part of a module, and {text} is a folder or a program: leave it out")
    if image_size is not None and not (path.is_dir() or is_weights_file(path)):
        raise OptionError(f"--image-size is for a Hugging Face folder, which {text} is not")
    if is_factory:
        return from_factory(text, settings, step_input, head)
    if not path.exists():
        raise SourceError(
            f"there is no file or folder {text}: name a checkpoint, a Hugging Face folder or its hub's org/name, "
            "or module:factory"
        )
    refuse_special_files(path)
    if path.is_dir():
        return from_folder(path, step_input, tokenizer, task, image_size)
    if is_program(path):
        return from_file(path, step_input, trust_pickle)
    if factory is not None:
        return from_state(path, factory, settings, step_input, head)
    if is_weights_file(path) and not trust_pickle:
        return from_folder(folder_of_weights(path), step_input, tokenizer, task, image_size)
    if trust_pickle:
        try:
            load_checkpoint(path)
        except SourceError:
            return from_pickle(path, step_input, head)
    return from_checkpoint(path, step_input, head, trust)
