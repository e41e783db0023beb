"""Helpers that run tformer-run in this process or in a subprocess, and read its error messages."""

from __future__ import annotations

import signal
import subprocess
import sys

from click.testing import CliRunner

from tformer_runtime.cli.main import main

PROGRAM = [sys.executable, "-m", "tformer_runtime.cli.main"]


def run(*arguments, stdin=""):
    """Run tformer-run in this process."""
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def start_process(*arguments):
    """Return a subprocess with pipes that handles SIGINT.

    A shell may run the tests in the background with SIGINT ignored, and subprocesses inherit that.
    """
    return subprocess.Popen(
        [str(a) for a in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def failed(result, before=0):
    """Return the message of a failed run, which is one line without a traceback.

    before: the number of results on standard output, of the inputs before the failed one.
    """
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert len(result.stdout.splitlines()) == before
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("device: ", "resume: "))]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("tformer-run: ")
    return lines[0].removeprefix("tformer-run: ")


def usage_error(result):
    """Return click's message for a usage error."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *_, last_line = result.stderr.splitlines()
    assert last_line.startswith("Error: ")
    return last_line.removeprefix("Error: ")
