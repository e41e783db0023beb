"""tformer-export on a disk that fails, and killed, at calls that change a file: the next export is whole."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from faults.processes import EXPORT, Action, Fault, Forks, check_sentence

TESTS = Path(__file__).parents[1]  # where the command finds the source
SOURCE = ["faults.plain_model:plain", "--step-input", "tgt", "--bos-id", 1, "--eos-id", 2, "--quiet", "--force"]
DISKS = {
    "full": (Action.FAIL, errno.ENOSPC),
    "short write": (Action.SHORT, errno.ENOSPC),
    "broken once": (Action.ONCE, errno.EIO),
    "killed": (Action.KILL, 0),
}
BEFORE = b"an earlier file"
FILES = ["model.onnx", "report.json"]


@pytest.fixture(scope="module")
def forks(shim, tmp_path_factory):
    modules = ["faults.warm_export", "tformer_export.sources.load"]
    with Forks(shim, EXPORT, tmp_path_factory.mktemp("streams"), *modules) as forks:
        yield forks


@pytest.fixture(scope="module", params=[[], pytest.param(["--quantize", "int8"], marks=pytest.mark.thorough)], ids=str)
def options(request):
    return request.param


@pytest.fixture(scope="module")
def whole(forks, options, tmp_path_factory):
    """Return the bytes of a file that no fault strikes, and the number of calls of its export that change files."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = export(forks, folder, *options)
    assert outcome.status == 0, outcome
    return (folder / "model.onnx").read_bytes(), outcome.calls


def export(forks, folder, *options, fault=None):
    arguments = [*SOURCE, "--output", folder / "model.onnx", "--report", folder / "report.json", *options]
    return forks.run(folder, *arguments, fault=fault, cwd=TESTS)


@pytest.mark.parametrize("count", [1, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("disk", DISKS)
def test_export_after_a_fault_is_whole(forks, options, whole, tmp_path, disk, count):
    content, calls = whole
    step = max(1, calls // count)
    for nth in range(1 + (3 + 5 * list(DISKS).index(disk)) % step, calls + 1, step):
        fault, folder = Fault(nth, *DISKS[disk]), tmp_path / str(nth)
        folder.mkdir()
        out, report = (folder / name for name in FILES)
        out.write_bytes(BEFORE)
        outcome = export(forks, folder, *options, fault=fault)
        if disk == "killed":
            assert outcome.status == -signal.SIGKILL, (str(fault), outcome)
        else:
            check_sentence(outcome, EXPORT, fault, report if out.read_bytes() != BEFORE else out)
            assert set(os.listdir(folder)) <= set(FILES), str(fault)
        assert out.read_bytes() in (BEFORE, content), str(fault)
        if report.exists():
            assert "refused" in json.loads(report.read_text()), str(fault)
        outcome = export(forks, folder, *options)
        assert outcome.status == 0, (str(fault), outcome)
        assert out.read_bytes() == content, str(fault)
        assert json.loads(report.read_text())["path"] == str(out), str(fault)
        assert sorted(os.listdir(folder)) == FILES, str(fault)
