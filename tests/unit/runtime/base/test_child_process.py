"""A child process is ended if it takes too long for a request, and only then."""

from __future__ import annotations

import textwrap
import time

import pytest

from tformer_runtime.base.child_process import ChildEndedError, ChildProcess

SECONDS = 0.5
PROGRAM = """
    import json, os, sys, time
    for line in sys.stdin:
        time.sleep(json.loads(line))
        print(os.getpid(), flush=True)
"""


@pytest.fixture
def child(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    return ChildProcess(program, SECONDS)


def test_slow_child_is_ended_and_the_next_request_starts_another(child):
    begun = time.monotonic()
    with pytest.raises(ChildEndedError):
        child.ask(1000)
    assert SECONDS <= time.monotonic() - begun < 100 * SECONDS
    assert isinstance(child.ask(0), int)
    with pytest.raises(ChildEndedError):  # the other is watched, too
        child.ask(1000)


def test_child_that_waits_for_requests_lives(child):
    first = child.ask(0)
    for _ in range(4):
        time.sleep(0.7 * SECONDS)
        assert child.ask(0.1 * SECONDS) == first
