"""`python -m fuzz`: run all targets in turn, or one case again. Exit status 1 if there are findings."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import click

from fuzz.minimise import smaller_case
from fuzz.supervisor import ROOT, Report, run_target
from fuzz.targets import TARGETS

FOLDER = ROOT / "build" / "fuzz"
MANY = 10**9
ROUND_SECONDS = 20.0


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True, help="Time for all targets together.")
@click.option("--seed", type=int, help="Seed of the changes.  [default: a random one, which is printed]")
@click.option(
    "--target", "names", multiple=True, type=click.Choice(list(TARGETS)), help="Run this target.  [default: all]"
)
@click.option(
    "--replay",
    type=click.Path(exists=True, path_type=Path),
    help="Run this case, or all of a folder, again. The name of its folder is that of the target.",
)
@click.option("--minimise", is_flag=True, help="With --replay: write a smaller case with the same finding next to it.")
@click.option("--guided", is_flag=True, help="Keep cases that reach new lines (needs atheris).")
def main(
    minutes: float, seed: int | None, names: tuple[str, ...], replay: Path | None, minimise: bool, guided: bool
) -> None:
    """Look for input that ends in anything but a result or a sentence."""
    if replay is not None:
        sys.exit(_replay(replay, minimise))
    seed = random.SystemRandom().randrange(10**9) if seed is None else seed
    click.echo(f"seed {seed}")
    names = names or tuple(TARGETS)
    reports = {name: Report() for name in names}
    end, turn = time.monotonic() + minutes * 60, 0
    while time.monotonic() < end:
        for name in names:
            left = end - time.monotonic()
            if left > 0:
                module = "fuzz.guided" if guided else "fuzz.child"
                report = run_target(
                    name, seed + turn, MANY, min(left, ROUND_SECONDS, minutes * 60 / len(names)), module=module
                )
                reports[name].counts.update(report.counts)
                for finding in report.findings.values():
                    if finding.place not in reports[name].findings:
                        click.echo(f"{name}: {finding.place}: {finding.save(FOLDER)}")
                    reports[name].add(finding)
        turn += 1
    click.echo(f"{'target':<14}{'cases':>9}{'results':>9}{'sentences':>10}{'findings':>9}{'places':>7}")
    for name, report in reports.items():
        counts = report.counts
        click.echo(
            f"{name:<14}{report.cases:>9}{counts['result']:>9}{counts['sentence']:>10}{counts['finding']:>9}{len(report.findings):>7}"
        )
    click.echo(f"{sum(report.cases for report in reports.values())} cases")
    sys.exit(any(report.findings for report in reports.values()))


def _replay(path: Path, minimise: bool) -> int:
    paths = sorted(p for p in path.iterdir() if p.suffix != ".txt") if path.is_dir() else [path]
    status = 0
    for case in paths:
        name = case.parent.name
        if name not in TARGETS:
            raise click.UsageError(f"{case} lies in a folder that has not the name of a target: {', '.join(TARGETS)}")
        report = run_target(name, 0, 1, MANY, [case.read_bytes()])
        for finding in report.findings.values():
            status = 1
            click.echo(f"{case}: {finding.place}\n{finding.text}")
            if minimise:
                smaller = smaller_case(name, finding)
                small_path = case.with_name(f"{case.name}-small")
                small_path.write_bytes(smaller)
                click.echo(f"{len(smaller)} of {len(finding.case)} bytes: {small_path}")
        if not report.findings:
            click.echo(f"{case}: {', '.join(report.counts)}")
    return status


if __name__ == "__main__":
    main()
