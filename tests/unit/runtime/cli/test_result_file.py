"""ResultFile: a run that is interrupted at any system call can be resumed, with the same results as an uninterrupted
run.
"""

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
OPTIONS = {"--num-beams": 2, "--json": None}


@pytest.fixture(autouse=True)
def frequent_journal(monkeypatch):
    monkeypatch.setattr(result_file, "JOURNAL_INTERVAL_RESULTS", 3)
    monkeypatch.setattr(result_file, "JOURNAL_INTERVAL_SECONDS", 1e9)


def write(path, inputs=INPUTS, run_options=OPTIONS, fails_at=None, read_ahead=4, **options):
    """Write a result file.

    fails_at: the number of results before an error.
    read_ahead: the number of inputs that are read before their results are written, as in batches.
    """
    with ResultFile(path, run_options, **options) as out:
        lines = out.rest(inputs)
        waiting = list(islice(lines, read_ahead))
        for index in range(out.done, len(inputs)):
            if index == fails_at:
                raise ValueError("no more")
            out.add(f"{index}: {waiting.pop(0)}\n")
            waiting += islice(lines, 1)
    return out


def write_and_fail(path, fails_at=5, **options):
    with pytest.raises(ValueError, match="no more") as caught:
        write(path, fails_at=fails_at, **options)
    return getattr(caught.value, "__notes__", [])


def refusal(path, **options):
    """Return the message of the OutputError of a run. Assert that the run changes no file."""
    before = {p: p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises(OutputError) as caught:
        write(path, **options)
    assert {p: p.read_bytes() for p in path.parent.iterdir()} == before
    return str(caught.value).replace(f"{path.parent}/", "")


def test_finished_run_leaves_only_the_result_file(tmp_path):
    assert write(tmp_path / "out").done == 11
    assert (tmp_path / "out").read_text() == EXPECTED
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("resumed", [False, True])
def test_run_killed_at_any_system_call_can_be_resumed(tmp_path, monkeypatch, resumed):
    """The files on the disk before and after each call that writes are the possible states after a kill."""
    path, kills = tmp_path / "run" / "out", tmp_path / "kills"
    path.parent.mkdir()
    if resumed:
        write_and_fail(path)

    def record_states(call):
        def recorded_call(*arguments, **options):
            shutil.copytree(path.parent, kills / str(len(os.listdir(kills))))
            result = call(*arguments, **options)
            shutil.copytree(path.parent, kills / str(len(os.listdir(kills))))
            return result

        return recorded_call

    kills.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", record_states(os.fsync))
        for name in ("replace", "unlink", "open"):
            patched.setattr(Path, name, record_states(getattr(Path, name)))
        write(path, resume=resumed)
    states = sorted(kills.iterdir(), key=lambda kill: int(kill.name))
    done_counts = set()
    for state in states:
        out, part = state / "out", state / "out.part"
        if out.exists():
            assert out.read_text() == EXPECTED
            with pytest.raises(OutputError, match="there is nothing to resume"):
                ResultFile(out, OPTIONS, resume=True)
            continue
        with part.open("a") as file:
            file.write("incomplete li")
        run = ResultFile(out, OPTIONS, resume=True)
        done_counts.add(run.done)
        write(out, resume=True)
        assert out.read_text() == EXPECTED
        assert os.listdir(state) == ["out"]
    assert done_counts == ({5, 8, 11} if resumed else {0, 3, 6, 9, 11})


def test_error_keeps_finished_results_and_names_resume(tmp_path):
    assert write_and_fail(tmp_path / "out") == ["--resume goes on after input 5"]
    assert sorted(os.listdir(tmp_path)) == ["out.part", "out.part.json"]
    assert write_and_fail(tmp_path / "out", fails_at=7, resume=True) == ["--resume goes on after input 7"]
    assert write(tmp_path / "out", resume=True).done == 11
    assert (tmp_path / "out").read_text() == EXPECTED


@pytest.mark.parametrize("options", [{"fails_at": 0}, {"keep": False}])
def test_error_without_results_leaves_no_files(tmp_path, options):
    assert write_and_fail(tmp_path / "out", **options) == []
    assert os.listdir(tmp_path) == []


def test_resume_without_a_journal_starts_from_the_beginning(tmp_path):
    (tmp_path / "out.part").write_text("something")
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_text() == EXPECTED
    assert os.listdir(tmp_path) == ["out"]


def test_unfinished_inputs_may_change_before_resume(tmp_path):
    write_and_fail(tmp_path / "out")
    write(tmp_path / "out", [*INPUTS[:5], "another"], resume=True)
    assert (tmp_path / "out").read_text().splitlines()[4:] == ["4: input 4", "5: another"]


def test_existing_or_damaged_files_are_refused(tmp_path):
    path = tmp_path / "out"
    write_and_fail(path)
    assert refusal(path) == (
        "out.part holds results of an interrupted run: give --resume to continue, or --force to start over"
    )
    assert refusal(path, resume=True, run_options=OPTIONS | {"--num-beams": 3}) == (
        "--num-beams is 3, but was 2 in the run that wrote out.part: give the same, or start over with --force"
    )
    assert "--json is given, but was not given in" in refusal(path, resume=True, run_options=OPTIONS | {"--json": True})
    assert "--ids is given, but was not given" in refusal(path, resume=True, run_options=OPTIONS | {"--ids": True})
    for inputs in (["other", *INPUTS[1:]], INPUTS[:4], []):
        assert "the first 5 inputs differ from the inputs whose results out.part holds" in refusal(
            path, resume=True, inputs=inputs
        )
    part = (tmp_path / "out.part").read_bytes()
    (tmp_path / "out.part").write_bytes(part[:10])
    assert "out.part has lost results" in refusal(path, resume=True)
    (tmp_path / "out.part").write_bytes(part)
    entries = (
        {"inputs": 1, "other": 2}, {"inputs": -1, "bytes": 0, "digest": ""},
        {"inputs": 2**80, "bytes": 0, "digest": ""},
        {"inputs": True, "bytes": 0, "digest": ""}, {"inputs": 1, "bytes": 0, "digest": 3}, [], None,
    )  # fmt: skip
    damaged = [json.dumps({"progress": entry, "options": {}}) for entry in entries]
    for text in ("", "{", "[]", "[" * 100_000, '{"progress": {}}', *damaged):
        (tmp_path / "out.part.json").write_text(text)
        for options in ({"resume": True}, {"force": True}):  # it may be a file of the user's
            assert refusal(path, **options) == (
                "out.part.json is not a journal of tformer-run, whose place it takes: move it away"
            )
    (tmp_path / "out.part.json").unlink()
    write(path, force=True)
    assert path.read_text() == EXPECTED
    assert refusal(path) == "out exists already: give --force to overwrite it"
    assert refusal(path, resume=True) == "out exists and out.part does not: there is nothing to resume"


def test_links_do_not_lead_to_files_of_others(tmp_path):
    path, other = tmp_path / "out", tmp_path / "other"
    other.write_text("of another")
    for name in ("out.part.json.new", "out.part"):
        os.symlink(other, tmp_path / name)
    with pytest.raises(OutputError, match="symbolic links"):
        write(path, force=True)
    (tmp_path / "out.part").unlink()
    write(path)
    assert path.read_text() == EXPECTED
    assert other.read_text() == "of another"
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_old_result_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    write_and_fail(path, force=True)
    assert path.read_text() == "old"
    assert refusal(path, resume=True) == "out exists already: give --force to overwrite it"
    assert write(path, resume=True, force=True).done == 11
    assert path.read_text() == EXPECTED


def test_second_run_on_the_same_file_is_refused(tmp_path):
    path = tmp_path / "out"
    write_and_fail(path)
    with ResultFile(path, OPTIONS, resume=True) as first:
        assert "another run is writing" in refusal(path, resume=True)
        assert "another run is writing" in refusal(path, force=True)
        for index, line in enumerate(first.rest(INPUTS), first.done):
            first.add(f"{index}: {line}\n")
    assert path.read_text() == EXPECTED


def test_unwritable_path_raises_output_error(tmp_path):
    with pytest.raises(OutputError, match="none/out cannot be written: No such file or directory"):
        write(tmp_path / "none" / "out")
    for place in (tmp_path, Path("/dev/null")):
        with pytest.raises(OutputError, match="is not a regular file"):
            write(place, force=True)


def test_full_disk_keeps_journaled_results(tmp_path, monkeypatch):
    path = tmp_path / "out"
    flush, calls = os.fsync, []

    def fail_on_full_disk(file):
        calls.append(file)
        if len(calls) > 8:
            raise OSError(28, "No space left on device")
        flush(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_on_full_disk)
        with pytest.raises(OutputError, match="out cannot be written: No space left on device") as caught:
            write(path)
    assert caught.value.__notes__ == ["--resume goes on after input 9"]
    write(path, resume=True)
    assert path.read_text() == EXPECTED
