"""What `tformer-run` does with a file, from lines to results, for any task of a model that is run once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer_runtime.base.errors import OptionError, UnsupportedCallError
from tformer_runtime.format.manifest import ATTENTION
from tformer_runtime.tasks.base import TRUNCATE, Task
from tformer_runtime.tasks.settings import MAX_MEMORY

if TYPE_CHECKING:
    from tformer_runtime.cli.heatmaps import Drawing
    from tformer_runtime.model import Model
    from tformer_runtime.preprocess.inputs import Input

_OF_THE_RUN = (TRUNCATE, ATTENTION, MAX_MEMORY)  # what is asked of a task and is none of its settings

Write = Callable[[Any], Any]  # of text, or bytes where a file is written


@dataclass(frozen=True)
class Asked:
    """What can be asked of any file. ids: inputs and results are ids. output: the file that results go to."""

    ids: bool = False
    as_json: bool = False
    output: Path | None = None
    resume: bool = False
    force: bool = False


@dataclass(frozen=True)
class Batches:
    """How inputs are run: so many together, batches side by side, and how many inputs came before."""

    size: int
    workers: int = 1
    first: int = 0


class Job:
    """asked: what results depend on beside the file and the inputs, by its name on the command line. batch_size: unless
    one is asked for. head: of so many inputs, what stands before their results, always as long; None for nothing.
    resumes: whether a run that was stopped leaves what another can go on with. streams: whether inputs are taken one
    after the other, each result shown as it comes. max_memory: bytes of caches. drawing: what draws pictures of the
    inputs, beside the results."""

    asked: Mapping[str, Any] = {}
    batch_size = 32
    head: Callable[[int], bytes] | None = None
    resumes = True
    streams = False
    drawing: Drawing | None = None
    max_memory: int | None = None

    def __init__(self, task: Task, settings: Mapping[str, Any], asked: Asked) -> None:
        """settings: of the task's results, and whether inputs are to be cut."""
        self.task, self.as_json, self.ids = task, asked.as_json, asked.ids
        self.batch_size = task.batch_size
        self.settings = {name: value for name, value in settings.items() if name not in _OF_THE_RUN}
        checked = task.settings(self.settings)  # refuses before the model is loaded
        self.truncate = task.cutting(settings.get(TRUNCATE, False), checked)
        self.max_memory = settings.get(MAX_MEMORY)
        if self.max_memory is not None and task.manifest.decode is None:
            raise OptionError("the model is run once for an input and keeps no caches: leave out --max-memory")
        self.drawing = self._drawing(Path(settings[ATTENTION]), asked) if ATTENTION in settings else None
        self.resumes = self.drawing is None
        flags = {name: flag.flag for flags in task.every_flag().values() for name, flag in flags.items()}
        self.asked = {flags[name]: value for name, value in settings.items() if name not in (ATTENTION, MAX_MEMORY)}

    def _drawing(self, path: Path, asked: Asked) -> Drawing:
        from tformer_runtime.cli.heatmaps import Maps  # which needs the model's class, and that tasks

        if asked.resume:
            raise OptionError("--resume goes on with results alone: leave out --attention")
        if not any(extra.kind == ATTENTION for extra in self.task.manifest.extras):
            raise UnsupportedCallError(
                "the file holds no attention to draw: export the model with --attention (attention=True)"
            )
        return Maps(path, asked.force, self.truncate, self.settings)

    def read(self, line: str) -> Input:
        """The input that a line stands for. InputError if it stands for none."""
        return self.task.read(line, self.ids)

    def prepare(self, model: Model, device: str, threads: int | None) -> None:
        """The model has been loaded."""

    def run(
        self, model: Model, values: Iterable[Input], how: Batches, write: Write, advance: Callable[[], None]
    ) -> None:
        """Write the results of all inputs, in their order. advance: told of each."""
        drawing = self.drawing
        results = self.results(model, drawing.watch(model, values) if drawing else values, how)
        for index, result in enumerate(drawing.drawn(model, results) if drawing else results, how.first):
            write(self.written(result, index))
            advance()

    def results(self, model: Model, values: Iterable[Input], how: Batches) -> Iterator[Any]:
        return model.predict(values, how.size, how.workers, self.truncate, how.first, **self.settings)

    def written(self, result: Any, index: int) -> str | bytes:
        """A result as it stands in the output."""
        if not self.as_json:
            return f"{self.task.line(result)}\n"
        return json.dumps({"index": index, **self.task.fields(result)}, ensure_ascii=False) + "\n"
