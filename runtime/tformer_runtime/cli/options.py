"""The generation options as flags of `tformer-run`, and a click command with the flags of every task.

`GenerationOptions` checks the values. Text that cannot be parsed is passed to it unchanged, so that it raises its usual
OptionError. `use_flag_names` replaces the Python names in the sentences of these errors by flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from msgspec import Struct

from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import OPTIONS as SPECS
from tformer_runtime.decoding.options import GenerationOptions, GenerationOptionSpec
from tformer_runtime.tasks import TASKS
from tformer_runtime.tasks.settings import Flag, value_of


def _flag_name(name: str) -> str:
    return SPECS[name].flag or f"--{name.replace('_', '-')}"


def _flag(name: str, spec: GenerationOptionSpec) -> Flag:
    """Return the flag of an option. Options without a metavar are for Python alone and have none."""
    kind = spec.kind
    help = spec.flag_help or re.sub(r"`(\w+)`", lambda option: _flag_name(option[1]), spec.help)
    if spec.json_only and not spec.flag_help:
        help += " Needs --json."
    if kind.repeated:
        help += " Repeatable."
    return Flag(_flag_name(name), kind.metavar or "", help, kind.parse, kind.repeated)


OPTIONS = {name: _flag(name, spec) for name, spec in SPECS.items() if spec.kind.metavar is not None}
GROUPS: dict[str, dict[str, Flag]] = {}
for _name, _spec in SPECS.items():
    if _name in OPTIONS:
        GROUPS.setdefault(_spec.heading, {})[_name] = OPTIONS[_name]
_TASK_FLAGS = {name: flag.flag for task in TASKS for flags in task.all_flags().values() for name, flag in flags.items()}
_LIMIT_FLAGS = {name: f"--{name.replace('_', '-')}" for name in ("max_process_memory", "max_run_seconds")}


class TableOptions(Struct, frozen=True):
    """The options of `--ray`.

    ray: whether the job is one of Ray.
    input_column: names of columns, or NAME=COLUMN for an input of the model. output_column: NAME or NAME=NEW.
    on_error: "fail" or "keep"; None for "fail".
    part_rows: rows of a part; None for the default.
    """

    ray: bool = False
    input_column: tuple[str, ...] = ()
    output_column: tuple[str, ...] = ()
    on_error: str | None = None
    part_rows: int | None = None

    def must_have_ray(self) -> None:
        """Raise click.UsageError for options that are not for a run without Ray."""
        given = {
            "--input-column": self.input_column,
            "--output-column": self.output_column,
            "--on-error": self.on_error,
            "--part-rows": self.part_rows,
        }
        for flag, value in given.items():
            if value:
                raise click.UsageError(f"{flag} is for columns of files: give --ray too")


def table_options(values: Mapping[str, Any]) -> tuple[TableOptions, dict[str, Any]]:
    """Return the options of `--ray`, and the other values of the command line."""
    own = {name: values[name] for name in TableOptions.__struct_fields__}
    return TableOptions(**own), {name: value for name, value in values.items() if name not in own}


class Command(click.Command):
    """A command with the flags of several kinds of files, shown under their headings."""

    def __init__(self, *args: Any, kinds: Sequence[Any], **settings: Any) -> None:
        """kinds: classes with `all_flags`. A flag of several kinds becomes one option."""
        super().__init__(*args, **settings)
        self.headings: dict[str, dict[str, Flag]] = {}
        for kind in kinds:
            for heading, flags in kind.all_flags().items():
                self.headings.setdefault(heading, {}).update(flags)
        self.flags = {name: flag for flags in self.headings.values() for name, flag in flags.items()}
        for name, flag in self.flags.items():
            if flag.switch:
                self.params.append(click.Option([flag.flag, name], is_flag=True, default=None))
            else:
                self.params.append(click.Option([flag.flag, name], multiple=flag.repeated, type=str))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        common = (p for p in self.get_params(ctx) if p.name not in self.flags and isinstance(p, click.Option))
        with formatter.section("Options"):
            formatter.write_dl([record for p in common if (record := p.get_help_record(ctx))])
        for heading, flags in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{flag.flag} {flag.metavar}".strip(), flag.help) for flag in flags.values()])


def generation_options(texts: Mapping[str, Any], ids: bool) -> GenerationOptions:
    """Parse the texts of flags into options.

    texts: by the name of the option.
    ids: the text of forced_prefix is ids.
    Raise OptionError for an impossible value.
    """
    parsed = {name: _value(name, text, ids) for name, text in texts.items() if text not in (None, ())}
    return GenerationOptions(**parsed)


def _value(name: str, text: Any, ids: bool) -> Any:
    if name == "forced_prefix" and ids:
        words = text.split()
        return [int(word) for word in words] if all(word.isdecimal() for word in words) else words
    try:
        return value_of(OPTIONS[name], text)
    except OptionError as error:
        raise OptionError(f"{OPTIONS[name].flag}: {error}") from error


def use_flag_names(sentence: str) -> str:
    """Replace the Python names of options in the sentence of an error by their flags.

    Quoted text does not change, nor does a name after a colon, which belongs to the defaults of a model file. A name
    without an underscore after an article is a plain English word. A flag with a help text of its own sets
    another value than that of its option.
    """
    own = {name: option.flag for name, option in OPTIONS.items() if SPECS[name].flag_help is None}
    flags = own | _TASK_FLAGS | _LIMIT_FLAGS
    names = "|".join(sorted(flags, key=len, reverse=True))

    def to_flag(match: re.Match[str]) -> str:
        name = match["name"]
        if not name or ("_" not in name and match["article"]):
            return match[0]
        return (match["article"] or "") + flags[name] + (" " if match["value"] else "")

    pattern = rf"""'[^']*'|"[^"]*"|(?P<article>\b(?:an?|the)\ )?(?<!:\ )(?<![\w-])(?P<name>{names})\b(?P<value>=)?"""
    return re.sub(pattern, to_flag, sentence)
