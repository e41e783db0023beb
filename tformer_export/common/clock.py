"""Wall time by phase of an export, the process's memory, and errors that no phase expected."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tformer_export.common.source_lines import line_of_error
from tformer_runtime.base.errors import (
    MORE_MEMORY,
    SourceError,
    TformerError,
    UnsupportedModelError,
    error_summary,
    typed_memory_error,
)
from tformer_runtime.cli.errors import TERMINATED


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PhaseClock:
    """Seconds of each phase, in the order in which the phases ran. A phase that runs twice is summed.

    progress: called with the name of each phase as it begins.
    latest: the phase that began last.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.latest = ""
        self.progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block to the phase `name`."""
        self.latest = name
        self.progress(name)
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


@contextmanager
def unexpected_errors(clock: PhaseClock) -> Iterator[None]:
    """Raise UnsupportedModelError, as one sentence, for an error that no phase expected. Its cause is that error.

    Errors that say that memory is missing pass, for `memory_errors`.
    """
    try:
        yield
    except TformerError:
        raise
    except Exception as error:
        if typed_memory_error(error) is not error:
            raise
        raise UnsupportedModelError(
            f"the export failed in its phase {clock.latest!r}, at {line_of_error(error)}: {error_summary(error)}. This "
            "model was not foreseen: report the traceback (--verbose, or the cause of this error)"
        ) from error


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise OutOfMemoryError, as one sentence, for an error whose cause is missing memory, whatever it says."""
    try:
        yield
    except Exception as error:
        if (typed := typed_memory_error(error, f"an export needs some four times the weights; {MORE_MEMORY}")) is error:
            raise
        raise typed from error


@contextmanager
def exits_refused() -> Iterator[None]:
    """Raise SourceError, as one sentence, if the model's code ends the program. The end of a command passes."""
    try:
        yield
    except SystemExit as error:
        if error.code == TERMINATED:
            raise
        raise SourceError(
            f"the model's code ends the program (SystemExit: {error.code}), at {line_of_error(error)}: let it raise an "
            "error, or leave out the call"
        ) from error
