"""`tformer-export SOURCE`: the options of a source and of `options.py` as flags.

Messages go to standard error, because the result is a file. Exit status: 0 done, 1 refused, 2 wrong usage.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from tformer_export.common.degradation_budget import DegradationBudget
from tformer_export.common.option_table import ExportOptionSpec, option_specs
from tformer_export.common.task import Task
from tformer_export.options import ADAPTERS_FLAG, ExportOptions, ExtraOutputs, Quantization, phases
from tformer_runtime.base.errors import MissingExtraError, OptionError, OutputError, TformerError
from tformer_runtime.base.extras import import_onnxruntime, install_command
from tformer_runtime.base.quick_start import freeze_objects, quick_start
from tformer_runtime.cli.errors import TERMINATED, errors_as_sentences

if TYPE_CHECKING:  # both take longer to import than --help takes
    from tformer_export.report import ExportReport
    from tformer_export.sources import Source

_ID = click.IntRange(min=0)
_PATH = click.Path(path_type=Path)
NEEDED = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime")
GROUPS: dict[str, type] = {
    "The file": ExportOptions,
    "Quantization": Quantization,
    "Task": Task,
    "Extra outputs": ExtraOutputs,
}
_SOURCE = "The source"
OWN_PROCESS = "own process"  # click's object of a command that has its process to itself


class _Option(click.Option):
    """An option under a heading of --help."""

    def __init__(self, *args: Any, heading: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heading = heading


def _budget(context: click.Context, parameter: click.Parameter, value: str | None) -> DegradationBudget | None:
    try:
        return DegradationBudget.of(value) if value is not None else None
    except OptionError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _dest(group: type, name: str) -> str:
    return f"{group.__name__.lower()}__{name}"


def _click_option(heading: str, dest: str, spec: ExportOptionSpec, default: Any) -> _Option:
    settings: dict[str, Any] = {"heading": heading, "help": spec.help, "metavar": spec.metavar}
    if spec.kind == "choice":
        shown = default is not None
        settings |= {"type": click.Choice(spec.choices), "default": default, "show_default": shown, "metavar": None}
    elif spec.kind == "switch":
        settings |= {"is_flag": True, "metavar": None}
    elif spec.kind == "length":
        settings |= {"type": click.IntRange(min=2)}
    elif spec.kind == "number":
        settings |= {"type": float}
    elif spec.kind == "layers":
        settings |= {"is_flag": False, "flag_value": ""}
    elif spec.kind == "names":
        settings |= {"multiple": True}
    elif spec.flag == "--max-degradation":
        settings |= {"callback": _budget}
    return _Option([spec.flag, dest], **settings)


class _Command(click.Command):
    """A command with the options of the table, and with a heading for each group of options in --help."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for heading, group in GROUPS.items():
            defaults = group()
            for name, spec in option_specs(group).items():
                option = _click_option(heading, _dest(group, name), spec, getattr(defaults, name))
                self.params.append(option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, among them several folders after one --adapters."""
        return super().parse_args(ctx, list(_flag_before_each(args, ADAPTERS_FLAG)))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        headings: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)):
                headings.setdefault(getattr(option, "heading", "") or "Options", []).append(record)
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _flag_before_each(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """Yield the arguments, with the flag before each of the values that follow it."""
    follows = False
    for i, argument in enumerate(arguments):
        if argument.startswith("-"):
            follows = argument == flag
        elif follows and arguments[i - 1] != flag:
            yield flag
        yield argument


@click.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source")
@click.option("-o", "--output", type=_PATH, help="Write this file.  [default: SOURCE.onnx]")
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option("--report", type=_PATH, metavar="FILE.json", help="Write the report to this file, as JSON.")
@click.option("--quiet", is_flag=True, help="Write only errors to standard error.")
@click.option("--verbose", is_flag=True, help="Write the name of each phase, and the traceback of an error.")
@click.version_option(package_name="tformer")
@click.option(
    "--factory",
    cls=_Option,
    heading=_SOURCE,
    metavar="MODULE:FUNCTION",
    help="Call this function (package.module:function) to make the module.",
)
@click.option(
    "--config",
    cls=_Option,
    heading=_SOURCE,
    type=_PATH,
    help="Pass the JSON object in this file to --factory, as keyword arguments.",
)
@click.option(
    "--revision",
    cls=_Option,
    heading=_SOURCE,
    metavar="NAME",
    help="Take this branch, tag or commit of a model of the Hugging Face hub.  [default: main]",
)
@click.option(
    "--trust-pickle",
    cls=_Option,
    heading=_SOURCE,
    is_flag=True,
    help="Load a pickled module. Unpickling can run any code: use this only for files that you trust.",
)
@click.option(
    "--trust",
    cls=_Option,
    heading=_SOURCE,
    metavar="PACKAGE",
    multiple=True,
    help="Let a checkpoint name a factory of this package or module, which runs its code; repeatable.",
)
@click.option(
    "--step-input",
    cls=_Option,
    heading=_SOURCE,
    metavar="NAME",
    help="Name the input that grows by a token at each step of decoding.  [default: that of SOURCE]",
)
@click.option(
    "--head",
    cls=_Option,
    heading=_SOURCE,
    metavar="NAME",
    multiple=True,
    help="Apply this submodule, such as generator, to the output of forward, if forward leaves it out; repeatable.",
)
@click.option(
    "--tokenizer", cls=_Option, heading=_SOURCE, type=_PATH, help="Use this tokenizer.json for all inputs of ids."
)
@click.option(
    "--image-size",
    cls=_Option,
    heading=_SOURCE,
    metavar="HEIGHTxWIDTH",
    help="Resize the images of a prompt to this size, for a folder whose model reads them at their own size.",
)
@click.option(
    "--chat-template",
    cls=_Option,
    heading=_SOURCE,
    type=_PATH,
    help="Put this Jinja template, which turns a conversation into a prompt, into the file.",
)
@click.option(
    "--bos-id",
    cls=_Option,
    heading=_SOURCE,
    metavar="ID",
    type=_ID,
    multiple=True,
    help="Start decoding with this token id; repeatable.",
)
@click.option(
    "--eos-id",
    cls=_Option,
    heading=_SOURCE,
    metavar="ID",
    type=_ID,
    multiple=True,
    help="End a sequence at this token id; repeatable.",
)
@click.option(
    "--pad-id",
    cls=_Option,
    heading=_SOURCE,
    metavar="ID",
    type=_ID,
    help="Name the padding token id, which a model that masks padding by its id needs.",
)
def command(
    source: str,
    output: Path | None,
    force: bool,
    report: Path | None,
    quiet: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Export SOURCE, a trained PyTorch Transformer, to one ONNX file, and compare the file with SOURCE.

    If the results differ, or the model cannot be exported, an error says why and no file is written. SOURCE is a
    checkpoint of save_checkpoint(), a state dict (with --factory), a .pt2 file of torch.export.save() (with
    --step-input), a Hugging Face folder, org/name of the Hugging Face hub, package.module:factory, or a pickled module
    (with --trust-pickle).
    """
    if quiet and verbose:
        raise click.UsageError("--quiet writes nothing but errors: not with --verbose")
    with errors_as_sentences("tformer-export", verbose):
        _run(source, output, force, report, quiet, verbose, flags)


def _run(
    source: str,
    output: Path | None,
    force: bool,
    report: Path | None,
    quiet: bool,
    verbose: bool,
    flags: Mapping[str, Any],
) -> None:
    """Export the source, and write the report."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"exporting needs {', '.join(missing)}: {install_command('export')}")
    import_onnxruntime()
    output = output or _default_output(source)
    options, task = _options(flags)
    _check_outputs(output, report, options, force)
    with quick_start():
        import tformer_export.api  # noqa: F401  imports torch
    if click.get_current_context().obj == OWN_PROCESS:
        freeze_objects()
    with _refusal_reported(report, source):
        found = _find(source, flags, quiet)
        with _progress(options, quiet, verbose) as progress:
            loaded, tokenizer = _load(found, task, flags)
            result = _export(loaded, output, tokenizer, options, task, flags, force, progress)
    if report is not None:
        result.write(report)
    if not quiet:
        _print_table(result.rows())


def _options(flags: Mapping[str, Any]) -> tuple[ExportOptions, Task]:
    """Return the dataclasses of the option table, from the values of the flags.

    Raises OptionError for values that do not go together.
    """

    def values(group: type) -> dict[str, Any]:
        return {name: flags[_dest(group, name)] for name in option_specs(group)}

    extra = values(ExtraOutputs)
    extra["cross_attentions"] = None if extra["cross_attentions"] is None else _layers(extra["cross_attentions"])
    named = values(Task)
    named["labels"] = None if named["labels"] is None else [label.strip() for label in named["labels"].split(",")]
    quantization = Quantization(**values(Quantization))
    options = ExportOptions(quantization=quantization, extra_outputs=ExtraOutputs(**extra), **values(ExportOptions))
    return options, Task(**named)


def _check_outputs(output: Path, report: Path | None, options: ExportOptions, force: bool) -> None:
    """Refuse output paths and flags before the export that would fail after it."""
    from tformer_export.common.atomic_output import check_writable

    if report is not None and report.absolute() == output.absolute():
        raise click.UsageError("the output and --report are the same file: name another for one of them")
    check_writable(output, force)
    if report is not None:
        check_writable(report, force)


def _find(source: str, flags: Mapping[str, Any], quiet: bool) -> str:
    """Return the source, or the folder of a model of the hub. The download has progress bars of its own."""
    from tformer_export.sources.load import find_source

    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # huggingface_hub is imported for a download only
    return find_source(source, flags["revision"], flags["factory"])


def _load(source: str, task: Task, flags: Mapping[str, Any]) -> tuple[Source, str | None]:
    """Return the source, and the text of --tokenizer."""
    from tformer_export.sources import load_source

    tokenizer = _tokenizer(flags["tokenizer"]) if flags["tokenizer"] is not None else None
    loaded = load_source(
        source,
        step_input=flags["step_input"],
        head=flags["head"] or None,
        factory=flags["factory"],
        config=flags["config"],
        trust_pickle=flags["trust_pickle"],
        trust=flags["trust"],
        tokenizer=tokenizer is None,
        task=task.name or ("feature-extraction" if task.pooling else None),
        image_size=_image_size(flags["image_size"]),
    )
    return loaded, tokenizer


def _export(
    loaded: Source,
    output: Path,
    tokenizer: str | None,
    options: ExportOptions,
    task: Task,
    flags: Mapping[str, Any],
    force: bool,
    progress: Callable[[str], None],
) -> ExportReport:
    from tformer_export.api import export_source
    from tformer_export.sources.finish import SourceOverrides

    special = loaded.special_tokens
    special = replace(
        special,
        bos_token_ids=flags["bos_id"] or special.bos_token_ids,
        eos_token_ids=flags["eos_id"] or special.eos_token_ids,
        pad_token_id=special.pad_token_id if flags["pad_id"] is None else flags["pad_id"],
    )
    template = flags["chat_template"]
    overrides = SourceOverrides.of(
        task,
        tokenizer=tokenizer,
        chat_template=None if template is None else _read("--chat-template", template),
        special_tokens=special,
        max_length=options.max_length,
    )
    return export_source(loaded, output, options, overrides, force, progress)


@contextmanager
def _progress(options: ExportOptions, quiet: bool, verbose: bool) -> Iterator[Callable[[str], None]]:
    """Yield a callable that shows the name of a phase: in a bar on a terminal, in a line with --verbose."""
    if quiet or not (verbose or sys.stderr.isatty()):
        yield lambda phase: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    expected = phases(options)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("load", total=len(expected))
        if verbose:
            bar.console.print("phase: load")

        def begin(phase: str) -> None:
            bar.update(task, description=phase, completed=expected.index(phase) if phase in expected else None)
            if verbose:
                bar.console.print(f"phase: {phase}")

        yield begin


def _print_table(rows: list[tuple[str, str]]) -> None:
    """Print the report: aligned on a terminal; elsewhere one fact a line, each line with its label, for grep."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if sys.stderr.isatty():
        table = Table(show_header=False, box=None, pad_edge=False)
        for label, text in rows:
            table.add_row(label, Text(text))
        Console(stderr=True).print(table)
        return
    width, latest = max(len(label) for label, _ in rows), ""
    for label, text in rows:
        latest = label if label not in ("", "*") else latest
        click.echo(f"{label.ljust(width) if label == '*' else latest.ljust(width)}  {text}", err=True)


@contextmanager
def _refusal_reported(report: Path | None, source: str) -> Iterator[None]:
    """Write a refusal to the report, too: the source, the sentence and the class of the error."""
    try:
        yield
    except TformerError as error:
        if report is not None:
            from tformer_export.report import write_json

            refusal = {"refused": str(error), "kind": type(error).__name__, "source": source}
            if error.__cause__ is not None:
                refusal["traceback"] = "".join(traceback.format_exception(error.__cause__))
            try:
                write_json(report, refusal)
            except OutputError as other:  # of the same full disk, perhaps
                error.add_note(str(other))
        raise


def _default_output(source: str) -> Path:
    path = Path(source)
    if path.exists():
        return path.with_suffix(".onnx") if path.is_file() else path.with_name(path.resolve().name + ".onnx")
    return Path(re.split("[:/]", source)[-1] + ".onnx")  # of module:factory or org/name


def _layers(text: str) -> Any:
    """Parse "", "last", or layers and layer:head pairs with commas between them."""
    if text in ("", "last"):
        return text or True
    pairs = [re.fullmatch(r"(\d+)(?::(\d+))?", part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise OptionError(f"--cross-attentions takes last, or layers such as 2,3:0, not {text!r}; put SOURCE before it")
    return [int(m[1]) if m[2] is None else (int(m[1]), int(m[2])) for m in pairs if m]


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{flag} {path} is not UTF-8") from error


def _image_size(text: str | None) -> tuple[int, int] | None:
    """Return height and width. Raises OptionError for another text."""
    if text is None:
        return None
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
        raise OptionError(f"--image-size is HEIGHTxWIDTH, such as 448x448, not {text}")
    return int(numbers[0]), int(numbers[1])


def _tokenizer(tokenizer: Path) -> str:
    from tokenizers import Tokenizer

    text = _read("--tokenizer", tokenizer)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises plain Exception
        raise OptionError(f"--tokenizer {tokenizer} is not in tokenizers' JSON format: {error}") from error
    return text


def main() -> None:
    """Run the command. SIGTERM ends it with status 143, after unfinished files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    command(obj=OWN_PROCESS)
