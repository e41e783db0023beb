"""Training of a sequence-to-sequence model, or of a forecaster, by a recipe, with Lightning's Trainer.

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
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, WeightAveraging
from torch import Tensor, nn

from tformer_export.checkpoint import (
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
from tformer_models.recipe import Recipe, Training
from tformer_models.windows import SeriesDataset, Windows

logger = logging.getLogger(__name__)

LAST, BEST, RECIPE, MODEL = "last", "best", "recipe.json", "model.pt"


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
    return Seq2SeqTask(model, options, pad), Stream(pairs, others, options)


def _of_data(model: nn.Module, dataset: Dataset | SeriesDataset) -> dict[str, Any]:
    """What the checkpoint says that follows from the data."""
    if isinstance(dataset, SeriesDataset):
        one_length: dict[str, Any] = {"shortest": dataset.context} if model.step is None else {}
        return {"series": {**dataset.series, **one_length}, "step": model.step}
    return {"tokenizer": dataset.tokenizers, "special": dataset.special}


class Task(L.LightningModule):
    """What any step of training has: the optimizer, its rate, and numbers that are drawn by the step."""

    def __init__(self, model: nn.Module, options: Training) -> None:
        super().__init__()
        self.model = model
        self.options = options
        self.train_loss: list[Tensor] = []
        self.totals = torch.zeros(5, dtype=torch.float64)

    def configure_optimizers(self) -> Any:
        options = self.options
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]  # biases and norms do not decay
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(
            groups, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed((self.options.seed << 32) + self.global_step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Lightning's own clipping refuses fused optimizers because of gradient scalers; bfloat16 needs none.
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)

    def on_validation_epoch_start(self) -> None:
        self.totals.zero_()


class Seq2SeqTask(Task):
    """One training step: predict tgt[1:] from src and tgt[:-1]; loss is cross-entropy with label smoothing."""

    def __init__(self, model: nn.Module, options: Training, pad: int) -> None:
        super().__init__(model, options)
        self.pad = pad

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        src, tgt = batch
        logits = self.model(src, tgt[:, :-1])
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            tgt[:, 1:].flatten(),
            ignore_index=self.pad,
            label_smoothing=self.options.label_smoothing,
        )
        self.train_loss.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        src, tgt = batch
        wanted = tgt[:, 1:]
        logits = self.model(src, tgt[:, :-1]).float()
        real = wanted != self.pad
        right = logits.argmax(-1) == wanted
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=self.pad, reduction="sum")
        rows = (right | ~real).all(dim=1)
        self.totals += torch.tensor([loss, real.sum(), (right & real).sum(), rows.sum(), len(rows)]).to(self.totals)

    def on_validation_epoch_end(self) -> None:
        loss, tokens, right_tokens, right_rows, rows = self.totals.tolist()
        self.log("loss", loss / tokens)
        self.log("token_accuracy", right_tokens / tokens)
        # Greedy decoding gives exactly the target if and only if every token is the best one after the right ones.
        self.log("sequence_accuracy", right_rows / rows)


class ForecastTask(Task):
    """One training step: the squared error of each next step and, as `rollout` weighs it, of whole forecasts.

    A model that is trained on true steps alone never sees what its own errors lead to. `noise` is added to what is
    read and not to what is to be said.
    """

    def __init__(self, model: nn.Module, options: Training, context: int, horizon: int) -> None:
        super().__init__(model, options)
        self.context, self.horizon = context, horizon

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rollout = self.options.rollout
        read = batch + self.options.noise * torch.randn_like(batch) if self.options.noise else batch
        said, _ = self.model.one_step(read, self.context)  # type: ignore[operator]
        loss = F.mse_loss(said.float(), batch[:, -said.shape[1] :])
        if rollout:
            forecast = self.model.forecast(read[:, : self.context], self.horizon)  # type: ignore[operator]
            loss = (1 - rollout) * loss + rollout * F.mse_loss(forecast.float(), batch[:, self.context :])
        self.train_loss.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        said, wanted = self.model.one_step(batch, self.context)  # type: ignore[operator]
        forecast = self.model.forecast(batch[:, : self.context], self.horizon)  # type: ignore[operator]
        one_step = F.mse_loss(said.float(), wanted, reduction="sum")
        whole = F.mse_loss(forecast.float(), batch[:, self.context :], reduction="sum")
        self.totals += torch.tensor([one_step, wanted.numel(), whole, forecast.numel(), 0]).to(self.totals)

    def on_validation_epoch_end(self) -> None:
        one_step, steps, whole, forecasts, _ = self.totals.tolist()
        self.log("loss", one_step / steps)
        self.log("forecast_error", math.sqrt(whole / forecasts))


def rate(step: int, options: Training) -> float:
    """Learning rate of a step, as a share of the peak: linear warm-up, then 1/√step ("Attention Is All You Need",
    §5.3) or half a cosine down to zero."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    if options.schedule == "inverse-sqrt":
        return math.sqrt(max(options.warmup, 1) / (step + 1))
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


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
    if recipe.training.monitor not in ("loss", "token_accuracy", "sequence_accuracy"):
        raise OptionError(f"{recipe.training.monitor} is a metric of forecasts, and {factory} gives pairs of ids")
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
    if recipe.training.monitor not in ("loss", "forecast_error"):
        raise OptionError(f"{recipe.training.monitor} is a metric of tokens, and {factory} gives a series of numbers")
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
