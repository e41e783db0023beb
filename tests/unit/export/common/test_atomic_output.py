"""The folder of an unfinished file: deleted by the next export if its own was killed, and never while it runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tformer_export.common import atomic_output
from tformer_export.common.atomic_output import folder_next_to
from tformer_export.common.onnx_writer import data_file

PROGRAM = """
import sys, time
from pathlib import Path
from tformer_export.common.atomic_output import folder_next_to
with folder_next_to(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"half")
    print(folder.name, flush=True)
    time.sleep(600)
"""


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


def test_empty_folder_of_a_killed_export_is_deleted(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix=".model.onnx.", dir=tmp_path))
    with folder_next_to(tmp_path / "model.onnx"):
        assert not folder.exists()
    assert not os.listdir(tmp_path)


def test_folder_that_another_export_sweeps_is_made_again(tmp_path, monkeypatch):
    out, swept = tmp_path / "model.onnx", []
    lock = atomic_output.fcntl.flock

    def sweep_first(file, mode):
        if not swept:  # between the making of the lock and its taking
            swept.append(Path(file.name).parent)
            atomic_output._sweep(out)
        lock(file, mode)

    monkeypatch.setattr(atomic_output.fcntl, "flock", sweep_first)
    with folder_next_to(out) as own:
        assert not swept[0].exists()
        assert os.listdir(tmp_path) == [own.name]
        atomic_output._sweep(out)
        assert own.exists()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("seconds", [-(10**9), 10**9])
def test_jump_of_the_clock_does_not_sweep_a_running_export(tmp_path, monkeypatch, seconds):
    out = tmp_path / "model.onnx"
    now = time.time
    with folder_next_to(out) as running:
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        os.utime(running / atomic_output.LOCK, (0, 0))
        with folder_next_to(out) as own:
            assert sorted(os.listdir(tmp_path)) == sorted([running.name, own.name])
    assert not os.listdir(tmp_path)


def test_publishing_never_puts_a_file_next_to_the_weights_of_another(tmp_path, monkeypatch):
    """A process that dies between two changes of the folder leaves the old pair, the new pair, or no file."""
    for old_split, new_split in itertools.product((False, True), repeat=2):
        for survived in range(4):
            folder = tmp_path / f"{old_split}{new_split}{survived}"
            (folder / "done").mkdir(parents=True)
            out, written = folder / "model.onnx", folder / "done" / "model.onnx"
            for path, text, split in ((out, b"old", old_split), (written, b"new", new_split)):
                path.write_bytes(text)
                if split:
                    data_file(path).write_bytes(text)
            left = [survived]

            def dies(change, left=left):
                def call(*arguments, **options):
                    left[0] -= 1
                    if left[0] < 0:
                        raise KeyboardInterrupt
                    return change(*arguments, **options)

                return call

            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(Path, "replace", dies(Path.replace))
                patch.setattr(Path, "unlink", dies(Path.unlink))
                atomic_output.publish(written, out)
            if out.exists() and (old_split if out.read_bytes() == b"old" else new_split):
                assert data_file(out).read_bytes() == out.read_bytes()
            if left[0] >= 0:
                assert out.read_bytes() == b"new"
                assert data_file(out).exists() == new_split
