"""Token data for training, in batches that depend only on the seed and the step, so that runs can be resumed.

Shapes use B = batch, S = source time, T = target time.
"""

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
    """The return value of a recipe's data factory for models that read ids.

    train, validation: pairs of id sequences, by kind of model:
        encoder-decoder (step_input "tgt"): source ids, and target ids with their start and end tokens;
        language model (step_input "ids"): ids, and the target id after each of them, the padding id where no target
        counts in the loss;
        classifier (`labels` given): ids, and one number, the index of the row's label.
    model_arguments: arguments of the model factory that follow from the data, such as vocabulary sizes.
    tokenizers: input name → text in tokenizers' JSON format.
    labels: label names of a classifier, in the order of its scores.
    special_tokens, step_input, chat_template: as in a checkpoint.
    """

    train: Sequence[Pair]
    validation: Sequence[Pair]
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, Any] = field(
        default_factory=lambda: {"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0}
    )
    labels: Sequence[str] = ()
    step_input: str = "tgt"
    chat_template: str | None = None


class Batches:
    """Batches of pairs of similar length: src (B, S) and tgt (B, T), padded with `pad_token_id`.

    A batch holds as many pairs as fit into `batch_tokens` ids, padding included, in each of src and tgt.

    Pairs are sorted by length, and shuffled among pairs of equal lengths. The sorted sequence of lengths is therefore
    the same in every pass over the data, and so are the number and the sizes of the batches. The pairs in each batch
    and the order of the batches are drawn for each pass, from the seed and the number of the pass.
    """

    def __init__(self, pairs: Sequence[Pair], batch_tokens: int, seed: int, pad_token_id: int = 0) -> None:
        self.pairs = pairs
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.source_lengths = np.array([len(source) for source, _ in pairs])
        self.target_lengths = np.array([len(target) for _, target in pairs])
        self.batch_starts = self._find_batch_starts(batch_tokens)

    def __len__(self) -> int:
        """Return the number of batches in one pass."""
        return len(self.batch_starts) - 1

    def _find_batch_starts(self, batch_tokens: int) -> list[int]:
        """Return the positions in the sorted pairs where batches begin, and the number of pairs at the end."""
        order = np.lexsort((self.target_lengths, self.source_lengths))
        starts = [0]
        row_length = 0  # of the current batch, padded
        for i, pair in enumerate(order):
            pair_length = max(int(self.source_lengths[pair]), int(self.target_lengths[pair]))
            row_length = max(row_length, pair_length)
            if i > starts[-1] and row_length * (i + 1 - starts[-1]) > batch_tokens:
                starts.append(i)
                row_length = pair_length
        return [*starts, len(order)]

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one pass in sorted order, without shuffling."""
        order = np.lexsort((self.target_lengths, self.source_lengths))
        for i in range(len(self)):
            yield self._make_batch(order, i)

    def shuffled(self, first_step: int, step_count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the steps first_step … first_step + step_count - 1, over as many passes as needed."""
        current_pass = -1
        for step in range(first_step, first_step + step_count):
            pass_number, step_in_pass = divmod(step, len(self))
            if pass_number != current_pass:
                current_pass = pass_number
                rng = np.random.default_rng([self.seed, pass_number])
                order = np.lexsort((rng.random(len(self.pairs)), self.target_lengths, self.source_lengths))
                batch_order = rng.permutation(len(self))
            yield self._make_batch(order, int(batch_order[step_in_pass]))

    def _make_batch(self, order: np.ndarray, i: int) -> tuple[Tensor, Tensor]:
        pairs = [self.pairs[j] for j in order[self.batch_starts[i] : self.batch_starts[i + 1]]]
        sources, targets = zip(*pairs, strict=True)
        return pad_rows(sources, self.pad_token_id), pad_rows(targets, self.pad_token_id)


def pad_rows(rows: Sequence[Sequence[int]], pad_token_id: int = 0) -> Tensor:
    """Return rows of ids as int64 (rows, maximum length), padded at the end."""
    table = np.full((len(rows), max(len(row) for row in rows)), pad_token_id, dtype=np.int64)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(table)
