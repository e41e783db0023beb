"""tformer compared with other engines: the same weights, inputs, precision and threads, interleaved in one run.

    make bench                                  everything; installs the peers first
    make bench-quick                            a table within an hour, once the peers are installed
    python tests/benchmarks/versus.py [--quick] [--rows 60M] [--only CTranslate2] [--precision int8] [--repeats 5]
    python tests/benchmarks/versus.py --report  only the table and the chart of stored results

Each engine, tformer included, runs in a process of its own and answers requests over pipes. The floor is a bound: the
bytes that a step must read and its multiply-adds, at the measured rates of this machine. Results are stored in a JSON
file, where a new figure replaces the old one. A peer that is missing, or cannot run a case, is listed with its reason.
Models are made once, from seeded random weights, in --models (30 GB for all rows).
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))
from versus import chart, processes, table
from versus.client import OURS, PEERS, RATES, ROOT, SLOW, SOURCE, PeerError
from versus.engines import code_of
from versus.measure import OVER, Bench, Record, same
from versus.shapes import PRECISIONS, ROWS, Row

BUILD = ROOT / "build"


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--rows", multiple=True, help="Only models with this in their name; may be given several times.")
@click.option(
    "--only", multiple=True, type=click.Choice([p.name for p in PEERS]), help="Compare tformer with this engine only."
)
@click.option("--precision", multiple=True, type=click.Choice(PRECISIONS), help="Only this precision.")
@click.option(
    "--quick",
    is_flag=True,
    help="Two rounds of a few cases; without the model of 1.1 B and torch.compile unless they are named.",
)
@click.option("--minutes", default=math.inf, help="End in about this time: then no case begins.  [default: no limit]")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Rounds of each case.")
@click.option("--budget", default=90.0, show_default=True, help="Seconds of a case after which no round begins.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds that an engine may take for one answer.")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count(), show_default=True)
@click.option("--models", type=click.Path(path_type=Path), default=BUILD / "versus", help="Folder of the models.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=BUILD / "versus.json",
    help="File of the results; the table (.md) and the chart (.png) have the same name.",
)
@click.option("--report", is_flag=True, help="Measure nothing.")
def main(
    rows: tuple[str, ...], only: tuple[str, ...], precision: tuple[str, ...], quick: bool, minutes: float, repeats: int,
    budget: float, timeout: float, threads: int, models: Path, out: Path, report: bool,
) -> None:  # fmt: skip
    for name in rows:
        if not any(name in row.name for row in ROWS):
            raise click.BadParameter(
                f"{name!r} is in none of {', '.join(row.name for row in ROWS)}", param_hint="--rows"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(out.read_text()) if out.exists() else {"records": []}
    if not report:
        peers = [
            peer for peer in PEERS if peer == OURS or (peer.name in only if only else not (quick and peer == SLOW))
        ]
        repeats = 2 if quick else repeats
        bench = Bench(peers, models, threads, repeats, budget, timeout, _tell, seconds=60 * minutes)
        kept = _here(kept, _machine(bench, threads), out)
        code = code_of(ROOT / "tformer_export", ROOT / "runtime")
        for row in ROWS:
            chosen = any(name in row.name for name in rows) if rows else not (quick and "1.1B" in row.name)
            precisions = [p for p in row.precisions if not precision or p in precision]
            if chosen and bench.is_over():
                _tell(f"{row.name}: {OVER}")
            elif chosen:
                kept["rates"] = _best(kept["rates"], bench.once(RATES, "measure", threads=threads))
            for records in _row(bench, row, precisions, quick, kept["rates"]) if chosen and not bench.is_over() else ():
                kept["records"] = _joined(kept["records"], [{**record, "code": code} for record in records])
                out.write_text(json.dumps(kept, indent=1))
    if not kept["records"]:
        raise click.ClickException(f"{out} holds no results")
    text = f"{_title(kept)}\n\n{table.markdown(kept['records'], kept['rates'])}"
    out.with_suffix(".md").write_text(text)
    chart.draw(kept["records"], out.with_suffix(".png"), _title(kept))
    click.echo(text)


def _row(
    bench: Bench, row: Row, precisions: Sequence[str], quick: bool, rates: Mapping[str, float]
) -> Iterator[list[Record]]:
    """Yield the records of a model."""
    _tell(row.name)
    try:
        bench.once(SOURCE, "prepare", **bench.model(row.shape, "fp32"))
    except PeerError as error:
        raise click.ClickException(f"the weights of {row.name} cannot be made: {error}") from error
    folder = Path(bench.model(row.shape, "fp32")["folder"])
    reference = json.loads((folder / "source" / "reference.json").read_text())
    for precision in precisions:
        yield bench.measure(row, row.quick if quick else row.cases, precision, reference, rates)
        if not quick or (precision == "int8" and row.shape.kind != "embed"):
            yield processes.starts(bench, row, precision)
            if row.has_file:
                yield processes.files(bench, row, precision)


def _joined(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    return [*(record for record in old if not any(same(record, other) for other in new)), *new]


def _machine(bench: Bench, threads: int) -> dict[str, Any]:
    """Return the processor, its rates and the versions of packages."""
    versions = {}
    for peer in bench.peers:
        try:
            versions[peer.name] = bench.once(peer, "versions")
        except PeerError as error:
            _tell(f"{peer.name}: {error}")
    rates = bench.once(RATES, "measure", threads=threads)
    rate_texts = [
        f"{rates['bandwidth'] / 1e9:.1f} GB/s",
        *(f"{p} {rates[p] / 1e9:.0f} GMAC/s" for p in ("fp32", "int8")),
    ]
    _tell(f"{_processor()}, {threads} threads: {', '.join(rate_texts)}")
    return {"processor": _processor(), "threads": threads, "rates": rates, "versions": versions}


def _here(kept: dict[str, Any], now: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the stored results of this machine, with the highest rates that it ever reached."""
    if not kept["records"]:
        return kept | now
    if any(kept[name] != now[name] for name in ("processor", "threads")):
        was = f"{kept['processor']} with {kept['threads']} threads"
        raise click.ClickException(f"{out} holds the results of {was}: give another --out")
    return kept | {"rates": _best(kept["rates"], now["rates"]), "versions": kept["versions"] | now["versions"]}


def _best(rates: Mapping[str, float], again: Mapping[str, float]) -> dict[str, float]:
    """Return the highest rates: other load may slow the machine at any one time."""
    return {name: max(rate, again[name]) for name, rate in rates.items()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}"


def _title(kept: dict[str, Any]) -> str:
    versions: dict[str, str] = {}
    for peer in reversed(PEERS):  # tformer's own last: others' environments may hold other releases
        versions |= kept["versions"].get(peer.name, {})
    named = ", ".join(f"{name} {version.split('+')[0]}" for name, version in sorted(versions.items()))
    units = {"bandwidth": "GB/s"}
    rate_text = ", ".join(
        f"{name} {rate / 1e9:.0f} {units.get(name, 'GMAC/s')}" for name, rate in kept["rates"].items()
    )
    return f"{kept['processor']}, {kept['threads']} threads ({rate_text}); {named}"


def _tell(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
