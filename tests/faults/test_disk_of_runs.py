"""tformer-run on a disk that fails, and killed, at each call that changes a file: the next run goes on."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal

import pytest
from support.toy_models import Toy

from faults.processes import RUN, Action, Fault, Forks, check_sentence

OPTIONS = ["--max-new-tokens", 4, "--batch-size", 2, "--device", "cpu", "--quiet"]
# Twelve batches, so that each kind of call comes several times.
LINES = ["".join(random.Random(i).choices("abcxyz", k=1 + i % 7)) for i in range(24)]
BEFORE = "an earlier result\n"
LEFT = {"out", "out.part", "out.part.json", "out.part.json.new"}  # files that a failed run may leave
DISKS = {
    "full": (Action.FAIL, errno.ENOSPC),
    "short write": (Action.SHORT, errno.ENOSPC),
    "broken": (Action.FAIL, errno.EIO),
    "broken once": (Action.ONCE, errno.EIO),
}
CASES = [("full", True), ("short write", False), ("broken once", True)]  # the disk, and whether the next run resumes
OTHERS = [(disk, resumes) for disk in DISKS for resumes in (True, False) if (disk, resumes) not in CASES]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Toy(seed=27).write(tmp_path_factory.mktemp("model") / "toy.onnx")


@pytest.fixture(scope="module")
def forks(shim, tmp_path_factory):
    with Forks(
        shim, RUN, tmp_path_factory.mktemp("streams"), "onnxruntime", "tformer_runtime.decoding.ordered"
    ) as forks:
        yield forks


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs") / "in"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def expected(forks, model, inputs, tmp_path_factory):
    """Return the results of a run that no fault strikes."""
    outcome = forks.run(tmp_path_factory.mktemp("whole"), model, "--input-file", inputs, *OPTIONS)
    assert outcome.status == 0, outcome
    assert len(outcome.stdout.splitlines()) == len(LINES)
    return outcome.stdout


@pytest.mark.parametrize(
    ("disk", "resumes"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)]
)
def test_run_on_a_failing_disk_ends_with_a_sentence(forks, model, inputs, expected, tmp_path, disk, resumes):
    arguments = [model, "--input-file", inputs, *OPTIONS, "--force"]
    nth = 1
    while True:
        fault, folder = Fault(nth, *DISKS[disk]), tmp_path / str(nth)
        folder.mkdir()
        out = folder / "out"
        out.write_text(BEFORE)
        outcome = forks.run(folder, *arguments, "--output-file", out, fault=fault)
        if outcome.calls < nth:  # the run has fewer calls
            break
        check_sentence(outcome, RUN, fault, out)
        assert out.read_text() == BEFORE, str(fault)
        assert set(os.listdir(folder)) <= LEFT, str(fault)
        outcome = forks.run(folder, *arguments, "--output-file", out, *["--resume"][:resumes])
        check_whole(outcome, out, expected, fault)
        nth += 1
    check_whole(outcome, out, expected, fault)
    assert nth > 20


@pytest.fixture(scope="module")
def killed(forks, model, inputs, tmp_path_factory):
    """Return a folder with an earlier output and the files of a killed run, whose journal has some results."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "out").write_text(BEFORE)
    arguments = [model, "--input-file", inputs, *OPTIONS, "--force", "--output-file", folder / "out"]
    assert forks.run(folder, *arguments, fault=Fault(16, Action.KILL)).status == -signal.SIGKILL
    assert 0 < json.loads((folder / "out.part.json").read_text())["progress"]["inputs"] < len(LINES)
    return folder


@pytest.mark.parametrize(
    ("action", "error"), [(Action.SHORT, errno.ENOSPC), (Action.ONCE, errno.EIO), (Action.KILL, 0)]
)
def test_resumed_run_is_resumed_after_a_fault(forks, model, inputs, expected, killed, tmp_path, action, error):
    arguments = [model, "--input-file", inputs, *OPTIONS, "--force", "--resume"]
    nth = 1
    while True:
        fault, folder = Fault(nth, action, error), shutil.copytree(killed, tmp_path / str(nth))
        out = folder / "out"
        recorded = progress(folder)
        outcome = forks.run(folder, *arguments, "--output-file", out, fault=fault)
        if outcome.status == 0:
            break
        if action == Action.KILL:
            assert outcome.status == -signal.SIGKILL, (str(fault), outcome)
        else:
            check_sentence(outcome, RUN, fault, out)
        assert out.read_text() == BEFORE, str(fault)
        assert progress(folder) >= recorded, str(fault)  # no finished input is lost
        check_whole(forks.run(folder, *arguments, "--output-file", out), out, expected, fault)
        nth += 1
    check_whole(outcome, out, expected, fault)
    assert nth > 10


def test_run_killed_at_each_call_is_resumed(forks, model, inputs, expected, tmp_path):
    arguments = [model, "--input-file", inputs, *OPTIONS, "--force"]
    nth = 1
    while True:
        fault, folder = Fault(nth, Action.KILL), tmp_path / str(nth)
        folder.mkdir()
        out = folder / "out"
        out.write_text(BEFORE)
        outcome = forks.run(folder, *arguments, "--output-file", out, fault=fault)
        if outcome.status == 0:
            break
        assert outcome.status == -signal.SIGKILL, (str(fault), outcome)
        assert out.read_text() == BEFORE, str(fault)
        check_whole(forks.run(folder, *arguments, "--output-file", out, "--resume"), out, expected, fault)
        nth += 1
    assert nth > 20


def progress(folder):
    """Return the number of finished inputs in the journal of a folder."""
    return json.loads((folder / "out.part.json").read_text())["progress"]["inputs"]


def check_whole(outcome, out, expected, fault):
    """Check that a run has written all results, and nothing else."""
    assert outcome.status == 0, (str(fault), outcome)
    assert out.read_text() == expected, str(fault)
    assert os.listdir(out.parent) == ["out"], str(fault)
