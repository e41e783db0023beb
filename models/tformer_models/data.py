"""Pairs of sequences or rows with labels, in batches that follow from seed and step, so that runs can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Dataset:
    """What a recipe's data factory returns.

    train, validation: pairs of source ids and target ids; the targets hold their start and end tokens. Of a language
    model, whose `step` is "ids" and not "tgt": pairs of ids and what is to be said after each, padding for nothing.
    model_arguments: what the data decides about the model, such as the sizes of its vocabularies.
    tokenizers: input name → text in tokenizers' JSON format. special: as in a checkpoint.
    step, chat_template: as in a checkpoint.
    labels: of a classifier, whose targets hold one number each: which label is the row's.
    """

    train: Sequence[Pair]
    validation: Sequence[Pair]
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, Any] = field(default_factory=lambda: {"start": [1], "end": [2], "pad": 0})
    labels: Sequence[str] = ()
    step: str = "tgt"
    chat_template: str | None = None


class Batches:
    """Batches of pairs of like length, each as large as `batch_tokens` allows: (src (B, S), tgt (B, T)), padded.

    Pairs are sorted by length, and shuffled among those of the same lengths. The sequence of lengths is then the same
    in every pass over the data, hence so are the number and the sizes of the batches; which pairs they hold and the
    order that they come in are drawn anew for each pass, from the seed and the number of the pass.
    """

    def __init__(self, pairs: Sequence[Pair], batch_tokens: int, seed: int, pad: int = 0) -> None:
        self.pairs = pairs
        self.seed = seed
        self.pad = pad
        self.source_lengths = np.array([len(source) for source, _ in pairs])
        self.target_lengths = np.array([len(target) for _, target in pairs])
        self.starts = self._starts(batch_tokens)

    def __len__(self) -> int:
        """Batches in one pass."""
        return len(self.starts) - 1

    def _starts(self, batch_tokens: int) -> list[int]:
        order = np.lexsort((self.target_lengths, self.source_lengths))
        starts = [0]
        longest = 0
        for i, pair in enumerate(order):
            longer = max(longest, int(self.source_lengths[pair]), int(self.target_lengths[pair]))
            if i > starts[-1] and longer * (i + 1 - starts[-1]) > batch_tokens:
                starts.append(i)
                longer = max(int(self.source_lengths[pair]), int(self.target_lengths[pair]))
            longest = longer
        return [*starts, len(order)]

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass, nothing shuffled."""
        order = np.lexsort((self.target_lengths, self.source_lengths))
        for i in range(len(self)):
            yield self._batch(order, i)

    def shuffled(self, first_step: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the steps first_step … first_step + count - 1, through as many passes as that takes."""
        current = -1
        for step in range(first_step, first_step + count):
            number, place = divmod(step, len(self))
            if number != current:
                current = number
                random = np.random.default_rng([self.seed, number])
                order = np.lexsort((random.random(len(self.pairs)), self.target_lengths, self.source_lengths))
                turns = random.permutation(len(self))
            yield self._batch(order, int(turns[place]))

    def _batch(self, order: np.ndarray, i: int) -> tuple[Tensor, Tensor]:
        pairs = [self.pairs[j] for j in order[self.starts[i] : self.starts[i + 1]]]
        return pad_rows([p[0] for p in pairs], self.pad), pad_rows([p[1] for p in pairs], self.pad)


def pad_rows(rows: Sequence[Sequence[int]], pad: int = 0) -> Tensor:
    """Rows of ids → int64 (rows, longest), padded at the end."""
    table = np.full((len(rows), max(len(row) for row in rows)), pad, dtype=np.int64)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(table)
