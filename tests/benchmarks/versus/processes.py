"""Whole processes: wall-clock and processor time from the start of a process to its first result, and to the results of
a file of texts.

A turn in which other machines took the processors is taken again, as in `measure`.
"""

from __future__ import annotations

import functools
import importlib
import json
import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from versus.client import BARE, OURS, Peer, PeerError, environment, loaded, require_installed
from versus.measure import OVER, Bench, Record, least_disturbed, ratios
from versus.shapes import NEW_OF_TEXT, Row, inputs_of, texts_of

ROUNDS = 3  # at most

Seconds = dict[str, float]


def starts(bench: Bench, row: Row, precision: str) -> list[Record]:
    """Measure the seconds from the start of a process to its first result: import, open, one token (or vector)."""
    model, case = bench.model(row.shape, precision), row.first
    inputs = inputs_of(row.shape, case)

    def start(peer: Peer) -> Seconds:
        begun = time.perf_counter()
        with loaded(peer, model, bench.threads, bench.log, bench.timeout) as worker:
            worker.ask("run", case=case.to_dict(), inputs=inputs)
            spent = time.perf_counter() - begun
            return {"start": spent, "processor": worker.ask("processor")["seconds"]}

    return _measure(bench, row, precision, "start", (*_peers(bench, row), BARE), start, warm=True)


def files(bench: Bench, row: Row, precision: str) -> list[Record]:
    """Measure the seconds from the start of a process to the results of all lines of a file, in another file."""
    model = bench.model(row.shape, precision)
    texts, results = Path(model["folder"]) / "texts.txt", Path(model["folder"]) / "results.txt"
    inputs = texts_of(row.shape)
    texts.write_text("".join(" ".join(map(str, ids)) + "\n" for ids in inputs))

    def run(peer: Peer) -> Seconds:
        require_installed(peer)
        results.unlink(missing_ok=True)
        command = file_command(peer, model, bench.threads, texts, results)
        seconds = _run(command, environment(bench.threads), bench.log, bench.timeout)
        check_results(results, len(inputs), NEW_OF_TEXT)
        return seconds

    return _measure(bench, row, precision, "file", _peers(bench, row), run)


def file_command(peer: Peer, model: Mapping[str, Any], threads: int, texts: Path, results: Path) -> list[str]:
    """Return the command of an engine's own program for files, or that of `file_job`."""
    module = importlib.import_module(peer.module)
    if hasattr(module, "file_command"):
        return module.file_command(Path(model["folder"]), model["precision"], threads, texts, results, NEW_OF_TEXT)
    job = {**model, "threads": threads, "texts": str(texts), "results": str(results), "new": NEW_OF_TEXT}
    return [str(peer.python), "-m", "versus.file_job", peer.module, json.dumps(job)]


def check_results(path: Path, count: int, new: int) -> None:
    """Raise PeerError unless the file has a line of `new` ids for each text."""
    lines = path.read_text().splitlines() if path.exists() else []
    if len(lines) != count:
        raise PeerError(f"it wrote {len(lines)} results for {count} texts")
    lengths = {len(line.split()) for line in lines}
    if lengths != {new}:
        raise PeerError(f"it generated {sorted(lengths)} tokens, not {new}")


def _run(command: Sequence[str], variables: Mapping[str, str], log: Path, timeout: float) -> Seconds:
    """Run a program; return its wall-clock and processor seconds."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("ab") as out:
        try:
            status = subprocess.run(command, stdout=out, stderr=out, env=variables, timeout=timeout).returncode
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"no results within {timeout:.0f} s") from error
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if status:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise PeerError(f"its process ended with {status}: {lines[-1][:200] if lines else ''}")
    return {"file": seconds, "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def _peers(bench: Bench, row: Row) -> list[Peer]:
    return [peer for peer in bench.peers if not row.peers or peer.name in row.peers]


def _is_prepared(bench: Bench, peer: Peer, model: Mapping[str, Any]) -> bool:
    """Return whether an engine has files for a model. `Bench.measure` has reported the reason if not."""
    try:
        bench.once(peer, "prepare", **model)
    except PeerError:
        return False
    return True


def _measure(
    bench: Bench, row: Row, precision: str, case: str, peers: Sequence[Peer], run: Callable[[Peer], Seconds],
    warm: bool = False,
) -> list[Record]:  # fmt: skip
    """Run all peers in each round. warm: a first round reads the files and does not count."""
    model, left = bench.model(row.shape, precision), {peer.name: peer for peer in peers}
    key = {"row": row.name, "precision": precision, "case": case}
    seconds: dict[str, list[Seconds]] = {name: [] for name in left}
    stolen: dict[str, list[float]] = {name: [] for name in left}
    failed: list[Record] = []
    for turn in range(min(bench.repeats, ROUNDS) + warm):
        for peer in list(left.values()):
            if bench.is_over():
                break
            try:
                if turn == 0 and not _is_prepared(bench, peer, model):
                    del left[peer.name], seconds[peer.name]
                    continue
                share, taken = least_disturbed(functools.partial(run, peer))
            except PeerError as error:
                del left[peer.name], seconds[peer.name]
                failed.append({**key, "peer": peer.name, "error": str(error)})
                continue
            if turn or not warm:
                seconds[peer.name].append(taken)
                stolen[peer.name].append(share)
    whole = min((len(values) for values in seconds.values() if values), default=0)  # rounds; the last may be cut short
    ours = seconds.get(OURS.name, [])[:whole]
    records = list(failed)
    for name, values in ((name, values[:whole]) for name, values in seconds.items()):
        if not values:
            records.append({**key, "peer": name, "error": OVER})
            continue
        measures = {measure: [value[measure] for value in values] for measure in values[0]}
        records.append(
            {**key, "peer": name, "seconds": measures, "ratio": ratios(values, ours), "stolen": stolen[name][:whole]}
        )
        bench.tell(f"  {precision} {case}: {name} {min(measures[case]):.2f} s")
    return records
