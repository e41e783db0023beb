"""Training by a recipe, with Lightning's Trainer: of a sequence model, a language model, a classifier or a forecaster.

A Lightning "epoch" is here the stretch of `validate_every` steps between two validations: at its end the weights are
checkpointed, and that is where a killed run resumes. What happens in a step (its batch, its dropout, its rate) follows
from the seed and the number of the step alone, so a resumed run walks the same path as one that was never killed.
"""

# Lightning's classes are Any to mypy.
# mypy: allow-subclassing-any
from __future__ import annotations

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
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, WeightAveraging
from torch import Tensor, nn

from tformer_export.common.checkpoint import (
    OptionError,
    OutputError,
    TformerError,
    import_callable,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from tformer_models.curves import write_curves
from tformer_models.data import Batches, Dataset
from tformer_models.dropout import use_byte_dropout
from tformer_models.objectives import ClassificationTask, ForecastTask, LanguageTask, Seq2SeqTask, Task
from tformer_models.recipe import Recipe, Training
from tformer_models.windows import SeriesDataset, Windows

logger = logging.getLogger(__name__)

LAST, BEST, RECIPE, MODEL = "last", "best", "recipe.json", "model.pt"
STEPS = {"tgt": Seq2SeqTask, "ids": LanguageTask}  # what pairs are for
METRICS = {
    "pairs": ("loss", "token_accuracy", "sequence_accuracy"),
    "labels": ("loss", "accuracy"),
    "series": ("loss", "forecast_error"),
}


def train(recipe: Recipe, output: Path, *, resume: bool = False, force: bool = False) -> Path:
    """Train by `recipe` in the folder `output`; returns the path of the finished model.pt.

    `resume` goes on from the folder's last checkpoint, or starts if there is none; `force` removes the run that the
    folder holds. Raises OutputError where it holds one and neither is set.
    """
    options = recipe.training
    _open_run(recipe, output, resume=resume, force=force)
    dataset = _make(recipe.data.factory, recipe.data.arguments)
    _check(dataset, recipe)
    arguments = {**dataset.model_arguments, **recipe.model.arguments}
    torch.manual_seed(options.seed)
    model = _make(recipe.model.factory, arguments)
    if options.start:
        load_weights(model, load_checkpoint(options.start).state_dict, options.start, recipe.model.factory)
    task, stream = _kind(model, dataset, options)
    keeper = ModelCheckpoint(
        dirpath=output / "checkpoints",
        filename=BEST,
        monitor=options.monitor,
        mode=_mode(options),
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
        callbacks=[*_callbacks(options, output), keeper],
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        default_root_dir=output,
    )
    if trainer.strategy.root_device.type == "cpu":
        use_byte_dropout(model)
    last = output / "checkpoints" / f"{LAST}.ckpt"
    try:
        trainer.fit(task, datamodule=stream, ckpt_path=last if resume and last.exists() else None)
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror or error}") from error
    # With averaging, the state dict of a checkpoint is the average.
    best = torch.load(output / "checkpoints" / f"{BEST}.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): value for name, value in best.items()})
    save_checkpoint(
        model,
        output / MODEL,
        factory=recipe.model.factory,
        arguments=arguments,
        task=recipe.checkpoint.task,
        defaults=recipe.checkpoint.defaults,
        max_length=recipe.checkpoint.max_length,
        **_of_data(model, dataset),
    )
    return output / MODEL


def _kind(model: nn.Module, dataset: Dataset | SeriesDataset, options: Training) -> tuple[Task, Stream]:
    """What a step of training is, and where its batches come from."""
    tokens, seed = options.batch_tokens, options.seed
    if isinstance(dataset, SeriesDataset):
        length = dataset.context + dataset.horizon
        train, validation = (Windows(side, length, tokens, seed) for side in (dataset.train, dataset.validation))
        return ForecastTask(model, options, dataset.context, dataset.horizon), Stream(train, validation, options)
    pad = int(dataset.special["pad"])
    pairs, others = (Batches(side, tokens, seed, pad) for side in (dataset.train, dataset.validation))
    task = ClassificationTask(model, options) if dataset.labels else STEPS[dataset.step](model, options, pad)
    return task, Stream(pairs, others, options)


def _of_data(model: nn.Module, dataset: Dataset | SeriesDataset) -> dict[str, Any]:
    """What the checkpoint says that follows from the data."""
    if isinstance(dataset, SeriesDataset):
        one_length: dict[str, Any] = {"shortest": dataset.context} if model.step is None else {}
        return {"series": {**dataset.series, **one_length}, "step": model.step}
    said: dict[str, Any] = {"tokenizer": dataset.tokenizers, "special": dataset.special}
    if dataset.labels:
        return {**said, "labels": dataset.labels, "step": None}
    return {**said, "step": dataset.step, "chat_template": dataset.chat_template}


class Stream(L.LightningDataModule):
    """The batches of the coming stretch of steps, made anew at its beginning."""

    def __init__(self, train: Batches | Windows, validation: Batches | Windows, options: Training) -> None:
        super().__init__()
        self.options = options
        self.train, self.validation = train, validation

    def train_dataloader(self) -> Loader:
        assert self.trainer is not None
        first = self.trainer.global_step
        count = min(self.options.validate_every, self.options.steps - first)
        return Loader(lambda: self.train.shuffled(first, count), count)

    def val_dataloader(self) -> Loader:
        return Loader(self.validation.in_order, len(self.validation))


class Loader:
    """A sized iterable, which is all that Lightning asks of one."""

    def __init__(self, batches: Callable[[], Iterator[Any]], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class History(Callback):
    """Keeps a row of metrics for each validation, and writes metrics.csv and curves.png after each.

    The rows are part of the checkpoint, so a resumed run goes on with the very rows that lead to it.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.rows: list[dict[str, float]] = []
        self.before = 0.0  # seconds spent by the runs that this one resumes
        self.began = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        loss = torch.stack(pl_module.train_loss).double().mean().item()
        pl_module.train_loss.clear()
        if not math.isfinite(loss):
            raise OptionError(
                f"the loss is {loss} at step {trainer.global_step}: lower learning_rate or lengthen warmup"
            )
        row = {
            "step": float(trainer.global_step),
            "train_loss": loss,
            **{name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "seconds": self.before + time.monotonic() - self.began,
        }
        self.rows.append(row)
        write_curves(self.rows, self.output)
        logger.info(", ".join(f"{name} {value:.6g}" for name, value in row.items()))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])
        self.before = self.rows[-1]["seconds"]


def _callbacks(options: Training, output: Path) -> list[Callback]:
    callbacks: list[Callback] = [History(output)]
    if options.average:

        def average(mean: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
            """Exponential, but shorter at first, so that the random beginning is forgotten."""
            decay = min(options.average, (1 + int(count)) / (10 + int(count)))
            return mean.lerp(current, 1 - decay)

        callbacks.append(WeightAveraging(use_buffers=False, avg_fn=average))
    if options.patience:
        callbacks.append(
            EarlyStopping(
                options.monitor, mode=_mode(options), patience=options.patience, check_on_train_epoch_end=False
            )
        )
    if sys.stderr.isatty():
        callbacks.append(RichProgressBar(console_kwargs={"stderr": True}))
    return callbacks


def _mode(options: Training) -> str:
    return "min" if options.monitor in ("loss", "forecast_error") else "max"


def _make(factory: str, arguments: Mapping[str, Any]) -> Any:
    make = import_callable(factory)
    try:
        return make(**arguments)
    except TformerError:
        raise
    except Exception as error:  # the recipe's own code: whatever it raises means that the recipe cannot be followed
        raise OptionError(f"the factory {factory} failed with the recipe's arguments: {error}") from error


def _check(dataset: Any, recipe: Recipe) -> None:
    """Raises OptionError for data that cannot be trained on."""
    factory, limit = recipe.data.factory, recipe.checkpoint.max_length
    if isinstance(dataset, SeriesDataset):
        _check_series(dataset, recipe)
        return
    if not isinstance(dataset, Dataset):
        raise OptionError(
            f"the data factory {factory} must return a tformer_models.data.Dataset, or a "
            "tformer_models.windows.SeriesDataset"
        )
    if not dataset.labels and dataset.step not in STEPS:
        raise OptionError(
            f"{factory} gives pairs for a step input {dataset.step!r}: it is 'tgt', of a model that reads 'src' beside "
            "it, or 'ids', of a language model"
        )
    told = METRICS["labels" if dataset.labels else "pairs"]
    if recipe.training.monitor not in told:
        given = "rows of ids with labels" if dataset.labels else "pairs of ids"
        raise OptionError(
            f"{factory} gives {given}, whose metrics are {', '.join(told)}: not {recipe.training.monitor}"
        )
    for side, pairs in (("training", dataset.train), ("validation", dataset.validation)):
        if not pairs:
            raise OptionError(f"the data factory {factory} returned no {side} pairs")
        longest = max(len(ids) for pair in pairs for ids in pair)
        if limit and longest > limit:
            raise OptionError(
                f"the {side} data has a sequence of {longest} ids, but the recipe's max_length is {limit}"
            )


def _check_series(dataset: SeriesDataset, recipe: Recipe) -> None:
    factory, length = recipe.data.factory, dataset.context + dataset.horizon
    told = METRICS["series"]
    if recipe.training.monitor not in told:
        raise OptionError(
            f"{factory} gives a series of numbers, whose metrics are {', '.join(told)}: not {recipe.training.monitor}"
        )
    for side, series in (("training", dataset.train), ("validation", dataset.validation)):
        if len(series) < length:
            raise OptionError(
                f"the {side} series has {len(series)} steps, and a window of context and horizon {length}"
            )


def _open_run(recipe: Recipe, output: Path, *, resume: bool, force: bool) -> None:
    """Make the folder of a run, and note there by which recipe it is trained."""
    note = output / RECIPE
    text = json.dumps(recipe.as_dict(), indent=1)
    try:
        if note.exists() and force:
            shutil.rmtree(output / "checkpoints", ignore_errors=True)
        elif note.exists():
            if not resume:
                raise OutputError(f"{output} holds a run already; go on with --resume, or begin anew with --force")
            if note.read_text(encoding="utf-8") != text:
                raise OptionError(f"{output} was begun by another recipe, so it cannot be resumed by this one")
        output.mkdir(parents=True, exist_ok=True)
        note.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror or error}") from error
