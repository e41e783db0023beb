"""Run the examples of the documentation and compare what they print with what the pages say.

    python docs/check_blocks.py                  # README.md and every page under docs/
    python docs/check_blocks.py docs/generation.md README.md

Each page has a temporary folder of its own, in which `models/` and `docs/examples/` are those of the repository. The
blocks of a page run in order:

- ```` ```console ````: each line `$ COMMAND` runs in bash. `> ` continues a command, as in a here-document, and so does
  a backslash. The lines below are its output, standard error included.
- ```` ```python ````: runs in one namespace for the page. A ```` ```text ```` block directly below is what it prints.
- a block of any language with `title="NAME"`: is not run but written to the file NAME.

`…` in an output matches any text of a line; a line that is `…` alone matches any lines. HTML comments above a block set
rules for it:

- `<!-- numbers vary -->`: every number matches every number, and every run of spaces every other.
- `<!-- not run: REASON -->`: the block is skipped, and the reason is printed.

Exit status: 0 if all outputs match, 1 if one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("models", "docs/examples")  # folders of the repository that commands of pages read
COMMAND_SECONDS = 900  # the longest time that one command may take
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)(?P<attributes>[^`]*)$")
TITLE = re.compile(r'title="([^"]+)"')
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
TRACEBACK = "Traceback (most recent call last):"
NUMBERS_VARY = "<!-- numbers vary -->"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
ENVIRONMENT = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


@dataclass
class Block:
    """A fenced block. line: the number of its first line of text, from 1. rules: the HTML comments above it.
    adjacent: whether nothing but comments and blank lines is between it and the block before it."""

    language: str
    title: str | None
    text: str
    line: int
    rules: str
    adjacent: bool

    @property
    def numbers_vary(self) -> bool:
        return NUMBERS_VARY in self.rules


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown page, in order."""
    lines = text.splitlines()
    rules, adjacent, at = "", False, 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is None:
            if lines[at].lstrip().startswith("<!--"):
                rules += lines[at]
            elif lines[at].strip():
                rules, adjacent = "", False
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence["ticks"])
        body = "".join(line.removeprefix(fence["indent"]) + "\n" for line in lines[at + 1 : end])
        title = TITLE.search(fence["attributes"])
        yield Block(fence["language"], title[1] if title else None, body, at + 2, rules, adjacent)
        rules, adjacent, at = "", True, end + 1


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """(command, expected output) pairs of a console block."""
    command: list[str] = []
    output: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command:
                yield "\n".join(command), "\n".join(output)
            command, output = [line[2:]], []
        elif not output and re.match(r">( |$)", line):
            command.append(line[2:])
        elif not output and command and command[-1].endswith("\\"):
            command.append(line)
        else:
            output.append(line)
    if command:
        yield "\n".join(command), "\n".join(output)


def difference(expected: str, actual: str, numbers_vary: bool) -> str | None:
    """A readable diff, or None if the output is the expected one. No page may expect a traceback."""
    texts = ["\n".join(line.rstrip() for line in text.strip("\n").splitlines()) for text in (expected, actual)]
    if numbers_vary:
        texts = [re.sub(r" +", " ", NUMBER.sub("0", text)) for text in texts]
    wanted, printed = (text.splitlines() for text in texts)
    pattern = "".join(
        r"(?:[^\n]*\n)*" if line.strip() == "…" else r"[^\n]*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in wanted
    )
    if re.fullmatch(pattern, "".join(line + "\n" for line in printed)) and TRACEBACK not in printed:
        return None
    return "\n".join(difflib.unified_diff(wanted, printed, "page", "run", lineterm="", n=1)) or TRACEBACK


def run_command(command: str, folder: Path) -> str:
    """What a command prints."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    try:
        run = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, timeout=COMMAND_SECONDS, **streams)
        return run.stdout.decode()
    except subprocess.TimeoutExpired:
        return f"not finished after {COMMAND_SECONDS} seconds"


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> tuple[str, bool]:
    """What a block prints, and whether it raised. Tracebacks name the lines of the page."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
    except Exception:
        return printed.getvalue() + traceback.format_exc(limit=-4), True
    return printed.getvalue(), False


def check_block(block: Block, output: Block | None, page: Path, folder: Path, namespace: dict[str, Any]) -> int:
    """Run a block. output: the block that holds what it prints. The number of outputs that differ."""
    name = os.path.relpath(page, ROOT)
    failures = 0

    def report(label: str, diff: str | None, seconds: float) -> int:
        print(f"{'ok  ' if diff is None else 'FAIL'} {name}:{block.line} {seconds:5.1f} s  {label.splitlines()[0]}")
        if diff is not None:
            print("    " + diff.replace("\n", "\n    "))
        sys.stdout.flush()
        return int(diff is not None)

    if block.title:
        path = folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    elif block.language in ("console", "python") and (reason := NOT_RUN.search(block.rules)):
        print(f"skip {name}:{block.line} not run: {reason[1]}")
    elif block.language == "console":
        for command, expected in commands_of(block):
            began = time.monotonic()
            diff = difference(expected, run_command(command, folder), block.numbers_vary)
            failures += report(command, diff, time.monotonic() - began)
    elif block.language == "python":
        began = time.monotonic()
        printed, raised = run_python(block, page, namespace)
        expected = output.text if output else printed if not raised else ""
        diff = difference(expected, printed, output is not None and output.numbers_vary)
        failures += report(block.text, diff, time.monotonic() - began)
    return failures


def check_page(page: Path) -> int:
    """Run the blocks of a page. The number of outputs that differ."""
    blocks = list(blocks_of(page.read_text(encoding="utf-8")))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("docs").mkdir()
        for name in SHARED:
            Path(name).symlink_to(ROOT / name)
        outputs = [b if b.language == "text" and b.adjacent else None for b in blocks[1:]]
        pairs = zip(blocks, [*outputs, None], strict=False)
        return sum(check_block(block, output, page, Path(folder), namespace) for block, output in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the examples of the documentation.")
    parser.add_argument("pages", nargs="*", type=Path, help="by default README.md and every page under docs/")
    pages = parser.parse_args().pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, "")  # modules in the page's folder
    failures = sum(check_page(page) for page in [page.resolve() for page in pages])
    print(f"{len(pages)} pages: " + (f"{failures} outputs differ" if failures else "all outputs match"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
