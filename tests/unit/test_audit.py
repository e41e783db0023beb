"""The audit tells known vulnerabilities, accepted ones and a missing network apart."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit"

# As pip-audit writes it: its README has this example of `--format json`.
FLASK = {
    "name": "flask",
    "version": "0.5",
    "vulns": [{"id": "PYSEC-2019-179", "fix_versions": ["1.0"], "aliases": ["CVE-2019-1010083"], "description": ""}],
}
SOUND = {"name": "jinja2", "version": "3.0.2", "vulns": []}
ABSENT = {"name": "click", "skip_reason": "Dependency not found on PyPI and could not be audited: click (8.5.1)"}


@pytest.fixture(scope="module")
def audit():
    loader = SourceFileLoader("audit", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("audit", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("packages", "accepted", "status", "line"),
    [
        ([FLASK, SOUND], set(), 1, "flask 0.5: PYSEC-2019-179, mended in 1.0"),
        ([FLASK, SOUND], {"CVE-2019-1010083"}, 0, "audit: 2 packages have no known vulnerability that is not accepted"),
        ([SOUND], {"CVE-2019-1010083"}, 1, "names CVE-2019-1010083, which no package has: remove the line"),
        ([SOUND, ABSENT], set(), 0, "not audited: Dependency not found on PyPI"),
        ([ABSENT], set(), 0, "audit skipped, because the vulnerabilities that PyPI lists cannot be read: Dependency"),
    ],
)
def test_audit_judges_what_pip_audit_found(audit, capsys, packages, accepted, status, line):
    assert audit.judged(packages, accepted) == status
    assert line in capsys.readouterr().out


def test_accepted_vulnerabilities_have_a_reason(audit):
    text = audit.ACCEPTED.read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert all(len(line.split()) > 2 for line in lines)
    assert audit.accepted(text + "PYSEC-1 is never reached\n") >= {"PYSEC-1"}
