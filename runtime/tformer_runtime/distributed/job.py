"""`tformer-run --ray`: a model on all rows of files, by workers on many machines. Each row has its result once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from tformer_runtime.base.errors import ModelFileError, OptionError, TformerError
from tformer_runtime.distributed.calls import Call
from tformer_runtime.distributed.cluster import Workers, connected, fitting_workers
from tformer_runtime.distributed.columns import import_pyarrow
from tformer_runtime.distributed.output_folder import OutputFolder, PlannedFile, PlannedPart
from tformer_runtime.distributed.predictor import InputColumn, InputColumns
from tformer_runtime.distributed.row_files import TEXT, FilePart, Results, format_of
from tformer_runtime.distributed.storage import Storage, StoredFile
from tformer_runtime.format.info import file_fingerprint
from tformer_runtime.model import Model

PART_ROWS = 1000
ERROR_COLUMN = "error"


class TableJob(Struct, frozen=True):
    """A job. All its values can be pickled.

    model: the file, on each machine under the same name. fingerprint: of the file.
    input_files: a file, a pattern of files, or a folder. output_folder: of the results.
    input_column: None for the only column.
    output_columns: column of the results → its name in the output; with "error", the column of errors. None for all.
    keeps_errors: the error of a row becomes a value; otherwise it ends the job.
    call: further arguments of `Call`.
    threads: of an operator, and CPUs of a worker.
    workers: None for as many as the cluster holds.
    part_rows: rows of a part, which is computed again if its worker dies.
    result_options: the options that results depend on.
    """

    model: str
    input_files: str
    output_folder: str
    input_column: InputColumn | None = None
    output_columns: Mapping[str, str] | None = None
    keeps_errors: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    device: str = "cpu"
    threads: int = 1
    max_memory: int | None = None
    max_run_seconds: float | None = None
    workers: int | None = None
    part_rows: int = PART_ROWS
    fingerprint: str = ""
    result_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error_column(self) -> str | None:
        """The column of errors; None if an error ends the job."""
        return (self.output_columns or {}).get(ERROR_COLUMN, ERROR_COLUMN) if self.keeps_errors else None

    @property
    def chosen_columns(self) -> Mapping[str, str] | None:
        """The columns of the results that are kept; None for all."""
        if self.output_columns is None:
            return None
        return {name: new for name, new in self.output_columns.items() if name != ERROR_COLUMN} or None


class PartWorker:
    """Computes parts of a job, in a process of its own."""

    def __init__(self, job: TableJob, input_column: InputColumn) -> None:
        self._job, self._input = job, InputColumns(input_column)

    def load(self) -> None:
        """Load the model. Raise ModelFileError if this machine has another file than the others."""
        job = self._job
        path = Path(job.model)
        if not path.exists():
            raise ModelFileError(
                f"{job.model} is not on the machine of a worker: put it on a file system that all machines share, or "
                "into their image"
            )
        if file_fingerprint(path) != job.fingerprint:
            raise ModelFileError(f"{job.model} is another file on the machine of a worker: copy the same to all")
        model = Model.load(path, job.device, job.threads, job.max_memory, max_run_seconds=job.max_run_seconds)
        self._call = Call(model, job.options, job.batch_size, **job.call)
        self._chosen = self._call.columns.chosen(job.chosen_columns)

    def run(self, task: PlannedPart) -> int:
        """Compute a part, and write the file of its results. Return the number of rows that failed."""
        job, file, part = self._job, Storage(task.file), task.part
        form = format_of([task.file])
        rows = form.read(file, part)
        error_column = job.error_column
        new = [*self._chosen.values(), *([error_column] if error_column is not None else [])]
        self._input.check(rows.columns, new, must_exist=form.has_columns)
        values = self._input.values({name: rows.values(name) for name in self._input.names})
        for number, error in rows.errors.items():
            values[number] = error  # reading the row raises it
        try:
            outcomes = self._call.outcomes(values, task.rows_before + part.first, job.keeps_errors)
        except TformerError as error:
            if error.input_number is None:
                raise
            number = error.input_number - task.rows_before
            raise type(error)(f"{task.file}, {form.unit} {number}: {error.reason}") from None
        results = Results(self._call.columns, self._chosen, outcomes, error_column)
        Storage(job.output_folder).child(task.name).write(rows.with_results(results))
        return sum(results.failed)


class JobSummary(Struct, frozen=True):
    """The rows of a job: all, those that an earlier run finished, and those of this run that failed."""

    rows: int
    finished_before: int
    failed: int


class Watcher:
    """Is told how a job goes. This one does nothing."""

    def started(self, workers: int, rows: int, finished: int) -> None:
        """The job begins, or goes on."""

    def advanced(self, rows: int) -> None:
        """More rows are finished."""

    def warned(self, sentence: str) -> None:
        """A worker has died."""


def run_job(job: TableJob, force: bool, resume: bool, watcher: Watcher) -> JobSummary:
    """Compute all rows. Raise InputError, OptionError, OutputError, DeviceError, or the error of a row.

    force: overwrite the results of an earlier job. resume: continue an earlier job.
    """
    import_pyarrow()
    files = Storage(job.input_files).files()
    form = format_of([file.name for file in files])
    columns = form.columns(Storage(files[0].name))
    input_column = job.input_column if job.input_column is not None else _only_column(files[0].name, columns)
    InputColumns(input_column).check(columns, (), must_exist=form.has_columns)
    folder = OutputFolder(job.output_folder, form.ending, force, resume)
    lines = {**job.call, "lines": form is TEXT}
    job = replace(job, call=lines, output_folder=Storage(job.output_folder).full_name)  # workers have another folder
    with folder.locked():
        options = {**job.result_options, "--input-column": input_column, "--part-rows": job.part_rows}
        earlier = folder.earlier_files(options, files)
        with connected() as ray:
            gpus = int(job.device == "cuda")
            places = fitting_workers(ray, job.threads, gpus)
            planned = earlier if earlier is not None else _plan(ray, files, job.part_rows)
            if earlier is None:
                folder.record(options, planned)
            parts = folder.parts(planned)
            finished = folder.finished(parts)
            rest = [part for part in parts if part.name not in finished]
            rows = sum(part.part.rows for part in parts)
            before = rows - sum(part.part.rows for part in rest)
            count = min(job.workers or places, len(rest))
            watcher.started(count, rows, before)
            failed = 0
            actor = ray.remote(num_cpus=job.threads, num_gpus=gpus)(PartWorker)
            with Workers[PlannedPart](ray, lambda: actor.remote(job, input_column), count, watcher.warned) as workers:
                for part, failures in workers.results(rest):
                    failed += failures
                    watcher.advanced(part.part.rows)
        folder.must_be_whole(parts)
        folder.clean()
        folder.record(options, planned, finished=True)
    return JobSummary(rows, before, failed)


def _only_column(name: str, columns: Sequence[str]) -> str:
    if len(columns) != 1:
        raise OptionError(
            f"{name} has the columns {', '.join(columns) or '(none)'}: name the one of the inputs with --input-column"
        )
    return columns[0]


def _plan(ray: Any, files: Sequence[StoredFile], part_rows: int) -> list[PlannedFile]:
    """Return the parts of all files. Each file is read by a task of Ray."""
    scan = ray.remote(num_cpus=1)(_scan)
    errors = ray.exceptions
    try:
        parts = ray.get([scan.remote(file.name, part_rows) for file in files])
    except errors.RayTaskError as error:
        if isinstance(error.cause, TformerError):
            raise error.cause from None
        raise
    return [PlannedFile(file, found) for file, found in zip(files, parts, strict=True)]


def _scan(name: str, part_rows: int) -> list[FilePart]:
    return format_of([name]).scan(Storage(name), part_rows)
