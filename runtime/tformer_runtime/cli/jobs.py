"""The job of each task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tformer_runtime.cli.forecasting import forecasting_job
from tformer_runtime.cli.job import Job, RunOptions
from tformer_runtime.cli.transcription import TranscriptionJob
from tformer_runtime.cli.vectors import vectors_job
from tformer_runtime.tasks.base import BaseTask
from tformer_runtime.tasks.features import Features
from tformer_runtime.tasks.forecasting import Forecasting
from tformer_runtime.tasks.speech import Speech

JOBS: dict[type[BaseTask], Callable[[Any, Mapping[str, Any], RunOptions], Job]] = {
    Features: vectors_job,
    Forecasting: forecasting_job,
    Speech: TranscriptionJob,
}


def make_job(task: BaseTask, settings: Mapping[str, Any], options: RunOptions) -> Job:
    """Return the job of the task's class, or of its nearest base class in `JOBS`; else a plain `Job`.

    Raise OptionError for options that do not go together.
    """
    make = next((JOBS[kind] for kind in type(task).__mro__ if kind in JOBS), Job)
    return make(task, settings, options)
