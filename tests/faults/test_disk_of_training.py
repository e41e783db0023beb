"""tformer-train on a disk that fails, and killed, at calls that change a file: the resumed run has equal weights."""

from __future__ import annotations

import csv
import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from faults.processes import TRAIN, Action, Fault, Forks, check_sentence
from tformer_export.common.checkpoint import load_checkpoint

RECIPE = """
[data]
factory = "support.tiny_task:successors"
[model]
factory = "tformer_models.seq2seq:Seq2SeqTransformer"
arguments = { width = 16, heads = 2, encoder_layers = 1, decoder_layers = 1, feedforward = 32, max_length = 16 }
[training]
steps = 8
validate_every = 4
batch_tokens = 128
"""
TESTS = Path(__file__).parents[1]  # the folder of `support`
FILES = {"recipe.json", "metrics.csv", "curves.png", "checkpoints", "model.pt"}
DISKS = {
    "full": (Action.FAIL, errno.ENOSPC),
    "short write": (Action.SHORT, errno.ENOSPC),
    "broken once": (Action.ONCE, errno.EIO),
    "killed": (Action.KILL, 0),
}
EVERY = 80  # one of so many calls is tried in the suite
EVERY_THOROUGH = 5


@pytest.fixture(scope="module")
def forks(shim, tmp_path_factory):
    modules = ["tformer_models.training", "matplotlib.backends.backend_agg", "support.tiny_task"]
    with Forks(shim, TRAIN, tmp_path_factory.mktemp("streams"), *modules, "tformer_models.seq2seq") as forks:
        yield forks


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def whole(forks, recipe, tmp_path_factory):
    """Return the folder of a run that no fault strikes, and the number of its calls that change files."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    outcome = train(forks, recipe, folder)
    assert outcome.status == 0, outcome
    return folder, outcome.calls


def train(forks, recipe, folder, *options, fault=None):
    return forks.run(folder, recipe, "--output", folder, "--quiet", "--threads", 1, *options, fault=fault, cwd=TESTS)


def weights(folder):
    return load_checkpoint(folder / "model.pt").state_dict


def curve(folder):
    """Return the rows of metrics.csv without the seconds, which differ from run to run."""
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def check_same(folder, whole, fault):
    """Check that a folder holds what the run without a fault left, and nothing else."""
    assert set(os.listdir(folder)) == FILES, str(fault)
    assert sorted(os.listdir(folder / "checkpoints")) == sorted(os.listdir(whole / "checkpoints")), str(fault)
    assert curve(folder) == curve(whole), str(fault)
    assert (folder / "curves.png").read_bytes() == (whole / "curves.png").read_bytes(), str(fault)
    ours, theirs = weights(folder), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), str(fault)


@pytest.mark.parametrize("every", [EVERY, pytest.param(EVERY_THOROUGH, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("disk", DISKS)
def test_training_goes_on_after_a_fault(forks, recipe, whole, tmp_path, disk, every):
    folder, calls = whole
    for nth in range(1 + (2 + 20 * list(DISKS).index(disk)) % every, calls + 1, every):
        fault, run = Fault(nth, *DISKS[disk]), tmp_path / str(nth)
        outcome = train(forks, recipe, run, fault=fault)
        if disk == "broken once" and outcome.status == 0:  # at making a folder that exists
            check_same(run, folder, fault)
            continue
        if disk == "killed":
            assert outcome.status == -signal.SIGKILL, (str(fault), outcome)
        else:
            check_sentence(outcome, TRAIN, fault, run)
        assert not (run / "model.pt").exists(), str(fault)
        outcome = train(forks, recipe, run, "--resume")
        assert outcome.status == 0, (str(fault), outcome)
        check_same(run, folder, fault)
