"""Running tformer-run in this process, and in one of its own where it has to be one."""

from __future__ import annotations

import signal
import subprocess
import sys

from click.testing import CliRunner

from tformer_runtime.cli.main import main

PROGRAM = [sys.executable, "-m", "tformer_runtime.cli.main"]


def run(*arguments, stdin=""):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def begun(*arguments):
    """A process that reads and writes pipes, and heeds an interrupt, which it would not where tests run in the
    background."""
    return subprocess.Popen(
        [str(a) for a in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def failed(result, status=1, before=0):
    """The one sentence of a failure; there is no traceback. before: results on standard output, of inputs before it."""
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit)
    assert len(result.stdout.splitlines()) == before
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("device: ", "resume: "))]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("tformer-run: ")
    return lines[0].removeprefix("tformer-run: ")


def misused(result):
    """What click says of options that do not go together."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *_, last = result.stderr.splitlines()
    assert last.startswith("Error: ")
    return last.removeprefix("Error: ")
