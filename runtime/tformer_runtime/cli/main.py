"""`tformer-run`: run a model file from the command line.

Standard output holds results only. Messages go to standard error. Exit status: 0 done, 1 the work failed, 2 wrong
usage.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tformer_runtime.base.errors import InputError, MemoryBudgetError, OptionError, TformerError, with_input_number
from tformer_runtime.base.process_memory import limit_process_memory
from tformer_runtime.base.quick_start import freeze_objects
from tformer_runtime.base.validation import MAX_INT, MAX_THREADS
from tformer_runtime.cli.errors import errors_as_sentences, require_output
from tformer_runtime.cli.generation import Generation
from tformer_runtime.cli.input_lines import InputLines, progress_bar
from tformer_runtime.cli.job import BatchSettings, Job, RunOptions, Write
from tformer_runtime.cli.jobs import make_job
from tformer_runtime.cli.options import Command, table_options, use_flag_names
from tformer_runtime.cli.result_file import ResultFile
from tformer_runtime.cli.resumed_model import ResumedModel
from tformer_runtime.format.info import file_fingerprint, file_info, info_lines, readable_info, verified_digest
from tformer_runtime.format.model_file import read_manifest
from tformer_runtime.model import Model, machine_facts
from tformer_runtime.preprocess.inputs import Input
from tformer_runtime.tasks import TASKS, BaseTask, generates, task_of
from tformer_runtime.tasks.settings import Flag, bytes_of, value_of

KINDS: tuple[type[Generation] | type[BaseTask], ...] = (Generation, *TASKS)
MAX_DEFAULT_WORKERS = 8  # Python code of the workers runs one thread at a time
_AT_LEAST_1 = click.IntRange(1, MAX_INT)
_THREADS = click.IntRange(1, MAX_THREADS)


@click.command(cls=Command, kinds=KINDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="MODEL.onnx", type=click.Path(path_type=Path))
@click.argument("inputs", metavar="[INPUT ...]", nargs=-1)
@click.option("--input-file", metavar="F|-", help="Read inputs from a file, one per line; - is standard input.")
@click.option(
    "--ray",
    is_flag=True,
    help="Read rows of files (Parquet, JSON lines, CSV, text), on all machines of Ray; F is a name, pattern or folder.",
)
@click.option(
    "--input-column",
    metavar="NAME",
    multiple=True,
    help="The column of the inputs; repeated for pairs; INPUT=NAME for models with several inputs.  [--ray]",
)
@click.option(
    "--output-column",
    metavar="NAME[=NEW]",
    multiple=True,
    help="Keep this column of the results, under a new name. Repeatable.  [--ray; default: all]",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "keep"]),
    help="keep writes the error of a row into the column error, instead of ending the run.  [--ray; default: fail]",
)
@click.option(
    "--part-rows", metavar="N", type=_AT_LEAST_1, help="Write N rows to a file of results.  [--ray; default: 1000]"
)
@click.option("--output-file", metavar="F", type=click.Path(path_type=Path), help="Write results to a file.")
@click.option("--resume", is_flag=True, help="Continue the output file of an interrupted run.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto is cuda if the file and the machine can use it, else cpu.",
)
@click.option(
    "--threads",
    metavar="N",
    type=_THREADS,
    help="Compute an operator with N threads.  [default: one per core; 1 with workers]",
)
@click.option(
    "--batch-size",
    metavar="N",
    type=_AT_LEAST_1,
    help="Compute N inputs together.  [default: 32; 8 for speech and masks; 1 with speculation]",
)
@click.option(
    "--workers",
    metavar="N",
    type=_THREADS,
    help="Compute N batches at the same time.  [default: 1 for INPUT arguments; else one per core, at most 8]",
)
@click.option(
    "--max-process-memory",
    metavar="SIZE",
    help="Limit all memory of the process, such as 2G: an input that needs more ends with an error.  [Linux]",
)
@click.option(
    "--max-run-seconds",
    metavar="S",
    type=float,
    help="Stop a run of the graph, such as a step, after S seconds.  [default: 600 for graphs with loops; else none]",
)
@click.option("--ids", is_flag=True, help="Inputs, results and --forced-prefix are token ids with spaces between.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object per result.")
@click.option("--info", is_flag=True, help="Describe the file, and exit.")
@click.option("--verify", is_flag=True, help="Compare the file with the digest of its export, and exit.")
@click.option("--quiet", is_flag=True, help="Write only errors to standard error.")
@click.option(
    "--verbose", is_flag=True, help="Write the device, the workers, the batch size, and the traceback of an error."
)
@click.version_option(package_name="tformer")
@click.pass_context
def main(
    context: click.Context, /, model: Path, inputs: tuple[str, ...], info: bool, verify: bool, **values: Any
) -> None:
    """Run a model on each INPUT, or on each line of a file or of standard input.

    The file decides the task, such as generation, classification or vectors, and the form of an input: a text, two
    texts with a tab between them, the name of an image, audio or CSV file, or JSON. The options under Options are for
    all files; the others are for files of some tasks. --info shows the task of a file.
    """
    assert isinstance(context.command, Command)
    flag_values = {name: values.pop(name) for name in context.command.flags}
    flag_values = {name: value for name, value in flag_values.items() if value not in (None, ())}
    tables, values = table_options(values)
    options = RunOptions(**values)
    with errors_as_sentences("tformer-run", options.verbose, _sentence):
        if not tables.ray:
            tables.must_have_ray()
        if info or verify or options.output_file is None:
            require_output()
        if options.max_process_memory is not None and not tables.ray:
            limit_process_memory(bytes_of(options.max_process_memory, "max_process_memory"))
        if verify:
            click.echo(f"{model} is as exported: digest {verified_digest(model)}")
            return
        if info:
            manifest = read_manifest(model)
            facts = {**file_info(model, manifest), **machine_facts(manifest)}
            lines = info_lines(readable_info(facts))
            click.echo(json.dumps(facts, ensure_ascii=False) if options.as_json else "\n".join(lines))
            return
        if tables.ray:
            from tformer_runtime.cli.tables import run_table_job  # 15 ms that other runs do not need

            run_table_job(model, inputs, options, tables, lambda options: _make_job(model, flag_values, options))
            return
        _run(model, inputs, flag_values, options)


def _run(model: Path, inputs: tuple[str, ...], flag_values: Mapping[str, Any], options: RunOptions) -> None:
    """Run the model on the inputs and write the results.

    flag_values: the values of the flags that not every file takes, by name.
    """
    source = _input_source(inputs, options)
    job = _make_job(model, flag_values, options)
    file = _result_file(model, job, options)
    finished = file.done if file else 0
    workers = options.workers or _default_workers(source, job, options)
    threads = 1 if workers > 1 and options.threads is None else options.threads
    seconds = options.max_run_seconds
    opened = Model.load(model, options.device, threads, job.max_memory, max_run_seconds=seconds)
    loaded = ResumedModel(opened, finished)
    job.prepare(loaded, options.device, threads)
    workers = 1 if loaded.device == "cuda" else workers
    batch_size = options.batch_size or job.batch_size
    for message in _messages(loaded.device, workers, batch_size, finished, options):
        click.echo(message, err=True)
    lines: InputLines | tuple[str, ...] = inputs if source is None else InputLines(source)
    remaining = file.rest(lines) if file else lines
    values = (_parse(job, line, number) for number, line in enumerate(remaining, finished + 1))
    # Looked up before the progress bar replaces sys.stdout.
    write: Write = file.add if file else sys.stdout.write
    with file or contextlib.nullcontext(), _located(source), _progress(lines, finished, job, options) as advance:
        job.run(loaded, values, BatchSettings(batch_size, workers, finished), write, advance)


def _input_source(inputs: tuple[str, ...], options: RunOptions) -> str | None:
    """Return the file of the inputs, "-" for standard input, or None for inputs on the command line.

    Raise click.UsageError for options that do not go together.
    """
    if options.quiet and options.verbose:
        raise click.UsageError("--quiet writes nothing but errors: not with --verbose")
    if inputs and options.input_file:
        raise click.UsageError("give INPUT or --input-file, not both")
    if options.resume and not options.output_file:
        raise click.UsageError("--resume goes on with an output file: give --output-file too")
    if not inputs and options.input_file in (None, "-") and sys.stdin is None:
        raise InputError("standard input is closed: name an input or an --input-file")
    if inputs or options.input_file:
        return options.input_file or None
    if sys.stdin.isatty():
        raise click.UsageError("there is no INPUT: give some, or --input-file")
    return "-"


def _make_job(model: Path, flag_values: Mapping[str, Any], options: RunOptions) -> Job:
    """Return the job of the file's task. Raise OptionError for a flag that this file does not take."""
    manifest = read_manifest(model)
    kind = Generation() if generates(manifest) else task_of(manifest)
    flags = {name: flag for flags in kind.all_flags().values() for name, flag in flags.items()}
    others = [option.flag for name, option in _all_flags().items() if name in flag_values and name not in flags]
    if others:
        raise OptionError(f"{model.name} {kind.does} ({manifest.task}): it takes no {', '.join(others)}")
    if isinstance(kind, Generation):
        return kind.job(flag_values, options)
    return make_job(kind, {name: value_of(flags[name], value) for name, value in flag_values.items()}, options)


def _all_flags() -> dict[str, Flag]:
    return {n: flag for kind in KINDS for flags in kind.all_flags().values() for n, flag in flags.items()}


def _result_file(model: Path, job: Job, options: RunOptions) -> ResultFile | None:
    """Return the output file, which knows how many inputs an earlier run finished; None for standard output."""
    path = options.output_file
    if path is None:
        return None
    if path.suffix == ".npy" and job.header is None:
        raise OptionError(
            f"{path} is the name of a numpy array, but the results are lines of text: choose another ending"
        )
    result_options = {"MODEL.onnx": file_fingerprint(model), **job.result_options}
    result_options |= {flag: True for flag, value in {"--ids": options.ids, "--json": options.as_json}.items() if value}
    return ResultFile(path, result_options, options.force, options.resume, job.can_resume, job.header)


def _default_workers(source: str | None, job: Job, options: RunOptions) -> int:
    if source is None or options.threads is not None or job.streams or options.device == "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_WORKERS)


def _messages(device: str, workers: int, batch_size: int, finished: int, options: RunOptions) -> Iterator[str]:
    """Yield the lines for standard error before the run."""
    if options.quiet:
        return
    if options.device == "auto" or options.verbose:
        yield f"device: {device}"
    if options.verbose:
        yield f"workers: {workers}"
        yield f"batch size: {batch_size}"
    if options.resume:
        yield f"resume: {finished} of the inputs are finished"


def _parse(job: Job, line: str, number: int) -> Input:
    try:
        return job.read(line)
    except InputError as error:
        raise with_input_number(error, number) from None


@contextlib.contextmanager
def _located(source: str | None) -> Iterator[None]:
    """Replace the number of an input in an InputError by its place: the file and the line."""
    try:
        yield
    except InputError as error:
        if not source or error.input_number is None:
            raise
        place = "line" if source == "-" else f"{source}, line"
        located = InputError(f"{place} {error.input_number}: {error.reason}")
        for note in getattr(error, "__notes__", ()):
            located.add_note(note)
        raise located from error


def _progress(
    lines: InputLines | tuple[str, ...], finished: int, job: Job, options: RunOptions
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Return a progress bar for a long input, if standard error is a terminal that does not show the results too."""
    shows_results = options.output_file is None and sys.stdout is not None and sys.stdout.isatty()
    hidden = job.streams or options.quiet or not sys.stderr.isatty() or shows_results
    if hidden or not isinstance(lines, InputLines):
        return contextlib.nullcontext(lambda: None)
    return progress_bar(lines, finished)


def _sentence(error: TformerError) -> str:
    """Return the sentence of an error, with flags in the place of the names of options."""
    return use_flag_names(str(error)) if isinstance(error, (OptionError, MemoryBudgetError)) else str(error)


def run() -> None:
    """Run the command in a process of its own."""
    freeze_objects()
    main()


if __name__ == "__main__":
    run()
