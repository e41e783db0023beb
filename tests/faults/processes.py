"""Commands in processes that a fault strikes: `Forks` runs them, `Outcome` is what became of one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUN, EXPORT, TRAIN = "tformer_runtime.cli.main:main", "tformer_export.cli:main", "tformer_models.cli:main"
NAMES = {RUN: "tformer-run", EXPORT: "tformer-export", TRAIN: "tformer-train"}


class Action(IntEnum):
    """What a call does; shim.c describes it."""

    FAIL = 0
    ONCE = 1
    SHORT = 2
    KILL = 3


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th call that changes a file. n = 0 is no fault."""

    nth: int = 0
    action: Action = Action.FAIL
    error: int = errno.ENOSPC

    def __str__(self) -> str:
        return f"{self.action.name.lower()} {errno.errorcode.get(self.error, '')} {self.nth}"


@dataclass(frozen=True)
class Outcome:
    """status: of the exit, negative for a signal. calls: those that changed files of the folder."""

    status: int
    calls: int
    stdout: str
    stderr: str


def compiled_shim(folder: Path) -> Path | None:
    """Compile shim.c in a folder. Return None where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "shim.so"
    command = [
        compiler,
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        library,
        HERE / "shim.c",
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return library


class Forks:
    """A process that has imported a command, and forks for each run of it. A context manager."""

    def __init__(self, shim: Path, function: str, scratch: Path, *modules: str) -> None:
        """function: one of RUN, EXPORT, TRAIN. scratch: a folder for standard streams. modules: to import first."""
        self._function, self._scratch = function, scratch
        environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "forks.py", function.partition(":")[0], *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(
        self,
        folder: Path,
        *arguments: Any,
        fault: Fault | None = None,
        stdin: Path | str = os.devnull,
        cwd: Path | None = None,
        seconds: float | None = None,
    ) -> Outcome:
        """Run the command. folder: whose files the fault strikes. seconds: after which the process is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        fault = fault or Fault()
        streams = [str(stdin), str(self._scratch / "stdout"), str(self._scratch / "stderr")]
        job = {
            "function": self._function,
            "arguments": [NAMES[self._function], *map(str, arguments)],
            "streams": streams,
            "cwd": str(cwd or folder),
            "folder": str(folder),
            "nth": fault.nth,
            "action": fault.action,
            "error": fault.error,
            "seconds": seconds,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        stdout, stderr = (Path(name).read_text() for name in streams[1:])
        return Outcome(answer["status"], answer["calls"], stdout, stderr)


def check_sentence(outcome: Outcome, command: str, fault: Fault, place: Path) -> None:
    """Check that a command ended with one sentence, which names the place and the reason."""
    assert outcome.status == 1, (str(fault), outcome)
    (line,) = [line for line in outcome.stderr.splitlines() if not line.startswith(("device: ", "resume: "))]
    assert line.startswith(f"{NAMES[command]}: "), (str(fault), line)
    assert "not foreseen" not in line, (str(fault), line)
    assert str(place) in line, (str(fault), line)
    assert os.strerror(fault.error) in line, (str(fault), line)
