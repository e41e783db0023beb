"""The open format of ``model.pt``: everything needed to build, export and run a model that someone trained.

The file is one dictionary of plain values, written by ``torch.save``. ``torch.load(weights_only=True)`` reads it
without running any code that it might hold:

================= ====================================================================================================
``format``        always ``"tformer.checkpoint"``
``version``       of this format: 2
``factory``       import path of a callable that returns the module: ``"package.module:callable"``
``arguments``     its keyword arguments, JSON-able
``state_dict``    name → tensor, as ``module.state_dict()`` gives it
``tokenizers``    input name → text in tokenizers' JSON format; ``"*"`` stands for every input; may be empty
``task``          the name of the task, such as ``"text2text-generation"``
``step_input``    name of the autoregressive input of ``forward``; None for a single-pass model
``special_tokens`` ``bos_token_id``, ``eos_token_id`` (lists of ids) and ``pad_token_id`` of the step input's vocabulary
``generation_defaults`` generation options, JSON-able
``series``        of a model that forecasts: its columns, normalisation and the rest (`analysis.series_options`);
                  None for any other
``labels``        of a classifier, in the order of its scores; empty for any other
``chat_template`` Jinja text that makes a prompt of a conversation, as transformers has it; None for no conversations
``max_length``    longest sequence that the model takes; None if the export has to set or find it
================= ====================================================================================================

Loading a file runs nothing of it. *Building* calls the factory that it names, which is code that the author of the
file chose. So the factory is a module class of `tformer_models` or `torch.nn`, or is in a package that the user trusts.
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
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from tformer_export.common.task import Task
from tformer_runtime.base.errors import OptionError, OutputError, SourceError
from tformer_runtime.base.special_files import check_output_name
from tformer_runtime.base.validation import named_path
from tformer_runtime.base.whole_files import replaced_file

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMAT = "tformer.checkpoint"
VERSION = 2
EVERY_INPUT = "*"
OWN_PACKAGES = "tformer_models", "torch.nn"  # a file may name their module classes


@dataclass(frozen=True)
class Checkpoint:
    """A loaded ``model.pt``. The module's docstring describes the fields."""

    factory: str
    arguments: Mapping[str, Any]
    state_dict: Mapping[str, Tensor]
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    task: str = "text2text-generation"
    step_input: str | None = "tgt"
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    series: Mapping[str, Any] | None = None
    labels: Sequence[str] = ()
    chat_template: str | None = None

    def build(self, trust: Sequence[str] = ()) -> nn.Module:
        """Call the factory and return the module with its weights, in eval mode.

        trust: packages or modules of which the file may name any factory.

        Raises SourceError if the factory is not trusted, cannot be imported or called, or returns no module, or if its
        weights do not fit the file; the message lists all differences.
        """
        from torch import nn

        make = _trusted_callable(self.factory, trust)
        if _is_within(getattr(make, "__module__", None) or "", OWN_PACKAGES):
            self._check_sizes(make)  # before memory is taken; another factory runs once, as its author expects
        try:
            module: nn.Module = make(**self.arguments)
        except (Exception, SystemExit) as error:  # user code: whatever it raises means that the file cannot be built
            reason = str(error) or type(error).__name__
            raise SourceError(
                f"the factory {self.factory} failed with the arguments in the checkpoint: {reason}"
            ) from error
        if not isinstance(module, nn.Module):
            raise SourceError(f"the factory {self.factory} returned {type(module).__name__}, not a module")
        load_weights(module, self.state_dict, "the checkpoint", self.factory)
        return module.eval()

    def _check_sizes(self, make: Callable[..., Any]) -> None:
        """Raise SourceError if the file lacks weights of these sizes. No memory is taken, however large they are."""
        import torch

        try:
            with torch.device("meta"):
                module = make(**self.arguments)
            expected = module.state_dict()
        except (Exception, SystemExit):  # the factory needs numbers, or fails without them too
            return
        check_weights(expected, self.state_dict, "the checkpoint", self.factory)


KINDS: dict[str, type | UnionType] = {
    "factory": str,
    "arguments": dict,
    "state_dict": dict,
    "tokenizers": dict,
    "task": str,
    "step_input": str | None,
    "special_tokens": dict,
    "generation_defaults": dict,
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
    task: str | Task = "text2text-generation",
    step_input: str | None = "tgt",
    special_tokens: Mapping[str, Any] | None = None,
    generation_defaults: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    series: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> None:
    """Write `model` to `path`. The file is replaced atomically: a killed process leaves the old file or the new one.

    factory, arguments: `factory(**arguments)` makes a module with the weights of `model`.
    tokenizer: a text in tokenizers' JSON format for every input, or one text for each input by name.
    task: the name of the task, or a `Task` with labels.

    The other arguments are fields of the format (see the module's docstring). Raises OptionError for values that the
    format cannot store, OutputError if the file cannot be written.
    """
    task = task if isinstance(task, Task) else Task(task)
    if task.problem_type or task.pooling:
        raise OptionError(
            "a checkpoint holds the name of a task and its labels: give problem_type and pooling to export"
        )
    if not isinstance(chat_template, str | None):
        raise OptionError(f"chat_template of a checkpoint must be Jinja text, not {type(chat_template).__name__}")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "factory": factory,
        "arguments": _plain("arguments", arguments),
        "state_dict": {name: value.detach().cpu() for name, value in model.state_dict().items()},
        "tokenizers": _plain("tokenizer", {EVERY_INPUT: tokenizer} if isinstance(tokenizer, str) else tokenizer or {}),
        "task": task.name,
        "step_input": step_input,
        "special_tokens": _plain(
            "special_tokens", special_tokens or {"bos_token_id": [], "eos_token_id": [], "pad_token_id": 0}
        ),
        "generation_defaults": _plain("generation_defaults", generation_defaults or {}),
        "max_length": max_length,
        "series": None if series is None else _plain("series", series),
        "labels": _plain("labels", list(task.labels or ())),
        "chat_template": chat_template,
    }
    save_whole(content, named_path(path, OutputError, "the checkpoint"))


def save_whole(content: Mapping[str, Any], path: Path) -> None:
    """Write a dictionary with `torch.save`. The file is replaced atomically, and is on the disk afterwards.

    Raises OutputError if the file cannot be written.
    """
    import torch

    check_output_name(path)
    with replaced_file(path) as file:
        checked = _FirstError(file)
        torch.save(content, cast(IO[bytes], checked))
        if checked.error is not None:
            raise checked.error


class _FirstError:
    """A file that keeps the first error of writing. `torch.save` goes on after an error and raises another, which does
    not say why.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the data, or drop them after an error. Return their number of bytes."""
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the writer of the file flushes it."""


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a ``model.pt`` without running code from it.

    Raises SourceError for a file that is missing, truncated, of another format, of a newer version, or that holds
    pickled objects instead of plain values and tensors.
    """
    import torch

    source = named_path(path, SourceError, "the checkpoint")
    try:
        source.open("rb").close()
    except OSError as error:
        raise SourceError(f"{source} cannot be read: {error.strerror or error}") from error
    refuse_bomb(source)
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


def refuse_bomb(source: Path) -> None:
    """Raise SourceError for an archive whose members are larger than the file itself. torch.save compresses none."""
    try:
        if not zipfile.is_zipfile(source):
            return  # a pickle, whose values take as many bytes in the file
        with zipfile.ZipFile(source) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # the module zipfile raises many types for a damaged directory
        raise SourceError(f"{source} is not a PyTorch checkpoint, or is damaged") from error
    size = source.stat().st_size
    if unpacked > size:
        raise SourceError(
            f"{source} has {size:,} bytes and unpacks to {unpacked:,}, which torch.save never writes: save it again "
            "with torch.save or save_checkpoint()"
        )


def _trusted_callable(path: str, trust: Sequence[str]) -> Callable[..., Any]:
    """Import a factory that a file names. Raises SourceError, before any of its code runs, if it is not trusted."""
    from torch import nn

    name, _ = _split(path)
    if not _is_within(name, (*OWN_PACKAGES, *trust)):
        raise SourceError(
            f"the file names the factory {path}, whose code would run: if you trust it, say so, --trust {name} "
            f'(trust=["{name}"] in Python)'
        )
    target = import_callable(path)
    home = getattr(target, "__module__", None) or ""
    is_module_class = isinstance(target, type) and issubclass(target, nn.Module) and _is_within(home, OWN_PACKAGES)
    if not is_module_class and not _is_within(home, trust):
        raise SourceError(
            f"the file names the factory {path}, which is not a module class of {' or '.join(OWN_PACKAGES)}, and is "
            f"defined in {home or 'no module'}: if you trust it, say so, --trust {home or name}"
        )
    return target


def _is_within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def import_callable(path: str) -> Callable[..., Any]:
    """Import the callable ``"package.module:callable"``. Raises SourceError that names the part that does not exist."""
    name, attribute = _split(path)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        where = "" if name == missing or name.startswith(f"{missing}.") else f" (imported by {name})"
        raise SourceError(f"there is no module {missing}{where} to take {attribute} from") from error
    except Exception as error:  # user code again
        raise SourceError(f"importing the module {name} failed: {type(error).__name__}: {error}") from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise SourceError(f"the module {name} has no {attribute}")
        target = getattr(target, part)
    if not callable(target):
        raise SourceError(f"{path} is not callable")
    return cast(Callable[..., Any], target)


def _split(path: str) -> tuple[str, str]:
    name, separator, attribute = path.partition(":")
    if not (name and separator and attribute):
        raise SourceError(f"{path!r} is not an import path; write it as package.module:callable")
    return name, attribute


def load_weights(module: nn.Module, state: Mapping[str, Tensor], owner: str, factory: str) -> None:
    """Load weights into the module. Raises one SourceError that lists every missing, unexpected or misshapen weight."""
    check_weights(module.state_dict(), state, owner, factory)
    module.load_state_dict(dict(state))


def check_weights(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], owner: str, factory: str) -> None:
    """Raise one SourceError that lists every missing, unexpected or misshapen weight."""
    differences = _differences(expected, state)
    if differences:
        raise SourceError(f"{owner}'s weights do not fit the module that {factory} makes: {'; '.join(differences)}")


def _parse(source: Path, content: Any) -> Checkpoint:
    import torch

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SourceError(
            f"{source} is a PyTorch file but not a tformer checkpoint: name the function that makes its module, "
            "--factory MODULE:FUNCTION, or write a checkpoint with save_checkpoint()"
        )
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise SourceError(f"{source} has format version {version}; this release reads up to {VERSION}: upgrade tformer")
    if version < VERSION:
        raise SourceError(f"{source} has format version {version}, an old one: save it again with save_checkpoint()")
    missing = [f.name for f in fields(Checkpoint) if f.name not in content]
    if missing:
        raise SourceError(f"{source} lacks {', '.join(missing)}, so it is damaged or was not written by tformer")
    wrong = [name for name, kind in KINDS.items() if not isinstance(content[name], kind)]
    if not wrong and not all(isinstance(value, torch.Tensor) for value in content["state_dict"].values()):
        wrong = ["state_dict"]
    if not wrong:
        values = source.stat().st_size  # each takes a byte or more
        for name in content:
            if name != "state_dict" and (values := _count_down(content[name], values)) < 0:
                raise SourceError(f"{source} is damaged: {name} holds itself, or more values than the file has bytes")
    if wrong:
        raise SourceError(f"{source} is not a valid checkpoint: wrong type of {', '.join(wrong)}")
    return Checkpoint(**{f.name: content[f.name] for f in fields(Checkpoint)})


def _count_down(value: Any, left: int) -> int:
    """Return how many values are left of a number after those in a value, or −1.

    A pickle of a few bytes can repeat a list in lists without end.
    """
    waiting = [value]
    while waiting and left >= 0:
        part = waiting.pop()
        left -= 1
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part
    return left if not waiting else -1


def _differences(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Describe every weight that is missing, unexpected or of another shape."""
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    misshapen = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(value.shape)}"
        for name, value in expected.items()
        if name in state and state[name].shape != value.shape
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
    return [f"{label}: {', '.join(names)}" for label, names in parts if names]


def _plain(label: str, value: Any) -> Any:
    """Return `value` after a round trip through JSON, so that a file holds nothing but plain values."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise OptionError(f"{label} of a checkpoint must be JSON-able: {error}") from error


def _is_pickle(source: Path) -> bool:
    """Return whether the file holds a complete pickle (bare or in torch's zip) that names classes or functions.

    It reads the opcodes and executes none.
    """
    try:
        if not zipfile.is_zipfile(source):
            with source.open("rb") as file:
                return _names_globals(file)
        with zipfile.ZipFile(source) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                return _names_globals(file)
    except Exception:  # the module zipfile raises many types for a damaged directory
        return False


def _names_globals(file: IO[bytes]) -> bool:
    """Return whether a pickle in the file names classes or functions; torch's format before the zip has several."""
    with contextlib.suppress(Exception):  # pickletools raises whatever the bytes lead it into
        while opcodes := {opcode.name for opcode, _, _ in pickletools.genops(file)}:
            if opcodes & {"GLOBAL", "STACK_GLOBAL", "INST"}:
                return True
    return False
