"""The corpus, and a short run of each target with a fixed seed: every case ends in a result or a sentence."""

from __future__ import annotations

import pytest

from fuzz.supervisor import Report, run_target
from fuzz.target import CORPUS, RESULT, Target, outcome_of
from fuzz.targets import TARGETS

CASES = {
    "checkpoint": 60,
    "graph": 60,
    "quantised-graph": 60,
    "command": 60,
}  # of targets whose cases take longer than a few milliseconds
MANY_SECONDS = 600.0  # no limit in practice: the number of cases is one


def told(report: Report) -> list[str]:
    return [f"{f.place}\n{f.text}\n{f.case[:2000]!r}" for f in report.findings.values()]


@pytest.mark.parametrize("name", TARGETS)
def test_cases_of_the_corpus_and_new_ones_end_in_a_result_or_a_sentence(name):
    cases = CASES.get(name, 150)
    report = run_target(name, seed=0, cases=cases, seconds=MANY_SECONDS)
    assert told(report) == []
    assert report.cases >= cases
    assert report.counts["result"] > 0  # the seeds, which are changed, are not damaged themselves


def test_every_folder_of_the_corpus_has_a_target():
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 300_000


def raises(error: BaseException):
    def run(case: bytes) -> None:
        if case != b"seed":
            raise error

    return run


class Panic(BaseException):
    """As errors of Rust are."""


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), Panic("x"), MemoryError()])
def test_other_errors_are_findings(error):
    target = Target("x", lambda: [b"seed"], lambda data, rng: data + b"x", raises(error))
    assert outcome_of(target, b"seed").kind == RESULT
    outcome = outcome_of(target, b"other")
    assert (outcome.kind, outcome.place.split()[0]) == ("finding", type(error).__name__)


@pytest.mark.parametrize(
    ("case", "place"),
    [
        (b"crash", "ended by SIGSEGV"),
        (b"hang", "computes for more than 1 s"),
        (b"grow", "memory"),
        (b"raise", "KeyError"),
    ],
)
def test_crash_hang_and_growth_are_seen_from_outside(case, place):
    """The cases after one that ended the child run too."""
    report = run_target("self-test", 0, 3, MANY_SECONDS, [b"fine", case, b"fine"], max_cpu_seconds=1.0)
    assert [finding.case for finding in report.findings.values()] == [case]
    assert next(iter(report.findings)).startswith(place)
    assert report.cases == 3
