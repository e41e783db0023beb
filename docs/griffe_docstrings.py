"""Docstrings of the code as Markdown: `name: text` lines become items of a list, and a tree of lines a block of text.

The code describes arguments and fields in plain text: a line for each that begins with the name and a colon, with its
continuation lines indented. Markdown would run them together into one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ITEM = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \w+)*): +(?P<text>.*)$")


class MarkdownDocstrings(Extension):
    """Docstrings of modules, classes and functions as Markdown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            names = {parameter.name for parameter in getattr(obj, "parameters", None) or ()}
            names |= set(obj.members) if obj.is_class else set()
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(
                f"```text\n{text}\n```" if "├──" in text else as_list(text, names) for text in paragraphs
            )


def as_list(text: str, names: set[str]) -> str:
    """The docstring with an item for each line that begins with one of the names."""
    lines: list[str] = []
    in_item = False
    for line in text.splitlines():
        match = _ITEM.match(line)
        if match and all(name.strip("* ") in names for name in match["names"].split(",")):
            if not in_item:
                lines.append("")
            lines.append(f"- `{match['names']}`: {match['text']}")
            in_item = True
        elif in_item and line.startswith(" "):
            lines.append("  " + line.strip())
        else:
            if in_item and line.strip():
                lines.append("")
            in_item = False
            lines.append(line)
    return "\n".join(lines)
