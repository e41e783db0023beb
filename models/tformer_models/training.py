"""Training by a recipe with Lightning's Trainer: encoder-decoders, language models, classifiers and forecasters.

A Lightning "epoch" is here the `validate_every` steps between two validations. At its end the weights are saved, and a
killed run resumes there. The batch, the dropout and the learning rate of a step depend only on the seed and the number
of the step, so a resumed run computes the same weights as an uninterrupted one.
"""

# Lightning's classes are Any to mypy.
# mypy: allow-subclassing-any
from __future__ import annotations

import functools
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, WeightAveraging
from torch import Tensor, nn

from tformer_export.common.checkpoint import import_callable, load_checkpoint, load_weights, save_checkpoint, save_whole
from tformer_export.common.task import Task
from tformer_models.curves import LOWER_IS_BETTER, write_curves
from tformer_models.data import Batches, Dataset
from tformer_models.dropout import use_byte_dropout
from tformer_models.objectives import (
    ClassificationObjective,
    ForecastObjective,
    LanguageModelObjective,
    Objective,
    Seq2SeqObjective,
)
from tformer_models.recipe import Recipe, TrainingOptions
from tformer_models.windows import SeriesDataset, WindowBatches
from tformer_runtime.base.errors import OptionError, OutputError, TformerError
from tformer_runtime.base.factory_arguments import wrong_arguments
from tformer_runtime.base.whole_files import replaced_file

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0  # between two lines of progress
CHECKPOINT_FOLDER = "checkpoints"  # of Lightning, in the folder of a run
LAST_CHECKPOINT = "last"
BEST_CHECKPOINT = "best"
RECIPE_FILE = "recipe.json"
MODEL_FILE = "model.pt"
OBJECTIVES = {"tgt": Seq2SeqObjective, "ids": LanguageModelObjective}  # by the step input of a Dataset
METRICS = {
    "pairs": ("loss", "token_accuracy", "sequence_accuracy"),
    "labels": ("loss", "accuracy"),
    "series": ("loss", "forecast_error"),
}


def train(recipe: Recipe, output: Path, *, resume: bool = False, force: bool = False, quiet: bool = False) -> Path:
    """Train by `recipe` in the folder `output`; return the path of the finished model.pt.

    resume: continue from the last checkpoint in the folder, or start if there is none.
    force: remove the run in the folder.
    quiet: show no progress bar. A terminal shows one otherwise.

    An interruption (KeyboardInterrupt) after the first validation leaves a model.pt with the best weights so far.

    Raises OutputError if the folder holds a run and neither is set, or cannot be written; OptionError for data or
    options that cannot be trained with; SourceError for factories and initial weights that cannot be loaded.
    """
    options = recipe.training
    _check_run(recipe, output, resume=resume, force=force)
    # The data may take minutes, and give the model further arguments.
    _check_arguments("model", recipe.model.factory, recipe.model.arguments, complete=False)
    _check_arguments("data", recipe.data.factory, recipe.data.arguments)
    logger.info("data: %s", recipe.data.factory)
    dataset = _call_factory(recipe.data.factory, recipe.data.arguments)
    _check_dataset(dataset, recipe)
    unit = "steps" if isinstance(dataset, SeriesDataset) else "examples"
    logger.info("data: %d %s for training, %d for validation", len(dataset.train), unit, len(dataset.validation))
    arguments = {**dataset.model_arguments, **recipe.model.arguments}
    _check_arguments("model", recipe.model.factory, arguments)
    torch.manual_seed(options.seed)
    model = _call_factory(recipe.model.factory, arguments)
    logger.info("model: %s, %s weights", recipe.model.factory, f"{sum(p.numel() for p in model.parameters()):,}")
    if options.start:
        load_weights(model, load_checkpoint(options.start).state_dict, options.start, recipe.model.factory)
    objective, batches = _build_objective(model, dataset, options)
    _open_run(recipe, output, force)
    save = functools.partial(
        save_checkpoint,
        model,
        output / MODEL_FILE,
        factory=recipe.model.factory,
        arguments=arguments,
        generation_defaults=recipe.checkpoint.generation_defaults,
        max_length=recipe.checkpoint.max_length,
        **_data_fields(model, dataset, recipe.checkpoint.task),
    )
    try:
        _fit(objective, batches, output, resume, shows_progress=sys.stderr.isatty() and not quiet)
    except KeyboardInterrupt as interruption:
        if (output / CHECKPOINT_FOLDER / f"{BEST_CHECKPOINT}.ckpt").exists():
            _load_best_weights(model, output)
            save()
            interruption.add_note(f"{output / MODEL_FILE} holds the best weights so far")
        raise
    _load_best_weights(model, output)
    save()
    return output / MODEL_FILE


def _build_objective(
    model: nn.Module, dataset: Dataset | SeriesDataset, options: TrainingOptions
) -> tuple[Objective, BatchModule]:
    """Return the objective for `dataset` and its batches."""
    batch_tokens, seed = options.batch_tokens, options.seed
    if isinstance(dataset, SeriesDataset):
        length = dataset.context + dataset.horizon
        train_windows = WindowBatches(dataset.train, length, batch_tokens, seed)
        validation_windows = WindowBatches(dataset.validation, length, batch_tokens, seed)
        forecast_objective = ForecastObjective(model, options, dataset.context, dataset.horizon)
        return forecast_objective, BatchModule(train_windows, validation_windows, options)
    pad_token_id = int(dataset.special_tokens["pad_token_id"])
    train_batches = Batches(dataset.train, batch_tokens, seed, pad_token_id)
    validation_batches = Batches(dataset.validation, batch_tokens, seed, pad_token_id)
    objective: Objective
    if dataset.labels:
        objective = ClassificationObjective(model, options)
    else:
        objective = OBJECTIVES[dataset.step_input](model, options, pad_token_id)
    return objective, BatchModule(train_batches, validation_batches, options)


def _fit(objective: Objective, batches: BatchModule, output: Path, resume: bool, shows_progress: bool) -> None:
    """Run the training loop; the folder `output` then holds the best checkpoint."""
    options = objective.options
    best_checkpoint = ModelCheckpoint(
        dirpath=output / CHECKPOINT_FOLDER,
        filename=BEST_CHECKPOINT,
        monitor=options.monitor,
        mode=_monitor_mode(options),
        save_last=True,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed" if options.precision == "bf16" else "32-true",
        max_steps=options.steps,
        max_epochs=-1,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[*_make_callbacks(options, output, shows_progress), best_checkpoint],
        enable_progress_bar=shows_progress,
        enable_model_summary=False,
        default_root_dir=output,
        plugins=[WholeCheckpoints()],
    )
    if trainer.strategy.root_device.type == "cpu":
        use_byte_dropout(objective.model)
    last_checkpoint = output / CHECKPOINT_FOLDER / f"{LAST_CHECKPOINT}.ckpt"
    resumed = last_checkpoint if resume and last_checkpoint.exists() else None
    try:
        trainer.fit(objective, datamodule=batches, ckpt_path=resumed)
    except SystemExit as end:  # Lightning ends the process after an interruption
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from end
        raise
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror or error}") from error


def _load_best_weights(model: nn.Module, output: Path) -> None:
    """Load the weights of the best validation; with weight averaging, a checkpoint's state dict is the average."""
    path = output / CHECKPOINT_FOLDER / f"{BEST_CHECKPOINT}.ckpt"
    state_dict = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): value for name, value in state_dict.items()})


def _data_fields(model: nn.Module, dataset: Dataset | SeriesDataset, task: str) -> dict[str, Any]:
    """Return the arguments of `save_checkpoint` that depend on the data. `task` is the name of the task."""
    if isinstance(dataset, SeriesDataset):
        # A model without a step input reads histories of one length only.
        fixed_length: dict[str, Any] = {"min_context_length": dataset.context} if model.step_input is None else {}
        return {"task": task, "series": {**dataset.series, **fixed_length}, "step_input": model.step_input}
    tokens: dict[str, Any] = {"tokenizer": dataset.tokenizers, "special_tokens": dataset.special_tokens}
    if dataset.labels:
        return {**tokens, "task": Task(task, labels=dataset.labels), "step_input": None}
    return {**tokens, "task": task, "step_input": dataset.step_input, "chat_template": dataset.chat_template}


class WholeCheckpoints(TorchCheckpointIO):
    """Writes Lightning's checkpoints so that each is whole.

    Lightning writes to the folder for temporary files and moves the file. Between two disks that is a copy, and a
    killed process leaves a half of it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the checkpoint. Raises OutputError if it cannot be written."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
        save_whole(checkpoint, Path(path))


class BatchModule(L.LightningDataModule):
    """The batches of the steps until the next validation, for Lightning."""

    def __init__(
        self, train: Batches | WindowBatches, validation: Batches | WindowBatches, options: TrainingOptions
    ) -> None:
        super().__init__()
        self.options = options
        self.train, self.validation = train, validation

    def train_dataloader(self) -> SizedLoader:
        """Return the batches from the current step to the next validation."""
        assert self.trainer is not None
        first_step = self.trainer.global_step
        step_count = min(self.options.validate_every, self.options.steps - first_step)
        return SizedLoader(lambda: self.train.shuffled(first_step, step_count), step_count)

    def val_dataloader(self) -> SizedLoader:
        """Return the batches of the validation data."""
        return SizedLoader(self.validation.in_order, len(self.validation))


class SizedLoader:
    """An iterable with a length, which is the interface that Lightning needs of a data loader."""

    def __init__(self, make_batches: Callable[[], Iterator[Any]], batch_count: int) -> None:
        self.make_batches, self.batch_count = make_batches, batch_count

    def __len__(self) -> int:
        return self.batch_count

    def __iter__(self) -> Iterator[Any]:
        return self.make_batches()


class MetricsHistory(Callback):
    """Records a row of metrics per validation, logs it, and writes metrics.csv and curves.png.

    The rows are part of the checkpoint, so a resumed run continues the table.
    """

    def __init__(self, output: Path, monitor: str) -> None:
        self.output = output
        self.monitor = monitor
        self.rows: list[dict[str, float]] = []
        self.previous_seconds = 0.0  # of the runs that this one resumes
        self.start_time = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.start_time = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add a row. Raises OptionError if the training loss is not finite."""
        assert isinstance(pl_module, Objective)
        loss = torch.stack(pl_module.train_losses).double().mean().item()
        pl_module.train_losses.clear()
        if not math.isfinite(loss):
            raise OptionError(
                f"the loss is {loss} at step {trainer.global_step}: lower learning_rate or lengthen warmup"
            )
        row = {
            "step": float(trainer.global_step),
            "train_loss": loss,
            **{name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "seconds": self.previous_seconds + time.monotonic() - self.start_time,
        }
        self.rows.append(row)
        write_curves(self.rows, self.output, self.monitor)
        logger.info(", ".join(f"{name} {value:.6g}" for name, value in row.items()))

    def state_dict(self) -> dict[str, Any]:
        """Return the rows for the checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the rows of a checkpoint."""
        self.rows = list(state_dict["rows"])
        self.previous_seconds = self.rows[-1]["seconds"]


class ProgressLines(Callback):
    """Logs the first step and then a step every PROGRESS_SECONDS."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.logged_at = -math.inf

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step, if it is time to."""
        if time.monotonic() - self.logged_at >= PROGRESS_SECONDS:
            self.logged_at = time.monotonic()
            logger.info("training: step %d of %d", trainer.global_step, self.steps)


def _make_callbacks(options: TrainingOptions, output: Path, shows_progress: bool) -> list[Callback]:
    """Return the callbacks of the training loop, except the one that saves checkpoints."""
    callbacks: list[Callback] = [MetricsHistory(output, options.monitor)]
    if options.average:

        def average(mean: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
            """Return the exponential moving average; a smaller decay at first forgets the random initial weights."""
            decay = min(options.average, (1 + int(count)) / (10 + int(count)))
            return mean.lerp(current, 1 - decay)

        callbacks.append(WeightAveraging(use_buffers=False, avg_fn=average))
    if options.patience:
        callbacks.append(
            EarlyStopping(
                options.monitor, mode=_monitor_mode(options), patience=options.patience, check_on_train_epoch_end=False
            )
        )
    shown = RichProgressBar(console_kwargs={"stderr": True}) if shows_progress else ProgressLines(options.steps)
    return [*callbacks, shown]


def _monitor_mode(options: TrainingOptions) -> str:
    return "min" if options.monitor in LOWER_IS_BETTER else "max"


def _check_arguments(section: str, factory: str, arguments: Mapping[str, Any], complete: bool = True) -> None:
    """Raise OptionError for arguments of a section that its factory does not take.

    complete: whether no further arguments follow from the data.
    """
    if (reason := wrong_arguments(import_callable(factory), arguments, complete=complete)) is not None:
        raise OptionError(f"the arguments of [{section}] do not fit {factory}: {reason}")


def _call_factory(factory: str, arguments: Mapping[str, Any]) -> Any:
    """Import and call `factory`. Raises SourceError if it cannot be imported, OptionError if it fails."""
    function = import_callable(factory)
    try:
        return function(**arguments)
    except TformerError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise OptionError(f"the factory {factory} failed with the recipe's arguments: {error}") from error


def _check_dataset(dataset: Any, recipe: Recipe) -> None:
    """Raise OptionError for data that cannot be trained on."""
    if isinstance(dataset, SeriesDataset):
        _check_series(dataset, recipe)
    elif isinstance(dataset, Dataset):
        _check_pairs(dataset, recipe)
    else:
        raise OptionError(
            f"the data factory {recipe.data.factory} must return a tformer_models.data.Dataset or a "
            "tformer_models.windows.SeriesDataset"
        )


def _check_pairs(dataset: Dataset, recipe: Recipe) -> None:
    """Raise OptionError for a wrong step input or metric, an empty split, or a sequence beyond max_length."""
    factory, max_length = recipe.data.factory, recipe.checkpoint.max_length
    if not dataset.labels and dataset.step_input not in OBJECTIVES:
        raise OptionError(
            f"{factory} returns pairs for the step input {dataset.step_input!r}: it must be 'tgt' for an "
            "encoder-decoder or 'ids' for a language model"
        )
    metrics = METRICS["labels" if dataset.labels else "pairs"]
    if recipe.training.monitor not in metrics:
        content = "rows of ids with labels" if dataset.labels else "pairs of ids"
        raise OptionError(
            f"{factory} returns {content}, with the metrics {', '.join(metrics)}: monitor cannot be "
            f"{recipe.training.monitor}"
        )
    for split, pairs in (("training", dataset.train), ("validation", dataset.validation)):
        if not pairs:
            raise OptionError(f"the data factory {factory} returned no {split} pairs")
        length = max(len(ids) for pair in pairs for ids in pair)
        if max_length and length > max_length:
            raise OptionError(
                f"the {split} data has a sequence of {length} ids, but the recipe's max_length is {max_length}"
            )


def _check_series(dataset: SeriesDataset, recipe: Recipe) -> None:
    """Raise OptionError for a wrong metric, or a series that is shorter than one window."""
    factory, length = recipe.data.factory, dataset.context + dataset.horizon
    metrics = METRICS["series"]
    if recipe.training.monitor not in metrics:
        raise OptionError(
            f"{factory} returns a series of numbers, with the metrics {', '.join(metrics)}: monitor cannot be "
            f"{recipe.training.monitor}"
        )
    for split, series in (("training", dataset.train), ("validation", dataset.validation)):
        if len(series) < length:
            raise OptionError(
                f"the {split} series has {len(series)} steps, fewer than a window of context and horizon, {length}"
            )


def _check_run(recipe: Recipe, output: Path, *, resume: bool, force: bool) -> None:
    """Check the folder of a run before the data are read.

    Raises OutputError if the folder holds a run and neither `resume` nor `force` is set, or cannot be read; OptionError
    if `resume` is set and the run has another recipe.
    """
    recipe_file = output / RECIPE_FILE
    if force or not recipe_file.exists():
        return
    if not resume:
        raise OutputError(f"{output} already holds a run: continue it with --resume or start again with --force")
    try:
        is_same = recipe_file.read_text(encoding="utf-8") == _recipe_text(recipe)
    except OSError as error:
        raise OutputError(f"{output} cannot be read: {error.strerror or error}") from error
    if not is_same:
        raise OptionError(
            f"{output} holds a run of another recipe, or of other text files, so this recipe cannot resume it"
        )


def _open_run(recipe: Recipe, output: Path, force: bool) -> None:
    """Create the folder of a run and write its recipe there. Raises OutputError if it cannot be written.

    force: remove the run in the folder.
    """
    try:
        if force and (output / RECIPE_FILE).exists():
            shutil.rmtree(output / CHECKPOINT_FOLDER, ignore_errors=True)
            (output / MODEL_FILE).unlink(missing_ok=True)
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror or error}") from error
    with replaced_file(output / RECIPE_FILE) as file:
        file.write(_recipe_text(recipe).encode())


def _recipe_text(recipe: Recipe) -> str:
    return json.dumps(recipe.as_dict(), indent=1)
