"""Pages name files by their paths in a checkout: those that a reader runs, and those that links lead to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPT = re.compile(r"\bpython ([\w./-]+\.py)\b")
LINK = re.compile(r"https://github\.com/tformer/tformer/(?:blob|tree)/main/([\w./-]+)")
RELATIVE = re.compile(r"\]\((?!https?:|#)([\w./-]+)")  # of the README; mkdocs checks those of the pages
WRITTEN = re.compile(r'^```\w+ title="([^"]+)"$', re.MULTILINE)  # by the page itself


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    scripts = {*SCRIPT.findall(text)} - {*WRITTEN.findall(text)}
    assert [path for path in {*scripts, *LINK.findall(text)} if not (ROOT / path).exists()] == []
    if page == ROOT / "docs/tasks/images.md":
        assert "docs/examples/tasks_digits.py" in scripts


def test_relative_links_of_the_readme_lead_to_files_and_headings():
    text = (ROOT / "README.md").read_text()
    links = RELATIVE.findall(text)
    assert len(links) > 20
    assert [path for path in links if not (ROOT / path).exists()] == []
    assert "how-the-compiler-knows-what-to-cache" in text
    assert "## How the compiler knows what to cache" in (ROOT / "docs/architecture.md").read_text()
