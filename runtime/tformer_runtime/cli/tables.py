"""`tformer-run --ray`: the flags of a job over files of rows, their checks, and its messages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from tformer_runtime.base.errors import OptionError
from tformer_runtime.base.extras import import_optional
from tformer_runtime.cli.generation import GenerationJob
from tformer_runtime.cli.job import Job, RunOptions
from tformer_runtime.cli.options import TableOptions
from tformer_runtime.cli.vectors import CosineJob
from tformer_runtime.distributed.job import JobSummary, TableJob, Watcher, run_job
from tformer_runtime.distributed.predictor import InputColumn
from tformer_runtime.format.info import file_fingerprint
from tformer_runtime.tasks.base import ADAPTER, TRUNCATE


def run_table_job(
    model: Path,
    inputs: Sequence[str],
    options: RunOptions,
    tables: TableOptions,
    make_job: Callable[[RunOptions], Job],
) -> None:
    """Run the model on all rows of files.

    make_job: makes the job of the task, which checks the flags of the task.
    """
    _check(inputs, options)
    import_optional("ray", "--ray needs Ray", "ray")
    job = make_job(replace(options, as_json=True, output_file=None, resume=False))
    fingerprint = file_fingerprint(model)
    assert options.input_file is not None
    assert options.output_file is not None
    table_job = TableJob(
        model=str(model.absolute()),
        fingerprint=fingerprint,
        input_files=options.input_file,
        output_folder=_uri(options.output_file),
        input_column=_input_column(tables.input_column),
        output_columns=_output_columns(tables.output_column),
        keeps_errors=tables.on_error == "keep",
        options=_call_options(job),
        call=_call_arguments(job, options),
        batch_size=options.batch_size or job.batch_size,
        device="cuda" if options.device == "cuda" else "cpu",
        threads=options.threads or 1,
        max_memory=job.max_memory,
        max_run_seconds=options.max_run_seconds,
        workers=options.workers,
        **({"part_rows": tables.part_rows} if tables.part_rows else {}),
        result_options={
            "MODEL.onnx": fingerprint,
            **job.result_options,
            **({"--ids": True} if options.ids else {}),
            **({"--output-column": list(tables.output_column)} if tables.output_column else {}),
            "--on-error": tables.on_error or "fail",
        },
    )
    with _Messages(options) as watcher:
        summary = run_job(table_job, options.force, options.resume, watcher)
    _tell_end(summary, table_job, options)


def _check(inputs: Sequence[str], options: RunOptions) -> None:
    """Raise click.UsageError for options that do not go together."""
    if inputs or options.input_file in (None, "-") or options.output_file is None:
        raise click.UsageError("--ray reads files and writes a folder: give --input-file and --output-file, no INPUT")
    if options.as_json:
        raise click.UsageError("--ray writes the columns of --json into files of the input's format: not with --json")
    if options.max_process_memory is not None:
        raise click.UsageError("--max-process-memory is the limit of one process: not with --ray")


def _call_options(job: Job) -> dict[str, Any]:
    """Return the options of the call of a job. Raise OptionError for flags whose results are not columns."""
    if isinstance(job, GenerationJob):
        if job.images or job.timing or job.streams or job.heat_maps is not None:
            raise OptionError("--image, --timing, --stream and --cross-attentions are not for --ray: leave them out")
        return {**job.options.to_dict(), **({"draft_model": str(job.draft.absolute())} if job.draft else {})}
    if isinstance(job, CosineJob) or job.heat_maps is not None:
        raise OptionError("--similarity and --attentions are not for --ray: leave them out")
    truncate = {TRUNCATE: True} if job.truncate else {}
    adapter = {ADAPTER: job.adapter} if job.adapter is not None else {}
    return {**job.settings, **truncate, **adapter}


def _call_arguments(job: Job, options: RunOptions) -> dict[str, Any]:
    chat = {"chat": job.chats, "system": job.system} if isinstance(job, GenerationJob) else {}
    return {"ids": options.ids, **chat}


def _input_column(names: Sequence[str]) -> InputColumn | None:
    """Return the columns of --input-column. Raise OptionError for names of both kinds."""
    if not names:
        return None
    if any("=" in name for name in names):
        if not all("=" in name for name in names):
            raise OptionError("--input-column is a name, or INPUT=NAME for each input of the model: not both")
        return dict(_parted(name) for name in names)
    return names[0] if len(names) == 1 else list(names)


def _output_columns(names: Sequence[str]) -> dict[str, str] | None:
    return dict(_parted(name) for name in names) if names else None


def _parted(name: str) -> tuple[str, str]:
    first, _, second = name.partition("=")
    return first, second or first


def _uri(folder: Path) -> str:
    """Return the name of a folder: pathlib takes a slash from the URI of an object store."""
    first, separator, rest = str(folder).partition(":/")
    return f"{first}://{rest.lstrip('/')}" if separator and "/" not in first else str(folder)


class _Messages(Watcher):
    """Writes messages to standard error, and shows a progress bar on a terminal. A context manager."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._advance: Callable[[int], None] = lambda rows: None
        self._bar = contextlib.ExitStack()

    def __enter__(self) -> _Messages:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def started(self, workers: int, rows: int, finished: int) -> None:
        if self._options.quiet:
            return
        if self._options.verbose:
            click.echo(f"workers: {workers}", err=True)
        if self._options.resume:
            click.echo(f"resume: {finished} of the {rows} rows are finished", err=True)
        if sys.stderr.isatty():
            self._advance = self._bar.enter_context(_rows_bar(rows, finished))

    def advanced(self, rows: int) -> None:
        self._advance(rows)

    def warned(self, sentence: str) -> None:
        if not self._options.quiet:
            click.echo(sentence, err=True)


@contextlib.contextmanager
def _rows_bar(rows: int, finished: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=rows, completed=finished)
        yield lambda count: bar.advance(task, count)


def _tell_end(summary: JobSummary, job: TableJob, options: RunOptions) -> None:
    if summary.failed and not options.quiet:
        computed = summary.rows - summary.finished_before
        click.echo(f"{summary.failed} of {computed} rows failed: the column {job.error_column} tells why", err=True)
