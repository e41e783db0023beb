"""Runs the cases of a target in a child process, which is started again after it died or was stopped.

A case is a finding if the child dies in it, computes for longer than MAX_CPU_SECONDS, waits for longer than
MAX_WAIT_SECONDS, or grows by more than MAX_GROWTH. Times of the processor do not depend on what else the machine does.
Needs /proc of Linux.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.child import HEADER, MAX_GROWTH, PAGE, STATE_BYTES, State

MAX_CPU_SECONDS = 5.0
MAX_WAIT_SECONDS = 120.0
POLL_SECONDS = 0.05
ROOT = Path(__file__).parents[2]
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Finding:
    """A case with a wrong outcome. place: equal for findings of one cause."""

    target: str
    number: int
    place: str
    text: str
    case: bytes

    def save(self, folder: Path) -> Path:
        """Write the case below folder/target, and what happened next to it. Return the path of the case."""
        path = folder / self.target / hashlib.sha256(self.case).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.case)
        path.with_suffix(".txt").write_text(f"{self.place}\n\n{self.text}\n", errors="backslashreplace")
        return path


@dataclass
class Report:
    """counts: cases by their outcome. findings: the smallest case of each place. seen: findings by place."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return sum(self.counts.values())

    def add(self, finding: Finding) -> None:
        self.seen[finding.place] += 1
        known = self.findings.get(finding.place)
        if known is None or len(finding.case) < len(known.case):
            self.findings[finding.place] = finding


def run_target(
    name: str,
    seed: int,
    cases: int,
    seconds: float,
    pool: Sequence[bytes] = (),
    module: str = "fuzz.child",
    max_cpu_seconds: float = MAX_CPU_SECONDS,
) -> Report:
    """Run the cases of a target until their number or the time is over.

    pool: the cases to change; without one, the seeds and the corpus of the target.
    module: the child's.
    max_cpu_seconds: of a case.
    """
    report = Report()
    end, first = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory(prefix="tformer-fuzz-") as folder:
        pool_path = Path(folder, "pool")
        pool_path.write_bytes(b"\n".join(map(base64.b64encode, pool)))
        while first < cases and time.monotonic() < end:
            left = end - time.monotonic()
            first = _run_child(report, Path(folder), module, name, seed, first, cases, left, max_cpu_seconds)
    return report


def _run_child(
    report: Report,
    folder: Path,
    module: str,
    name: str,
    seed: int,
    first: int,
    cases: int,
    seconds: float,
    max_cpu_seconds: float,
) -> int:
    """Run cases until the end, or until a case ends the child. Return the number of the next case."""
    state_path, log = folder / "state", folder / "log"
    with state_path.open("wb") as file:
        file.write(HEADER.pack(-1, 0, 0))
        file.truncate(STATE_BYTES)
    state = State(state_path)
    arguments = [str(state_path), name, str(seed), str(first), str(cases - first), str(seconds), str(folder / "pool")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "PYTHONHASHSEED": "0",
    }
    environment |= {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("tests", ".", "runtime", "models"))
                    + os.pathsep + os.environ.get("PYTHONPATH", "")}  # fmt: skip
    lines_path = folder / "lines"
    with log.open("wb") as errors, lines_path.open("wb") as lines:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=lines, stderr=errors,
            env=environment, cwd=folder,
        )  # fmt: skip
        try:
            stopped = _watch(child, state, max_cpu_seconds)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
    counted = recorded = 0
    for line in lines_path.read_bytes().splitlines():
        entry = json.loads(line)
        if "place" in entry:
            recorded += 1
            case = base64.b64decode(entry["case"])
            report.add(Finding(name, entry["number"], entry["place"], entry["text"], case))
        elif "counts" in entry:
            report.counts.update(entry["counts"])
            counted = sum(entry["counts"].values())
    if stopped is None and child.returncode == 0:
        return first + counted if counted and seconds > 0 else cases
    number, _, case = state.read()
    if number < 0:
        tail = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the child of {name} ended between cases, with status {child.returncode}:\n{tail}")
    report.counts["finding"] += 1 + recorded
    report.counts["before an end"] += number - first - recorded  # results and sentences that were not told
    kind = stopped or f"ended by {_signal_name(child.returncode)}"
    report.add(Finding(name, number, kind, log.read_text(errors="replace")[-3000:], case))
    return number + 1


def _watch(child: subprocess.Popen[bytes], state: State, max_cpu_seconds: float) -> str | None:
    """Wait for the end of a child. Return why a case must be stopped; None if the child ended by itself."""
    number, began, cpu_before = -1, time.monotonic(), 0.0
    while child.poll() is None:
        time.sleep(POLL_SECONDS)
        try:
            cpu, memory = _usage(child.pid)
        except (OSError, IndexError):
            continue
        if state.number() != number:
            number, began, cpu_before = state.number(), time.monotonic(), cpu
        if number < 0:
            continue
        if cpu - cpu_before > max_cpu_seconds:
            return f"computes for more than {max_cpu_seconds:g} s"
        if time.monotonic() - began > MAX_WAIT_SECONDS:
            return f"waits for more than {MAX_WAIT_SECONDS:g} s"
        if memory - state.memory() > MAX_GROWTH:
            return "memory"
    return None


def _usage(process: int) -> tuple[float, int]:
    """Return the seconds of the processor that a process took, and its bytes in memory."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    memory = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    return (int(fields[11]) + int(fields[12])) / TICKS, memory


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"
