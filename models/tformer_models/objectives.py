"""What a step of training is, for each kind of model: its loss, and what is told of the validation side."""

# Lightning's classes are Any to mypy.
# mypy: allow-subclassing-any
from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_models.recipe import Training


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

    def said_and_wanted(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V), and the ids (B, T) that are right, `pad` for those that do not count."""
        src, tgt = batch
        return self.model(src, tgt[:, :-1]).float(), tgt[:, 1:]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits, wanted = self.said_and_wanted(batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            wanted.flatten(),
            ignore_index=self.pad,
            label_smoothing=self.options.label_smoothing,
        )
        self.train_loss.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits, wanted = self.said_and_wanted(batch)
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


class LanguageTask(Seq2SeqTask):
    """One training step: predict what is to be said after each id, where something is; loss as of `Seq2SeqTask`."""

    def said_and_wanted(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, wanted = batch
        return self.model(ids).float(), wanted


class ClassificationTask(Task):
    """One training step: say the label of each row; loss is cross-entropy with label smoothing."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, labels = batch
        loss = F.cross_entropy(self.model(ids).float(), labels[:, 0], label_smoothing=self.options.label_smoothing)
        self.train_loss.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        ids, labels = batch
        scores = self.model(ids).float()
        loss = F.cross_entropy(scores, labels[:, 0], reduction="sum")
        right = (scores.argmax(-1) == labels[:, 0]).sum()
        self.totals += torch.tensor([loss, right, len(ids), 0, 0]).to(self.totals)

    def on_validation_epoch_end(self) -> None:
        loss, right, rows, *_ = self.totals.tolist()
        self.log("loss", loss / rows)
        self.log("accuracy", right / rows)


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
