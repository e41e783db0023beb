"""Command lines, files and streams that no user means: one sentence and exit status 1, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.command_lines import run

from tformer_runtime import Model, OptionError

RUN = "from tformer_runtime.cli.main import main; main()"
EXPORT = "from tformer_export.cli import main; main()"


def in_a_process(code, *arguments, shell=""):
    """Return the status and standard error of a command, with a redirection of the shell."""
    line = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {shell}', "bash", *line], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, timeout=300
    )
    return done.returncode, done.stderr.decode()


def sentence(status, err):
    assert status == 1, err
    assert "Traceback" not in err
    *others, last = err.splitlines()
    assert all(line.startswith("device: ") for line in others)
    return last


def test_full_and_closed_standard_output(path):
    assert "cannot be written: No space left on device" in sentence(
        *in_a_process(RUN, path, "hello", shell="> /dev/full")
    )
    assert "standard output is closed" in sentence(*in_a_process(RUN, path, "hello", shell=">&-"))


def test_reader_that_goes_away_ends_the_command_in_silence(path):
    status, err = in_a_process(RUN, path, *["hello"] * 40, shell="| true; exit ${PIPESTATUS[0]}")
    assert status in (0, 1)
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("code", [RUN, EXPORT])
def test_named_pipes_and_devices_are_no_models(code, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", "/dev/zero"):
        output = ("-o", tmp_path / "out.onnx") if code is EXPORT else ("hello",)
        message = sentence(*in_a_process(code, source, *output))
        assert "pipe" in message or "device" in message
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-beams", 1000000), "--num-beams must be a whole number of at most 4,096, not 1000000"),
        (("--num-beams", 10**20), "--num-beams must be a whole number of at most 4,096"),
        (("--num-return-sequences", 100000), "--num-return-sequences must be a whole number of at most 4,096"),
        (("--max-new-tokens", 10**20), "--max-new-tokens must be a whole number of at most 2,147,483,647"),
        (("--seed", 10**20), "--seed must be a whole number of at most 18,446,744,073,709,551,615"),
        (("--seed", 3), "--seed 3 changes nothing without sampling: set a temperature"),
        (("--length-penalty", "1e308"), "--length-penalty must be a number from -50 to 50"),
        (("--patience", "1e308"), "--patience must be more than 0 and at most 1000"),
        (("--json-schema", "[" * 100_000), "--json-schema is nested too deeply"),
    ],
)
def test_impossible_numbers_are_refused(path, arguments, message):
    result = run(path, "hello", *arguments)
    assert message in sentence(result.exit_code, result.stderr)


@pytest.mark.parametrize("option", ["--threads", "--workers"])
def test_more_threads_than_any_machine_has_are_a_usage_error(path, option):
    result = run(path, "hello", option, 100000)
    assert result.exit_code == 2
    assert "is not in the range 1<=x<=1024" in result.stderr


def test_threads_and_workers_of_python_are_bounded(path):
    with pytest.raises(OptionError, match="threads must be a whole number of at most 1,024, not 100000000"):
        Model.load(path, "cpu", threads=10**8)
    with pytest.raises(OptionError, match="workers must be a whole number of at most 1,024"):
        list(Model.load(path, "cpu").generate_batch(["hello"], workers=10**5))


def test_error_that_nobody_foresaw_is_a_sentence_and_a_file(path, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise ZeroDivisionError("half a character: \ud800\nand a second line")

    monkeypatch.setattr("tformer_runtime.cli.main.read_manifest", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(path, "--info")
    line = sentence(result.exit_code, result.stderr)
    start, _, report = line.rpartition(" ")
    assert start == (
        "tformer-run: an error that was not foreseen, ZeroDivisionError: half a character: \\ud800: please report the "
        "traceback, which is in"
    )
    text = Path(report).read_text()
    assert "Traceback (most recent call last)" in text
    assert "in fail" in text


def test_streams_that_are_not_used_may_be_closed(path, tmp_path):
    output = tmp_path / "out.txt"
    status, err = in_a_process(RUN, path, "hello", "--output-file", output, shell=">&-")
    assert (status, output.read_text().count("\n")) == (0, 1), err
    assert "standard input is closed" in sentence(*in_a_process(RUN, path, "--input-file", "-", shell="<&-"))


def test_error_after_results_that_nobody_takes_is_told_once(path):
    status, err = in_a_process(RUN, path, "hello", "é", "--num-beams", "2", shell="> /dev/full")
    assert status == 1
    assert "Exception ignored" not in err
    assert "Traceback" not in err
