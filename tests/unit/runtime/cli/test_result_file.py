"""ResultFile: whenever a run ends, even between two system calls, another makes the file what it would have been."""

from __future__ import annotations

import json
import os
import shutil
from itertools import islice
from pathlib import Path

import pytest

from tformer_runtime import OutputError
from tformer_runtime.cli import result_file
from tformer_runtime.cli.result_file import ResultFile

INPUTS = [f"input {i}" for i in range(11)]
EXPECTED = "".join(f"{i}: {line}\n" for i, line in enumerate(INPUTS))
ASKED = {"--num-beams": 2, "--json": None}


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(result_file, "JOURNAL_INTERVAL_RESULTS", 3)
    monkeypatch.setattr(result_file, "JOURNAL_INTERVAL_SECONDS", 1e9)


def write(path, inputs=INPUTS, asked=ASKED, most=None, ahead=4, **options):
    """Some inputs are read ahead of their results, as batches do. most: so many results, and then an error."""
    with ResultFile(path, asked, **options) as out:
        lines = out.rest(inputs)
        waiting = list(islice(lines, ahead))
        for index in range(out.done, len(inputs)):
            if index == most:
                raise ValueError("no more")
            out.add(f"{index}: {waiting.pop(0)}\n")
            waiting += islice(lines, 1)
    return out


def unfinished(path, most=5, **options):
    with pytest.raises(ValueError, match="no more") as caught:
        write(path, most=most, **options)
    return getattr(caught.value, "__notes__", [])


def refused(path, **options):
    """The sentence; what is there stays as it is."""
    before = {p: p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises(OutputError) as caught:
        write(path, **options)
    assert {p: p.read_bytes() for p in path.parent.iterdir()} == before
    return str(caught.value).replace(f"{path.parent}/", "")


def test_a_run_that_ends_leaves_its_file_alone(tmp_path):
    assert write(tmp_path / "out").done == 11
    assert (tmp_path / "out").read_text() == EXPECTED
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_kill_at_any_moment(tmp_path, monkeypatch, resumed):
    """What is on the disk before and after each call that writes there is what a kill may leave."""
    path, kills = tmp_path / "run" / "out", tmp_path / "kills"
    path.parent.mkdir()
    if resumed:
        unfinished(path)

    def watched(call):
        def watching(*arguments, **options):
            shutil.copytree(path.parent, kills / str(len(os.listdir(kills))))
            result = call(*arguments, **options)
            shutil.copytree(path.parent, kills / str(len(os.listdir(kills))))
            return result

        return watching

    kills.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", watched(os.fsync))
        for name in ("replace", "unlink", "open"):
            patched.setattr(Path, name, watched(getattr(Path, name)))
        write(path, resume=resumed)
    states = sorted(kills.iterdir(), key=lambda kill: int(kill.name))
    done = set()
    for state in states:
        out, part = state / "out", state / "out.part"
        if out.exists():
            assert out.read_text() == EXPECTED
            with pytest.raises(OutputError, match="nothing is left to resume"):
                ResultFile(out, ASKED, resume=True)
            continue
        with part.open("a") as file:
            file.write("half a li")
        run = ResultFile(out, ASKED, resume=True)
        done.add(run.done)
        write(out, resume=True)
        assert out.read_text() == EXPECTED
        assert os.listdir(state) == ["out"]
    assert done == ({5, 8, 11} if resumed else {0, 3, 6, 9, 11})


def test_an_error_keeps_what_is_done_and_says_so(tmp_path):
    assert unfinished(tmp_path / "out") == ["--resume goes on after input 5"]
    assert sorted(os.listdir(tmp_path)) == ["out.part", "out.part.json"]
    assert unfinished(tmp_path / "out", most=7, resume=True) == ["--resume goes on after input 7"]
    assert write(tmp_path / "out", resume=True).done == 11
    assert (tmp_path / "out").read_text() == EXPECTED


@pytest.mark.parametrize("options", [{"most": 0}, {"keep": False}])
def test_an_error_with_nothing_to_keep_leaves_nothing(tmp_path, options):
    assert unfinished(tmp_path / "out", **options) == []
    assert os.listdir(tmp_path) == []


def test_without_a_journal_a_run_starts_from_the_beginning(tmp_path):
    (tmp_path / "out.part").write_text("something")
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_text() == EXPECTED
    assert os.listdir(tmp_path) == ["out"]


def test_inputs_that_are_not_done_may_change(tmp_path):
    unfinished(tmp_path / "out")
    write(tmp_path / "out", [*INPUTS[:5], "another"], resume=True)
    assert (tmp_path / "out").read_text().splitlines()[4:] == ["4: input 4", "5: another"]


def test_what_stands_in_the_way(tmp_path):
    path = tmp_path / "out"
    unfinished(path)
    assert refused(path) == (
        "out.part is there, of a run that did not end: give --resume to go on, or --force to start over"
    )
    assert refused(path, resume=True, asked=ASKED | {"--num-beams": 3}) == (
        "--num-beams is 3, and was 2 for out.part: ask for the same, or start over with --force"
    )
    assert "--json is given, and was not given for" in refused(path, resume=True, asked=ASKED | {"--json": True})
    assert "--ids is given, and was not given" in refused(path, resume=True, asked=ASKED | {"--ids": True})
    for inputs in (["other", *INPUTS[1:]], INPUTS[:4], []):
        assert "the first 5 inputs are not those that out.part has results of" in refused(
            path, resume=True, inputs=inputs
        )
    kept = (tmp_path / "out.part").read_bytes()
    (tmp_path / "out.part").write_bytes(kept[:10])
    assert "out.part has lost results" in refused(path, resume=True)
    (tmp_path / "out.part").write_bytes(kept)
    for text in ("", "{", "[]", '{"progress": {}}', json.dumps({"progress": {"inputs": 1, "other": 2}, "options": {}})):
        (tmp_path / "out.part.json").write_text(text)
        assert refused(path, resume=True) == "out.part.json is not a journal of tformer-run: start over with --force"
    write(path, force=True)
    assert path.read_text() == EXPECTED
    assert refused(path) == "out exists already: give --force to overwrite it"
    assert refused(path, resume=True) == "out is there and out.part is not: nothing is left to resume"


def test_an_old_file_stays_until_the_end(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    unfinished(path, force=True)
    assert path.read_text() == "old"
    assert refused(path, resume=True) == "out exists already: give --force to overwrite it"
    assert write(path, resume=True, force=True).done == 11
    assert path.read_text() == EXPECTED


def test_two_runs_do_not_write_one_file(tmp_path):
    path = tmp_path / "out"
    unfinished(path)
    with ResultFile(path, ASKED, resume=True) as first:
        assert "another run is writing" in refused(path, resume=True)
        assert "another run is writing" in refused(path, force=True)
        for index, line in enumerate(first.rest(INPUTS), first.done):
            first.add(f"{index}: {line}\n")
    assert path.read_text() == EXPECTED


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match="none/out cannot be written: No such file or directory"):
        write(tmp_path / "none" / "out")
    for place in (tmp_path, Path("/dev/null")):
        with pytest.raises(OutputError, match="is not a file that results could replace"):
            write(place, force=True)


def test_a_full_disk_keeps_what_the_journal_says(tmp_path, monkeypatch):
    path = tmp_path / "out"
    flush, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) > 8:
            raise OSError(28, "No space left on device")
        flush(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="out cannot be written: No space left on device") as caught:
            write(path)
    assert caught.value.__notes__ == ["--resume goes on after input 9"]
    write(path, resume=True)
    assert path.read_text() == EXPECTED
