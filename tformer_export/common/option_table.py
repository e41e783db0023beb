"""The form of the table of export options: dataclass fields that hold help, allowed values and command-line form."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tformer_runtime.base.errors import OptionError

Kind = Literal["choice", "text", "list", "file", "length", "number", "switch", "layers", "names"]


@dataclass(frozen=True)
class ExportOptionSpec:
    """One option of `export`.

    help: one or more sentences.
    kind: the form of the value on the command line.
    flag: the name of the option on the command line.
    metavar: the name of the value on the command line.
    choices: the allowed values, if they are few.
    """

    help: str
    kind: Kind
    flag: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()


def option(
    default: Any,
    help: str,
    kind: Kind = "text",
    *,
    flag: str,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Make a dataclass field that holds an `ExportOptionSpec`. The arguments are fields of the spec."""
    spec = ExportOptionSpec(help, "choice" if choices else kind, flag, metavar, choices)
    return field(default=default, metadata={"option": spec})


def option_specs(group: type) -> dict[str, ExportOptionSpec]:
    """Return the options of a dataclass: name of the field → option."""
    return {f.name: f.metadata["option"] for f in fields(group) if "option" in f.metadata}


def check_choices(options: Any) -> None:
    """Raise OptionError for a field of the dataclass whose value is not among its choices. None is always allowed."""
    for name, spec in option_specs(type(options)).items():
        value = getattr(options, name)
        if spec.choices and value is not None and value not in spec.choices:
            raise OptionError(f"{name} must be one of {', '.join(spec.choices)}, not {value!r}", option=name)
