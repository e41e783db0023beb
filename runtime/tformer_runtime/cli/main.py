"""`tformer-run`: a model file on the command line.

Standard output holds results only. What is said besides goes to standard error. Exit status: 0 done, 1 the work
failed, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from tformer_runtime.base.errors import InputError, MemoryBudgetError, OptionError, TformerError, numbered
from tformer_runtime.cli.generation import Generation
from tformer_runtime.cli.job import Asked, Batches, Job, Write
from tformer_runtime.cli.jobs import make_job
from tformer_runtime.cli.options import Command, as_written
from tformer_runtime.cli.result_file import ResultFile
from tformer_runtime.format.info import file_info, identity, info_lines
from tformer_runtime.format.model_file import read_manifest
from tformer_runtime.model import Model
from tformer_runtime.preprocess.inputs import Input
from tformer_runtime.tasks import TASKS, Task, generates, task_of
from tformer_runtime.tasks.settings import Flag, value_of

LONGEST = 64 << 20  # bytes of a line

KINDS: tuple[type[Generation] | type[Task], ...] = (Generation, *TASKS)
_AT_LEAST_1 = click.IntRange(min=1)


@click.command(cls=Command, kinds=KINDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="MODEL.onnx", type=click.Path(path_type=Path))
@click.argument("inputs", metavar="[INPUT ...]", nargs=-1)
@click.option("--input-file", metavar="F|-", help="Read inputs from a file, one a line; - is standard input.")
@click.option("--output-file", metavar="F", type=click.Path(path_type=Path), help="Write results to a file.")
@click.option("--resume", is_flag=True, help="Go on with the output file of a run that was stopped.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", type=_AT_LEAST_1, help="Threads of one operator.  [default: one per core, 1 with workers]")
@click.option("--batch-size", type=_AT_LEAST_1, help="Inputs computed together.  [default: 32, 1 with a draft]")
@click.option("--workers", type=_AT_LEAST_1, help="Batches side by side.  [default: one per core for --input-file]")
@click.option("--ids", is_flag=True, help="Inputs and results are ids between spaces.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--info", is_flag=True, help="Say what the file is, and stop.")
@click.version_option(package_name="tformer")
@click.pass_context
def main(context: click.Context, /, model: Path, info: bool, as_json: bool, **asked: Any) -> None:
    """Do what a model is for on each INPUT, or on each line of a file or of standard input: generate, classify, turn
    into numbers. An image is given by its file's name, and a pair with a tab between the two."""
    with _sentences():
        if info:
            facts = file_info(model, read_manifest(model))
            click.echo(json.dumps(facts, ensure_ascii=False) if as_json else "\n".join(info_lines(facts)))
            return
        assert isinstance(context.command, Command)
        given = {name: asked.pop(name) for name in context.command.flags}
        given = {name: value for name, value in given.items() if value not in (None, ())}
        _run(model, given, as_json=as_json, **asked)


def _job(model: Path, given: Mapping[str, Any], asked: Asked) -> Job:
    """What the file does with its inputs. given: options that not every file has. OptionError for those of others."""
    manifest = read_manifest(model)
    kind = Generation() if generates(manifest) else task_of(manifest)
    flags = {name: flag for flags in kind.every_flag().values() for name, flag in flags.items()}
    others = [option.flag for name, option in _every_flag().items() if name in given and name not in flags]
    if others:
        raise OptionError(f"{model.name} {kind.does} ({manifest.task}): it takes no {', '.join(others)}")
    if isinstance(kind, Generation):
        return kind.job(given, asked)
    return make_job(kind, {name: value_of(flags[name], value) for name, value in given.items()}, asked)


def _every_flag() -> dict[str, Flag]:
    return {n: flag for kind in KINDS for flags in kind.every_flag().values() for n, flag in flags.items()}


def _run(
    model: Path,
    given: Mapping[str, Any],
    inputs: tuple[str, ...],
    input_file: str | None,
    output_file: Path | None,
    resume: bool,
    force: bool,
    device: str,
    threads: int | None,
    batch_size: int | None,
    workers: int | None,
    ids: bool,
    as_json: bool,
) -> None:
    if inputs and input_file:
        raise click.UsageError("give INPUT or --input-file, not both")
    if resume and not output_file:
        raise click.UsageError("--resume goes on with an output file: give --output-file too")
    if not inputs and not input_file:
        if sys.stdin.isatty():
            raise click.UsageError("there is no INPUT: give some, or --input-file")
        input_file = "-"
    job = _job(model, given, Asked(ids, as_json, output_file, resume, force))
    if output_file and output_file.suffix == ".npy" and job.head is None:
        raise OptionError(f"{output_file} is named as an array, and the results are lines: give it another ending")
    file: ResultFile | None = None
    if output_file:
        asked = {"MODEL.onnx": identity(model), **job.asked}
        asked |= {flag: True for flag, value in {"--ids": ids, "--json": as_json}.items() if value}
        file = ResultFile(output_file, asked, force, resume, job.resumes, job.head)
    done = file.done if file else 0
    if workers is None:
        workers = _cores() if input_file and threads is None and not job.streams and device != "cuda" else 1
    threads = 1 if workers > 1 and threads is None else threads
    loaded = Model.load(model, device, threads, job.max_memory)
    job.prepare(loaded, device, threads)
    if loaded.device == "cuda":
        workers = 1
    if device == "auto":
        click.echo(f"device: {loaded.device}", err=True)
    if resume:
        click.echo(f"resume: {done} inputs are done", err=True)
    lines: Iterable[str] = inputs or _lines(input_file or "-")
    if file:
        lines = file.rest(lines)
    values = (_value(job, line, number) for number, line in enumerate(lines, done + 1))
    write: Write = file.add if file else sys.stdout.write  # which a progress bar puts something else in place of
    source = None if inputs else input_file
    with file or contextlib.nullcontext(), _located(source), _progress(input_file, done, job) as advance:
        job.run(loaded, values, Batches(batch_size or job.batch_size, workers, done), write, advance)
    sys.stdout.flush()


def _value(job: Job, line: str, number: int) -> Input:
    try:
        return job.read(line)
    except InputError as error:
        raise numbered(error, number) from None


def _cores() -> int:
    """How many workers are worth having: those of Python's own work take turns."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(own, 8)


def _lines(source: str) -> Iterator[str]:
    """Lines of a file or of standard input (-), as text, without their ends."""
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
                if len(line) == LONGEST:
                    raise InputError(f"input {number}: it is longer than {LONGEST >> 20} MiB")
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise InputError(f"input {number}: it is not UTF-8") from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _located(source: str | None) -> Iterator[None]:
    """Say where in the input file an input is that was refused."""
    try:
        yield
    except InputError as error:
        place = "line" if source in (None, "-") else f"{source}, line"
        raise InputError(re.sub(r"^input (\d+):", rf"{place} \1:", str(error)) if source else str(error)) from error


@contextlib.contextmanager
def _progress(source: str | None, done: int, job: Job) -> Iterator[Callable[[], None]]:
    """How many inputs are done, on a terminal's standard error, unless results go to a terminal too."""
    if not source or job.streams or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed} inputs"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, completed=done)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Each error as one sentence on standard error, and the exit status that belongs to it."""
    try:
        yield
    except TformerError as error:
        sentence = as_written(str(error)) if isinstance(error, (OptionError, MemoryBudgetError)) else str(error)
        _fail(sentence, error, status=2 if isinstance(error, OptionError) else 1)
    except BrokenPipeError:
        # Whoever read the results has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        _fail("interrupted", error, status=128 + signal.SIGINT)


def _fail(sentence: str, error: BaseException, status: int) -> NoReturn:
    notes = getattr(error, "__notes__", ())
    click.echo(f"tformer-run: {' '.join('; '.join((sentence, *notes)).split())}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
