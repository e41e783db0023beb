"""tformer-run writes the results of Model.generate to standard output or a file, and errors as one sentence."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.command_lines import PROGRAM, failed, run, start_process, usage_error
from support.toy_models import LETTERS, with_manifest

from tformer_runtime import Model, __version__
from tformer_runtime.cli import input_lines
from tformer_runtime.format.manifest import MANIFEST_VERSION

WORDS = ["hello", "a", "transformer", "zebra"]
SHORT = ["--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def expected(path):
    model = Model.load(path, "cpu")
    return [model.generate(word, max_new_tokens=6).text for word in WORDS]


def test_arguments_generate_as_model_generate(path, expected):
    result = run(path, *WORDS, *SHORT)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == expected
    assert result.stderr == "device: cpu\n"


def test_device_is_reported_only_for_auto(path):
    assert run(path, "a", *SHORT, "--device", "cpu").stderr == ""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_lines_of_a_file_and_of_standard_input_generate_as_arguments(path, expected, tmp_path, line_end):
    (tmp_path / "in").write_bytes((line_end.join(WORDS) + line_end).encode())
    assert run(path, "--input-file", tmp_path / "in", *SHORT).stdout.splitlines() == expected
    assert run(path, "--input-file", "-", *SHORT, stdin=line_end.join(WORDS)).stdout.splitlines() == expected
    assert run(path, *SHORT, stdin=line_end.join(WORDS)).stdout.splitlines() == expected


def test_many_lines_keep_their_order(path, expected):
    result = run(path, *SHORT, "--batch-size", 3, stdin="\n".join(WORDS * 50))
    assert result.stdout.splitlines() == expected * 50


def test_output_file_contains_results_and_is_overwritten_only_with_force(path, expected, tmp_path):
    out = tmp_path / "out"
    result = run(path, *WORDS, *SHORT, "--output-file", out)
    assert result.stdout == ""
    assert out.read_text().splitlines() == expected
    assert failed(run(path, *WORDS, "--output-file", out)) == (f"{out} exists already: give --force to overwrite it")
    assert run(path, "a", *SHORT, "--output-file", out, "--force").exit_code == 0
    assert out.read_text().splitlines() == expected[1:2]
    assert os.listdir(tmp_path) == ["out"]


def test_failed_run_keeps_the_old_output(path, tmp_path):
    out = tmp_path / "out"
    out.write_text("old")
    message = "'é' (character 1 of the input) is not in the model's vocabulary"
    assert failed(run(path, *SHORT, "--output-file", out, "--force", stdin="é\n")) == f"line 1: {message}"
    assert os.listdir(tmp_path) == ["out"]
    assert failed(run(path, *SHORT, "--output-file", out, "--force", stdin="ab\né\n")) == (
        f"line 2: {message}; --resume goes on after input 1"
    )
    assert sorted(os.listdir(tmp_path)) == ["out", "out.part", "out.part.json"]
    assert out.read_text() == "old"


def test_output_in_a_missing_folder_is_refused(path, tmp_path):
    message = failed(run(path, "a", *SHORT, "--output-file", tmp_path / "none" / "out"))
    assert "cannot be written: No such file or directory" in message


def test_num_return_sequences_writes_several_lines_per_input(path):
    result = run(path, "hello", "ab", *SHORT, "--num-beams", 3, "--num-return-sequences", 2)
    model = Model.load(path, "cpu")
    expected = []
    for word in ("hello", "ab"):
        best = model.generate(word, num_beams=3, num_return_sequences=2, max_new_tokens=6)
        expected += [best.text, best.alternatives[0].text]
    assert result.stdout.splitlines() == expected


def test_json_contains_the_fields_of_the_results(path):
    result = run(path, "hello", "ab", *SHORT, "--json", "--num-beams", 2, "--num-return-sequences", 2)
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(o["index"], o["rank"]) for o in objects] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    best = Model.load(path, "cpu").generate("hello", num_beams=2, num_return_sequences=2, max_new_tokens=6)
    assert objects[0]["text"] == best.text
    assert tuple(objects[0]["token_ids"]) == best.token_ids
    assert objects[0]["score"] == best.score
    assert objects[0]["finish_reason"] == best.finish_reason
    assert len(objects[0]["token_logprobs"]) == len(best.token_ids)


def test_ids_are_read_and_written_with_ids_flag(path):
    ids = " ".join(str(LETTERS.index(c)) for c in "hello")
    result = run(path, ids, *SHORT, "--ids")
    expected = Model.load(path, "cpu").generate("hello", max_new_tokens=6).token_ids
    assert tuple(map(int, result.stdout.split())) == expected
    assert failed(run(path, "3 x", "--ids")) == "input 1: '3 x' is not a list of ids"
    assert "id 99 (number 2 of the input)" in failed(run(path, "3 99", "--ids"))


def test_stream_writes_the_same_texts(path, expected):
    assert run(path, *WORDS, *SHORT, "--stream").stdout.splitlines() == expected


def test_info_describes_the_file(path):
    result = run(path, "--info")
    assert result.exit_code == 0
    for line in (
        "task: translate", "stages: encode, decode", "max length: 64", "caches: 2", "cache bytes per token: 128",
        "quantization: none", "target: cpu", "  src: int64 (batch, source)", "  tformer: 0", "  max abs error: 0.0",
        f"bytes: {os.path.getsize(path)}",
    ):  # fmt: skip
        assert line in result.stdout.splitlines(), line
    assert json.loads(run(path, "--info", "--json").stdout)["max_length"] == 64


def test_version_and_help_are_printed():
    assert __version__ in run("--version").stdout
    assert "--num-beams" in run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-file", "f"], "give INPUT or --input-file, not both"),
        (["--stream", "--json"], "--stream writes text to standard output: not with"),
        (
            ["--stream", "--num-beams", "2", "--num-return-sequences", "2"],
            "--stream writes text to standard output: not with",
        ),
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--device", "tpu"], "Invalid value for '--device'"),
        (["--beem-size", "2"], "No such option '--beem-size'"),
        (["--timing"], "--timing needs --json: give both"),
        (["--top-logprobs", "2"], "--top-logprobs needs --json: give both"),
        (["--resume"], "--resume goes on with an output file: give --output-file too"),
    ],
)
def test_invalid_usage_is_refused(path, arguments, message):
    assert usage_error(run(path, "a", *arguments)).startswith(message)


def test_missing_arguments_exit_with_status_2():
    assert run().exit_code == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("", "the input is empty"),
        ("a" * 41, "41 tokens long and the model takes at most 40"),
        ("a b", "' ' (character 2"),
    ],
)
def test_invalid_inputs_are_refused_with_their_number(path, word, message):
    assert message in (sentence := failed(run(path, "ok", word), before=1))
    assert "input 2" in sentence
    assert message in failed(run(path, "--stream", word))


def test_invalid_lines_are_refused_with_file_and_line_number(path, tmp_path):
    (tmp_path / "in").write_bytes(b"ab\ncd\n\xff\n")
    assert failed(run(path, "--input-file", tmp_path / "in"), before=2) == f"{tmp_path / 'in'}, line 3: it is not UTF-8"
    (tmp_path / "in").write_text("ab\n\ncd\n")
    assert failed(run(path, "--input-file", tmp_path / "in"), before=1).endswith("line 2: the input is empty")
    assert "cannot be read: No such file" in failed(run(path, "--input-file", tmp_path / "none"))


def test_line_longer_than_the_limit_is_refused(path, monkeypatch):
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", 1 << 20)
    message = failed(run(path, stdin="ab\n" + "a" * (1 << 20)), before=1)
    assert message == "line 2: it is longer than 1 MiB"


def test_invalid_model_files_are_refused(path, tmp_path):
    (tmp_path / "cut.onnx").write_bytes(Path(path).read_bytes()[:5000])
    (tmp_path / "other.onnx").write_text("hello")
    newer = with_manifest(Path(path), tmp_path / "newer.onnx", version=MANIFEST_VERSION + 1)
    for options in (["a"], ["--info"]):
        assert "does not exist" in failed(run(tmp_path / "none.onnx", *options))
        assert "not a whole ONNX file" in failed(run(tmp_path / "cut.onnx", *options))
        assert "not a whole ONNX file" in failed(run(tmp_path / "other.onnx", *options))
        assert "upgrade tformer" in failed(run(newer, *options))


def test_device_cuda_without_a_driver_is_refused(path):
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("there is an NVIDIA driver")
    assert "device cuda is not available" in failed(run(path, "a", "--device", "cuda"))


def test_closed_standard_output_ends_the_run_without_traceback(path):
    command = subprocess.Popen([*PROGRAM, path, *SHORT], stdin=-1, stdout=-1, stderr=-1, text=True)
    assert command.stdout is not None
    command.stdout.close()
    assert command.stdin is not None
    assert command.stderr is not None
    command.stdin.write("\n".join(WORDS * 2000))
    command.stdin.close()
    errors = command.stderr.read()
    command.stderr.close()
    assert command.wait() == 1
    assert "Traceback" not in errors


def test_interrupt_exits_with_status_130_and_removes_partial_files(path, tmp_path):
    out = tmp_path / "out"
    command = start_process(*PROGRAM, path, "--output-file", out)
    assert command.stdin is not None
    command.stdin.write("ab\n")
    command.stdin.flush()
    # The run has begun and waits for more input when its partial file exists.
    while not any(name.endswith(".part") for name in os.listdir(tmp_path)):
        time.sleep(0.05)
        assert command.poll() is None
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 130
    assert errors.splitlines()[-1] == "tformer-run: interrupted"
    assert os.listdir(tmp_path) == []


def test_progress_is_shown_only_on_a_terminal(path, tmp_path):
    (tmp_path / "in").write_text("\n".join(WORDS * 20))
    controller, terminal = pty.openpty()
    command = [*PROGRAM, path, *SHORT, "--input-file", str(tmp_path / "in")]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, check=True, text=True)
    os.close(terminal)
    terminal_text = os.read(controller, 65536).decode()
    os.close(controller)
    assert "inputs" in terminal_text
    assert len(result.stdout.splitlines()) == 80
    quiet = subprocess.run(command, capture_output=True, check=True, text=True)
    assert quiet.stderr == "device: cpu\n"


def test_progress_is_shown_where_results_go_to_a_file(path, tmp_path):
    """Both outputs are a terminal, as in a shell; results on it would be written into the bar."""
    (tmp_path / "in").write_text("\n".join(WORDS * 20))

    def shown(*arguments):
        controller, terminal = pty.openpty()
        command = [*PROGRAM, path, *SHORT, "--input-file", str(tmp_path / "in"), *arguments]
        subprocess.run(command, stdout=terminal, stderr=terminal, check=True)
        os.close(terminal)
        text = os.read(controller, 65536).decode()
        os.close(controller)
        return text

    assert " inputs" in shown("--output-file", str(tmp_path / "out"))
    assert len((tmp_path / "out").read_text().splitlines()) == 80
    assert " inputs" not in shown()


def test_terminal_without_input_exits_with_status_2(path):
    controller, terminal = pty.openpty()
    result = subprocess.run([*PROGRAM, path], stdin=terminal, capture_output=True, text=True, check=False)
    os.close(terminal)
    os.close(controller)
    assert result.returncode == 2
    assert "there is no INPUT" in result.stderr
