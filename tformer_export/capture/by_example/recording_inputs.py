"""Inputs for recordings: of any sizes, with padding or without.

A model may take another path where rows are padded. Recordings of one path get data of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tformer_export.common.derived_inputs import Mask

SCATTERED = 0.25  # of the ids
OFTEN = 0.5  # of the ids, for one that the module asks for


@dataclass(frozen=True)
class DataKind:
    """Rows of one length, or rows of several lengths with padding at their ends.

    padding: the id of padding; None for rows that are padded by a mask alone.
    scattered: whether some ids anywhere are padding too, those of the step input as well.
    """

    padded: bool
    padding: int | None = None
    scattered: bool = False


@dataclass(frozen=True)
class RecordingInputs:
    """Draws inputs like an example.

    groups: for each free size, the inputs and axes that have it. The first group is the batch.
    masks: inputs that follow from the lengths of another input.
    paddings: the ids that may be padding: that of the model, and the ids with which it compares its ids.
    vocabulary: input → number of its ids, where it is known.
    asked: an id that is drawn often, besides others. Of two draws with the seeds 0 and 1, one has it at each position.
    fills_one_row: whether a row of each padded batch has no padding, as models need that read `lengths.max()`.
    """

    example: Mapping[str, torch.Tensor]
    groups: Sequence[Sequence[tuple[str, int]]]
    step_input: str | None
    masks: Mapping[str, Mask] = field(default_factory=dict)
    paddings: frozenset[int] = frozenset()
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    fills_one_row: bool = False
    asked: int | None = None

    @property
    def kinds(self) -> list[DataKind]:
        """The kinds of data, the most general first."""
        requests = [name for name in self.vocabulary if name != self.step_input]
        scattered = [DataKind(True, i, scattered=True) for i in sorted(self.paddings)]
        padded = [DataKind(True, i) for i in sorted(self.paddings) if requests]
        return [*scattered, *padded, *([DataKind(True)] if self.masks else []), DataKind(False)]

    def draw(self, sizes: Sequence[int], kind: DataKind, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return name → input. sizes: one for each group."""
        generator = torch.Generator().manual_seed(seed)
        size_of = {place: size for group, size in zip(self.groups, sizes, strict=True) for place in group}
        keeps: dict[str, torch.Tensor] = {}
        drawn: dict[str, torch.Tensor] = {}
        for name, value in self.example.items():
            for axis in range(value.dim()):
                if (name, axis) in size_of:
                    value = value.index_select(axis, torch.arange(size_of[name, axis]) % value.shape[axis])
            if name in self.vocabulary:
                value = self._ids(name, value, generator, seed)
                if kind.scattered and kind.padding is not None:
                    value[torch.rand(value.shape, generator=generator) < SCATTERED] = kind.padding
            if value.dim() >= 2 and (name, 0) in size_of and (name, 1) in size_of:
                keeps[name] = self._keep(name, value, kind, generator)
                if name in self.vocabulary and kind.padding is not None:
                    value = value.masked_fill(~keeps[name], kind.padding) if value.dim() == 2 else value
            drawn[name] = value.contiguous()
        for name, mask in self.masks.items():
            if mask.of in keeps:
                drawn[name] = mask.build(keeps[mask.of], {}, padded=kind.padded)
        return drawn

    def _ids(self, name: str, value: torch.Tensor, generator: torch.Generator, seed: int) -> torch.Tensor:
        """Return random ids other than padding."""
        ids = [i for i in range(self.vocabulary[name]) if i not in self.paddings] or [0]
        drawn = torch.tensor(ids)[torch.randint(len(ids), value.shape, generator=generator)].to(value.dtype)
        if self.asked is not None and 0 <= self.asked < self.vocabulary[name]:
            of_pair = torch.Generator().manual_seed(seed // 2)
            drawn[(torch.rand(value.shape, generator=of_pair) < OFTEN) == (seed % 2 == 0)] = self.asked
        return drawn

    def _keep(self, name: str, value: torch.Tensor, kind: DataKind, generator: torch.Generator) -> torch.Tensor:
        """Return (batch, time): whether a position holds no padding. Rows of the step input have none."""
        batch, time = value.shape[:2]
        if not kind.padded or name == self.step_input:
            return torch.ones(batch, time, dtype=torch.bool)
        lengths = torch.randint(1, time, (batch,), generator=generator) if time > 1 else torch.ones(batch)
        if self.fills_one_row:
            lengths[torch.randint(batch, (1,), generator=generator)] = time
        return torch.arange(time) < lengths[:, None]
