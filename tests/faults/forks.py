"""A program that runs commands in forks of itself, each with a fault. A fork does not import the packages again.

Standard input has a job a line, in JSON; standard output answers each with a line, in JSON. `processes.Forks` writes
and reads them. The arguments are the modules to import first.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
from typing import Any

from tformer_runtime.cli import result_file

SHIM = ctypes.CDLL(None)  # with the functions of the preloaded library
SHIM.fault_refuse_memory.argtypes = [ctypes.c_size_t, ctypes.c_long]


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    result_file.JOURNAL_INTERVAL_RESULTS, result_file.JOURNAL_INTERVAL_SECONDS = 8, 1e9
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def run(job: dict[str, Any]) -> dict[str, int]:
    """Run a job in a fork. Return its status, negative for a signal, and the number of calls that change files."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        status = 70
        try:
            os.close(reading)
            status = run_here(job)
        finally:
            os.write(writing, str(SHIM.fault_count()).encode())
            os._exit(status)
    os.close(writing)
    if job["seconds"] is not None and not select.select([reading], [], [], job["seconds"])[0]:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    count = os.read(reading, 100)
    os.close(reading)
    return {"status": os.waitstatus_to_exitcode(status), "calls": int(count or 0)}


def run_here(job: dict[str, Any]) -> int:
    """Run the function of a job with its arguments as those of a command. Return the exit status."""
    for number, (name, flags) in enumerate(zip(job["streams"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(name, flags | os.O_CREAT | os.O_TRUNC if number else flags, 0o666), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    os.chdir(job["cwd"])
    sys.path.insert(0, job["cwd"])
    sys.argv = job["arguments"]
    module, function = job["function"].split(":")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    SHIM.fault_arm(os.fsencode(job["folder"]), job["nth"], job["action"], job["error"])
    try:
        getattr(importlib.import_module(module), function)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else bool(end.code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0


if __name__ == "__main__":
    main()
