"""Quality of a file's predictions on given tokens: its distributions and best tokens against the unquantised file's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tformer_export.calibration.samples import Sample
from tformer_export.common.degradation_budget import TOKENS, DegradationBudget, QualityUnit
from tformer_export.verify.teacher_forcing import padded
from tformer_runtime.engine.engine import Engine

MAX_BATCH_LOGITS = 1 << 24  # 64 MB
MAX_BATCH_ROWS = 32


@dataclass(frozen=True)
class TokenQuality:
    """The quality of a file's predictions, compared with the unquantised file's.

    divergence: the mean KL divergence of the next token's distribution from the unquantised file's, in nats.
    token_agreement: share of positions with the same best token.
    loss: mean negative log-likelihood of the tokens of the data, in nats.
    before: the loss of the unquantised file.
    positions: the number of predicted tokens.
    """

    divergence: float
    token_agreement: float
    loss: float
    before: float
    positions: int

    @property
    def changed(self) -> float:
        """Return the share of positions with another best token."""
        return 1 - self.token_agreement

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))

    @property
    def perplexity_before(self) -> float:
        return float(np.exp(self.before))

    @property
    def perplexity_ratio(self) -> float:
        return float(np.exp(self.loss - self.before))

    @property
    def meaning(self) -> QualityUnit:
        return TOKENS

    def beyond(self, budget: DegradationBudget) -> str | None:
        """Return how a budget is exceeded, as the middle of a sentence; None if it is not."""
        return budget.exceeded(self.changed, self.perplexity_ratio)

    def __str__(self) -> str:
        return f"{self.changed:.2%} of tokens, perplexity × {self.perplexity_ratio:.4f}"


class ReferenceDistribution:
    """The unquantised file's distributions on samples, with which other files are compared.

    Memory: a float32 for each position and id of the vocabulary.
    """

    meaning = TOKENS

    def __init__(self, engine: Engine, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.expected = [(at, _log_probabilities(rows)) for at, rows in predictions(engine, samples)]
        targets = {at: sample.tokens[sample.given_tokens :] for at, sample in enumerate(samples)}
        self.targets = [targets[at] for at, _ in self.expected]
        self.loss = _mean_loss([rows for _, rows in self.expected], self.targets)

    def quality(self, engine: Engine) -> TokenQuality:
        """Return the quality of a file, by one pass over the samples."""
        diverged = agreed = positions = 0.0
        losses = 0.0
        predicted = predictions(engine, self.samples)
        for (_, expected), (_, logits), target in zip(self.expected, predicted, self.targets, strict=True):
            rows = _log_probabilities(logits)
            with np.errstate(invalid="ignore"):  # NaN for a token that is impossible in both, which adds nothing
                diverged += float(np.nansum(np.exp(expected) * (expected - rows), dtype=np.float64))
            agreed += float((expected.argmax(-1) == rows.argmax(-1)).sum())
            losses -= float(np.take_along_axis(rows, target[:, None], -1).sum(dtype=np.float64))
            positions += len(rows)
        return TokenQuality(diverged / positions, agreed / positions, losses / positions, self.loss, int(positions))


def predictions(engine: Engine, samples: Sequence[Sample]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of each sample and its teacher-forced logits (positions, vocabulary).

    Samples of similar lengths run and come together.
    """
    for batch in _batches(samples, int(engine.decode.logits.shape[-1])):
        batch_samples = [samples[at] for at in batch]
        inputs = [sample.tokens[:-1] for sample in batch_samples]
        counts, tokens = np.array([len(tokens) for tokens in inputs]), padded(inputs)
        names = list(batch_samples[0].request)
        requests = {name: [sample.request[name] for sample in batch_samples] for name in names} or None
        logits = engine.step(engine.start(requests, len(batch_samples)), tokens, counts, logit_positions="all")
        for at, sample, row, count in zip(batch, batch_samples, logits, counts, strict=True):
            yield at, row[sample.given_tokens - 1 : count]


def _batches(samples: Sequence[Sample], vocabulary: int) -> Iterator[list[int]]:
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    batch: list[int] = []
    for index in order:
        batch_logits = len(samples[index].tokens) * vocabulary * (len(batch) + 1)
        if batch and (len(batch) == MAX_BATCH_ROWS or batch_logits > MAX_BATCH_LOGITS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _mean_loss(rows: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> float:
    total = -sum(
        float(np.take_along_axis(row, target[:, None], -1).sum(dtype=np.float64))
        for row, target in zip(rows, targets, strict=True)
    )
    return total / sum(map(len, targets))
