"""Errors of a command as one sentence on standard error and an exit status."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import click

from tformer_runtime.base.crash_reports import report_crashes
from tformer_runtime.base.errors import MORE_MEMORY, OutputError, TformerError, error_summary, typed_memory_error
from tformer_runtime.base.process_memory import require_stack
from tformer_runtime.base.validation import surrogate_in

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@contextlib.contextmanager
def errors_as_sentences(
    command: str,
    verbose: bool,
    sentence_of: Callable[[TformerError], str] = str,
    interrupted: str = "interrupted",
) -> Iterator[None]:
    """Write each error as one sentence to standard error, and exit. Standard output is flushed.

    A signal that ends the process in native code is reported with the model that it ran.

    The status is 1 for an error and 130 for an interruption. Status 2 is click's, for a command line that it cannot
    parse. The traceback of an error that nobody foresaw is written to a file, which the sentence names.

    Results that ASCII cannot hold are written as UTF-8, as click writes its own texts: a terminal of ASCII alone is a
    setting that is missing.

    verbose: write the traceback before the sentence.
    interrupted: the sentence for an interruption.
    """
    report_crashes()
    if _is_ascii(getattr(sys.stdout, "encoding", None)):
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        require_stack()
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except TformerError as error:
        _fail(command, sentence_of(error), error, 1, verbose)
    except KeyboardInterrupt as error:
        _fail(command, interrupted, error, INTERRUPTED, verbose)
    except (click.exceptions.ClickException, click.exceptions.Exit):
        raise
    except click.exceptions.Abort as error:
        _fail(command, interrupted, error, INTERRUPTED, verbose)
    except OSError as error:
        refused = _flush_or_discard()
        if refused is None:
            _fail(command, _sentence(command, error), error, 1, verbose)
        if isinstance(refused, BrokenPipeError):  # the reader of the results has gone
            sys.exit(1)
        _fail(command, f"the results cannot be written: {refused.strerror}", error, 1, verbose)
    except UnicodeEncodeError as error:
        _fail(command, _lacking_character(error) or _unforeseen(command, error), error, 1, verbose)
    except Exception as error:
        _fail(command, _sentence(command, error), error, 1, verbose)


def _is_ascii(encoding: str | None) -> bool:
    return encoding is not None and codecs.lookup(encoding).name == "ascii"


def _lacking_character(error: UnicodeEncodeError) -> str | None:
    """Return the sentence for a text that standard output cannot hold; None for an error of another text."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        error.object.encode(encoding)
    except UnicodeEncodeError:
        if found := surrogate_in(error.object):  # a label or the name of a file may have one; no encoding helps
            return f"the results hold {found}: rename the file or the label that it comes from"
        character = error.object[error.start]
        return (
            f"standard output has the encoding {encoding}, which lacks {character!r}: set PYTHONIOENCODING=utf-8, or "
            "write to a file"
        )
    return None


def require_output() -> None:
    """Raise OutputError if there is no standard output for the results."""
    if sys.stdout is None or sys.stdout.closed:
        raise OutputError("standard output is closed: redirect it to a file, or to /dev/null")


def _flush_or_discard() -> OSError | None:
    """Write the rest of the results. Return the error of standard output, if it takes none; then it leads nowhere.

    Otherwise Python would report the error again when it flushes at exit.
    """
    if sys.stdout is None or sys.stdout.closed:
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _sentence(command: str, error: Exception) -> str:
    """Return the sentence of an error that has none: of missing memory, or one that names the file of its traceback."""
    typed = typed_memory_error(error, MORE_MEMORY)
    return str(typed) if typed is not error else _unforeseen(command, error)


def _unforeseen(command: str, error: Exception) -> str:
    """Write the traceback of an error to a new file, and return the sentence that names it."""
    import tempfile  # takes 3 ms to import

    summary = error_summary(error)
    try:
        handle, path = tempfile.mkstemp(prefix=f"{command}-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return f"an error that was not foreseen, {summary}: run it with --verbose and report the traceback"
    return f"an error that was not foreseen, {summary}: please report the traceback, which is in {path}"


def _fail(command: str, sentence: str, error: BaseException, status: int, verbose: bool) -> NoReturn:
    _flush_or_discard()
    if verbose:
        _write("".join(traceback.format_exception(error)))
    notes = getattr(error, "__notes__", ())
    _write(f"{command}: {' '.join('; '.join((sentence, *notes)).split())}\n")
    sys.exit(status)


def _write(text: str) -> None:
    """Write a text to standard error, if that is open. Lone surrogates, which a file name may hold, are escaped."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(text.encode("utf-8", "backslashreplace").decode("utf-8"), nl=False, err=True)
