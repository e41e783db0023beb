"""A child process is ended if it takes too long for a request, and only then. One that others end is replaced."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tformer_runtime.base import child_process
from tformer_runtime.base.child_process import ChildEndedError, ChildProcess
from tformer_runtime.base.errors import OutOfMemoryError

SECONDS = 15.0  # of the clock of the tests
HANG_SECONDS = 120  # after which a test fails
PROGRAM = """
    import json, os, signal, sys, time
    for line in sys.stdin:
        action, value = json.loads(line)
        if action == "sleep":
            time.sleep(value)
        elif action == "kill":  # ends or stops itself, the first times
            with open("times", "a") as times:
                times.write(".")
            if os.path.getsize("times") <= value[1]:
                os.kill(os.getpid(), value[0])
        elif action == "exit":
            sys.exit(value)
        elif action == "half":
            os.write(1, b'"half of a reply')
            sys.exit()
        print(os.getpid(), flush=True)
"""
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")


class Clock:
    """A clock that stands still until a test moves it, in the place of the module `time`."""

    def __init__(self):
        self._now, self._moved = 0.0, threading.Condition()

    def monotonic(self):
        return self._now

    def sleep(self, seconds):
        with self._moved:
            end = self._now + seconds
            self._moved.wait_for(lambda: self._now >= end)

    def move(self, seconds):
        with self._moved:
            self._now += seconds
            self._moved.notify_all()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(child_process, "time", clock)
    return clock


@pytest.fixture
def child(tmp_path, monkeypatch, clock):
    monkeypatch.chdir(tmp_path)  # children count their requests there
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    return ChildProcess(program, SECONDS)


def ask_while_time_passes(child, clock, request, ends):
    """Return the reply to a request during which time passes until so many children have ended."""
    with ThreadPoolExecutor(1) as pool:
        asked, pause = pool.submit(child.ask, request), threading.Event()
        for _ in range(ends):
            while child._asked_at is None:
                pause.wait(0.01)
            process = child._process
            while child._process is process and not asked.done():
                clock.move(SECONDS / 8)
                pause.wait(0.01)
        return asked.result(HANG_SECONDS)


def test_slow_child_is_ended_and_the_next_request_starts_another(child, clock):
    with pytest.raises(ChildEndedError, match=r"did not reply within 15 s, and was replaced in vain"):
        ask_while_time_passes(child, clock, ["sleep", 1000], ends=2)
    assert isinstance(child.ask(["sleep", 0]), int)
    with pytest.raises(ChildEndedError):  # the other is watched, too
        ask_while_time_passes(child, clock, ["sleep", 1000], ends=2)


def test_child_that_waits_for_requests_lives(child, clock):
    first = child.ask(["sleep", 0])
    for _ in range(4):
        clock.move(0.7 * SECONDS)
        assert child.ask(["sleep", 0.01]) == first


@posix
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGSEGV"])
def test_child_that_ends_or_stands_still_at_a_request_is_replaced(child, clock, name):
    first = child.ask(["sleep", 0])
    request = ["kill", [getattr(signal, name), 1]]
    assert ask_while_time_passes(child, clock, request, ends=name == "SIGSTOP") != first


@posix
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_child_that_ends_or_stands_still_between_requests_is_replaced(child, clock, name, size):
    """A large request does not fit into the pipe to a child that reads nothing."""
    for _ in range(3):
        first = child.ask(["sleep", 0])
        os.kill(first, getattr(signal, name))
        assert ask_while_time_passes(child, clock, ["nothing", "a" * size], ends=name == "SIGSTOP") != first


@posix
def test_child_that_ends_twice_is_told_with_the_reason(child):
    with pytest.raises(ChildEndedError, match=r"ended with signal 9 \(Killed.*\), and was replaced in vain"):
        child.ask(["kill", [signal.SIGKILL, 2]])
    assert os.path.getsize("times") == 2
    with pytest.raises(ChildEndedError, match="ended with status 3, and was replaced in vain"):
        child.ask(["exit", 3])
    with pytest.raises(ChildEndedError, match="ended with status 0, and was replaced in vain"):
        child.ask(["half", 0])
    assert isinstance(child.ask(["sleep", 0]), int)


@posix
def test_request_that_takes_too_much_processor_time_is_not_repeated(child):
    with pytest.raises(ChildEndedError, match=r"^took too much processor time$"):
        child.ask(["kill", [signal.SIGPROF, 9]])
    assert os.path.getsize("times") == 1


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ((subprocess, "Popen"), MemoryError()),
        ((subprocess, "Popen"), OSError(errno.ENOMEM, "Cannot allocate memory")),
        ((threading.Thread, "start"), RuntimeError("can't start new thread")),
    ],
)
def test_child_without_memory_is_told_so(child, monkeypatch, place, error):
    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(OutOfMemoryError, match="there is not enough memory"):
            child.ask(["sleep", 0])
    assert isinstance(child.ask(["sleep", 0]), int)
