"""The call of a task for many inputs. An input that the model cannot take keeps its error; the others get results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tformer_runtime.base.errors import (
    DeadlineError,
    InputError,
    MemoryBudgetError,
    OptionError,
    UnsupportedCallError,
    with_input_number,
)
from tformer_runtime.decoding.options import GenerationOptions
from tformer_runtime.distributed.columns import ResultColumns, generation_columns, task_columns
from tformer_runtime.model import Model
from tformer_runtime.preprocess.chat_template import messages_of_line
from tformer_runtime.preprocess.input_line import line_input
from tformer_runtime.preprocess.inputs import Input
from tformer_runtime.tasks import BaseTask, Forecasting, generates, task_of
from tformer_runtime.tasks.base import ADAPTER, TRUNCATE
from tformer_runtime.tasks.forecasting import History
from tformer_runtime.tasks.speech import Speech

ROW_ERRORS = (InputError, MemoryBudgetError, DeadlineError)  # of one input; any other error ends the job
GENERATION_BATCH = 32


class Call:
    """The call of the task of a model, with its options.

    columns: of its results.
    """

    columns: ResultColumns

    def __init__(
        self,
        model: Model,
        options: Mapping[str, Any],
        batch_size: int | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        ids: bool = False,
        lines: bool = False,
    ) -> None:
        """
        options: of `Model.generate`, or of the call of the task, such as top_k, truncate or adapter. A draft_model may
            be the name of a file.
        batch_size: inputs that are computed together; by default that of the task.
        chat: inputs are messages of the chat template. system: a system message before them.
        ids: texts are ids with spaces between.
        lines: texts are lines of `tformer-run`, so that a tab parts a pair.
        Raise OptionError or UnsupportedCallError for options that the model does not take.
        """
        self.model, self._options = model, dict(options)
        self._chat, self._system, self._ids, self._lines = chat, system, ids, lines
        self._task: BaseTask | None = None if generates(model.manifest) else task_of(model.manifest)
        self._run: Callable[[Iterable[Any]], Iterator[Any]]
        if self._task is None:
            self._set_up_generation(batch_size or GENERATION_BATCH)
        else:
            if chat or system is not None:
                raise UnsupportedCallError(f"this model {self._task.does}: it takes no chat and no system message")
            self._set_up_task(self._task, batch_size or self._task.batch_size)

    def _set_up_generation(self, batch_size: int) -> None:
        options, model = self._options, self.model
        if isinstance(draft := options.get("draft_model"), (str, os.PathLike)):
            options["draft_model"] = Model.load(draft, model.device, threads=1)
        if self._system is not None and not self._chat:
            raise OptionError("system needs chat: give both", option="system")
        generation = GenerationOptions().replace(options)
        self.columns = generation_columns(model.settings(generation, {}))
        self._run = lambda inputs: model.generate_batch(inputs, generation, batch_size)

    def _set_up_task(self, task: BaseTask, batch_size: int) -> None:
        options, model = self._options, self.model
        truncate, adapter = options.pop(TRUNCATE, False), options.pop(ADAPTER, None)
        task.truncates(truncate, task.settings(options))
        model.manifest.adapter_number(adapter)
        self.columns = task_columns(task)
        if isinstance(task, Forecasting):
            horizon = options.get("horizon")
            self._run = lambda histories: model.forecast_batch(histories, horizon, batch_size, truncate=truncate)
        else:
            self._run = lambda inputs: model.predict(inputs, batch_size, 1, truncate, adapter, **options)

    def read(self, value: Any) -> Input:
        """Return the value of a row as an input. Raise InputError if it is not an input.

        value: an InputError if the row could not be read.
        """
        if isinstance(value, InputError):
            raise value
        if value is None:
            raise InputError("it has no value")
        if self._chat:
            lines = self._lines and isinstance(value, str)
            return self.model.prompt(messages_of_line(value) if lines else value, self._system)
        if self._task is None:
            if isinstance(value, str) and (self._lines or self._ids):
                value = line_input(value, self.model.manifest, self._ids)
        elif isinstance(value, str) and (self._lines or self._ids or not self._reads_text):
            read = self._task.parse_line(value, self._ids)
            value = read.values if isinstance(read, History) else read
        given: Input = value
        return given

    @property
    def _reads_text(self) -> bool:
        return bool(self.model.manifest.tokenizer_of) or isinstance(self._task, Speech)

    def outcomes(self, values: Sequence[Any], first: int, keeps_errors: bool) -> list[Any]:
        """Return the result of each row, or its error.

        values: of the rows. first: the number of rows before them in the job, which the seed of a row depends on.
        keeps_errors: otherwise the error of a row is raised, with its number, from 1.
        """
        found: list[Any] = []
        while len(found) < len(values):
            start = len(found)
            self.model._index_offset = first + start  # numbers in errors, and seeds, continue from it
            inputs = (self.read(value) for value in values[start:])
            try:
                for result in self._run(inputs):
                    found.append(result)
            except ROW_ERRORS as error:  # in the turn of its row, after the results of the rows before it
                numbered = with_input_number(error, first + len(found) + 1)
                if not keeps_errors:
                    raise numbered from error
                found.append(numbered)
        return found
