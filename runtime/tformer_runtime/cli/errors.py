"""Errors of a command as one sentence on standard error and an exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import click

from tformer_runtime.base.errors import TformerError

INTERRUPTED = 128 + signal.SIGINT


@contextlib.contextmanager
def errors_as_sentences(
    command: str,
    verbose: bool,
    sentence_of: Callable[[TformerError], str] = str,
    interrupted: str = "interrupted",
) -> Iterator[None]:
    """Write each error as one sentence to standard error, and exit.

    The status is 1 for a TformerError and 130 for an interruption. Status 2 is click's, for a command line that it
    cannot parse.

    verbose: write the traceback before the sentence.
    interrupted: the sentence for an interruption.
    """
    try:
        yield
    except TformerError as error:
        _fail(command, sentence_of(error), error, 1, verbose)
    except BrokenPipeError:
        # The reader of the results has gone. Without this, Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        _fail(command, interrupted, error, INTERRUPTED, verbose)


def _fail(command: str, sentence: str, error: BaseException, status: int, verbose: bool) -> NoReturn:
    if verbose:
        click.echo("".join(traceback.format_exception(error)), nl=False, err=True)
    notes = getattr(error, "__notes__", ())
    click.echo(f"{command}: {' '.join('; '.join((sentence, *notes)).split())}", err=True)
    sys.exit(status)
