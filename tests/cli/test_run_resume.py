"""tformer-run --resume continues a killed run and writes the same file as an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time

import pytest
from support.command_lines import failed, run, start_process
from support.toy_models import Toy

OPTIONS = ["--workers", "1", "--max-new-tokens", "4", "--batch-size", "2", "--device", "cpu"]  # windows of 32 inputs
SAMPLES = ["--json", "--num-return-sequences", "2", "--temperature", "1.3", "--seed", "5"]
FREQUENT_JOURNAL_PROGRAM = (
    "from tformer_runtime.cli import main, result_file; result_file.JOURNAL_INTERVAL_RESULTS = 8; main.main()"
)
LINES = ["".join(random.Random(i).choices("abcxyz", k=1 + i % 11)) for i in range(200)]


@pytest.fixture(scope="module")
def expected(path):
    return run(path, *OPTIONS, stdin=join_lines(LINES)).stdout


def join_lines(lines):
    return "".join(f"{line}\n" for line in lines)


def start_run(path, out, lines, *options):
    """Return the process of a run that has recorded new results in its journal and waits for more lines."""
    journal = out.with_name(f"{out.name}.part.json")
    before = num_recorded_inputs(journal)
    command = start_process(
        sys.executable, "-c", FREQUENT_JOURNAL_PROGRAM, path, *OPTIONS, "--output-file", out, *options
    )
    assert command.stdin is not None
    command.stdin.write(join_lines(lines))
    command.stdin.flush()
    while num_recorded_inputs(journal) == before:
        assert command.poll() is None
        time.sleep(0.01)
    return command


def num_recorded_inputs(journal):
    """Return the number of finished inputs in a journal."""
    return json.loads(journal.read_text())["progress"]["inputs"] if journal.exists() else 0


def start_and_kill_run(*arguments):
    """Start a run and kill it after it has recorded results."""
    command = start_run(*arguments)
    command.kill()
    command.communicate()
    assert command.returncode == -signal.SIGKILL


@pytest.mark.parametrize("options", [[], SAMPLES], ids=["text", "samples"])
def test_killed_run_is_resumed(path, tmp_path, expected, options):
    out = tmp_path / "out"
    start_and_kill_run(path, out, LINES[:100], *options)
    with (tmp_path / "out.part").open("a") as file:
        file.write('{"index": 2')
    if not options:  # the resumed run is killed too
        start_and_kill_run(path, out, LINES, "--resume")
    result = run(path, *OPTIONS, *options, "--output-file", out, "--resume", stdin=join_lines(LINES))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert out.read_text() == (run(path, *OPTIONS, *options, stdin=join_lines(LINES)).stdout if options else expected)
    assert os.listdir(tmp_path) == ["out"]


def test_interrupted_run_is_resumed(path, tmp_path, expected):
    command = start_run(path, tmp_path / "out", LINES[:100])
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 128 + signal.SIGINT
    num_done = num_recorded_inputs(tmp_path / "out.part.json")
    assert errors.splitlines()[-1] == f"tformer-run: interrupted; --resume goes on after input {num_done}"
    result = run(path, *OPTIONS, "--output-file", tmp_path / "out", "--resume", stdin=join_lines(LINES))
    assert result.stderr == f"resume: {num_done} of the inputs are finished\n"
    assert (tmp_path / "out").read_text() == expected


@pytest.fixture(scope="module")
def stopped_folder(path, tmp_path_factory):
    """Return a folder with the lines, one of them invalid, and the files that a run stopped by this line leaves."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "in").write_text(join_lines([*LINES[:100], "é", *LINES[101:]]))
    message = failed(run(path, *OPTIONS, "--input-file", folder / "in", "--output-file", folder / "out"))
    assert message == (
        f"{folder / 'in'}, line 101: 'é' (character 1 of the input) is not in the model's vocabulary; "
        "--resume goes on after input 100"
    )
    assert sorted(os.listdir(folder)) == ["in", "out.part", "out.part.json"]
    return folder


@pytest.fixture
def folder(stopped_folder, tmp_path):
    return shutil.copytree(stopped_folder, tmp_path / "run")


def test_run_is_resumed_after_an_invalid_line_is_corrected(path, folder, expected):
    resumed = ["--input-file", folder / "in", "--output-file", folder / "out", "--resume"]
    message = failed(run(path, *OPTIONS, *resumed))
    assert "line 101: 'é'" in message  # the line number of the whole file
    assert message.endswith("--resume goes on after input 100")
    (folder / "in").write_text(join_lines(LINES))
    assert (
        run(path, *OPTIONS, *resumed, "--batch-size", 3, "--workers", 2).exit_code == 0
    )  # batch size and workers may change
    assert (folder / "out").read_text() == expected
    assert failed(run(path, *OPTIONS, *resumed)).endswith("there is nothing to resume")


def test_run_is_resumed_with_inputs_as_arguments(path, folder):
    words = [*LINES[:100], "abc"]
    assert run(path, *words, *OPTIONS, "--output-file", folder / "out", "--resume").exit_code == 0
    assert (folder / "out").read_text() == run(path, *words, *OPTIONS).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-beams", 2], "--num-beams is 2, but was not given in"),
        (["--max-new-tokens", 7], "--max-new-tokens is 7, but was 4 in"),
        (["--bad-words-ids", "3,4"], "--bad-words-ids is [[3, 4]], but was not given in"),
        (["--json"], "--json is given, but was not given in"),
        (["--input-file", os.devnull], "the first 100 inputs differ from"),
    ],
)
def test_resume_with_other_options_or_inputs_is_refused(path, folder, options, message):
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    result = run(path, *OPTIONS, "--input-file", folder / "in", "--output-file", folder / "out", "--resume", *options)
    assert failed(result).startswith(message)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before


def test_resume_with_another_model_is_refused(path, folder):
    other = Toy(seed=27, max_length=63).write(folder / "other.onnx")
    result = run(other, *OPTIONS, "--input-file", folder / "in", "--output-file", folder / "out", "--resume")
    assert failed(result).startswith("MODEL.onnx is ")


def test_new_run_over_a_partial_output_needs_force(path, folder, expected):
    (folder / "in").write_text(join_lines(LINES))
    resumed = ["--input-file", folder / "in", "--output-file", folder / "out"]
    assert failed(run(path, *OPTIONS, *resumed)) == (
        f"{folder / 'out.part'} holds results of an interrupted run: give --resume to continue, or --force to start "
        "over"
    )
    assert run(path, *OPTIONS, *resumed, "--force").exit_code == 0
    assert (folder / "out").read_text() == expected
    assert sorted(os.listdir(folder)) == ["in", "out"]


def test_resume_without_a_partial_output_starts_a_run(path, tmp_path, expected):
    result = run(path, *OPTIONS, "--output-file", tmp_path / "out", "--resume", stdin=join_lines(LINES))
    assert result.stderr == "resume: 0 of the inputs are finished\n"
    assert (tmp_path / "out").read_text() == expected
