"""What a file computes on given tokens, against the unquantised one: how far its distributions are, and its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tformer_export.calibration.samples import Sample
from tformer_export.common.degradation_budget import TOKENS, Budget, Meaning
from tformer_export.verify.teacher_forcing import padded
from tformer_runtime.engine.engine import Engine

AT_ONCE = 1 << 24  # logits of a batch, 64 MB
ROWS = 32


@dataclass(frozen=True)
class Quality:
    """divergence: the mean KL divergence of the next token's distribution from the unquantised file's, in nats.
    token_agreement: share of positions with the same best token. loss: mean negative log-likelihood of the tokens of
    the data, in nats; before: the unquantised file's. positions: how many there were."""

    divergence: float
    token_agreement: float
    loss: float
    before: float
    positions: int

    @property
    def changed(self) -> float:
        """Share of tokens that changed."""
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
    def meaning(self) -> Meaning:
        return TOKENS

    def beyond(self, budget: Budget) -> str | None:
        """What is beyond the budget, as the middle of a sentence."""
        return budget.exceeded(self.changed, self.perplexity_ratio)

    def __str__(self) -> str:
        return f"{self.changed:.2%} of tokens, perplexity × {self.perplexity_ratio:.4f}"


class Yardstick:
    """The unquantised file's distributions on samples, which others are held against.

    Memory: a float32 for each position and id of the vocabulary.
    """

    meaning = TOKENS

    def __init__(self, engine: Engine, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.expected = [(at, _log_probabilities(rows)) for at, rows in predictions(engine, samples)]
        targets = {at: sample.tokens[sample.scored :] for at, sample in enumerate(samples)}
        self.targets = [targets[at] for at, _ in self.expected]
        self.loss = _mean_loss([rows for _, rows in self.expected], self.targets)

    def quality(self, engine: Engine) -> Quality:
        """One pass over the samples."""
        diverged = agreed = positions = 0.0
        losses = 0.0
        found = predictions(engine, self.samples)
        for (_, expected), (_, logits), target in zip(self.expected, found, self.targets, strict=True):
            rows = _log_probabilities(logits)
            with np.errstate(invalid="ignore"):  # a token that is impossible in both adds nothing
                diverged += float(np.nansum(np.exp(expected) * (expected - rows), dtype=np.float64))
            agreed += float((expected.argmax(-1) == rows.argmax(-1)).sum())
            losses -= float(np.take_along_axis(rows, target[:, None], -1).sum(dtype=np.float64))
            positions += len(rows)
        return Quality(diverged / positions, agreed / positions, losses / positions, self.loss, int(positions))


def predictions(engine: Engine, samples: Sequence[Sample]) -> Iterator[tuple[int, np.ndarray]]:
    """For each sample, those of like length together: its number, and the logits (positions, vocabulary) of what it
    predicts, teacher-forced."""
    for batch in _batches(samples, int(engine.decode.logits.shape[-1])):
        chosen = [samples[at] for at in batch]
        fed = [sample.tokens[:-1] for sample in chosen]
        counts, tokens = np.array([len(tokens) for tokens in fed]), padded(fed)
        names = list(chosen[0].request)
        requests = {name: [sample.request[name] for sample in chosen] for name in names} or None
        logits = engine.step(engine.start(requests, len(chosen)), tokens, counts, want="all")
        for at, sample, row, count in zip(batch, chosen, logits, counts, strict=True):
            yield at, row[sample.scored - 1 : count]


def _batches(samples: Sequence[Sample], vocabulary: int) -> Iterator[list[int]]:
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    batch: list[int] = []
    for at in order:
        longer = len(samples[at].tokens) * vocabulary * (len(batch) + 1)
        if batch and (len(batch) == ROWS or longer > AT_ONCE):
            yield batch
            batch = []
        batch.append(at)
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
