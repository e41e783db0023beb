"""A child process that replies to requests in JSON, and that is ended if it takes too long for one.

It is for programs of strangers, such as templates: a thread cannot be ended, a process can.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer_runtime.base.errors import MissingExtraError, typed_memory_error

if TYPE_CHECKING:
    import subprocess

PYTHON_VARIABLE = "TFORMER_PYTHON"  # names the interpreter, for a program that is not one
_OWN_LIMIT = -signal.SIGPROF if hasattr(signal, "SIGPROF") else None  # the status of a child that took too much time
START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)


class ChildEndedError(Exception):
    """The child ended before it replied. Its text says how, as the end of a sentence about it."""


class ChildProcess:
    """A program that is started with the first request. Threads may share it: it answers one request after the other.

    The child runs until this process ends.

    program: the file of the program, which reads a line of JSON and writes one for each request. It may limit its
        own processor time with SIGPROF. A request may be sent to it twice.
    seconds: the time after which a child without a reply is ended, whatever it does: it may also stand still.
    """

    def __init__(self, program: Path, seconds: float) -> None:
        self._program, self._seconds, self._lock = program, seconds, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._silent: subprocess.Popen[str] | None = None  # the process that `_watch` has ended
        self._asked_at: float | None = None  # the time of the request that has no reply yet
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin again in a forked process: the child belongs to the parent, and another thread may hold the lock."""
        self._lock, self._process = threading.Lock(), None

    def ask(self, request: Any) -> Any:
        """Return the reply to a request.

        A child that ends for another reason than its own limit is replaced, and asked once more: the system or a user
        may have ended it, and the request is not to blame.
        Raise ChildEndedError if there is no reply then, TypeError or ValueError for a request that is not JSON, and
        OutOfMemoryError if no child can be started. Cost: 0.1 ms, and 0.1 s for the first.
        """
        line = json.dumps(request) + "\n"
        with self._lock:
            reply = self._reply(line) or self._reply(line, is_last=True)
        return json.loads(reply)

    def _reply(self, line: str, is_last: bool = False) -> str:
        """Return the line of a reply; an empty one if the child has ended and the request is worth another."""
        process = self._running()
        try:
            self._asked_at = time.monotonic()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(line)
                process.stdin.flush()
                if (reply := process.stdout.readline()).endswith("\n"):
                    return reply
        except BaseException:  # Ctrl-C: the next request must not read this one's reply
            self._end(process)
            raise
        finally:
            self._asked_at = None
        self._end(process)
        if is_last or process.returncode == _OWN_LIMIT:
            raise ChildEndedError(self._reason(process))
        return ""

    def _reason(self, process: subprocess.Popen[str]) -> str:
        if process.returncode == _OWN_LIMIT:
            return "took too much processor time"
        if process is self._silent:
            return f"did not reply within {self._seconds:g} s, and was replaced in vain"
        status = process.returncode
        how = f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"status {status}"
        return f"ended with {how}, and was replaced in vain"

    def _running(self) -> subprocess.Popen[str]:
        """Return the process, and start it if need be."""
        import subprocess  # takes 3 ms to import

        if self._process is None or self._process.poll() is not None:
            command = [_interpreter(), "-I", "-S", "-c", START, json.dumps(sys.path), os.fspath(self._program)]
            pipe = subprocess.PIPE
            try:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
                self._process = process
                threading.Thread(target=self._watch, args=(process,), name="child watch", daemon=True).start()
            except (OSError, RuntimeError, MemoryError) as error:
                if self._process is not None:
                    self._end(self._process)
                raise typed_memory_error(error) from None
        return self._process

    def _watch(self, process: subprocess.Popen[str]) -> None:
        """End a process that takes too long for a request. A thread for each request would cost more."""
        waited = 0.0
        while waited < self._seconds:
            time.sleep(self._seconds - waited)
            if process is not self._process:
                return
            asked_at = self._asked_at
            waited = 0.0 if asked_at is None else time.monotonic() - asked_at
            if waited >= self._seconds and self._asked_at != asked_at:  # the reply has just come
                waited = 0.0
        self._silent = process
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
