"""Fixtures: an exported file for tformer-run, and tformer-export in this process with checks of its refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.toy_models import Toy

from tformer_export.cli import main


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    """Return the path of a model file from letters to letters. Tests do not change it."""
    return str(Toy(seed=27).write(tmp_path_factory.mktemp("run") / "toy.onnx"))


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs tformer-export and returns its exit status and standard error.

    Standard output stays empty, because the command has no results.
    """

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tformer-export", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return call


@pytest.fixture
def refused(run):
    """Return a function that runs a failing tformer-export and returns its message.

    It checks that the exit status is 1, that the message is one line without a traceback, and that no file changes.
    """

    def call(*arguments):
        files_before = files()
        status, err = run(*arguments)
        assert status == 1, err
        (line,) = err.splitlines()
        assert line.startswith("tformer-export: ")
        assert files() == files_before
        return line.removeprefix("tformer-export: ")

    return call


def files():
    """Return the modification time of each file below the current folder."""
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in str(path)}
