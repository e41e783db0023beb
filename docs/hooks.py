"""Hooks of MkDocs: parts of pages that are made from the code.

`<!-- generation options -->` becomes the tables of `GenerationOptions`. `<!-- help of tformer-run -->` becomes what the
command prints with --help, under its own headings, which mkdocs-click leaves out.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import click

COMMANDS = {
    "tformer-run": ("tformer_runtime.cli.main", "main"),
    "tformer-serve": ("tformer_serve.cli", "main"),
    "tformer-export": ("tformer_export.cli", "command"),
    "tformer-golden": ("tformer_export.golden_cli", "command"),
    "tformer-train": ("tformer_models.cli", "main"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the marks of a page in."""
    markdown = re.sub("<!-- generation options -->", lambda _: _tables(), markdown)
    return re.sub("<!-- help of ([a-z-]+) -->", lambda match: _help(match[1]), markdown)


def _help(name: str) -> str:
    module, attribute = COMMANDS[name]
    command: click.Command = getattr(importlib.import_module(module), attribute)
    context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
    return f"```text\n{command.get_help(context)}\n```"


def _tables() -> str:
    """A table for each heading of the options: name, form on the command line, default, meaning."""
    from tformer_runtime.cli.options import OPTIONS as FLAGS
    from tformer_runtime.decoding.options import OPTIONS

    lines = []
    for heading in dict.fromkeys(spec.heading for spec in OPTIONS.values()):
        lines += [f"### {heading}", "", "| option | command line | default | meaning |", "| --- | --- | --- | --- |"]
        for name, spec in OPTIONS.items():
            if spec.heading == heading:
                flag = FLAGS.get(name)
                usage = f"`{flag.flag} {flag.metavar}".rstrip().replace("|", "\\|") + "`" if flag else ""
                default = "" if spec.default in (None, ()) else f"`{spec.default!r}`"
                lines.append(f"| `{name}` | {usage} | {default} | {spec.help} |")
        lines.append("")
    return "\n".join(lines)
