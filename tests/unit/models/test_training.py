"""Training: models learn, runs are reproducible and can be resumed, and invalid recipes and data are refused."""

import csv
import math
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from matplotlib.figure import Figure
from support import tiny_task

from tformer_export.common.checkpoint import load_checkpoint
from tformer_models.cli import main
from tformer_models.curves import find_best_step
from tformer_models.data import Batches, pad_rows
from tformer_models.dropout import ByteDropout, use_byte_dropout
from tformer_models.objectives import Seq2SeqObjective, learning_rate_factor
from tformer_models.recipe import CheckpointOptions, FactoryCall, Recipe, TrainingOptions, load_recipe
from tformer_models.training import train
from tformer_runtime.base.errors import OptionError, OutputError, SourceError

MODEL = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feedforward": 32, "max_length": 16}
RECIPE = Recipe(
    data=FactoryCall("support.tiny_task:successors"),
    model=FactoryCall("tformer_models.seq2seq:Seq2SeqTransformer", MODEL | {"norm": "pre"}),
    training=TrainingOptions(steps=12, validate_every=4, batch_tokens=128, warmup=4, learning_rate=5e-3),
    checkpoint=CheckpointOptions(generation_defaults={"num_beams": 2}, max_length=16),
)


@pytest.fixture(autouse=True)
def single_torch_thread():
    """Use one thread, so that sums have one order and training is reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recipe_with(**options):
    return replace(RECIPE, training=replace(RECIPE.training, **options))


def curve(output):
    """Return the rows of metrics.csv without the seconds, which differ from run to run."""
    with (output / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def weights(path):
    return load_checkpoint(path).state_dict


def equal_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_model_learns_and_its_checkpoint_is_complete(tmp_path):
    longer = recipe_with(
        steps=160, validate_every=40, batch_tokens=256, learning_rate=1e-2, warmup=20, schedule="cosine"
    )
    path = train(replace(longer, data=FactoryCall("support.tiny_task:successors", {"max_digits": 3})), tmp_path / "run")
    rows = curve(tmp_path / "run")
    assert [row["step"] for row in rows] == ["40", "80", "120", "160"]
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * math.log(6)  # half the loss of a uniform guess among five digits and the end token
    assert float(rows[-1]["token_accuracy"]) > 0.8
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    loaded = load_checkpoint(path)
    assert loaded.arguments["source_vocabulary"] == 8
    assert loaded.special_tokens == {"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0}
    assert (loaded.generation_defaults, loaded.max_length) == ({"num_beams": 2}, 16)
    model = loaded.build()
    digits = torch.tensor([[3, 4, 5]])
    assert model(digits, torch.tensor([[1]])).shape == (1, 1, 8)


def test_same_seed_gives_the_same_curve(tmp_path):
    first = train(RECIPE, tmp_path / "first")
    second = train(RECIPE, tmp_path / "second")
    other = train(recipe_with(seed=2), tmp_path / "other")
    assert curve(tmp_path / "first") == curve(tmp_path / "second")
    assert equal_weights(weights(first), weights(second))
    assert curve(tmp_path / "first") != curve(tmp_path / "other")
    assert not equal_weights(weights(first), weights(other))


@pytest.mark.parametrize("killed_step", [5, 11, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 8))])
def test_resumed_run_equals_an_uninterrupted_run(tmp_path, monkeypatch, killed_step):
    recipe = recipe_with(schedule="cosine", precision="bf16")
    uninterrupted = train(recipe, tmp_path / "whole")
    step = Seq2SeqObjective.training_step

    def fail_at_killed_step(self, batch, batch_idx):
        if self.global_step == killed_step:
            raise RuntimeError("killed")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Seq2SeqObjective, "training_step", fail_at_killed_step)
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe, tmp_path / "broken")
    assert not (tmp_path / "broken" / "model.pt").exists()
    torch.manual_seed(killed_step)  # a new process does not have the random state of the old one
    resumed = train(recipe, tmp_path / "broken", resume=True)
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")
    assert equal_weights(weights(resumed), weights(uninterrupted))


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    before = weights(train(RECIPE, tmp_path))
    assert equal_weights(before, weights(train(RECIPE, tmp_path, resume=True)))


def test_run_is_overwritten_with_force_only(tmp_path):
    train(RECIPE, tmp_path)
    with pytest.raises(OutputError, match=r"--resume.*--force"):
        train(RECIPE, tmp_path)
    with pytest.raises(OptionError, match="another recipe"):
        train(recipe_with(seed=5), tmp_path, resume=True)
    first = curve(tmp_path)
    train(recipe_with(seed=5), tmp_path, force=True)
    assert len(curve(tmp_path)) == 3
    assert curve(tmp_path) != first


def test_run_started_again_does_not_resume_the_old_run(tmp_path, monkeypatch):
    train(RECIPE, tmp_path / "used")
    with monkeypatch.context() as patch:
        patch.setattr(Seq2SeqObjective, "training_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(recipe_with(seed=5), tmp_path / "used", force=True)
    train(recipe_with(seed=5), tmp_path / "used", resume=True)
    train(recipe_with(seed=5), tmp_path / "fresh")
    assert curve(tmp_path / "used") == curve(tmp_path / "fresh")


def test_saved_weights_are_the_average_at_the_best_validation(tmp_path):
    path = train(recipe_with(average=0.5), tmp_path)
    best = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    assert equal_weights(
        weights(path), {name.removeprefix("model."): value for name, value in best["state_dict"].items()}
    )
    last = best["current_model_state"]["model.output.bias"]
    assert not torch.equal(weights(path)["output.bias"], last)


@pytest.mark.parametrize("monitor", ["loss", "sequence_accuracy"])
def test_curves_mark_the_step_of_the_saved_weights(tmp_path, monkeypatch, monitor):
    figures = []
    save = Figure.savefig

    def record_figure(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", record_figure)
    train(recipe_with(monitor=monitor, learning_rate=0.5, clip=0.0), tmp_path)  # the last step need not be the best
    best_step = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)["global_step"]
    rows = [{name: float(value) for name, value in row.items()} for row in curve(tmp_path)]
    assert find_best_step(rows, monitor) == best_step
    assert len(figures) == len(rows)
    for axes in figures[-1].axes:
        assert axes.get_xlabel() == "training step (linear scale)"
        assert axes.get_ylabel().endswith(f"({axes.get_yscale()} scale)")
        (marker,) = [line for line in axes.lines if line.get_label().startswith("saved weights")]
        assert set(marker.get_xdata()) == {best_step}


def test_curves_mark_the_first_of_equal_steps():
    rows = [{"step": 2.0, "accuracy": 0.5}, {"step": 4.0, "accuracy": 0.7}, {"step": 6.0, "accuracy": 0.7}]
    assert find_best_step(rows, "accuracy") == 4
    assert find_best_step([{"step": row["step"], "loss": row["accuracy"]} for row in rows], "loss") == 2


def test_saved_weights_without_average_equal_the_best_validation_weights(tmp_path):
    path = train(recipe_with(average=0.0), tmp_path)
    best = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    assert torch.equal(weights(path)["output.bias"], best["state_dict"]["model.output.bias"])


def test_run_stops_after_patience_validations(tmp_path):
    constant_weights = recipe_with(steps=100, validate_every=2, patience=2, learning_rate=0.0, weight_decay=0.0)
    train(constant_weights, tmp_path)
    assert [row["step"] for row in curve(tmp_path)] == ["2", "4", "6"]


def test_loss_that_is_not_finite_is_an_error(tmp_path):
    with pytest.raises(OptionError, match="lower learning_rate"):
        train(recipe_with(learning_rate=1e30, clip=0.0), tmp_path)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (replace(RECIPE, data=FactoryCall("support.tiny_task:no_pairs")), "no training pairs"),
        (
            replace(RECIPE, data=FactoryCall("support.tiny_task:wrong_step_input")),
            "the step input 'input_ids': it must be 'tgt'",
        ),
        (replace(RECIPE, data=FactoryCall("builtins:dict")), "Dataset"),
        (
            replace(RECIPE, model=FactoryCall(RECIPE.model.factory, MODEL | {"heads": 5})),
            "16 is not a multiple of 5 heads",
        ),
        (
            replace(RECIPE, data=FactoryCall("support.tiny_task:successors", {"digits": 0})),
            "tiny_task:successors failed",
        ),
        (replace(RECIPE, checkpoint=CheckpointOptions(max_length=4)), "a sequence of 8 ids"),
    ],
)
def test_invalid_data_is_refused(tmp_path, recipe, message):
    with pytest.raises(OptionError, match=message):
        train(recipe, tmp_path)


def test_learning_rate_schedules_have_known_factors():
    options = TrainingOptions(steps=100, warmup=10)
    assert learning_rate_factor(0, options) == pytest.approx(0.1)
    assert learning_rate_factor(9, options) == 1.0
    assert learning_rate_factor(39, options) == pytest.approx(0.5)  # 1/√4 of the peak, at four times the warm-up
    cosine = replace(options, schedule="cosine")
    assert learning_rate_factor(10, cosine) == 1.0
    assert learning_rate_factor(55, cosine) == pytest.approx(0.5)
    assert learning_rate_factor(100, cosine) == 0.0


def numbered_pairs(num_pairs=97):
    """Return pairs of different lengths; the first id of a pair is its number."""
    return [([i + 1] * (1 + i % 7), [i + 1] * (1 + i % 5)) for i in range(num_pairs)]


def test_epoch_has_every_pair_once_within_batch_tokens():
    batches = Batches(numbered_pairs(), batch_tokens=40, seed=1)
    for first in (0, len(batches), 5 * len(batches)):
        pair_counts = Counter()
        for src, tgt in batches.shuffled(first, len(batches)):
            assert max(src.numel(), tgt.numel()) <= 40
            assert src[:, 0].tolist() == tgt[:, 0].tolist()
            pair_counts.update(src[:, 0].tolist())
        assert pair_counts == Counter(range(1, 98))
    assert sum(len(src) for src, _ in batches.in_order()) == 97


def test_batches_depend_on_seed_and_step_only():
    batches = Batches(numbered_pairs(), batch_tokens=40, seed=1)
    whole = list(batches.shuffled(0, 3 * len(batches)))
    for first in (0, 3, len(batches) - 1, len(batches), 2 * len(batches) + 1):
        for (src, tgt), (other_src, other_tgt) in zip(
            whole[first:], batches.shuffled(first, len(whole) - first), strict=True
        ):
            assert torch.equal(src, other_src)
            assert torch.equal(tgt, other_tgt)
    passes = [whole[i * len(batches)][0].tolist() for i in range(3)]
    assert passes[0] != passes[1] != passes[2]
    other = next(iter(Batches(numbered_pairs(), batch_tokens=40, seed=2).shuffled(0, 1)))
    assert other[0].tolist() != whole[0][0].tolist()


def test_rows_are_padded_at_the_end():
    assert pad_rows([[1, 2, 3], [4]], pad_token_id=9).tolist() == [[1, 2, 3], [4, 9, 9]]


def test_byte_dropout_keeps_the_mean_and_the_gradient():
    torch.manual_seed(0)
    dropout = ByteDropout(0.25)
    x = torch.ones(200, 501, requires_grad=True)
    y = dropout(x)
    assert sorted(set(y.flatten().tolist())) == pytest.approx([0.0, 4 / 3])
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert not torch.equal(dropout(x), y)
    assert dropout.eval()(x) is x


def test_byte_dropout_replaces_every_dropout():
    model = torch.nn.Sequential(
        torch.nn.Dropout(0.5), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
    )
    use_byte_dropout(model)
    assert [type(m).__name__ for m in model.modules() if "Dropout" in type(m).__name__] == ["ByteDropout"] * 2
    assert list(model.state_dict()) == ["1.0.weight", "1.0.bias"]


RECIPE_TOML = """
[data]
factory = "support.tiny_task:successors"
[model]
factory = "tformer_models.seq2seq:Seq2SeqTransformer"
arguments = { width = 16, heads = 2, encoder_layers = 1, decoder_layers = 1, feedforward = 32, max_length = 16 }
[training]
steps = 2
"""


def test_recipe_error_lists_all_unknown_and_missing_names(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[model]\nfactory = 'a:b'\nwidht = 3\n[training]\nsteps = 1\nseeds = 2\n[extra]\n")
    with pytest.raises(OptionError) as caught:
        load_recipe(path)
    for name in ("widht", "seeds", "[extra]", "[data] is missing"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("schedule = 'linear'", "inverse-sqrt"),
        ("batch_tokens = 0", "batch_tokens must be at least 1"),
        ("monitor = 'wer'", "monitor"),
        ("clip = 'no'", "clip must be of type float"),
        ("seed = 1.5", "seed must be of type int"),
        ("clip = true", "clip must be of type float, not True"),
        ("learning_rate = -1", "learning_rate must be a number that is not negative"),
        ("learning_rate = nan", "learning_rate must be a number that is not negative"),
        ("weight_decay = inf", "weight_decay must be a number that is not negative"),
        ("average = 1.5", "average must be between 0 and 1"),
        ("betas = [0.9]", "betas must be two numbers"),
        ("betas = ['a', 0.9]", "betas must be two numbers"),
        ("betas = [0.9, 1.0]", "betas must be two numbers"),
        ("warmpu = 3", r"\[training\] has no warmpu \(nearest: warmup\)"),
        ("[checkpoint]\ntask = 3", "task must be a text, not 3"),
        ("[checkpoint]\nmax_length = 0", "max_length must be at least 1"),
        ("[checkpoint]\nmax_length = 'all'", "max_length must be a whole number, not 'all'"),
        ("[checkpoint]\ngeneration_defaults = 3", "generation_defaults must be a table, not 3"),
        ("[chekpoint]", r"there is no section \[chekpoint\] \(nearest: checkpoint\)"),
    ],
)
def test_invalid_value_in_a_recipe_is_refused(tmp_path, line, message):
    (tmp_path / "recipe.toml").write_text(RECIPE_TOML + line)
    with pytest.raises(OptionError, match=message):
        load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "heads = 2",
            "haeds = 2",
            r"\[model\] do not fit .*: it has no argument haeds \(nearest: heads\); its arguments are",
        ),
        (
            "heads = 2",
            "heads = '2'",
            r"\[model\] do not fit tformer_models.seq2seq:Seq2SeqTransformer: heads must be int",
        ),
        (
            'successors"',
            'successors"\narguments = { pairs = 3 }',
            r"\[data\] do not fit .* no argument pairs \(nearest: num_pairs\)",
        ),
        ('successors"', 'successors"\narguments = 3', "arguments must be a table, not 3"),
        ('factory = "support', "factory = 3 #", "factory must be a text, not 3"),
    ],
)
def test_wrong_arguments_are_refused_before_the_data_are_read(tmp_path, monkeypatch, old, new, message):
    def read(**_arguments):
        raise AssertionError("the data are read")

    monkeypatch.setattr(tiny_task, "Dataset", read)
    (tmp_path / "recipe.toml").write_text(RECIPE_TOML.replace(old, new))
    with pytest.raises(OptionError, match=message):
        train(load_recipe(tmp_path / "recipe.toml"), tmp_path / "run")


def test_arguments_that_lack_one_are_refused_before_the_model_is_made(tmp_path):
    """The data give the sizes of the vocabularies; this data set gives none."""
    (tmp_path / "recipe.toml").write_text(RECIPE_TOML.replace(":successors", ":sizeless"))
    with pytest.raises(OptionError, match="it lacks the argument source_vocabulary, target_vocabulary; its arguments"):
        train(load_recipe(tmp_path / "recipe.toml"), tmp_path / "run")


@pytest.mark.parametrize("content", ["steps = = 2", "\x00"])
def test_recipe_that_is_not_toml_is_refused(tmp_path, content):
    (tmp_path / "recipe.toml").write_text(content)
    with pytest.raises(SourceError, match="not TOML"):
        load_recipe(tmp_path / "recipe.toml")


def test_command_prints_the_path_of_the_model_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(RECIPE_TOML)
    result = CliRunner().invoke(main, ["small.toml", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "runs/small/model.pt\n"
    assert (tmp_path / "runs" / "small" / "model.pt").exists()
    second_run = CliRunner().invoke(main, ["small.toml"])
    assert second_run.exit_code == 1
    assert second_run.stdout == ""
    assert second_run.stderr.count("\n") == 1
    assert "--resume" in second_run.stderr


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_command_prints_its_help(option):
    result = CliRunner().invoke(main, [option])
    assert result.exit_code == 0
    assert "RECIPE" in result.stdout


def test_command_prints_its_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert version("tformer") in result.stdout


def test_command_refuses_resume_with_force():
    result = CliRunner().invoke(main, ["small.toml", "--resume", "--force"])
    assert result.exit_code == 2


PROGRESS = [
    "recipe: ", "data: support.tiny_task:successors", "data: 200 examples for training, 50 for validation",
    "model: tformer_models.seq2seq:Seq2SeqTransformer, ", "training: step 1 of 2", "step 2, train_loss ",
]  # fmt: skip


@pytest.mark.parametrize(("options", "starts"), [([], PROGRESS), (["--quiet"], [])], ids=["progress", "quiet"])
def test_command_writes_progress_and_metrics_unless_it_is_quiet(tmp_path, options, starts):
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE_TOML)
    command = [sys.executable, "-c", "from tformer_models.cli import main; main()", recipe, *options]
    tests = Path(__file__).parents[2]  # the folder of `support`, which the command finds as its current folder
    result = subprocess.run(
        [*command, "--output", tmp_path / "run"], capture_output=True, check=True, text=True, cwd=tests
    )
    assert result.stdout == f"{tmp_path / 'run' / 'model.pt'}\n"
    lines = result.stderr.splitlines()
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_interrupted_command_says_how_to_continue(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(RECIPE_TOML)

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", interrupt)
    handler = signal.getsignal(signal.SIGINT)  # Lightning ignores further signals
    try:
        result = CliRunner().invoke(main, [str(tmp_path / "small.toml"), "--output", str(tmp_path / "run"), "--quiet"])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert result.exit_code == 128 + signal.SIGINT
    assert result.stderr.endswith("tformer-train: interrupted; the same command with --resume continues the run\n")


def test_verbose_command_writes_the_traceback_of_an_error(tmp_path):
    arguments = [str(tmp_path / "none.toml")]
    plain, verbose = CliRunner().invoke(main, arguments), CliRunner().invoke(main, [*arguments, "--verbose"])
    assert "Traceback" not in plain.stderr
    assert verbose.stderr.startswith("Traceback (most recent call last):")
    assert verbose.stderr.endswith(plain.stderr)


def test_quiet_and_verbose_exclude_each_other():
    result = CliRunner().invoke(main, ["small.toml", "--quiet", "--verbose"])
    assert result.exit_code == 2
    assert "--quiet writes nothing but errors: not with --verbose" in result.stderr


def test_command_names_a_missing_recipe_and_a_missing_extra(tmp_path, monkeypatch):
    missing = CliRunner().invoke(main, [str(tmp_path / "none.toml")])
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "none.toml cannot be read" in missing.stderr
    (tmp_path / "small.toml").write_text(RECIPE_TOML)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "tformer_models.training")
    extra = CliRunner().invoke(main, [str(tmp_path / "small.toml"), "--output", str(tmp_path / "run")])
    assert (extra.exit_code, extra.stdout) == (1, "")
    assert "pip install 'tformer[train]'" in extra.stderr


def test_recipe_starts_from_the_weights_of_a_checkpoint(tmp_path):
    first = train(RECIPE, tmp_path / "first")
    frozen = recipe_with(start=str(first), learning_rate=0.0, weight_decay=0.0, seed=9)
    assert equal_weights(weights(train(frozen, tmp_path / "second")), weights(first))


def test_start_with_weights_of_another_shape_is_refused(tmp_path):
    first = train(RECIPE, tmp_path / "first")
    wider = replace(
        recipe_with(start=str(first)), model=FactoryCall(RECIPE.model.factory, MODEL | {"width": 32, "norm": "pre"})
    )
    with pytest.raises(SourceError, match="misshapen"):
        train(wider, tmp_path / "second")
