"""A file that changes while its model is loaded: results are those of the bytes that were verified, or an error."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
from support.digested_models import with_changed_byte, write_digested, write_in_place
from support.toy_models import Toy

from tformer_export.common import onnx_writer
from tformer_runtime import AsyncModel, Model, ModelChangedError, ModelFileError
from tformer_runtime.backend import session
from tformer_runtime.backend.run_slots import RunSlots
from tformer_runtime.backend.session import Session
from tformer_runtime.format import open_files
from tformer_runtime.format.digest import DIGEST_KEY


def write(path, seed=5):
    return write_digested(path, seed=seed, encoder=False)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """No file is small enough to be copied."""
    monkeypatch.setattr(open_files, "MAX_COPIED_BYTES", -1)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "live.onnx")


@pytest.fixture
def other(tmp_path):
    """A file of the same size with other weights."""
    return write(tmp_path / "other.onnx", seed=6)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A file whose weights are in a second one."""
    monkeypatch.setattr(onnx_writer, "MAX_FILE_BYTES", 1)
    monkeypatch.setattr(onnx_writer, "MAX_INLINE_BYTES", 64)
    return write(tmp_path / "pair.onnx")


def text_of(path):
    with Model.load(path, "cpu") as model:
        return model.generate("hello").text


def test_other_bytes_of_the_same_size_and_time_are_an_error(path, other):
    assert path.stat().st_size == other.stat().st_size
    model = Model.load(path, "cpu")
    expected = model.generate("hello").text
    assert text_of(other) != expected
    content = path.read_bytes()
    write_in_place(path, other.read_bytes())
    for call in (model.generate, lambda text: list(model.stream(text)), lambda text: model.score(text, [5])):
        with pytest.raises(ModelChangedError, match=r"live\.onnx was changed in place .* load it again\. .* \(mv\)"):
            call("hello")
    with pytest.raises(ModelChangedError) as error:
        list(model.generate_batch(["hello"]))
    assert error.value.path == str(path)
    assert text_of(path) == text_of(other)
    write_in_place(path, content)  # as the one who changed it may do
    assert model.generate("hello").text == expected


@pytest.mark.parametrize("size", [0, 1000])
def test_file_that_is_cut_short_is_an_error_and_does_not_end_the_process(path, size):
    model = Model.load(path, "cpu")
    os.truncate(path, size)
    with pytest.raises(ModelChangedError):
        model.generate("hello")


@pytest.mark.parametrize("change", [with_changed_byte, lambda path: b""])
def test_second_file_with_weights_is_watched_too(pair, change):
    model = Model.load(pair, "cpu")
    data = onnx_writer.data_file(pair)
    write_in_place(data, change(data))
    with pytest.raises(ModelChangedError, match=r"pair\.onnx\.data was changed in place"):
        model.generate("hello")


def test_file_without_a_digest_is_watched_by_its_size_and_time(tmp_path):
    path = Toy(seed=5, encoder=False).write(tmp_path / "plain.onnx")
    model = Model.load(path, "cpu")
    expected = model.generate("hello").text
    path.chmod(0o600)
    assert model.generate("hello").text == expected
    path.write_bytes(path.read_bytes())
    with pytest.raises(ModelChangedError):
        model.generate("hello")


def test_file_of_other_times_alone_stays(path, tmp_path):
    model = Model.load(path, "cpu")
    expected = model.generate("hello").text
    os.utime(path)
    assert model.generate("hello").text == expected
    os.link(path, tmp_path / "again.onnx")
    path.chmod(0o600)
    assert model.generate("hello").text == expected
    write_in_place(path, path.read_bytes())
    assert model.generate("hello").text == expected


@pytest.mark.parametrize("replace", [os.replace, lambda other, path: path.unlink()], ids=["mv", "rm"])
def test_file_whose_name_is_taken_stays(path, other, replace):
    model = Model.load(path, "cpu")
    expected, size = model.generate("hello").text, model.info()["bytes"]
    replace(other, path)
    assert model.generate("hello").text == expected
    assert model.info()["bytes"] == size
    draft = Model.load(write(path.with_name("draft.onnx")), "cpu")
    os.remove(draft.engine.session.path)
    assert model.generate("hello", draft_model=draft).text == expected


@pytest.mark.parametrize("limit", [-1, 1 << 30], ids=["watched", "copied"])
@pytest.mark.parametrize("change", [os.replace, shutil.copy], ids=["mv", "cp"])
@pytest.mark.parametrize("after", [(open_files, "read_metadata"), (session, "read_mapped_model")], ids=lambda it: it[1])
def test_file_that_changes_while_it_is_loaded_is_an_error(path, other, monkeypatch, after, change, limit):
    """The manifest or the graph may be that of one file and the weights those of another, of which each is whole."""
    module, name = after
    read = getattr(module, name)

    def read_and_change(mapped):
        content = read(mapped)
        change(other, path)
        return content

    monkeypatch.setattr(open_files, "MAX_COPIED_BYTES", limit)
    monkeypatch.setattr(module, name, read_and_change)
    with pytest.raises(ModelFileError, match=r"live\.onnx was changed or replaced while it was loaded: load it again"):
        Model.load(path, "cpu", verify=False)


def relink(path):
    os.link(path, path.with_name("again.onnx"))


def rename_twice(path):
    os.rename(path, path.with_name("away.onnx"))
    os.rename(path.with_name("away.onnx"), path)


@pytest.fixture
def load_with_change(path, monkeypatch):
    """Return a function that loads the file and calls a function with its path in between."""

    def load(change, verify):
        read = session.read_mapped_model

        def read_and_change(mapped):
            content = read(mapped)
            change(path)
            return content

        monkeypatch.setattr(session, "read_mapped_model", read_and_change)
        return Model.load(path, "cpu", verify=verify)

    return load


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("change", [lambda path: path.chmod(0o600), relink, rename_twice], ids=["chmod", "ln", "mv"])
def test_new_mode_or_name_while_a_file_is_loaded_is_harmless(path, load_with_change, change, verify):
    expected = text_of(path)
    with load_with_change(change, verify) as model:
        assert model.generate("hello").text == expected


@pytest.mark.parametrize("verify", [False, True])
def test_other_bytes_whose_time_is_set_back_while_a_file_is_loaded_are_an_error(path, other, load_with_change, verify):
    def change(path):
        status = path.stat()
        write_in_place(path, other.read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(ModelFileError):
        load_with_change(change, verify)


def test_run_does_not_begin_if_a_file_is_cut_short_while_it_waits_for_a_slot(path, monkeypatch):
    model, waits, runs = Model.load(path, "cpu"), threading.Event(), []
    monkeypatch.setattr(Session, "_run", lambda *arguments: runs.append(arguments))

    class Slots(RunSlots):
        def __enter__(self):
            waits.set()
            super().__enter__()

    slots = model.engine.session.run_slots = Slots(1)
    with ThreadPoolExecutor(1) as pool:
        with slots:
            waits.clear()
            result = pool.submit(model.generate, "hello")
            assert waits.wait(60)
            os.truncate(path, 0)
        with pytest.raises(ModelChangedError):
            result.result(60)
    assert not runs


def test_change_during_a_run_is_an_error_of_this_run(path, monkeypatch):
    model, run = Model.load(path, "cpu"), Session._run

    def run_and_change(self, *arguments):
        run(self, *arguments)
        write_in_place(path, with_changed_byte(path))

    monkeypatch.setattr(Session, "_run", run_and_change)
    with pytest.raises(ModelChangedError):
        model.generate("hello", max_new_tokens=1)


def test_request_of_an_event_loop_gets_the_error_and_the_thread_goes_on(path):
    async def results():
        async with AsyncModel(Model.load(path, "cpu")) as model:
            first = await model.generate("hello")
            content = path.read_bytes()
            write_in_place(path, with_changed_byte(path))
            with pytest.raises(ModelChangedError):
                await model.generate("hello")
            write_in_place(path, content)
            return first.text, (await model.generate("hello")).text

    first, second = asyncio.run(results())
    assert first == second


@pytest.fixture
def copies(monkeypatch, tmp_path):
    """Return a function that returns the copies in this test's folder that the process maps."""
    monkeypatch.undo()
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return lambda: [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("change", [lambda path: b"", with_changed_byte], ids=["cut", "other bytes"])
def test_small_file_is_mapped_from_a_copy_that_nobody_changes(copies, path, change):
    with Model.load(path, "cpu") as model:
        assert copies()
        expected = model.generate("hello").text
        write_in_place(path, change(path))
        assert model.generate("hello").text == expected
    del model
    assert not copies()
    assert not list((path.parent / "temporary").iterdir())


def test_small_file_whose_weights_are_in_a_file_of_any_name_is_not_copied(copies, path, tmp_path):
    expected = text_of(path)
    model = onnx.load(path)
    assert model.metadata_props.pop().key == DIGEST_KEY
    onnx.save_model(model, tmp_path / "own.onnx", save_as_external_data=True, location="own.weights", size_threshold=64)
    assert (tmp_path / "own.weights").stat().st_size
    with Model.load(tmp_path / "own.onnx", "cpu") as loaded:
        assert not copies()
        assert loaded.generate("hello").text == expected


def test_small_file_without_a_place_for_its_copy_is_watched(copies, path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    model = Model.load(path, "cpu")
    assert not copies()
    write_in_place(path, with_changed_byte(path))
    with pytest.raises(ModelChangedError):
        model.generate("hello")


PROGRAM = """
import os, sys, threading
from tformer_runtime import Model
from tformer_runtime.base.crash_reports import report_crashes
from tformer_runtime.format import open_files
from tformer_runtime.format.open_files import OpenFiles
report_crashes()
open_files.MAX_COPIED_BYTES = -1
model = Model.load(sys.argv[1], "cpu", threads=2)
OpenFiles.check = lambda self: None  # as if the file was cut short after the check
os.truncate(sys.argv[1], 0)
thread = threading.Thread(target=model.generate, args=("hello",))
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of other systems may be another")
def test_bus_error_names_the_file(path):
    ended = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGBUS, ended.stderr
    assert ended.stderr.startswith("Fatal Python error: Bus error")
    assert f"in model {path}" in ended.stderr


def test_files_are_closed_with_their_model(path):
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    Model.load(path, "cpu").close()
    before = num_open()
    model = Model.load(path, "cpu")
    assert num_open() > before
    model.close()
    assert num_open() == before
    model = Model.load(path, "cpu")
    del model
    assert num_open() == before
