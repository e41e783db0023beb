"""Random requests for a source, and the source's own answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tformer_export.analysis.input_facts import About
from tformer_export.sources import Source
from tformer_export.verify.report import TOLERANCE
from tformer_export.verify.torch_reference import Reference
from tformer_runtime.preprocess.series import Series


class Draws:
    """`inputs` bounds the ids that are drawn; padding is never among them. tolerance: how far a file may be off, as a
    share of the range of what it is compared with."""

    def __init__(
        self,
        source: Source,
        inputs: Mapping[str, About],
        seed: int = 0,
        gives_last: bool = False,
        tolerance: float = TOLERANCE,
        series: Series | None = None,
    ) -> None:
        self.source, self.inputs, self.tolerance, self.series = source, inputs, tolerance, series
        self.reference = Reference(source, gives_last)
        self.random = np.random.default_rng(seed)

    @property
    def hidden(self) -> list[int]:
        """Ids that the model takes for padding: after one of them it would not see what it decoded."""
        about = self.inputs[self.source.step or ""]
        if about.ids is None:
            return []
        return [about.pad] if about.masked and about.pad not in self.source.special.start else []

    def start(self, max_length: int) -> np.ndarray:
        """What decoding starts from: the special tokens, or, if there are none, a prompt."""
        if self.source.special.start:
            return np.array(self.source.special.start, np.int64)
        return self.draw(self.source.step, min(3, max_length - 1))

    def draw_sequence(self, length: int) -> np.ndarray:
        """Ids of the step input, beginning as decoding does; or steps of a series."""
        drawn = self.draw(self.source.step, length)
        start = self.source.special.start[:length]
        if start:
            drawn[: len(start)] = start
        return drawn

    def draw(self, name: str | None, length: int) -> np.ndarray:
        """Random ids of an input, none of them padding; or normal numbers, (length, features), of a series."""
        about, held = self.inputs[name or ""], self.source.example[name or ""]
        if about.ids is None:
            return self.random.standard_normal((length, *held.shape[2:])).astype(held.numpy().dtype)
        ids = np.arange(about.ids or 0)
        ids = ids[ids != about.pad] if name not in self.source.types else ids
        return self.random.choice(ids, length).astype(held.numpy().dtype)

    def draw_requests(self, lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """A row of so many positions each; of one length where a series' histories are only read so together."""
        if self.series is not None and not self.series.ragged:
            lengths = [lengths[0]] * len(lengths)
        return [self.draw_request(length) for length in lengths]

    def draw_request(self, length: int) -> dict[str, np.ndarray]:
        """One row of each request input, without its batch axis, as long as that or as the input may be."""
        drawn = {}
        for name, value in self.source.example.items():
            if name == self.source.step or name in self.source.masks:
                continue
            about, axes = self.inputs[name], self.source.dynamic.get(name, (0, 1))
            size = min(length, about.max_length or length) if 1 in axes else value.shape[1]
            if name in self.source.shortest and 1 in axes:  # half of what the model needs, for each position
                size = max(self.source.shortest[name], self.source.shortest[name] * length // 2)
            if self.series is not None and name == self.series.input:
                size = max(self.series.shortest, min(size, self.series.longest or size))
            if about.ids is not None:
                drawn[name] = self.draw(name, size)
            else:
                drawn[name] = self.random.standard_normal((size, *value.shape[2:])).astype(value.numpy().dtype)
        return drawn
