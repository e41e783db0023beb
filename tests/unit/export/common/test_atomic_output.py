"""The folder of an unfinished file: deleted by the next export if its own was killed, and never while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tformer_export.common import atomic_output
from tformer_export.common.atomic_output import folder_next_to

PROGRAM = """
import sys, time
from pathlib import Path
from tformer_export.common.atomic_output import folder_next_to
with folder_next_to(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"half")
    print(folder.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(atomic_output, "JUST_MADE", -3600)


def started(out):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_folder_of_a_killed_export_is_deleted_by_the_next(tmp_path):
    out = tmp_path / "model.onnx"
    process, name = started(out)
    with folder_next_to(out) as own:
        assert sorted(os.listdir(tmp_path)) == sorted([name, own.name])
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert os.listdir(tmp_path / name)
    with folder_next_to(tmp_path / "other.onnx"):
        assert name in os.listdir(tmp_path)
    with folder_next_to(out) as own:
        assert os.listdir(tmp_path) == [own.name]
    assert not os.listdir(tmp_path)


def test_folders_of_others_and_links_stay(tmp_path):
    out, elsewhere = tmp_path / "model.onnx", tmp_path / "elsewhere"
    for folder in (elsewhere, tmp_path / ".model.onnx.mine"):
        folder.mkdir()
    (elsewhere / atomic_output.LOCK).touch()
    os.symlink(elsewhere, tmp_path / ".model.onnx.link")
    with folder_next_to(out):
        pass
    assert sorted(os.listdir(tmp_path)) == [".model.onnx.link", ".model.onnx.mine", "elsewhere"]
    assert os.listdir(elsewhere) == [atomic_output.LOCK]
