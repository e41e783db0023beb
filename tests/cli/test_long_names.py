"""Names of files that are too long, themselves or while the file is unfinished, are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.command_lines import failed
from support.command_lines import run as run_file
from torch import nn

from tformer_export import save_checkpoint
from tformer_runtime import TformerError

LENGTHS = (232, 254, 255, 256, 5000)
LONGEST = 231


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tgt):
        return self.out(self.embed(tgt))


def name(length, ending):
    return "a" * (length - len(ending)) + ending


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plain(folder, monkeypatch):
    """Save a checkpoint of `Plain` in the current folder and return the arguments that name it."""
    (folder / "plain_of_long_names.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(folder)
    save_checkpoint(Plain(), "plain.pt", factory="plain_of_long_names:Plain", arguments={}, max_length=20)
    return "plain.pt", "--trust", "plain_of_long_names"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("flag", ["--output", "--report"])
def test_long_name_of_an_exported_file_or_report_is_refused(flag, length, plain, refused):
    other = ("--output", "out.onnx") if flag == "--report" else ()
    message = refused(*plain, *other, flag, name(length, ".onnx"))
    assert f"has {length} bytes: give one of at most {LONGEST}" in message


def test_longest_name_of_an_exported_file_and_report_works(plain, run):
    status, err = run(*plain, "--output", name(LONGEST, ".onnx"), "--report", name(LONGEST, ".json"))
    assert status == 0, err
    assert Path(name(LONGEST, ".onnx")).is_file()
    assert Path(name(LONGEST, ".json")).is_file()


@pytest.mark.parametrize("length", LENGTHS)
def test_long_name_of_a_result_file_is_refused(length, folder, path):
    message = failed(run_file(path, "abc", "--output-file", name(length, ".txt")))
    assert f"has {length} bytes: give one of at most {LONGEST}" in message
    assert not list(folder.iterdir())


def test_longest_name_of_a_result_file_works(folder, path):
    result = run_file(path, "abc", "--output-file", name(LONGEST, ".txt"))
    assert result.exit_code == 0, result.stderr
    assert [len(each.name) for each in folder.iterdir()] == [LONGEST]


@pytest.mark.parametrize("length", LENGTHS)
def test_long_name_of_a_checkpoint_is_refused(length, folder):
    with pytest.raises(TformerError, match=f"has {length} bytes: give one of at most {LONGEST}"):
        save_checkpoint(Plain(), name(length, ".pt"), factory="factories:Plain", arguments={})
    assert not list(folder.iterdir())


def test_path_that_is_too_long_is_refused(folder):
    deep = Path(*["b" * 200] * 21) / "model.pt"
    with pytest.raises(TformerError, match=r"the path bbb.* bytes: give one of at most"):
        save_checkpoint(Plain(), deep, factory="factories:Plain", arguments={})
