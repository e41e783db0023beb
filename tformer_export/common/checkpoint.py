"""The open format of ``model.pt``: everything needed to build, export and run a model that someone trained.

The file is what ``torch.save`` writes of one dictionary of plain values, so that ``torch.load(weights_only=True)``
reads it without running any code that it might hold:

================= ====================================================================================================
``format``        always ``"tformer.checkpoint"``
``version``       of this format: 1
``factory``       import path of a callable that returns the module: ``"package.module:callable"``
``arguments``     its keyword arguments, JSON-able
``state_dict``    name → tensor, as ``module.state_dict()`` gives it
``tokenizers``    input name → text in tokenizers' JSON format; ``"*"`` stands for every input; may be empty
``task``          what the model does, such as ``"text2text-generation"``
``step``          name of the autoregressive input of ``forward``; None for a model that is run once
``special``       ``{"start": [ids], "end": [ids], "pad": id}`` of the step input's vocabulary
``defaults``      generation defaults, JSON-able
``series``        of a model that forecasts: its columns, normalisation and the rest (`analysis.series`);
                  None for any other
``labels``        of a classifier, in the order of its scores; empty for any other
``chat_template`` Jinja text that makes a prompt of a conversation, as transformers has it; None for no conversations
``max_length``    longest sequence that the model takes, or None where it has to be told or found
================= ====================================================================================================

Loading a file runs nothing of it. *Building* imports the factory that it names and calls it, as an import would.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import IO, TYPE_CHECKING, Any, cast

from tformer_runtime.base.errors import (
    InputError,
    MissingExtraError,
    OptionError,
    OutputError,
    SourceError,
    TformerError,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "Checkpoint",
    "InputError",
    "MissingExtraError",
    "OptionError",
    "OutputError",
    "SourceError",
    "TformerError",
    "import_callable",
    "load_checkpoint",
    "save_checkpoint",
]

FORMAT = "tformer.checkpoint"
VERSION = 1
EVERY_INPUT = "*"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded ``model.pt``; the fields are those of the module's docstring."""

    factory: str
    arguments: Mapping[str, Any]
    state_dict: Mapping[str, Tensor]
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    task: str = "text2text-generation"
    step: str | None = "tgt"
    special: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    series: Mapping[str, Any] | None = None
    labels: Sequence[str] = ()
    chat_template: str | None = None

    def build(self) -> nn.Module:
        """The module with its weights, in eval mode.

        Raises SourceError where the factory cannot be imported or called, or its weights are not the file's; all
        differences are listed at once.
        """
        make = import_callable(self.factory)
        try:
            module: nn.Module = make(**self.arguments)
        except Exception as error:  # user code: whatever it raises means that the file cannot be built
            raise SourceError(
                f"the factory {self.factory} failed with the arguments in the checkpoint: {error}"
            ) from error
        load_weights(module, self.state_dict, "the checkpoint", self.factory)
        return module.eval()


KINDS: dict[str, type | UnionType] = {
    "factory": str,
    "arguments": dict,
    "state_dict": dict,
    "tokenizers": dict,
    "task": str,
    "step": str | None,
    "special": dict,
    "defaults": dict,
    "max_length": int | None,
    "series": dict | None,
    "labels": list,
    "chat_template": str | None,
}


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    factory: str,
    arguments: Mapping[str, Any],
    tokenizer: str | Mapping[str, str] | None = None,
    task: str = "text2text-generation",
    step: str | None = "tgt",
    special: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    series: Mapping[str, Any] | None = None,
    labels: Sequence[str] = (),
    chat_template: str | None = None,
) -> None:
    """Write `model` to `path`, which is replaced in one go: a killed process leaves the old file or the new one.

    `factory(**arguments)` must make a module with the weights of `model`. `tokenizer` is a text in tokenizers' JSON
    format for every input, or one text for each input by name. Raises OptionError for what cannot be stored in the
    format, OutputError where the file cannot be written.
    """
    import torch

    if isinstance(tokenizer, str):
        tokenizer = {EVERY_INPUT: tokenizer}
    if not isinstance(chat_template, str | None):
        raise OptionError(f"chat_template of a checkpoint must be Jinja text, not {type(chat_template).__name__}")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "factory": factory,
        "arguments": _plain("arguments", arguments),
        "state_dict": {name: value.detach().cpu() for name, value in model.state_dict().items()},
        "tokenizers": _plain("tokenizer", tokenizer or {}),
        "task": task,
        "step": step,
        "special": _plain("special", special or {"start": [], "end": [], "pad": 0}),
        "defaults": _plain("defaults", defaults or {}),
        "max_length": max_length,
        "series": None if series is None else _plain("series", series),
        "labels": _plain("labels", list(labels)),
        "chat_template": chat_template,
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        torch.save(content, temporary)
        os.replace(temporary, target)
    except (OSError, RuntimeError) as error:  # torch reports a folder that is missing, or a full disk, as RuntimeError
        raise OutputError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a ``model.pt`` without running anything that it holds.

    Raises SourceError for a file that is missing, truncated, foreign, newer than this version, or that holds pickled
    objects rather than plain values and tensors.
    """
    import torch

    source = Path(path)
    try:
        source.open("rb").close()
    except OSError as error:
        raise SourceError(f"{source} cannot be read: {error.strerror or error}") from error
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if _is_pickle(source):
            raise SourceError(
                f"{source} holds pickled Python objects, which is refused because unpickling runs code that the file "
                "brings along; --trust-pickle overrides this for a file that you trust, and save_checkpoint() writes "
                "one that needs no trust"
            ) from error
        raise SourceError(f"{source} is not a PyTorch checkpoint, or is damaged") from error
    except Exception as error:  # RuntimeError, EOFError, OSError, ... depending on where a file breaks off
        raise SourceError(f"{source} is not a PyTorch checkpoint, or is damaged") from error
    return _parse(source, content)


def import_callable(path: str) -> Callable[..., Any]:
    """What ``"package.module:callable"`` names. Raises SourceError naming the part that does not exist."""
    name, separator, attribute = path.partition(":")
    if not (name and separator and attribute):
        raise SourceError(f"{path!r} is not an import path; write it as package.module:callable")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        where = "" if name == missing or name.startswith(f"{missing}.") else f" (imported by {name})"
        raise SourceError(f"there is no module {missing}{where} to take {attribute} from") from error
    except Exception as error:  # user code again
        raise SourceError(f"importing the module {name} failed: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise SourceError(f"the module {name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise SourceError(f"{path} is not callable")
    return cast(Callable[..., Any], found)


def load_weights(module: nn.Module, state: Mapping[str, Tensor], whose: str, factory: str) -> None:
    """Give the module these weights, or raise one SourceError that lists every missing, unexpected or misshapen one."""
    differences = _differences(module.state_dict(), state)
    if differences:
        raise SourceError(f"{whose}'s weights do not fit the module that {factory} makes: {'; '.join(differences)}")
    module.load_state_dict(dict(state))


def _parse(source: Path, content: Any) -> Checkpoint:
    import torch

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SourceError(
            f"{source} is a PyTorch file but not a tformer checkpoint; write one with save_checkpoint(), or name a "
            "factory to load it with"
        )
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise SourceError(f"{source} has format version {version}; this release reads up to {VERSION}: upgrade tformer")
    content = {"series": None, "labels": [], "chat_template": None, **content}  # which earlier releases did not write
    missing = [f.name for f in fields(Checkpoint) if f.name not in content]
    if missing:
        raise SourceError(f"{source} lacks {', '.join(missing)}, so it is damaged or was not written by tformer")
    wrong = [name for name, kind in KINDS.items() if not isinstance(content[name], kind)]
    if not wrong and not all(isinstance(value, torch.Tensor) for value in content["state_dict"].values()):
        wrong = ["state_dict"]
    if wrong:
        raise SourceError(f"{source} holds something else than a checkpoint does as its {', '.join(wrong)}")
    return Checkpoint(**{f.name: content[f.name] for f in fields(Checkpoint)})


def _differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Every weight that is missing, unexpected or of another shape, in words."""
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    misshapen = [
        f"{name} is {tuple(given[name].shape)}, not {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in given and given[name].shape != value.shape
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
    return [f"{label}: {', '.join(names)}" for label, names in parts if names]


def _plain(label: str, value: Any) -> Any:
    """`value` as JSON gives it back, so that a file holds nothing but plain values."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise OptionError(f"{label} of a checkpoint must be JSON-able: {error}") from error


def _is_pickle(source: Path) -> bool:
    """Whether the file holds a whole pickle (bare or in torch's zip) that names classes or functions, judged by its
    opcodes, of which none is executed."""
    try:
        if not zipfile.is_zipfile(source):
            with source.open("rb") as file:
                return _names_globals(file)
        with zipfile.ZipFile(source) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                return _names_globals(file)
    except (OSError, StopIteration, KeyError, zipfile.BadZipFile):
        return False


def _names_globals(file: IO[bytes]) -> bool:
    """Whether one of the pickles in the file does; torch's format before the zip has several in a row."""
    with contextlib.suppress(Exception):  # pickletools raises whatever the bytes lead it into
        while opcodes := {opcode.name for opcode, _, _ in pickletools.genops(file)}:
            if opcodes & {"GLOBAL", "STACK_GLOBAL", "INST"}:
                return True
    return False
