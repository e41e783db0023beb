"""Forks of a process with open sessions.

The threads of onnxruntime's pool take locks when they go to sleep after a run. A lock that a thread holds while the
process forks is never free in the child, whose next run would wait for ever. So a fork waits until no thread computes.
"""

from __future__ import annotations

import os
import threading
import time
from functools import cache
from pathlib import Path

MAX_WAIT_SECONDS = 0.5  # if the caller's own threads compute for longer; those of a pool sleep after milliseconds
CHECK_SECONDS = 0.001
_TASKS = Path("/proc/self/task")  # Linux


@cache
def wait_before_forks() -> None:
    """Let the forks of this process wait for the threads of its sessions, from the first call on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=wait_for_threads)


def wait_for_threads() -> None:
    """Wait until all other threads of the process sleep, for `MAX_WAIT_SECONDS` at most.

    Cost: that of reading a file for each thread, 20 µs.
    """
    end = time.monotonic() + MAX_WAIT_SECONDS
    if not _TASKS.exists():
        time.sleep(20 * CHECK_SECONDS)
        return
    while _computes() and time.monotonic() < end:
        time.sleep(CHECK_SECONDS)


def _computes() -> bool:
    """Return whether another thread computes, or would if it had a core."""
    own = str(threading.get_native_id())
    for task in _TASKS.iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # the thread has ended
            continue
        if state == "R" and task.name != own:
            return True
    return False
