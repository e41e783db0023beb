"""tformer-run writes messages and progress to standard error, and keeps the line breaks of a chat's only answer."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections import deque

import pytest
from support.command_lines import PROGRAM, failed, run, usage_error
from support.toy_models import Toy, letters, with_manifest

from tformer_runtime import Model
from tformer_runtime.cli.input_lines import InputLines

SHORT = ["--max-new-tokens", "8"]


def run_on_a_terminal(*arguments, stdin=subprocess.DEVNULL):
    """Return the results, and the text on a terminal that is standard error."""
    controller, terminal = pty.openpty()
    result = subprocess.run(
        [*PROGRAM, *map(str, arguments)], stdin=stdin, stdout=subprocess.PIPE, stderr=terminal, check=True, text=True
    )
    os.close(terminal)
    try:
        terminal_text = os.read(controller, 1 << 16).decode()
    except OSError:  # nothing was written, and the other end is closed
        terminal_text = ""
    os.close(controller)
    return result.stdout, terminal_text


def test_quiet_writes_no_messages(path, tmp_path):
    (tmp_path / "in").write_text("hello\n" * 40)
    plain = run(path, "--input-file", tmp_path / "in", *SHORT)
    assert plain.stderr == "device: cpu\n"
    quiet = run(path, "--input-file", tmp_path / "in", *SHORT, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (plain.stdout, "")
    for options in ([], ["--resume"]):
        out = run(path, "hello", *SHORT, "--output-file", tmp_path / f"out{len(options)}", "--quiet", *options)
        assert (out.exit_code, out.stdout, out.stderr) == (0, "", "")


def test_quiet_shows_no_progress(path, tmp_path):
    (tmp_path / "in").write_text("hello\n" * 40)
    results, terminal_text = run_on_a_terminal(path, "--input-file", tmp_path / "in", *SHORT, "--quiet")
    assert len(results.splitlines()) == 40
    assert terminal_text == ""


def test_quiet_writes_errors(path):
    result = run(path, "é", "--quiet")
    assert failed(result) == "input 1: 'é' (character 1 of the input) is not in the model's vocabulary"
    assert len(result.stderr.splitlines()) == 1


def test_verbose_names_device_workers_and_batch_size(path):
    result = run(path, "hello", *SHORT, "--verbose", "--batch-size", 3, "--workers", 2, "--device", "cpu")
    assert result.stderr.splitlines() == ["device: cpu", "workers: 2", "batch size: 3"]
    assert result.stdout == run(path, "hello", *SHORT).stdout
    assert "batch size: 32" in run(path, "hello", *SHORT, "--verbose").stderr


@pytest.mark.parametrize("arguments", [["é"], ["a", "--num-beams", "0"]])
def test_verbose_writes_the_traceback_of_an_error(path, arguments):
    verbose, plain = run(path, *arguments, "--verbose"), run(path, *arguments)
    assert "Traceback (most recent call last):" in verbose.stderr
    assert "Traceback" not in plain.stderr
    assert verbose.exit_code == plain.exit_code
    assert verbose.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]


def test_quiet_and_verbose_exclude_each_other(path):
    assert (
        usage_error(run(path, "a", "--quiet", "--verbose")) == "--quiet writes nothing but errors: not with --verbose"
    )


def test_progress_of_a_file_estimates_the_remaining_time(path, tmp_path):
    (tmp_path / "in").write_text("hello\n" * 400)
    arguments = (path, *SHORT, "--batch-size", 1, "--workers", 1)
    results, terminal_text = run_on_a_terminal(*arguments, "--input-file", tmp_path / "in")
    assert len(results.splitlines()) == 400
    assert "inputs" in terminal_text
    assert "remaining" in terminal_text
    with (tmp_path / "in").open() as file:
        assert "remaining" in run_on_a_terminal(*arguments, stdin=file)[1]


def test_progress_of_a_pipe_has_no_estimate(path):
    with subprocess.Popen(["printf", "hello\\n%.0s", *map(str, range(40))], stdout=subprocess.PIPE) as source:
        results, terminal_text = run_on_a_terminal(path, *SHORT, stdin=source.stdout)
    assert len(results.splitlines()) == 40
    assert "inputs" in terminal_text
    assert "remaining" not in terminal_text


def test_progress_of_a_resumed_run_counts_the_finished_inputs(path, tmp_path):
    lines = ["hello"] * 30 + ["é"] + ["hello"] * 9
    (tmp_path / "in").write_text("\n".join(lines))
    arguments = (path, *SHORT, "--input-file", tmp_path / "in", "--output-file", tmp_path / "out")
    failed(run(*arguments))
    lines[30] = "hello"
    (tmp_path / "in").write_text("\n".join(lines))
    _, terminal_text = run_on_a_terminal(*arguments, "--resume")
    counts = [int(count) for count in re.findall(r"(\d+) inputs ", terminal_text.partition("are finished")[2])]
    assert min(counts) >= 30
    assert len((tmp_path / "out").read_text().splitlines()) == 40


def test_input_lines_record_their_end_offsets(tmp_path):
    """Offsets are in bytes, not in characters."""
    (tmp_path / "in").write_bytes("ab\r\né\n\nlast".encode())
    lines = InputLines(str(tmp_path / "in"))
    lines.line_ends = deque()
    assert list(lines) == ["ab", "é", "", "last"]
    assert list(lines.line_ends) == [4, 7, 8, 12]
    assert lines.size == 12
    assert InputLines(str(tmp_path / "none")).size is None


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Return a file with a chat template whose answer to "hello" has a line break, and this answer."""
    folder = tmp_path_factory.mktemp("chat")
    plain = Toy(encoder=False, seed=5, end=()).write(folder / "plain.onnx")
    text = Model.load(plain, "cpu").generate("hello", max_new_tokens=8).text
    replaced_letter = next(letter for letter in text[1:-1] if letter not in "hello")
    definition = json.loads(letters().to_str())
    vocabulary = definition["model"]["vocab"]
    vocabulary["\n"] = vocabulary.pop(replaced_letter)
    changes = {"tokenizers": (json.dumps(definition),), "chat_template": "<s>{{ messages[-1].content }}"}
    path = with_manifest(plain, folder / "chat.onnx", **changes)
    return str(path), text.replace(replaced_letter, "\n")


def test_the_only_answer_of_a_chat_keeps_its_line_breaks(chat, tmp_path):
    path, answer = chat
    assert run(path, "hello", *SHORT, "--chat").stdout == f"{answer}\n"
    assert run(path, *SHORT, "--chat", stdin="hello\n").stdout == f"{answer}\n"
    assert run(path, "hello", *SHORT, "--chat", "--stream").stdout == f"{answer}\n"
    assert json.loads(run(path, "hello", *SHORT, "--chat", "--json").stdout)["text"] == answer


def test_each_of_several_answers_of_a_chat_is_one_line(chat, tmp_path):
    path, answer = chat
    line = " ".join(answer.splitlines())
    assert run(path, "hello", "hello", *SHORT, "--chat").stdout == f"{line}\n" * 2
    assert run(path, "hello", *SHORT).stdout == f"{line}\n"  # without --chat
    beams = run(path, "hello", *SHORT, "--chat", "--num-beams", 2, "--num-return-sequences", 2)
    assert len(beams.stdout.splitlines()) == 2
    result = run(path, "hello", '[{"role": "user"}]', *SHORT, "--chat")
    assert "a conversation is a text" in failed(result, before=1)
    assert result.stdout == f"{line}\n"


@pytest.fixture(scope="module")
def greek(tmp_path_factory):
    """Return a file whose texts are Greek letters, and its text for "hello"."""
    folder = tmp_path_factory.mktemp("greek")
    definition = json.loads(letters().to_str())
    definition["decoder"] = {
        "type": "Sequence",
        "decoders": [definition["decoder"]]
        + [
            {"type": "Replace", "pattern": {"String": latin}, "content": chr(0x3B1 + i)}
            for i, latin in enumerate("abcdefghijklmnopqrstuvwxyz")
        ],
    }
    plain = Toy(seed=27).write(folder / "plain.onnx")
    path = with_manifest(plain, folder / "greek.onnx", tokenizers=(json.dumps(definition),))
    text = Model.load(path, "cpu").generate("hello", max_new_tokens=8).text
    assert text
    assert not text.isascii()
    return path, text


@pytest.mark.parametrize("options", [[], ["--stream"], ["--json"]])
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "koi8-r", "utf-8"])
def test_output_of_another_encoding_is_utf_8_or_named(greek, encoding, options):
    path, text = greek
    command = [*PROGRAM, str(path), "hello", *SHORT, "--device", "cpu", *options]
    result = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=False)
    if encoding in ("ascii", "utf-8"):
        assert (result.returncode, result.stderr) == (0, b"")
        assert text in result.stdout.decode()
    else:
        (line,) = result.stderr.decode(encoding).splitlines()
        assert result.returncode == 1
        assert line.startswith(f"tformer-run: standard output has the encoding {encoding}, which lacks ")
        assert "set PYTHONIOENCODING=utf-8" in line


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
def test_name_with_half_a_character_is_told_without_advice_about_the_encoding(greek, tmp_path, encoding, options):
    path = os.fsencode(tmp_path) + b"/\xff.onnx"
    os.link(greek[0], path)
    command, environment = [*PROGRAM, path, "--info", *options], {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    (line,) = result.stderr.decode(encoding).splitlines()
    assert result.returncode == 1
    assert line.startswith("tformer-run: the results hold '\\udcff' (character ")
    assert "rename the file" in line
    assert "PYTHONIOENCODING" not in line


@pytest.mark.parametrize("command", ["tformer_runtime.cli.main", "tformer_export.cli", "tformer_serve.cli"])
def test_small_stack_is_told_at_the_start(path, command):
    program = [sys.executable, "-c", f"from {command} import main; main()", path]
    call = ["sh", "-c", 'ulimit -s 200 && exec "$@"', "sh", *program]
    result = subprocess.run(call, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert result.returncode == 1
    assert result.stderr.endswith("limited to 200 KiB, and 256 KiB are the least: raise the limit (ulimit -s 8192)\n")
    assert len(result.stderr.splitlines()) == 1
