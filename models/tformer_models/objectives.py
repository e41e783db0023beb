"""Training objectives, one for each kind of model: the loss of a step, and the validation metrics."""

# Lightning's classes are Any to mypy.
# mypy: allow-subclassing-any
from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_models.recipe import TrainingOptions


class Objective(L.LightningModule):
    """The common part of all objectives: optimizer, learning rate and the random state of each step.

    Subclasses append each step's loss to `train_losses`, and add up to five sums per validation batch in
    `validation_sums`, which `on_validation_epoch_end` turns into metrics.
    """

    def __init__(self, model: nn.Module, options: TrainingOptions) -> None:
        super().__init__()
        self.model = model
        self.options = options
        self.train_losses: list[Tensor] = []
        self.validation_sums = torch.zeros(5, dtype=torch.float64)

    def configure_optimizers(self) -> Any:
        """Return Adam or AdamW with the recipe's learning rate schedule."""
        options = self.options
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]  # no weight decay on biases and norms
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer_class = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
        optimizer = optimizer_class(
            groups, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed torch by the step, so that dropout and noise are the same in a resumed run."""
        torch.manual_seed((self.options.seed << 32) + self.global_step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the norm of the gradient."""
        # Lightning's own clipping refuses fused optimizers because of gradient scalers; bfloat16 needs no scaler.
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self.validation_sums.zero_()


class Seq2SeqObjective(Objective):
    """Predict tgt[:, 1:] from src and tgt[:, :-1]; the loss is cross-entropy with label smoothing.

    Metrics: loss (nats per token), token_accuracy, and sequence_accuracy, the share of rows with every token right.
    """

    def __init__(self, model: nn.Module, options: TrainingOptions, pad_token_id: int) -> None:
        super().__init__(model, options)
        self.pad_token_id = pad_token_id

    def compute_logits(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (B, T, V) and target ids (B, T); targets equal to the padding id are ignored."""
        src, tgt = batch
        return self.model(src, tgt[:, :-1]).float(), tgt[:, 1:]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        logits, targets = self.compute_logits(batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            ignore_index=self.pad_token_id,
            label_smoothing=self.options.label_smoothing,
        )
        self.train_losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the sums."""
        logits, targets = self.compute_logits(batch)
        counted = targets != self.pad_token_id
        correct = logits.argmax(-1) == targets
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.pad_token_id, reduction="sum")
        correct_rows = (correct | ~counted).all(dim=1)
        sums = torch.tensor([loss, counted.sum(), (correct & counted).sum(), correct_rows.sum(), len(correct_rows)])
        self.validation_sums += sums.to(self.validation_sums)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics."""
        loss, tokens, correct_tokens, correct_rows, rows = self.validation_sums.tolist()
        self.log("loss", loss / tokens)
        self.log("token_accuracy", correct_tokens / tokens)
        # Greedy decoding gives the target if and only if every target token has the highest logit after its true
        # predecessors. So this equals the accuracy of greedy decoding.
        self.log("sequence_accuracy", correct_rows / rows)


class LanguageModelObjective(Seq2SeqObjective):
    """Predict the target id after each id, where there is a target; loss and metrics as in `Seq2SeqObjective`."""

    def compute_logits(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (B, T, V) and target ids (B, T); targets equal to the padding id are ignored."""
        ids, targets = batch
        return self.model(ids).float(), targets


class ClassificationObjective(Objective):
    """Predict the label of each row; the loss is cross-entropy with label smoothing.

    Metrics: loss (nats per row) and accuracy.
    """

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        ids, labels = batch
        loss = F.cross_entropy(self.model(ids).float(), labels[:, 0], label_smoothing=self.options.label_smoothing)
        self.train_losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the sums."""
        ids, labels = batch
        scores = self.model(ids).float()
        loss = F.cross_entropy(scores, labels[:, 0], reduction="sum")
        correct = (scores.argmax(-1) == labels[:, 0]).sum()
        self.validation_sums += torch.tensor([loss, correct, len(ids), 0, 0]).to(self.validation_sums)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics."""
        loss, correct, rows, *_ = self.validation_sums.tolist()
        self.log("loss", loss / rows)
        self.log("accuracy", correct / rows)


class ForecastObjective(Objective):
    """Forecast a window (B, context + horizon, F): the squared error of single steps and of fed-back forecasts.

    The loss is (1 - rollout) · the error of single steps after true steps + rollout · the error of forecasts that feed
    predictions back. Without the second part a model never trains on the inputs that its own errors lead to. `noise` is
    added to the inputs and not to the targets.

    Metrics: loss (mean squared error of single steps) and forecast_error (root mean squared error of forecasts), in the
    units of the normalised series.
    """

    def __init__(self, model: nn.Module, options: TrainingOptions, context: int, horizon: int) -> None:
        super().__init__(model, options)
        self.context, self.horizon = context, horizon

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        rollout = self.options.rollout
        inputs = batch + self.options.noise * torch.randn_like(batch) if self.options.noise else batch
        predictions, _ = self.model.teacher_force(inputs, self.context)  # type: ignore[operator]
        loss = F.mse_loss(predictions.float(), batch[:, -predictions.shape[1] :])
        if rollout:
            forecast = self.model.forecast(inputs[:, : self.context], self.horizon)  # type: ignore[operator]
            loss = (1 - rollout) * loss + rollout * F.mse_loss(forecast.float(), batch[:, self.context :])
        self.train_losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Add a batch to the sums."""
        predictions, targets = self.model.teacher_force(batch, self.context)  # type: ignore[operator]
        forecast = self.model.forecast(batch[:, : self.context], self.horizon)  # type: ignore[operator]
        step_error = F.mse_loss(predictions.float(), targets, reduction="sum")
        forecast_error = F.mse_loss(forecast.float(), batch[:, self.context :], reduction="sum")
        sums = torch.tensor([step_error, targets.numel(), forecast_error, forecast.numel(), 0])
        self.validation_sums += sums.to(self.validation_sums)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics."""
        step_error, step_numbers, forecast_error, forecast_numbers, _ = self.validation_sums.tolist()
        self.log("loss", step_error / step_numbers)
        self.log("forecast_error", math.sqrt(forecast_error / forecast_numbers))


def learning_rate_factor(step: int, options: TrainingOptions) -> float:
    """Return the learning rate of `step` as a share of the peak.

    The rate rises linearly over `warmup` steps. Then it falls as 1/√step ("Attention Is All You Need", §5.3), or as
    half a cosine that reaches zero at the last step.
    """
    if step < options.warmup:
        return (step + 1) / options.warmup
    if options.schedule == "inverse-sqrt":
        return math.sqrt(max(options.warmup, 1) / (step + 1))
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
