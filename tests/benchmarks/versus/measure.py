"""Rounds of measurements: each round runs every engine once, after a pause in which the threads of the last one stop
spinning.

The result of an engine is the median of its rounds, the distance of its fastest round, and the median ratio to
tformer's time in the same round. All rounds are stored.

On a virtual machine other guests may take the processors for seconds, up to half of the time. Linux reports this share
("steal"). A short run with a share above STOLEN is repeated, at most TRIES times, and the share of the used run is
reported."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from versus.client import OURS, Peer, PeerError, Worker, loaded
from versus.floor import floors, room
from versus.shapes import Case, Row, Shape, inputs_of

QUIET = 0.3  # seconds before each turn
TURN = 0.25  # seconds that a turn takes at least: short requests come several at a time, and the median counts
FEWEST = 3  # rounds at least
STOLEN = 0.02  # of the processors' time
TRIES = 4  # of a turn
SHORT = 5.0  # seconds of a turn that is taken again
OVER = "no time was left"  # the reason for a case that did not begin within `--minutes`

Record = dict[str, Any]
Tell = Callable[[str], None]
Reply = TypeVar("Reply")


class RequestWorker(Protocol):
    """A worker process that answers requests, such as `client.Worker`."""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]: ...


def processor_ticks() -> tuple[int, int]:
    """Return the stolen ticks and all ticks of all processors so far; zeros where the system does not report them."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
        numbers = list(map(int, first.split()[1:9]))  # user, nice, system, idle, iowait, irq, softirq, steal
    except (OSError, IndexError, ValueError):
        return 0, 0
    return numbers[7], sum(numbers)


@dataclass
class Rounds:
    """The rounds of each case: engine → its seconds in each round (`measures`), the stolen share of the processors'
    time, and the reason why it has none."""

    seconds: dict[Case, dict[str, list[dict[str, float]]]]
    stolen: dict[Case, dict[str, list[float]]]
    failed: dict[Case, dict[str, str]]


def rounds(
    workers: Mapping[str, RequestWorker],
    inputs: Mapping[Case, list[list[int]]],
    repeats: int,
    budget: float,
    quiet: float = QUIET,
    ticks: Callable[[], tuple[int, int]] = processor_ticks,
    is_over: Callable[[], bool] = lambda: False,
) -> Rounds:
    """Run all cases in each round, so that a disturbance affects one round of each case and not one case. Every second
    round has the engines in reverse order. The first round warms up and does not count.

    budget: seconds after which a case gets no further round, once it has FEWEST. ticks: a function such as
    `processor_ticks`. is_over: returns whether the time of the whole run is over; then no case begins.
    """
    measured = Rounds(
        {case: {name: [] for name in workers} for case in inputs},
        {case: {name: [] for name in workers} for case in inputs},
        {case: {} for case in inputs},
    )
    spent = dict.fromkeys(inputs, 0.0)
    for turn in range(repeats + 1):
        for case, given in inputs.items():
            if is_over() or (turn > FEWEST and spent[case] > budget):
                continue
            begun = time.monotonic()
            for name in list(measured.seconds[case])[:: 1 if turn % 2 else -1]:
                arguments = {"case": case.to_dict(), "inputs": given, "min_seconds": TURN if turn else 0.0}
                try:
                    share, reply = least_disturbed(
                        functools.partial(workers[name].ask, "run", **arguments), quiet, ticks, TRIES if turn else 1
                    )
                except PeerError as error:
                    measured.failed[case][name] = str(error)
                    del measured.seconds[case][name]
                    continue
                if turn:
                    measured.seconds[case][name].append(measures(reply, case))
                    measured.stolen[case][name].append(share)
            spent[case] += time.monotonic() - begun if turn else 0.0
    for case, by_name in measured.seconds.items():
        for name in [name for name, values in by_name.items() if not values]:
            measured.failed[case][name] = OVER
            del by_name[name]
    return measured


def least_disturbed(
    run: Callable[[], Reply],
    quiet: float = QUIET,
    ticks: Callable[[], tuple[int, int]] = processor_ticks,
    tries: int = TRIES,
) -> tuple[float, Reply]:
    """Return the stolen share of the processors' time in the least disturbed try, and what it returned."""
    attempts: list[tuple[float, Reply]] = []
    for _ in range(tries):
        time.sleep(quiet)
        before, begun = ticks(), time.monotonic()
        reply = run()
        (stolen, every), seconds = (b - a for a, b in zip(before, ticks(), strict=True)), time.monotonic() - begun
        attempts.append((stolen / max(every, 1), reply))
        if attempts[-1][0] <= STOLEN or seconds > SHORT:
            break
    return min(attempts, key=lambda one: one[0])


def measures(reply: Mapping[str, Any], case: Case) -> dict[str, float]:
    """Return the seconds of the whole "request", its "processor" time, and, if known, the seconds to the "first" token
    and of each further "step"."""
    seconds, first = reply["seconds"], reply["first"]
    taken = {"request": seconds, "processor": reply["processor"]}
    if first is None:
        return taken
    steps = {"step": (seconds - first) / (case.new - 1)} if case.new > 1 else {}
    return {**taken, "first": first, **steps}


def ratios(theirs: Sequence[Mapping[str, float]], ours: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return measure → the median ratio of the peer's time to tformer's in the same round."""
    names = set(theirs[0] if theirs else ()) & set(ours[0] if ours else ())
    pairs = list(zip(theirs, ours, strict=True)) if names else []
    return {name: statistics.median(a[name] / b[name] for a, b in pairs) for name in sorted(names)}


def agreement(results: Sequence[Sequence[int]], source: Sequence[Sequence[int]]) -> float:
    """Return the share of steps after the source's own tokens that chose the source's next token."""
    equal = changed = 0
    for mine, right in zip(results, source, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), len(right))
        equal += same
        changed += same < len(right)
    return equal / (equal + changed)


def cosine(results: Sequence[Sequence[float]], source: Sequence[Sequence[float]]) -> float:
    """Return the mean cosine between each vector and the source's."""
    return sum(
        sum(a * b for a, b in zip(mine, right, strict=True)) / (math.hypot(*mine) * math.hypot(*right))
        for mine, right in zip(results, source, strict=True)
    ) / len(source)


def quality(worker: RequestWorker, row: Row, reference: Mapping[str, Any]) -> dict[str, float]:
    """Return the agreement of an engine's results with the source's."""
    case, inputs, right = row.quality, reference["inputs"], reference["result"]
    result = worker.ask("run", case=case.to_dict(), inputs=inputs, keep=True)["result"]
    if row.shape.kind == "embed":
        return {"cosine": cosine(result, right)}
    figures = {"agreement": agreement(result, right)}
    if row.shape.kind == "continue":
        try:
            whole = [[*prompt, *tokens] for prompt, tokens in zip(inputs, right, strict=True)]
            scores = worker.ask("score", inputs=whole, last=case.new)["result"]
        except PeerError:
            return figures
        figures["perplexity"] = math.exp(sum(reference["scores"]) / len(scores) - sum(scores) / len(scores))
    return figures


def groups(sizes: Mapping[str, float], first: str, room: float) -> list[list[str]]:
    """Return groups of engines that fit in memory together, each with `first`, the reference of the ratios."""
    base = sizes.get(first, 0.0)
    others = [name for name in sizes if name != first]
    result: list[list[str]] = []
    left = 0.0
    for name in others:
        if not result or sizes[name] > left:
            result.append([first] if first in sizes else [])
            left = room - base
        result[-1].append(name)
        left -= sizes[name]
    return result or ([[first]] if first in sizes else [])


class Bench:
    """The engines on this machine. seconds: of the whole run; after them nothing begins."""

    def __init__(
        self, peers: Sequence[Peer], folder: Path, threads: int, repeats: int, budget: float, timeout: float,
        tell: Tell, seconds: float = math.inf,
    ) -> None:  # fmt: skip
        self.peers, self.folder, self.threads = peers, folder, threads
        self.repeats, self.budget, self.timeout, self.tell = repeats, budget, timeout, tell
        self._end = time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "workers.log"

    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def model(self, shape: Shape, precision: str) -> dict[str, Any]:
        folder = self.folder / shape.name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        return {"shape": shape.__dict__, "folder": str(folder.resolve()), "precision": precision}

    def once(self, peer: Peer, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one request to a process of its own, and end it."""
        with Worker(peer, self.threads, self.log, self.timeout) as worker:
            return worker.ask(do, **arguments)

    def measure(self, row: Row, cases: Sequence[Case], precision: str, reference: Any, rates: Any) -> list[Record]:
        """Measure all engines on all cases in one precision."""
        model, records = self.model(row.shape, precision), []
        sizes, models = {}, {}
        largest = max(room(row.shape, case) for case in cases)
        for peer in self.peers:
            key = {"row": row.name, "precision": precision, "peer": peer.name}
            if row.peers and peer.name not in row.peers:
                continue
            try:
                if self.is_over():
                    raise PeerError(OVER)
                models[peer.name] = {**key, "bytes": self.once(peer, "prepare", **model)["bytes"]}
                sizes[peer.name] = 2.0 * models[peer.name]["bytes"] + 0.6e9 + largest
            except PeerError as error:
                records.append({**key, "error": str(error)})
                self.tell(f"  {peer.name}: {error}")
        for group in groups(sizes, OURS.name, 0.8 * available()):
            self._group(row, cases, group, model, reference, models, records, rates)
        return [*records, *models.values()]

    def _group(
        self, row: Row, cases: Sequence[Case], group: Sequence[str], model: Any, reference: Any,
        models: dict[str, Record], records: list[Record], rates: Any,
    ) -> None:  # fmt: skip
        workers: dict[str, Worker] = {}
        precision = model["precision"]
        try:
            for peer in (peer for peer in self.peers if peer.name in group):
                try:
                    workers[peer.name] = loaded(peer, model, self.threads, self.log, self.timeout)
                except PeerError as error:
                    models[peer.name]["error"] = str(error)
                    self.tell(f"  {peer.name}: {error}")
            inputs = {case: inputs_of(row.shape, case) for case in cases}
            measured = rounds(workers, inputs, self.repeats, self.budget, is_over=self.is_over)
            for case in cases:
                turns, failed = measured.seconds[case], measured.failed[case]
                ours = turns.get(OURS.name, [])
                floor = floors(row.shape, case, precision, rates)
                key = {"row": row.name, "precision": precision, "case": case.to_dict()}
                for name, values in turns.items():
                    record = {**key, "peer": name, "ratio": ratios(values, ours)}
                    taken = {measure: [value[measure] for value in values] for measure in values[0]}
                    record |= {"seconds": taken, "stolen": measured.stolen[case][name]}
                    add(records, record)
                    self.tell(f"  {precision} {case.name}: {name} {describe(record, floor)}")
                for name, reason in failed.items():
                    add(records, {**key, "peer": name, "error": reason})
                    self.tell(f"  {precision} {case.name}: {name}: {reason}")
            for name, worker in workers.items():
                try:
                    if "agreement" not in models[name] and "cosine" not in models[name]:
                        models[name] |= quality(worker, row, reference)
                    models[name]["peak"] = worker.ask("memory")["peak"]
                except PeerError as error:
                    self.tell(f"  {name}: {error}")
        finally:
            for worker in workers.values():
                worker.close()


def add(records: list[Record], record: Record) -> None:
    """Add a record to others. An engine that was measured in two groups has one record; one that failed in one group
    has
    the reason alone."""
    before = next((other for other in records if same(other, record)), None)
    if before is not None:
        records.remove(before)
        if "error" in before:
            record = before
        elif "error" not in record:
            taken = {measure: before["seconds"][measure] + own for measure, own in record["seconds"].items()}
            record = {**record, "seconds": taken, "stolen": before["stolen"] + record["stolen"]}
    records.append(record)


def same(one: Record, other: Record) -> bool:
    """Return whether a record replaces another."""
    return all(one.get(name) == other.get(name) for name in ("row", "precision", "peer", "case"))


def describe(record: Record, floor: Mapping[str, float]) -> str:
    parts = []
    for measure, floor_seconds in floor.items():
        values = record["seconds"].get(measure)
        if values:
            middle = statistics.median(values)
            parts.append(f"{measure} {middle * 1e3:.2f} ms ({floor_seconds / middle:.0%} of the floor's speed)")
    return ", ".join(parts)


def available() -> float:
    """Return the available bytes of memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
