"""Code of the model that ends the program is refused in one sentence, and an interruption ends the command at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tformer_export import export
from tformer_runtime import SourceError

ROOT = Path(__file__).parents[2]
FACTORY = """
import os, sys, time
import torch
from torch import nn

PLACE = {place!r}


def end():
    {action}


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tgt):
        if PLACE == "forward":
            end()
        return self.out(self.embed(tgt))


def make():
    if PLACE == "factory":
        end()
    return Module(), {{"tgt": torch.tensor([[3, 4, 5], [6, 7, 8]])}}, {{"step_input": "tgt"}}


if PLACE == "import":
    end()
"""
PLACES = ("import", "factory", "forward")


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """Return a function that writes a factory that ends at a place, and returns the name of its source."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    (tmp_path / "imports").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "imports")

    def write(place, action):
        (tmp_path / "imports" / "ends.py").write_text(FACTORY.format(place=place, action=action))
        return "ends:make"

    yield write
    sys.modules.pop("ends", None)


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("place", PLACES)
def test_code_that_ends_the_program_is_refused(place, status, ends, refused):
    message = refused(ends(place, f"sys.exit({status})"), "-o", "out.onnx")
    assert f"SystemExit: {status}" in message
    assert "ends.py" in message or "ends:make" in message


def test_forward_that_ends_the_program_is_refused_in_python(tmp_path):
    class Ends(nn.Linear):
        def forward(self, x):
            raise SystemExit("no licence")

    with pytest.raises(SourceError, match=r"ends the program \(SystemExit: no licence\), at"):
        export(Ends(2, 2), tmp_path / "out.onnx", {"x": torch.ones(2, 3, 2)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_an_export_at_once_and_leaves_nothing(sent, status, place, ends, tmp_path):
    wait = "print('waits', flush=True); time.sleep(600)"
    source = ends(place, wait)
    paths = [tmp_path / "imports", ROOT, ROOT / "runtime", ROOT / "models"]
    command = subprocess.Popen(
        [sys.executable, "-c", "from tformer_export.cli import main; main()", source, "-o", "out.onnx"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert command.stdout.readline() == "waits\n"
    command.send_signal(sent)
    _, err = command.communicate(timeout=300)
    assert command.returncode == status
    assert err.splitlines() == (["tformer-export: interrupted"] if sent == signal.SIGINT else [])
    assert not list(Path().iterdir())
