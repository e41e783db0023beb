"""The exported file that tests run, running tformer-export in this process, and what has to hold when it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.toy_models import Toy

from tformer_export.cli import main


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    """A file that tformer-run takes, of letters to letters; read only."""
    return str(Toy(seed=27).write(tmp_path_factory.mktemp("run") / "toy.onnx"))


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command; (exit status, standard error). Standard output is for results, of which there are none."""

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
    """Run what has to fail: exit status 1, one sentence and no traceback, and no file that was not there before."""

    def call(*arguments):
        before = files()
        status, err = run(*arguments)
        assert status == 1, err
        (line,) = err.splitlines()
        assert line.startswith("tformer-export: ")
        assert files() == before
        return line.removeprefix("tformer-export: ")

    return call


def files():
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in str(path)}
