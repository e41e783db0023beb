"""A job of `tformer-run`: from input lines to formatted results, for any task of a single-pass model."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from tformer_runtime.base.errors import OptionError, UnsupportedCallError
from tformer_runtime.format.manifest import ATTENTIONS
from tformer_runtime.tasks.base import ADAPTER, TRUNCATE, BaseTask
from tformer_runtime.tasks.settings import MAX_MEMORY

if TYPE_CHECKING:
    from tformer_runtime.cli.heatmaps import HeatMapWriter
    from tformer_runtime.model import Model
    from tformer_runtime.preprocess.inputs import Input

_RUN_FLAGS = (TRUNCATE, ADAPTER, ATTENTIONS, MAX_MEMORY)  # flags of a task that are not settings of its results

Value = TypeVar("Value")
Outcome = TypeVar("Outcome")
Write = Callable[[Any], Any]  # of text, or of bytes to a file


class RunOptions(Struct, frozen=True):
    """The options that files of all kinds take.

    ids: inputs and results are ids.
    as_json: write results as JSON.
    output_file: the file of the results; None for standard output.
    resume: continue an output file that an earlier run left unfinished.
    force: overwrite existing files.
    input_file: the file of the inputs, one a line; "-" for standard input, None for inputs on the command line.
    device: "auto", "cpu" or "cuda".
    threads: threads of one operator; None for the default.
    batch_size: inputs that are computed together; None for the default of the job.
    workers: batches that run in parallel; None for the default.
    max_process_memory: the limit of all memory of the process, such as "2G"; None for no limit.
    max_run_seconds: the deadline of a run of the graph; None for the default.
    quiet: write nothing but errors to standard error.
    verbose: write the device, workers and batch size, and the traceback of an error.
    """

    ids: bool = False
    as_json: bool = False
    output_file: Path | None = None
    resume: bool = False
    force: bool = False
    input_file: str | None = None
    device: str = "auto"
    threads: int | None = None
    batch_size: int | None = None
    workers: int | None = None
    max_process_memory: str | None = None
    max_run_seconds: float | None = None
    quiet: bool = False
    verbose: bool = False


class BatchSettings(Struct, frozen=True):
    """How inputs are batched.

    size: inputs of a batch.
    workers: batches that run in parallel.
    index_offset: inputs that an earlier run finished.
    """

    size: int
    workers: int = 1
    index_offset: int = 0


class Job:
    """The work of one run of the command. Subclasses override the class attributes.

    result_options: the options that results depend on, by their flags. A run with other values cannot resume.
    batch_size: the default batch size.
    header: from a number of inputs to the bytes before their results, of one length for any number; None without one.
    can_resume: whether another run can continue this one.
    streams: whether inputs are run one by one, and text is written during generation.
    heat_maps: the writer of an image per input; None without images.
    max_memory: bytes of the caches; None without a limit.
    """

    result_options: Mapping[str, Any] = {}
    batch_size = 32
    header: Callable[[int], bytes] | None = None
    can_resume = True
    streams = False
    heat_maps: HeatMapWriter | None = None
    max_memory: int | None = None

    def __init__(self, task: BaseTask, settings: Mapping[str, Any], options: RunOptions) -> None:
        """Check the options before the model is loaded.

        settings: the settings of the task's results, and the flags in `_RUN_FLAGS`.
        """
        self.task, self.as_json, self.ids = task, options.as_json, options.ids
        self.batch_size = task.batch_size
        self.settings = {name: value for name, value in settings.items() if name not in _RUN_FLAGS}
        checked = task.settings(self.settings)
        self.truncate = task.truncates(settings.get(TRUNCATE, False), checked)
        self.adapter = settings.get(ADAPTER)
        task.manifest.adapter_number(self.adapter)
        self.max_memory = settings.get(MAX_MEMORY)
        if self.max_memory is not None and task.manifest.decode is None:
            raise OptionError("the file holds a single-pass model, which keeps no caches: leave out --max-memory")
        self.heat_maps = self._heat_maps(Path(settings[ATTENTIONS]), options) if ATTENTIONS in settings else None
        self.can_resume = self.heat_maps is None
        flags = {name: flag.flag for flags in task.all_flags().values() for name, flag in flags.items()}
        self.result_options = {
            flags[name]: value for name, value in settings.items() if name not in (ATTENTIONS, MAX_MEMORY)
        }

    def _heat_maps(self, path: Path, options: RunOptions) -> HeatMapWriter:
        from tformer_runtime.cli.heatmaps import AttentionMapWriter  # its imports include the tasks

        if options.resume:
            raise OptionError("--resume cannot continue images: leave out --attentions")
        if not any(extra.kind == ATTENTIONS for extra in self.task.manifest.extras):
            raise UnsupportedCallError(
                "the file holds no attention weights to draw: export the model with --attentions "
                "(ExtraOutputs(attentions=True))"
            )
        return AttentionMapWriter(path, options.force, self.truncate, self.settings, self.adapter)

    def read(self, line: str) -> Input:
        """Parse a line into an input. Raise InputError if it is not an input."""
        return self.task.parse_line(line, self.ids)

    def prepare(self, model: Model, device: str, threads: int | None) -> None:
        """Use the loaded model before the first input is read."""

    def run(
        self, model: Model, inputs: Iterable[Input], batches: BatchSettings, write: Write, advance: Callable[[], None]
    ) -> None:
        """Write the results of all inputs, in the order of the inputs. Call `advance` after each result."""
        heat_maps = self.heat_maps
        results = self.results(model, heat_maps.watch(model, inputs) if heat_maps else inputs, batches)
        drawn = heat_maps.draw_results(model, results) if heat_maps else results
        for index, result in enumerate(drawn, batches.index_offset):
            write(self.format_result(result, index))
            advance()

    def results(self, model: Model, inputs: Iterable[Input], batches: BatchSettings) -> Iterator[Any]:
        """Run the model on all inputs."""
        return model.predict(inputs, batches.size, batches.workers, self.truncate, self.adapter, **self.settings)

    def format_result(self, result: Any, index: int) -> str | bytes:
        """Format a result for the output. index: of the input, from 0."""
        if not self.as_json:
            return f"{self.task.format_line(result)}\n"
        return json.dumps({"index": index, **self.task.format_fields(result)}, ensure_ascii=False) + "\n"


def count_several(values: Iterable[Value], index_offset: int) -> tuple[bool, Iterator[Value]]:
    """Return whether a run has several inputs, and an iterator of `values`. Read two of them.

    index_offset: inputs that an earlier run finished. An error in reading the second value is raised after the first.
    """
    rest = iter(values)
    first = list(islice(rest, 1))
    second: list[Value] = []
    failure: Exception | None = None
    try:
        second = list(islice(rest, 1))
    except Exception as error:
        failure = error

    def all_values() -> Iterator[Value]:
        yield from first
        if failure is not None:
            raise failure
        yield from second
        yield from rest

    return index_offset > 0 or failure is not None or bool(second), all_values()


def run_named(
    inputs: Iterable[tuple[str, Value]], run: Callable[[Iterator[Value]], Iterator[Outcome]]
) -> Iterator[tuple[str, Outcome]]:
    """Run a model on named inputs. Return each result with the name of its input, in the order of the inputs.

    run: from an iterator of inputs to an iterator of one result per input.
    """
    names: deque[str] = deque()  # of inputs without a result

    def values() -> Iterator[Value]:
        for name, value in inputs:
            names.append(name)
            yield value

    for result in run(values()):
        yield names.popleft(), result
