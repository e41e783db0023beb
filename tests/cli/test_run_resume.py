"""--resume: a run that was killed goes on, and its file is the one of a run that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time

import pytest
from support.command_lines import begun, failed, run
from support.toy_models import Toy

SMALL = ["--workers", "1", "--max-new-tokens", "4", "--batch-size", "2", "--device", "cpu"]  # windows of 32 inputs
SAMPLES = ["--json", "--num-return-sequences", "2", "--temperature", "1.3", "--seed", "5"]
OFTEN = "from tformer_runtime.cli import main, result_file; result_file.JOURNAL_INTERVAL_RESULTS = 8; main.main()"
LINES = ["".join(random.Random(i).choices("abcxyz", k=1 + i % 11)) for i in range(200)]


@pytest.fixture(scope="module")
def expected(path):
    return run(path, *SMALL, stdin=joined(LINES)).stdout


def joined(lines):
    return "".join(f"{line}\n" for line in lines)


def started(path, out, lines, *options):
    """A run that has done some of the lines, and waits for more. Eight are done, or more, of all but two windows."""
    journal = out.with_name(f"{out.name}.part.json")
    before = recorded(journal)
    command = begun(sys.executable, "-c", OFTEN, path, *SMALL, "--output-file", out, *options)
    assert command.stdin is not None
    command.stdin.write(joined(lines))
    command.stdin.flush()
    while recorded(journal) == before:
        assert command.poll() is None
        time.sleep(0.01)
    return command


def recorded(journal):
    return json.loads(journal.read_text())["progress"]["inputs"] if journal.exists() else 0


def killed(*arguments):
    command = started(*arguments)
    command.kill()
    command.communicate()
    assert command.returncode == -signal.SIGKILL


@pytest.mark.parametrize("options", [[], SAMPLES], ids=["text", "samples"])
def test_a_killed_run_goes_on(path, tmp_path, expected, options):
    out = tmp_path / "out"
    killed(path, out, LINES[:100], *options)
    with (tmp_path / "out.part").open("a") as file:
        file.write('{"index": 2')
    if not options:  # and is killed once more
        killed(path, out, LINES, "--resume")
    result = run(path, *SMALL, *options, "--output-file", out, "--resume", stdin=joined(LINES))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert out.read_text() == (run(path, *SMALL, *options, stdin=joined(LINES)).stdout if options else expected)
    assert os.listdir(tmp_path) == ["out"]


def test_an_interrupted_run_goes_on(path, tmp_path, expected):
    command = started(path, tmp_path / "out", LINES[:100])
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 128 + signal.SIGINT
    done = recorded(tmp_path / "out.part.json")
    assert errors.splitlines()[-1] == f"tformer-run: interrupted; --resume goes on after input {done}"
    result = run(path, *SMALL, "--output-file", tmp_path / "out", "--resume", stdin=joined(LINES))
    assert result.stderr == f"resume: {done} inputs are done\n"
    assert (tmp_path / "out").read_text() == expected


@pytest.fixture(scope="module")
def stopped(path, tmp_path_factory):
    """A folder with the lines, one of which is bad, and what a run has left that came to it."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "in").write_text(joined([*LINES[:100], "é", *LINES[101:]]))
    message = failed(run(path, *SMALL, "--input-file", folder / "in", "--output-file", folder / "out"))
    assert message == (
        f"{folder / 'in'}, line 101: 'é' (character 1 of the input) is not in the model's vocabulary; "
        "--resume goes on after input 100"
    )
    assert sorted(os.listdir(folder)) == ["in", "out.part", "out.part.json"]
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def test_a_bad_line_that_has_been_mended(path, folder, expected):
    again = ["--input-file", folder / "in", "--output-file", folder / "out", "--resume"]
    message = failed(run(path, *SMALL, *again))
    assert "line 101: 'é'" in message  # counted from the beginning of the file
    assert message.endswith("--resume goes on after input 100")
    (folder / "in").write_text(joined(LINES))
    assert run(path, *SMALL, *again, "--batch-size", 3, "--workers", 2).exit_code == 0  # how it is computed may change
    assert (folder / "out").read_text() == expected
    assert failed(run(path, *SMALL, *again)).endswith("nothing is left to resume")


def test_inputs_may_come_as_arguments(path, folder):
    words = [*LINES[:100], "abc"]
    assert run(path, *words, *SMALL, "--output-file", folder / "out", "--resume").exit_code == 0
    assert (folder / "out").read_text() == run(path, *words, *SMALL).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-beams", 2], "--num-beams is 2, and was not given for"),
        (["--max-new-tokens", 7], "--max-new-tokens is 7, and was 4 for"),
        (["--bad-words-ids", "3,4"], "--bad-words-ids is [[3, 4]], and was not given for"),
        (["--json"], "--json is given, and was not given for"),
        (["--input-file", os.devnull], "the first 100 inputs are not those that"),
    ],
)
def test_what_was_asked_for_must_be_the_same(path, folder, options, message):
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    result = run(path, *SMALL, "--input-file", folder / "in", "--output-file", folder / "out", "--resume", *options)
    assert failed(result).startswith(message)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before


def test_the_model_must_be_the_same(path, folder):
    other = Toy(seed=27, max_length=63).write(folder / "other.onnx")
    result = run(other, *SMALL, "--input-file", folder / "in", "--output-file", folder / "out", "--resume")
    assert failed(result).startswith("MODEL.onnx is ")


def test_a_run_does_not_begin_anew_by_mistake(path, folder, expected):
    (folder / "in").write_text(joined(LINES))
    again = ["--input-file", folder / "in", "--output-file", folder / "out"]
    assert failed(run(path, *SMALL, *again)) == (
        f"{folder / 'out.part'} is there, of a run that did not end: give --resume to go on, or --force to start over"
    )
    assert run(path, *SMALL, *again, "--force").exit_code == 0
    assert (folder / "out").read_text() == expected
    assert sorted(os.listdir(folder)) == ["in", "out"]


def test_with_nothing_to_resume_a_run_begins(path, tmp_path, expected):
    result = run(path, *SMALL, "--output-file", tmp_path / "out", "--resume", stdin=joined(LINES))
    assert result.stderr == "resume: 0 inputs are done\n"
    assert (tmp_path / "out").read_text() == expected
