"""Models of public packages, unchanged, exported and compared with themselves: a table in Markdown.

    make wild                                            makes .venv-wild with the packages, and prints the table
    cd tests; ../.venv-wild/bin/python -m wild_packages [NAME …]     only entries with one of these in their name
    make wild-repositories                               public repositories in their place, cloned into build/

The packages are those of requirements.txt, with tiny seeded weights. Each entry runs in a process of its
own. The status is 1 if a file differs from its module, if a model is refused that is expected to export, or if one
exports or is refused otherwise than its entry says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import click

from tformer_export import export
from tformer_runtime.base.errors import TformerError
from wild_packages import repositories as public
from wild_packages.check import DIFFERS, check
from wild_packages.entries import ENTRIES
from wild_packages.entry import Entry

LIMIT = 1800  # seconds, after which an entry is taken to hang
REFUSED = "refused"
HEADER = "| package | class | export was told | result | compared |\n| --- | --- | --- | --- | --- |"


def judge(entry: Entry) -> dict[str, str]:
    """Export one entry and compare its file. Return the cells of its row, and `wrong`: what was not expected."""
    row = {"package": f"{entry.package} {entry.version}", "class": f"`{entry.model}`"}
    row |= {"told": entry.said(), "result": "", "compared": "", "wrong": ""}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            export(entry.make(), path, **entry.arguments())
        except TformerError as error:
            expected = bool(entry.refusal) and entry.refusal in str(error)
            row["wrong"] = "" if expected else f"refused: {error}"
            return row | {"result": f"{REFUSED}: {entry.why or 'not as expected'}"}
        verdict = check(entry, entry.make(), path)
    row |= {"result": verdict.outcome, "compared": verdict.figures}
    if verdict.outcome == DIFFERS:
        row["wrong"] = "differs"
    elif entry.refusal:
        row["wrong"] = f"exports, and a refusal was expected: {entry.refusal}"
    return row


def run(name: str, repositories: Path | None) -> dict[str, str]:
    """Return the row of one entry, from a process of its own."""
    failed = {"package": name.partition(": ")[0], "class": name.partition(": ")[2], "told": "", "compared": ""}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, "-m", "wild_packages", "--into", answer.name, name]
        if repositories is not None:
            command += ["--repositories", str(repositories)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=Path(__file__).parents[1])
        except subprocess.TimeoutExpired:
            return {**failed, "result": "failed", "wrong": f"more than {LIMIT} s"}
        text = answer.read()
    if not text:
        return {
            **failed,
            "result": "failed",
            "wrong": done.stderr.strip() or f"the process ended with {done.returncode}",
        }
    row: dict[str, str] = json.loads(text)
    return row


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("names", nargs=-1)
@click.option(
    "--repositories",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Take public repositories, which are cloned into this folder, in the place of packages.",
)
@click.option("--into", hidden=True, type=click.Path(path_type=Path))
def main(names: tuple[str, ...], repositories: Path | None, into: Path | None) -> None:
    entries = ENTRIES if repositories is None else public.ENTRIES
    if into is not None:
        warnings.simplefilter("ignore")
        try:
            entry = entries[names[0]]
            if repositories is not None:
                public.import_from(entry, repositories)
            into.write_text(json.dumps(judge(entry)))
        except Exception:
            traceback.print_exc()
        return
    chosen = [name for name in entries if not names or any(part.lower() in name.lower() for part in names)]
    rows = []
    for name in chosen:
        rows.append(row := run(name, repositories))
        click.echo(f"{row['result']:10} {name} {row['compared']}", err=True)
        if row["wrong"]:
            click.echo(f"  wrong: {row['wrong']}", err=True)
    click.echo(HEADER)
    for row in rows:
        click.echo(f"| {row['package']} | {row['class']} | {row['told']} | {row['result']} | {row['compared']} |")
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
