"""Which job does a file's task on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tformer_runtime.cli.forecasting import forecasting_job
from tformer_runtime.cli.job import Asked, Job
from tformer_runtime.cli.transcription import Transcribing
from tformer_runtime.cli.vectors import vectors_job
from tformer_runtime.tasks.base import Task
from tformer_runtime.tasks.ctc_recognition import Speech
from tformer_runtime.tasks.features import Features
from tformer_runtime.tasks.forecasting import Forecasting

JOBS: dict[type[Task], Callable[[Any, Mapping[str, Any], Asked], Job]] = {
    Features: vectors_job,
    Forecasting: forecasting_job,
    Speech: Transcribing,
}


def make_job(task: Task, settings: Mapping[str, Any], asked: Asked) -> Job:
    """The job of the nearest class of the task that has one of its own. OptionError if it cannot be done so."""
    make = next((JOBS[kind] for kind in type(task).__mro__ if kind in JOBS), Job)
    return make(task, settings, asked)
