"""A child process that answers requests in JSON, and that is ended if one takes too long.

It is for programs of strangers, such as templates: a thread cannot be ended, a process can.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer_runtime.base.errors import MissingExtraError

if TYPE_CHECKING:
    import subprocess

PYTHON_VARIABLE = "TFORMER_PYTHON"  # names the interpreter, for a program that is not one
START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)


class ChildEndedError(Exception):
    """The child ended before it replied: it exceeded a limit, or crashed."""


class ChildProcess:
    """A program that is started with the first request. Threads may share it: it answers one request after the other.

    The child runs until this process ends.

    program: the file of the program, which reads a line of JSON and writes one for each request.
    seconds: the time after which a request without a reply is given up.
    """

    def __init__(self, program: Path, seconds: float) -> None:
        self._program, self._seconds, self._lock = program, seconds, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._asked_at: float | None = None  # the time of the request that has no reply yet
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin anew in a forked process: the child belongs to the parent, and another thread may hold the lock."""
        self._lock, self._process = threading.Lock(), None

    def ask(self, request: Any) -> Any:
        """Return the reply to a request. Raise ChildEndedError if there is none: the next request starts a new child.

        Raise TypeError or ValueError for a request that is no JSON. Cost: 0.1 ms, and 0.1 s for the first.
        """
        line = json.dumps(request) + "\n"
        with self._lock:
            process = self._running()
            try:
                self._asked_at = time.monotonic()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(line)
                process.stdin.flush()
                return json.loads(process.stdout.readline())
            except (OSError, ValueError) as error:
                self._end(process)
                raise ChildEndedError from error
            except BaseException:  # Ctrl-C: the next request must not read this one's reply
                self._end(process)
                raise
            finally:
                self._asked_at = None

    def _running(self) -> subprocess.Popen[str]:
        """Return the process, and start it if need be."""
        import subprocess  # takes 3 ms to import

        if self._process is None or self._process.poll() is not None:
            command = [_interpreter(), "-I", "-S", "-c", START, json.dumps(sys.path), os.fspath(self._program)]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            self._process = process
            try:
                threading.Thread(target=self._watch, args=(process,), name="child watch", daemon=True).start()
            except RuntimeError as error:  # there is no memory for a thread
                self._end(process)
                raise ChildEndedError from error
        return self._process

    def _watch(self, process: subprocess.Popen[str]) -> None:
        """Kill a process that takes too long for a request. A thread for each request would cost more."""
        waited = 0.0
        while waited < self._seconds:
            time.sleep(self._seconds - waited)
            if process is not self._process:
                return
            asked_at = self._asked_at
            waited = 0.0 if asked_at is None else time.monotonic() - asked_at
            if waited >= self._seconds and self._asked_at != asked_at:  # the reply has just come
                waited = 0.0
        process.kill()

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _interpreter() -> str:
    """Return the file of a Python interpreter. Raise MissingExtraError if this program is none and names none."""
    named = os.environ.get(PYTHON_VARIABLE)
    folder = Path(sys.prefix) / ("." if os.name == "nt" else "bin")
    for candidate in (named, sys.executable, folder / "python3", folder / "python.exe"):
        if candidate and Path(candidate).is_file() and (candidate == named or "python" in Path(candidate).name.lower()):
            return os.fspath(candidate)
    raise MissingExtraError(
        f"there is no Python interpreter to run a chat template in: name one in the variable {PYTHON_VARIABLE}"
    )
