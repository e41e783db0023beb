"""The process in which cases run: `python -m fuzz.child STATE TARGET SEED FIRST CASES SECONDS POOL`.

Before each case it writes the case into STATE, a file in shared memory, so that the supervisor knows the case that
crashed or hangs. Each line on standard output is a JSON object: a finding, or the counts at the end.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fuzz.target import FINDING, Outcome, Target, outcome_of

Write = Callable[[dict[str, object]], None]
STATE_BYTES = 32 << 20
HEADER = struct.Struct(
    "<qqq"
)  # number of the case (−1: none runs), bytes of resident memory before it, bytes of the case
MAX_GROWTH = 512 << 20  # bytes of resident memory in a case
ADDRESS_SPACE = 6 << 30  # more than the process has at first: a single allocation cannot take the machine's memory
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def peak() -> int:
    """Return the most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class State:
    """What the supervisor knows of the child."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), STATE_BYTES)

    def write(self, number: int, case: bytes, memory: int) -> None:
        size = min(len(case), STATE_BYTES - HEADER.size)
        self._map[: HEADER.size] = HEADER.pack(-1, memory, size)
        self._map[HEADER.size : HEADER.size + size] = case[:size]
        self._map[: HEADER.size] = HEADER.pack(number, memory, size)

    def read(self) -> tuple[int, int, bytes]:
        """Return the number of the case, the memory before it, and its bytes."""
        number, memory, size = HEADER.unpack(self._map[: HEADER.size])
        return number, memory, self._map[HEADER.size : HEADER.size + size]

    def number(self) -> int:
        return int(HEADER.unpack(self._map[: HEADER.size])[0])

    def memory(self) -> int:
        return int(HEADER.unpack(self._map[: HEADER.size])[1])


class Recorder:
    """Runs cases, counts their outcomes and writes findings."""

    def __init__(self, target: Target, state_path: Path, write: Write) -> None:
        self.target, self.state, self.write = target, State(state_path), write
        self.counts: Counter[str] = Counter()

    def warm_up(self, number: int, case: bytes) -> None:
        """Run a seed, because the memory of what it imports is not a growth. number, case: of the first case."""
        self.state.write(number, case, resident())
        outcome_of(self.target, self.target.seeds()[0])
        self.write({"ready": resident()})

    def run(self, number: int, case: bytes) -> None:
        before, peak_before = resident(), peak()
        self.state.write(number, case, before)
        outcome = outcome_of(self.target, case)
        if outcome.kind != FINDING and peak() > peak_before and peak() - before > MAX_GROWTH:
            outcome = Outcome(FINDING, f"memory grew by {peak() - before >> 20} MiB", "memory")
        self.counts[outcome.kind] += 1
        if outcome.kind == FINDING:
            data = base64.b64encode(case).decode()
            self.write({"number": number, "place": outcome.place, "text": outcome.text, "case": data})

    def end(self) -> None:
        self.state.write(-1, b"", resident())
        self.write({"counts": dict(self.counts)})


def take_output() -> Write:
    """Return a function that writes an entry to standard output. What libraries print goes to the log instead."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(entry: dict[str, object]) -> None:
        out.write(json.dumps(entry) + "\n")
        out.flush()

    return write


def read_pool(target: Target, path: Path) -> list[bytes]:
    """Return the cases of a file, or else the seeds and the corpus of the target."""
    return [base64.b64decode(line) for line in path.read_bytes().splitlines()] or target.pool()


def limit_memory() -> None:
    """Let a single allocation not take the memory of the machine."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    name, seed, first, cases, seconds, pool_path = sys.argv[2:]
    write = take_output()
    from fuzz.targets import ALL_TARGETS  # imports the product, which may print

    target = ALL_TARGETS[name]
    recorder = Recorder(target, Path(sys.argv[1]), write)
    pool = read_pool(target, Path(pool_path))
    recorder.warm_up(int(first), pool[0])
    limit_memory()
    end, number, last = time.monotonic() + float(seconds), int(first), int(first) + int(cases)
    while number < last and time.monotonic() < end:
        recorder.run(number, target.case(pool, int(seed), number))
        number += 1
    recorder.end()


if __name__ == "__main__":
    main()
