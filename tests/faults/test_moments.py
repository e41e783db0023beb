"""Kills at random moments, and two commands that write the same file at once: `make thorough`."""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from faults import test_disk_of_exports as exports
from faults import test_disk_of_runs as runs
from faults import test_disk_of_training as training
from faults.processes import EXPORT, RUN, Fault, Forks
from tformer_runtime.format.info import verified_digest

pytestmark = pytest.mark.thorough

KILLS = 50
TRAINING_KILLS = 15
PAIRS = 6


def moments(seconds, count):
    """Return random moments of a command that takes so many seconds when nothing else runs."""
    draw = random.Random(0)
    return [draw.uniform(0, 1.1 * seconds) for _ in range(count)]


def timed(run):
    """Return the result of a second run, and the seconds that it took: the first reads files that are not in memory."""
    run()
    begin = time.monotonic()
    return run(), time.monotonic() - begin


@contextmanager
def two(shim, tmp_path_factory, command, *modules):
    """Yield two processes that run a command, for two runs at once."""
    with (
        Forks(shim, command, tmp_path_factory.mktemp("first"), *modules) as first,
        Forks(shim, command, tmp_path_factory.mktemp("second"), *modules) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def exporters(shim, tmp_path_factory):
    with two(shim, tmp_path_factory, EXPORT, "faults.warm_export", "tformer_export.sources.load") as forks:
        yield forks


@pytest.fixture(scope="module")
def runners(shim, tmp_path_factory):
    with two(shim, tmp_path_factory, RUN, "onnxruntime", "tformer_runtime.decoding.ordered") as forks:
        yield forks


@pytest.fixture(scope="module")
def trainer(shim, tmp_path_factory):
    modules = ["tformer_models.training", "support.tiny_task", "tformer_models.seq2seq"]
    with Forks(shim, training.TRAIN, tmp_path_factory.mktemp("streams"), *modules) as forks:
        yield forks


def export_arguments(folder):
    return [*exports.SOURCE, "--output", folder / "model.onnx", "--report", folder / "report.json"]


def test_export_killed_at_random_moments(exporters, tmp_path):
    forks, _ = exporters
    whole = tmp_path / "whole"
    whole.mkdir()
    outcome, seconds = timed(lambda: exports.export(forks, whole))
    assert outcome.status == 0, outcome
    content, killed = (whole / "model.onnx").read_bytes(), 0
    for number, moment in enumerate(moments(seconds, KILLS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        out = folder / "model.onnx"
        out.write_bytes(exports.BEFORE)
        outcome = forks.run(folder, *export_arguments(folder), cwd=exports.TESTS, seconds=moment)
        killed += outcome.status == -signal.SIGKILL
        assert out.read_bytes() in (exports.BEFORE, content), moment
        assert exports.export(forks, folder).status == 0, moment
        assert out.read_bytes() == content, moment
        assert sorted(path.name for path in folder.iterdir()) == exports.FILES, moment
    assert killed > KILLS / 5


def test_two_exports_of_one_file_at_once(exporters, tmp_path):
    for number in range(PAIRS):
        folder, outcomes = tmp_path / str(number), {}
        folder.mkdir()

        def export(index, forks, folder=folder, outcomes=outcomes):
            outcomes[index] = forks.run(folder, *export_arguments(folder), cwd=exports.TESTS)

        threads = [threading.Thread(target=export, args=each) for each in enumerate(exporters)]
        for thread in threads:
            thread.start()
            time.sleep(random.Random(number).uniform(0, 0.3))
        for thread in threads:
            thread.join()
        assert {outcome.status for outcome in outcomes.values()} <= {0, 1}, outcomes
        assert 0 in {outcome.status for outcome in outcomes.values()}, outcomes
        assert verified_digest(folder / "model.onnx")
        assert sorted(path.name for path in folder.iterdir()) == exports.FILES


def run_arguments(model, inputs, folder):
    return [model, "--input-file", inputs, *runs.OPTIONS, "--force", "--output-file", folder / "out"]


@pytest.fixture(scope="module")
def run_files(runners, tmp_path_factory):
    """Return the model, the inputs, the results and the seconds of a run."""
    folder = tmp_path_factory.mktemp("run")
    model, inputs = runs.Toy(seed=27).write(folder / "toy.onnx"), folder / "in"
    inputs.write_text("".join(f"{line}\n" for line in runs.LINES))
    outcome, seconds = timed(lambda: runners[0].run(folder, model, "--input-file", inputs, *runs.OPTIONS))
    assert outcome.status == 0, outcome
    return model, inputs, outcome.stdout, seconds


def test_run_killed_at_random_moments_is_resumed(runners, run_files, tmp_path):
    """A run is killed and resumed until it ends."""
    forks, (model, inputs, expected, seconds) = runners[0], run_files
    killed = 0
    for number, moment in enumerate(moments(seconds, KILLS)):
        folder, tries = tmp_path / str(number), 0
        folder.mkdir()
        while True:
            limit = moment if tries < 3 else None
            outcome = forks.run(folder, *run_arguments(model, inputs, folder), "--resume", seconds=limit)
            if outcome.status == 0:
                break
            assert outcome.status == -signal.SIGKILL, outcome
            killed, tries = killed + 1, tries + 1
        runs.check_whole(outcome, folder / "out", expected, Fault())
    assert killed > KILLS / 5


def test_two_runs_of_one_file_at_once(runners, run_files, tmp_path):
    model, inputs, expected, _ = run_files
    for number in range(PAIRS):
        folder, outcomes = tmp_path / str(number), {}
        folder.mkdir()

        def run(index, forks, folder=folder, outcomes=outcomes):
            outcomes[index] = forks.run(folder, *run_arguments(model, inputs, folder))

        threads = [threading.Thread(target=run, args=each) for each in enumerate(runners)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = {outcome.status for outcome in outcomes.values()}
        assert 0 in statuses, outcomes
        assert statuses <= {0, 1}, outcomes
        assert (folder / "out").read_text() == expected
        assert [path.name for path in folder.iterdir()] == ["out"]


def test_training_killed_at_random_moments_goes_on(trainer, tmp_path):
    recipe, whole = tmp_path / "tiny.toml", tmp_path / "whole" / "run"
    recipe.write_text(training.RECIPE)
    training.train(trainer, recipe, tmp_path / "first")
    begin = time.monotonic()
    outcome = training.train(trainer, recipe, whole)
    seconds = time.monotonic() - begin
    assert outcome.status == 0, outcome
    killed = 0
    for number, moment in enumerate(moments(seconds, TRAINING_KILLS)):
        folder = tmp_path / str(number)
        arguments = [recipe, "--output", folder, "--quiet", "--threads", 1]
        outcome = trainer.run(folder, *arguments, cwd=training.TESTS, seconds=moment)
        killed += outcome.status == -signal.SIGKILL
        assert outcome.status in (0, -signal.SIGKILL), outcome
        if outcome.status:
            assert training.train(trainer, recipe, folder, "--resume").status == 0
        training.check_same(folder, whole, Fault())
    assert killed > TRAINING_KILLS / 5
